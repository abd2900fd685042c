"""Locks on tables delay only what reads those tables."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import structlog

from tailrace.config.source.postgres import PostgresSource
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.catalog import published_oids, published_table
from tailrace.sources.postgres.schema.column_lists import check_disclosure, published_columns
from tailrace.sources.postgres.schema.column_selection import table_columns
from tailrace.sources.postgres.schema.publication import (
    left_out,
    publication_warnings,
    published_names,
)
from tailrace.sources.postgres.schema.published_tables import published
from tailrace.sources.postgres.schema.source_tables import matching_tables
from tailrace.sources.postgres.schema.table_metadata import catalog_tables
from tailrace.sources.postgres.slot import monitor
from tailrace.sources.postgres.slot.creation import held_up, lasting_transactions
from tailrace.sources.postgres.snapshot import incremental
from tailrace.sources.postgres.snapshot.plan import SnapshotOutcome
from tailrace_servers.postgres import EmbeddedPostgres
from tests.support.capture.captured import CREATE_ITEMS, SLOT, Running, capturing, read_log
from tests.support.capture.requested import await_end, found, is_over, request
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = pytest.mark.each_postgres("what waits for locks, and the catalogue's queries")

CAPTURED = ("public.items", "public.parts", "public.whole")
EVERY_TABLE = "parts, parts_1, parts_2, whole, others, others_1"
WAY_OUT = re.compile(r"end them \((SELECT pg_terminate_backend\(\d+\)), or wait\)")
OPTIONS: dict[str, Any] = {"tables": CAPTURED, "slot_watch": {"interval_s": 0.2}, "reconnect_s_max": 30}


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "SOON_S", 0.2)
    monkeypatch.setattr(monitor, "NEW_TABLES_S", 0.2)


def create_tables(pg: Database) -> None:
    pg.execute(CREATE_ITEMS)
    pg.execute("create table whole(id bigint primary key, note text)")
    for name in ("parts", "others"):
        pg.execute(f"create table {name}(id bigint primary key, note text) partition by range (id)")
        pg.execute(f"create table {name}_1 partition of {name} for values from (0) to (1000)")
    pg.execute("create table parts_2 partition of parts for values from (1000) to (2000)")


@contextmanager
def locked(pg: Database, tables: str = EVERY_TABLE) -> Iterator[None]:
    """Lock the tables as VACUUM FULL, TRUNCATE or a rewriting ALTER TABLE does while it runs."""
    with pg.connect(autocommit=False) as owner:
        owner.execute(f"lock table {tables} in access exclusive mode".encode())
        yield


def stream_goes_on(pg: Database, running: Running, id_: int) -> None:
    pg.execute(f"insert into items values ({id_}, 'x')")
    running.catch_up(pg.query, 20)


def looks_go_on(running: Running) -> None:
    before = running.task.progress().health
    wait_until(lambda: running.task.progress().health not in (None, before), 20, "a look at the slot")


@pytest.mark.parametrize("via_root", [True, False], ids=["root", "leaves"])
def test_locks_on_tables_delay_neither_a_start_nor_the_stream_nor_the_slot_watch(
    pg: Database, tmp_path: Path, via_root: bool
) -> None:
    log = tmp_path / "log"
    create_tables(pg)
    options = {**OPTIONS, "publish_via_partition_root": via_root}
    with capturing(pg.dsn, log, **options) as running:
        running.wait_for("streaming")
        with locked(pg):
            for id_ in (1, 2):
                stream_goes_on(pg, running, id_)
                looks_go_on(running)
        assert running.task.progress().reconnects == 0
    # Their Relation messages come while they are locked.
    pg.execute("insert into parts values (11, 'x'), (1011, 'x'); insert into whole values (12, 'x')")
    pg.execute("alter table parts add column more int default 7; insert into parts values (13, 'x', 1)")
    with locked(pg), capturing(pg.dsn, log, **options) as running:
        running.wait_for("streaming", 20)
        stream_goes_on(pg, running, 3)
        looks_go_on(running)
        assert running.task.progress().reconnects == 0
    assert sorted(read_log(log).inserts) == [1, 2, 3, 11, 12, 13, 1011]


def test_a_snapshot_of_a_locked_table_waits_and_the_stream_does_not(pg: Database, tmp_path: Path) -> None:
    log = tmp_path / "log"
    create_tables(pg)
    pg.execute("insert into whole values (21, 'x'); insert into parts values (22, 'x'), (1022, 'x')")
    with capturing(pg.dsn, log, **OPTIONS) as running:
        running.wait_for("streaming")
        with locked(pg, "whole, parts_2"):
            asked = request(log, "public.whole", "public.parts", "public.items")
            wait_until(lambda: (found(log, asked)) is not None, 30, "the request to be taken")
            for id_ in (1, 2, 3):
                pg.execute(f"insert into items values ({id_}, 'x')")
                wait_until(lambda: id_ in read_log(log).inserts, 20, "the stream")  # noqa: B023
            assert not is_over(log, asked)()
        assert await_end(running, log, asked).outcome is SnapshotOutcome.DONE
        assert running.task.progress().reconnects == 0
    assert sorted(read_log(log).snapshot).count(21) == 2


def test_a_condition_on_a_locked_table_waits_and_delays_no_other_request_and_no_start(
    pg: Database, tmp_path: Path
) -> None:
    create_tables(pg)
    pg.execute("insert into whole values (1, 'x'), (2, 'y')")
    log = tmp_path / "log"
    with capturing(pg.dsn, log, **OPTIONS) as running:
        running.wait_for("streaming")
    with locked(pg, "whole"):
        asked = request(log, "public.whole", where="id = 1")
        with capturing(pg.dsn, log, **OPTIONS) as running:
            running.wait_for("streaming")
            # Its slot waits for the end of the locking transaction; nevertheless the request is taken.
            other = request(log, "public.items")
            wait_until(lambda: found(log, other) is not None, 30, "the other request to be taken")
            pg.execute("insert into items values (1, 'x')")
            wait_until(lambda: read_log(log).inserts == [1], 20, "the stream")
            assert found(log, asked) is None
    with capturing(pg.dsn, log, **OPTIONS) as running:
        for each in (asked, other):
            assert await_end(running, log, each).outcome is SnapshotOutcome.DONE


def test_a_delayed_check_is_repeated_soon(pg: Database, tmp_path: Path) -> None:
    create_tables(pg)
    with capturing(pg.dsn, tmp_path / "log", **OPTIONS) as running:
        running.wait_for("streaming")
        looks_go_on(running)
        with locked(pg, "pg_publication"), structlog.testing.capture_logs() as said:
            wait_until(lambda: any("can't be watched" in each["event"] for each in said), 30, "two looks")
        pg.execute("insert into items values (1, 'x')")
        looks_go_on(running)


@pytest.mark.follows("slot_creation_held_up")
def test_a_slot_delayed_by_older_transactions_is_created_once_they_are_terminated(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incremental, "SLOT_DEADLINE_S", 0.5)
    create_tables(pg)
    log = tmp_path / "log"
    with capturing(pg.dsn, log, **OPTIONS) as running, psycopg.connect(pg.dsn) as older:
        running.wait_for("streaming")
        older.execute("insert into others values (1, 'x')")
        with structlog.testing.capture_logs() as said:
            asked = request(log, "public.items")
            # A transaction is named once it is a second old: the first attempt may end before that.
            wait_until(lambda: WAY_OUT.search(str(said)) is not None, 30, "the transaction to be named")
        way_out = WAY_OUT.search(str(said))
        assert way_out is not None
        pg.execute(way_out[1])
        assert await_end(running, log, asked).outcome is SnapshotOutcome.DONE
        older.close()


def test_a_role_that_may_only_replicate_learns_what_delays_its_slot(own_pg: EmbeddedPostgres) -> None:
    own_pg.execute("create role cdc login replication")
    source = PostgresSource(dsn=own_pg.dsn(user="cdc"))
    with (
        psycopg.connect(own_pg.dsn()) as older,
        closing(Session.connect(source, threading.Event())) as session,
    ):
        assert lasting_transactions(session) == []
        older.execute("select txid_current()")
        [named] = lasting_transactions(session)
        assert named.pid == older.info.backend_pid
        assert f"SELECT pg_terminate_backend({named.pid}), or wait" in held_up([named], 1.0).hint


@pytest.mark.follows("snapshot_delayed")
@pytest.mark.parametrize("taken", ["max_replication_slots", "max_wal_senders"])
def test_a_snapshot_for_which_no_slot_is_free_waits_and_the_stream_does_not(
    make_server: Callable[..., EmbeddedPostgres], tmp_path: Path, taken: str
) -> None:
    server, log = make_server(**{taken: "2"}), tmp_path / "log"
    server.execute(CREATE_ITEMS)
    with capturing(server.dsn(), log, slot_watch={"interval_s": 0}) as running:
        running.wait_for("streaming")
        with psycopg.connect(f"{server.dsn()}?replication=database", autocommit=True) as other:
            other.execute("CREATE_REPLICATION_SLOT other TEMPORARY PHYSICAL")
            with structlog.testing.capture_logs() as said:
                asked = request(log, "public.items")
                wait_until(lambda: "trying again" in str(said), 30, "the snapshot to be held")
            if taken == "max_replication_slots":
                assert "streaming continues: drop a slot that is not needed" in str(said)
            for id_ in (1, 2):
                server.execute(f"insert into items values ({id_}, 'x')")
                wait_until(lambda: id_ in read_log(log).inserts, 20, "the stream")  # noqa: B023
            assert not is_over(log, asked)()
        assert await_end(running, log, asked).outcome is SnapshotOutcome.DONE
        assert running.task.progress().reconnects == 0
    assert sorted(read_log(log).snapshot) == [1, 2]


def test_queries_of_the_catalogue_wait_for_no_lock(pg: Database) -> None:
    create_tables(pg)
    pg.execute(f"create publication {SLOT} for table items, parts, whole")
    source = PostgresSource(dsn=pg.dsn, tables=CAPTURED, columns_exclude=("public.parts.note",)).for_pipeline(
        "t"
    )
    with (
        closing(Session.connect(source, threading.Event(), lock_wait_s=0.1)) as session,
        locked(pg, f"items, {EVERY_TABLE}"),
    ):
        tables = matching_tables(session, source)
        oids = published_oids(session, source).values()
        assert len(tables) == len(published_names(session, SLOT) - {("public", "parts")}) - 1 == 3
        assert table_columns(session, tables)
        assert not publication_warnings(session, source)
        assert not left_out(session, SLOT, oids)
        check_disclosure(session, source)
        assert catalog_tables(session, list(oids)).by_oid
        for oid in oids:
            assert published_table(session, source, oid, with_filter=False)
        if session.server_version >= 150000:
            assert published_columns(session, SLOT)


PUBLICATIONS = [
    "for all tables",
    "for table parts, items",
    "for table parts, parts_1",
    "for table parts_1, whole",
    "for table parts (id), items (id)",
    "for table parts where (id > 5), whole where (id > 7)",
    "for tables in schema public",
    "for tables in schema apart",
    "for tables in schema apart, table items",
]


@pytest.mark.parametrize("via_root", ["true", "false"])
def test_our_queries_of_publications_equal_the_servers_own_view(pg: Database, via_root: str) -> None:
    create_tables(pg)
    pg.execute("create schema apart; create table apart.plain(id int primary key, twice int)")
    pg.execute("create table apart.parts_3 partition of parts for values from (2000) to (4000) "
               "partition by range (id)")  # fmt: skip
    pg.execute("create table parts_4 partition of apart.parts_3 for values from (2000) to (3000)")
    pg.execute(
        "create table apart.computed(id int primary key, more int generated always as (id + 1) stored)"
    )
    pg.execute("create unlogged table apart.volatile(id int primary key)")
    pg.execute("alter table whole add column dropped int; alter table whole drop column dropped")
    source = PostgresSource(dsn=pg.dsn, tables=("public.*",)).for_pipeline("t")
    with closing(Session.connect(source, threading.Event())) as session:
        for number, what in enumerate(PUBLICATIONS):
            name = f"p{number}"
            options = f"publish_via_partition_root = {via_root}"
            if pg.server.version >= 18 and number % 2:
                options += ", publish_generated_columns = stored"
            if via_root == "false":  # the server wants the terms with what is sent
                what = what.replace("parts (id)", "parts_1 (id)")  # noqa: PLW2901
                what = what.replace("parts where", "parts_1 where")  # noqa: PLW2901
            pg.execute(f"create publication {name} {what} with ({options})")
            wanted = pg.query(f"select schemaname, tablename, attnames from pg_publication_tables "
                              f"where pubname = '{name}'")  # fmt: skip
            # The view of 15 lists generated columns, too, which no server before 18 sends.
            not_sent = {"more"} if pg.server.version == 15 else set()
            columns = {row[:2]: set(row[2]) - not_sent for row in wanted}
            sent = published_columns(session, name)
            assert {table: each.names for table, each in sent.items()} == columns, what
            assert any(each.listed for each in sent.values()) is ("(id)," in what), what
            rows = session.run(
                f"with recursive {published(name, session.server_version)} "
                "select n.nspname, c.relname from published p join pg_class c on c.oid = p.oid "
                "join pg_namespace n on n.oid = c.relnamespace",
                "read the publication",
            )
            assert {tuple(row.values()) for row in rows} == {row[:2] for row in wanted}, what
