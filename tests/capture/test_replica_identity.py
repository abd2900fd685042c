"""Configured replica identities are set, but never one that breaks writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest

from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind
from tailrace.pipeline.preflight.preflight import preflight
from tailrace.sources.findings import Severity
from tests.support.capture.captured import NAME, capturing, read_log, run_to_end
from tests.support.capture.resumed import RUN, life
from tests.support.postgres import Database

pytestmark = pytest.mark.each_postgres("replica identities in the catalogue")

TABLES = (
    "create table keyed(id int primary key, code text not null)",
    "create unique index keyed_code on keyed (code)",
    "create table keyless(id int)",
    "create table parts(id int not null, code text not null, primary key (id)) partition by range (id)",
    "create table parts_a partition of parts for values from (0) to (10)",
    "create table parts_b partition of parts for values from (10) to (20)",
    "create unique index parts_id on parts (id)",
)


def identities(pg: Database) -> dict[str, str]:
    rows = pg.query(
        "select relname, relreplident::text from pg_class where relkind in ('r', 'p') "
        "and relnamespace = 'public'::regnamespace"
    )
    return dict(rows)


def create(pg: Database) -> None:
    for statement in TABLES:
        pg.execute(statement)


def begin(pg: Database, log: Path, **asked: Any) -> None:
    with capturing(pg.dsn, log, **asked) as running:
        running.wait_for("streaming")


def test_identities_are_set_at_the_first_start_and_the_next(pg: Database, tmp_path: Path) -> None:
    create(pg)
    asked = {"public.keyed": "index keyed_code", "public.key*": "full", "public.parts": "index parts_id"}
    log = tmp_path / "log"
    with capturing(pg.dsn, log, replica_identity=asked) as running:
        running.wait_for("streaming")
        # Without an identity it would have been excluded from the publication.
        pg.execute("insert into keyless values (7)")
        pg.execute("delete from keyless")
        running.catch_up(pg.query)
    found = identities(pg)
    assert found == {"keyed": "i", "keyless": "f", "parts": "i", "parts_a": "i", "parts_b": "i"}
    assert read_log(log).deletes == [7]
    # Another identity is set by hand, and a partition is added: the next start sets both.
    pg.execute("alter table keyed replica identity full")
    pg.execute("create table parts_c partition of parts for values from (20) to (30)")
    begin(pg, log, replica_identity=asked)
    assert identities(pg) == {**found, "parts_c": "i"}
    begin(pg, log, replica_identity={"public.*": "default"})
    # Without a key it keeps what it has.
    assert identities(pg) == {
        "keyed": "d", "keyless": "f", "parts": "d", "parts_a": "d", "parts_b": "d", "parts_c": "d",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"public.keyless": "default"}, "no primary key"),
        ({"public.keyed": "index no_such"}, "no index 'no_such'"),
        ({"public.keyed": "index keyed_partial"}, "no index 'keyed_partial'"),
        ({"public.keyed": "index keyed_null"}, "no index 'keyed_null'"),
        ({"public.listed": "full"}, "column list"),
    ],
)
def test_a_replica_identity_that_would_break_writes_is_refused(
    pg: Database, tmp_path: Path, asked: dict[str, str], said: str
) -> None:
    create(pg)
    pg.execute("alter table keyless replica identity full")
    pg.execute("alter table keyed add n int")
    pg.execute("create unique index keyed_partial on keyed (code) where id > 0")
    pg.execute("create unique index keyed_null on keyed (n)")
    pg.execute("create table listed(id int primary key, a int)")
    pg.execute("create publication somebody for table listed (id)")
    before = identities(pg)
    error = run_to_end(pg.dsn, tmp_path / "log", replica_identity=asked)
    assert error is not None
    assert error.kind is Kind.SOURCE_MISCONFIGURED
    assert said in error.message
    assert [finding.message for finding in errors(pg, tmp_path, asked)] == [error.message]
    # Matched by a pattern for several tables, the table keeps what it has.
    begin(pg, tmp_path / "log", replica_identity={f"{name}*": value for name, value in asked.items()})
    assert identities(pg) == before
    for table in ("keyed", "keyless", "listed"):
        pg.execute(f"update {table} set id = id + 1")


def test_full_is_never_set_with_virtual_generated_columns(pg: Database, tmp_path: Path) -> None:
    if pg.server.query("show server_version_num")[0][0] < "180000":
        pytest.skip("virtual generated columns came with 18")
    pg.execute("create table t(id int primary key, a int, b int generated always as (a + 1))")
    pg.execute("insert into t values (1, 1)")
    begin(pg, tmp_path / "log", replica_identity={"public.*": "full"})
    pg.execute("update t set a = 2")
    error = run_to_end(pg.dsn, tmp_path / "other", replica_identity={"public.t": "full"}, slot="other")
    assert error is not None
    assert "virtual" in error.message


def test_a_role_that_does_not_own_the_table_gets_the_sql(own_pg: Any, tmp_path: Path) -> None:
    own_pg.execute("create role cdc login replication")
    own_pg.execute("create database shop")
    shop = Database(own_pg, "shop")
    shop.execute("create table t(id int primary key)")
    shop.execute("grant select on t to cdc")
    shop.execute(f"create publication tailrace_{NAME} for table t")
    dsn = shop.dsn.replace("postgres@", "cdc@")
    asked = {"public.t": "full"}
    [finding] = errors(shop, tmp_path, asked, user="cdc")
    error = run_to_end(dsn, tmp_path / "log", replica_identity=asked)
    assert error is not None
    assert error.kind is finding.kind is Kind.SOURCE_PRIVILEGE_MISSING
    sql = 'ALTER TABLE "public"."t" REPLICA IDENTITY FULL;'
    assert sql in error.hint
    assert sql in finding.repair
    shop.execute(sql)
    assert errors(shop, tmp_path, asked, user="cdc") == []
    with capturing(dsn, tmp_path / "log", replica_identity=asked) as running:
        running.wait_for("streaming")
    # Later it is a warning: capturing goes on.
    shop.execute("alter table t replica identity default")
    with capturing(dsn, tmp_path / "log", replica_identity=asked) as running:
        running.wait_for("streaming")
        shop.execute("insert into t values (3)")
        running.catch_up(shop.query)
    assert read_log(tmp_path / "log").inserts == [3]


def test_a_locked_table_does_not_delay_the_stream(pg: Database, tmp_path: Path) -> None:
    for number in range(31):
        pg.execute(f"create table t{number}(id int primary key)")
    begin(pg, tmp_path / "log")
    with psycopg.connect(pg.dsn) as locker:
        for number in range(30):
            locker.execute(f"lock table t{number} in access share mode")
        with capturing(pg.dsn, tmp_path / "log", replica_identity={"public.*": "full"}) as running:
            running.wait_for("streaming", 15)
            pg.execute("insert into t30 values (1)")
            running.catch_up(pg.query)
    assert read_log(tmp_path / "log").inserts == [1]
    begin(pg, tmp_path / "log", replica_identity={"public.*": "full"})
    assert set(identities(pg).values()) == {"f"}


def test_a_first_start_waits_for_a_lock_and_is_killed_meanwhile(pg: Database, tmp_path: Path) -> None:
    pg.execute("create table t(id int primary key)")
    pg.execute("insert into t values (1)")
    script = RUN.replace(
        "snapshot_connections=3,", "snapshot_connections=3, replica_identity={'public.t': 'full'},"
    )
    with psycopg.connect(pg.dsn) as locker:
        locker.execute("lock table t in access share mode")
        error = run_to_end(
            pg.dsn, tmp_path / "log", replica_identity={"public.t": "full"}, reconnect_s_max=1.0
        )
    assert error is not None
    assert error.kind is Kind.SOURCE_UNREACHABLE
    assert life(pg, tmp_path / "log", "snapshot.after_slot=kill@1", script=script) == -9
    assert life(pg, tmp_path / "log", "", script=script) == 0
    assert identities(pg) == {"t": "f"}
    assert read_log(tmp_path / "log").snapshot == [1]


def test_check_takes_into_account_what_the_start_sets(pg: Database, tmp_path: Path) -> None:
    create(pg)
    sink = "{type: delta, mode: mirror, path: ./lake, keyless: full_row}"
    assert any(finding.table == "public.keyless" for finding in findings(pg, tmp_path, {}, sinks=sink))
    assert findings(pg, tmp_path, {"public.keyless": "full", "public.parts": "full"}, sinks=sink) == []


@pytest.mark.parametrize("value", ["", "nothing", "index", "index ", "FULL"])
def test_only_identities_that_identify_rows_are_accepted(value: str) -> None:
    with pytest.raises(ValueError, match="must be default, full, or index NAME"):
        PostgresSource(dsn="postgresql://u@localhost/d", replica_identity={"public.t": value})


def findings(
    pg: Database, directory: Path, asked: dict[str, str], *, user: str = "postgres", sinks: str = ""
):
    file = directory / "pipeline.yaml"
    file.write_text(
        f"name: {NAME}\nsource:\n  host: 127.0.0.1\n  port: {pg.port}\n  user: {user}\n  dbname: {pg.name}\n"
        f"  replica_identity: {asked}\nlog: {{path: ./checked}}\nsinks: [{sinks}]\n"
    )
    return preflight(file)


def errors(pg: Database, directory: Path, asked: dict[str, str], **options: str):
    return [each for each in findings(pg, directory, asked, **options) if each.severity is Severity.ERROR]
