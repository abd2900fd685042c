"""A start never breaks an application's writes: tables that would refuse them are excluded and named."""

from __future__ import annotations

import threading
from contextlib import closing
from functools import partial
from pathlib import Path

import psycopg
import pytest

from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.publication import (
    prepare_publication,
    publication_warnings,
    published_names,
)
from tailrace.sources.postgres.schema.source_tables import SourceTable, matching_tables
from tailrace.sources.postgres.slot import monitor
from tests.support.capture.captured import SLOT, capturing, run_to_end
from tests.support.postgres import Database, require_since
from tests.support.wait import wait_until

pytestmark = pytest.mark.each_postgres("which writes a publication makes the server refuse")

#: Tables with every kind of replica identity, by name; `{t}` is the table's name.
TABLES: dict[str, tuple[str, ...]] = {
    "keyed": ("create table {t}(id int primary key, n int)",),
    "keyless": ("create table {t}(id int, n int)",),
    "keyless_full": ("create table {t}(id int, n int)", "alter table {t} replica identity full"),
    "nothing": ("create table {t}(id int primary key, n int)", "alter table {t} replica identity nothing"),
    "deferred": ("create table {t}(id int primary key deferrable, n int)",),
    "by_index": (
        "create table {t}(id int not null, n int)",
        "create unique index {t}_i on {t}(id)",
        "alter table {t} replica identity using index {t}_i",
    ),
    "index_dropped": (
        "create table {t}(id int primary key, n int not null)",
        "create unique index {t}_i on {t}(n)",
        "alter table {t} replica identity using index {t}_i",
        "drop index {t}_i",
    ),
    "stored": ("create table {t}(id int primary key, n int generated always as (id + 1) stored)",),
    "stored_full": (
        "create table {t}(id int primary key, n int generated always as (id + 1) stored)",
        "alter table {t} replica identity full",
    ),
    "parts": (
        "create table {t}(id int primary key) partition by range (id)",
        "create table {t}_a partition of {t} for values from (0) to (10)",
        "create table {t}_b partition of {t} for values from (10) to (20)",
    ),
    "parts_keyless": (
        "create table {t}(id int) partition by range (id)",
        "create table {t}_a partition of {t} for values from (0) to (10)",
    ),
    "part_nothing": (
        "create table {t}(id int primary key) partition by range (id)",
        "create table {t}_a partition of {t} for values from (0) to (10)",
        "create table {t}_b partition of {t} for values from (10) to (20)",
        "alter table {t}_b replica identity nothing",
    ),
    "part_not_full": (
        "create table {t}(id int) partition by range (id)",
        "create table {t}_a partition of {t} for values from (0) to (10)",
        "create table {t}_b partition of {t} for values from (10) to (20)",
        "alter table {t} replica identity full",
        "alter table {t}_a replica identity full",
    ),
}
SINCE_18: dict[str, tuple[str, ...]] = {
    "virtual": ("create table {t}(id int primary key, n int generated always as (id + 1))",),
    "virtual_full": (
        "create table {t}(id int primary key, n int generated always as (id + 1))",
        "alter table {t} replica identity full",
    ),
    "virtual_keyless": ("create table {t}(id int, n int generated always as (id + 1))",),
    "virtual_part_full": (
        "create table {t}(id int primary key, n int generated always as (id + 1)) partition by range (id)",
        "create table {t}_a partition of {t} for values from (0) to (10)",
        "alter table {t}_a replica identity full",
    ),
}


def create(pg: Database) -> list[str]:
    tables = TABLES | (SINCE_18 if pg.server.version >= 18 else {})
    for name, statements in tables.items():
        for statement in statements:
            pg.execute(statement.format(t=name))
    return sorted(tables)


def refused_by_server(pg: Database, name: str) -> str:
    """Return the server's error for a DELETE from a table or one of its partitions, without executing it."""
    rows = pg.query(f"select relid::regclass::text from pg_partition_tree('{name}') where isleaf")
    for (leaf,) in rows or [(name,)]:
        try:
            pg.query(f"explain delete from {leaf} where false")
            pg.query(f"explain update {leaf} set id = 1 where false")
        except psycopg.errors.ObjectNotInPrerequisiteState as error:
            return str(error)
        except psycopg.errors.InvalidColumnReference as error:
            return str(error)
    return ""


def meant(pg: Database, *tables: str) -> dict[str, SourceTable]:
    source = PostgresSource(dsn=pg.dsn, tables=tables or ("public.*",))
    with closing(Session.connect(source, threading.Event())) as session:
        return {table.name: table for table in matching_tables(session, source)}


def published(pg: Database) -> set[str]:
    source = PostgresSource(dsn=pg.dsn, publication=SLOT)
    with closing(Session.connect(source, threading.Event())) as session:
        return {name for _, name in published_names(session, SLOT)}


def test_our_prediction_of_refused_writes_equals_the_servers(pg: Database) -> None:
    names = create(pg)
    before = meant(pg)
    options = ", publish_generated_columns = stored" if pg.server.version >= 18 else ""
    pg.execute(
        f"create publication everything for table {', '.join(names)} "
        f"with (publish_via_partition_root = true{options})"
    )
    judged = {name: bool(before[name].refused) for name in names}
    assert judged == {name: bool(refused_by_server(pg, name)) for name in names}


def test_a_start_keeps_every_write_possible(pg: Database, tmp_path: Path) -> None:
    names = create(pg)
    refused = {name for name, table in meant(pg).items() if table.refused}
    assert {"keyless", "nothing", "deferred", "index_dropped", "part_not_full"} <= refused
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        assert [name for name in names if refused_by_server(pg, name)] == []
        assert published(pg) == set(names) - refused


def test_a_table_that_is_listed_is_captured_nevertheless(pg: Database, tmp_path: Path) -> None:
    pg.execute("create table other(id int)")
    pg.execute("create table only_inserts(id int)")
    with capturing(pg.dsn, tmp_path / "log", tables=("public.*", "public.only_inserts")) as running:
        running.wait_for("streaming")
        assert published(pg) == {"only_inserts"}


def test_a_start_without_any_capturable_table_fails_with_the_reason(pg: Database, tmp_path: Path) -> None:
    pg.execute("create table keyless(id int)")
    error = run_to_end(pg.dsn, tmp_path / "log")
    assert error is not None
    assert error.kind is Kind.TABLE_MISSING
    assert "refuse updates and deletes" in error.message
    assert "name it in source.tables: public.keyless" in error.hint
    assert pg.query("select 1 from pg_publication") == []


def test_a_users_publication_need_not_include_tables_whose_writes_would_be_refused(
    pg: Database, tmp_path: Path
) -> None:
    pg.execute("create table keyed(id int primary key)")
    pg.execute("create table keyless(id int)")
    pg.execute(f"create publication {SLOT} for table keyed")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        assert refused_by_server(pg, "keyless") == ""


@pytest.mark.parametrize("name", sorted(TABLES | SINCE_18))
def test_the_suggested_repair_makes_writes_possible(pg: Database, name: str) -> None:
    if name in SINCE_18:
        require_since(18, "virtual generated columns", pg.server.version)
    for statement in (TABLES | SINCE_18)[name]:
        pg.execute(statement.format(t=name))
    table = meant(pg)[name]
    for statement in table.identity_repair.replace("(…)", "(id)").split("; "):
        if statement:
            pg.execute(statement)
    assert meant(pg)[name].refused == ""
    options = ", publish_generated_columns = stored" if pg.server.version >= 18 else ""
    pg.execute(f"create publication p for table {name} with (publish_via_partition_root = true{options})")
    assert refused_by_server(pg, name) == ""


def test_status_names_excluded_tables_and_those_whose_writes_are_refused_later(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "SOON_S", 0.2)
    monkeypatch.setattr(monitor, "NEW_TABLES_S", 0.2)
    for name in ("keyed", "keyless", "keyless_full", "by_index"):
        for statement in TABLES[name]:
            pg.execute(statement.format(t=name))
    pg.execute("create table parts(id int) partition by range (id)")
    pg.execute("create table parts_a partition of parts for values from (0) to (10)")
    pg.execute("alter table parts replica identity full")
    pg.execute("alter table parts_a replica identity full")
    with capturing(pg.dsn, tmp_path / "log", slot_watch={"interval_s": 0.2}) as running:
        running.wait_for("streaming")

        def warned() -> dict[str, str]:
            return {each.key: each.repair for each in running.task.progress().warnings}

        wait_until(lambda: set(warned()) == {"table_not_captured:public.keyless"}, 60, "the first warning")
        # What may happen to published tables later: an index is dropped, a partition without identity is
        # attached.
        pg.execute("drop index by_index_i")
        pg.execute("create table parts_b partition of parts for values from (10) to (20)")
        wanted = {"writes_refused:public.by_index", "writes_refused:public.parts"}
        wait_until(lambda: wanted <= set(warned()), 60, "the later warnings")
        assert refused_by_server(pg, "parts")
        for key in sorted(wanted):
            pg.execute(warned()[key])
        wait_until(lambda: not wanted & set(warned()), 60, "the warnings to go")
        assert not refused_by_server(pg, "parts")
        assert not refused_by_server(pg, "by_index")
        # An excluded table is captured once its repair is done.
        repair = warned()["table_not_captured:public.keyless"]
        assert "tailrace snapshot FILE --table public.keyless; or, if it is only inserted into" in repair
        for statement in repair.split("--")[0].split(";")[:2]:
            pg.execute(statement)
        assert not refused_by_server(pg, "keyless")
        wait_until(lambda: not warned(), 60, "all warnings to go")


def test_a_publication_of_inserts_only_refuses_nothing(pg: Database) -> None:
    pg.execute("create table keyless(id int)")
    pg.execute(f"create publication {SLOT} for table keyless with (publish = 'insert')")
    source = PostgresSource(dsn=pg.dsn, publication=SLOT)
    with closing(Session.connect(source, threading.Event())) as session:
        warned = [each.key for each in publication_warnings(session, source)]
    assert warned == ["operations_left_out"]
    assert refused_by_server(pg, "keyless") == ""


def test_a_publication_created_meanwhile_by_a_killed_start_is_accepted(pg: Database) -> None:
    pg.execute("create table items(id int primary key)")
    source = PostgresSource.model_validate({"type": "postgresql", "dsn": pg.dsn}).for_pipeline("shop")
    with (
        pg.connect(autocommit=False) as killed,
        closing(Session.connect(source, threading.Event())) as session,
    ):
        # Its server process continues the command, and commits once it gets the lock that it waits for.
        killed.execute(f"create publication {source.publication} for table items")
        making = threading.Thread(target=partial(prepare_publication, session, source, is_own=True))
        making.start()
        waits = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = %s"
        wait_until(lambda: pg.query(waits, [pg.name])[0][0], 60, "the second command to wait")
        pg_names = "select tablename from pg_publication_tables where pubname = %s"
        killed.commit()
        making.join(60)
        assert not making.is_alive()
        assert pg.query(pg_names, [source.publication]) == [("items",)]
