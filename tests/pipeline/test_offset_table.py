"""Offsets in a table of a real server: found again, whole or not at all, and after lost connections."""

from __future__ import annotations

import threading

import psycopg
import pytest

from fix_postgres import Database
from tailrace.config.engine_options import OffsetStorage
from tailrace.engine.clock import SystemClock
from tailrace.engine.commit_policies import Always
from tailrace.engine.committing import OffsetCommitter
from tailrace.engine.offset_stores import store_for
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.offset_table import PostgresOffsetStore
from tailrace.records.batch import Batch

A, B = {"server": "a"}, {"server": "b", "shard": "-80"}

pytestmark = pytest.mark.any_postgres("a table, an upsert: the same on every version")


def opened(dsn: str, name: str = "shop", table: str = "tailrace_offsets") -> PostgresOffsetStore:
    store = PostgresOffsetStore(OffsetStorage(type="postgresql", dsn=dsn, table=table), name)
    store.start()
    return store


def test_offsets_are_kept_by_engine_and_partition_in_a_table_that_is_made(pg: Database) -> None:
    for table in ("tailrace_offsets", "public.Other"):
        store = opened(pg.dsn, table=table)
        assert store.read([A, B]) == {}
        offset = {"lsn": 2**63 - 1, "texts": ["ü", None, 1.5]}
        store.write([(A, {"lsn": 1}), (B, offset)], 5)
        store.write([(A, {"lsn": 2})], 5)
        store.stop()
        again, other = opened(pg.dsn, table=table), opened(pg.dsn, "other", table)
        assert again.read([B, {"server": "c"}, A]) == {0: offset, 2: {"lsn": 2}}
        assert other.read([A, B]) == {}
        again.stop()
        other.stop()
    assert pg.query("select count(*) from tailrace_offsets") == [(2,)]
    assert pg.query('select count(*) from "Other"') == [(2,)]


def test_engines_that_start_at_the_same_moment_share_the_table(pg: Database) -> None:
    errors: list[Exception] = []

    def life(name: str) -> None:
        try:
            store = opened(pg.dsn, name)
            store.write([(A, {"of": name})], 30)
            store.stop()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors.append(error)

    threads = [threading.Thread(target=life, args=(f"engine {n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert pg.query("select count(*) from tailrace_offsets") == [(6,)]


def test_a_lost_connection_fails_one_write_and_the_next_goes_on(pg: Database) -> None:
    store = opened(pg.dsn)
    told: list[int] = []
    committer = OffsetCommitter(
        store, Always(), SystemClock(), committed=lambda _, offset: told.append(offset["n"]), timeout_s=30
    )

    def done(n: int) -> None:
        batch = Batch(A, (), 1, [{"n": n}])
        committer.take(batch)
        committer.mark_processed(batch)
        committer.mark_batch_finished(batch)

    done(1)
    pg.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'tailrace offsets'"
    )
    done(2)
    done(3)
    assert told == [1, 3]
    assert committer.finish(30)
    assert store.read([A]) == {0: {"n": 3}}
    store.stop()


def test_a_write_that_waits_for_somebody_is_given_up_and_leaves_nothing(pg: Database) -> None:
    store = opened(pg.dsn)
    store.write([(A, {"n": 1})], 5)
    with psycopg.connect(pg.dsn) as holder:
        holder.execute("select * from tailrace_offsets for update")
        with pytest.raises(TailraceError, match="statement timeout") as raised:
            store.write([(B, {"n": 2}), (A, {"n": 2})], 0.2)
    assert raised.value.kind is Kind.OFFSETS_UNWRITABLE
    assert store.read([A, B]) == {0: {"n": 1}}
    store.write([(B, {"n": 3}), (A, {"n": 3})], 5)
    assert store.read([A, B]) == {0: {"n": 3}, 1: {"n": 3}}
    store.stop()


def test_what_is_missing_is_said_without_secrets(pg: Database) -> None:
    wrong = psycopg.conninfo.make_conninfo(pg.dsn, dbname="nowhere_to_be_found", password="very secret")
    with pytest.raises(TailraceError, match="nowhere_to_be_found") as raised:
        opened(wrong)
    assert raised.value.kind is Kind.OFFSETS_UNREADABLE
    assert "very secret" not in str(raised.value)
    pg.execute("create table tailrace_offsets (other int)")
    store = opened(pg.dsn)
    with pytest.raises(TailraceError, match="does not exist"):
        store.read([A])
    store.stop()


def test_the_configuration_names_the_table(pg: Database) -> None:
    storage = OffsetStorage(type="postgresql", dsn=pg.dsn, table="chosen")
    store = store_for(storage, "shop")
    assert isinstance(store, PostgresOffsetStore)
    store.start()
    store.write([(A, {"n": 1})], 30)
    assert store.read([A]) == {0: {"n": 1}}
    store.stop()
    assert pg.query("select engine from chosen") == [("shop",)]
