"""Documented repairs work: they are followed exactly, and the result is compared with the source."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tailrace.changelog.reader import LogReader
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.preflight.preflight import preflight
from tailrace.sinks.delta import sink
from tailrace.sinks.delta.mirror import small_merge
from tailrace.sources.postgres.snapshot.plan import SnapshotOutcome
from tests.support.capture.captured import NAME, SLOT, capturing
from tests.support.capture.requested import KEYED, await_end, request
from tests.support.capture.resumed import SMALL, create_tables, life, until_whole, writers_at_work
from tests.support.postgres import Database, require_since
from tests.support.sinks.ddl_story import write_and_die


def make_gaps(pg: Database) -> None:
    """Change tables in ways that the stream does not show."""
    pg.execute(f"alter publication {SLOT} drop table items, pairs")
    pg.execute("delete from items where id % 3 = 0")
    pg.execute("update items set n = -1 where id % 5 = 1")
    pg.execute("insert into items values (999999, 7)")
    pg.execute("delete from pairs")
    pg.execute(f"alter publication {SLOT} add table items, pairs")
    pg.execute("truncate parts_low")


def refuse(*_: Any, **__: Any) -> None:
    raise DeltaError


@pytest.mark.parametrize(
    "mirror", ["small", "large", pytest.param("refused by delta-rs", marks=pytest.mark.ci)]
)
def test_a_requested_snapshot_removes_rows_that_no_longer_exist(
    place: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, mirror: str
) -> None:
    pg, log = place.pg, place.log
    if mirror == "small":
        monkeypatch.setattr(sink, "remove_unread", None)  # Spark is not used
    elif mirror == "large":
        monkeypatch.setattr(small_merge, "IN_PROCESS_TARGET_BYTES_MAX", 0)
    else:
        monkeypatch.setattr(DeltaTable, "delete", refuse)
    create_tables(pg)
    with capturing(pg.dsn, log, **SMALL) as running:
        running.wait_for("streaming")
        lake = place.mirror()
        lake.follow()
        lake.require_equal(pg, "items", "pairs", "parts")
        make_gaps(pg)
        with writers_at_work(pg):
            asked = request(log, *KEYED)
            lake.follow()
            assert await_end(running, log, asked).outcome is SnapshotOutcome.DONE
            lake.follow()
        pg.execute("insert into pairs values ('last', 1)")
        running.catch_up(pg.query, 120)
        lake.follow()
        lake.require_equal(pg, "items", "pairs", "parts")
        fresh = place.mirror("fresh")
        fresh.follow()
        fresh.require_equal(pg, "items", "pairs", "parts")


def test_a_killed_snapshot_and_an_interrupted_mirror_remove_rows_that_no_longer_exist(
    place: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pg, log = place.pg, place.log
    create_tables(pg)
    until_whole(pg, log)
    lake = place.mirror()
    lake.follow()
    make_gaps(pg)
    pg.execute("delete from pairs")  # the mirror learns that a table is empty, too
    request(log, *KEYED)
    for point in ("after_plan", "after_chunk@3", "before_chunk_end@5", "before_finish"):
        name, _, count = point.partition("@")
        assert life(pg, log, f"snapshot.{name}=kill@{count or 1}") in {-9, 0}, point
        lake.follow()
    until_whole(pg, log)
    lake.follow()
    lake.require_equal(pg, "items", "pairs", "parts")


@pytest.mark.parametrize("point", ["sink.before_remove", "sink.before_remove@2", "sink.before_position"])
def test_a_mirror_killed_while_it_removes_rows_is_completed(
    place: SimpleNamespace, tmp_path: Path, point: str
) -> None:
    pg, log = place.pg, place.log
    create_tables(pg)
    with capturing(pg.dsn, log, **SMALL) as running:
        running.wait_for("streaming")
        lake = place.mirror()
        lake.follow()
        make_gaps(pg)
        assert await_end(running, log, request(log, *KEYED)).outcome is SnapshotOutcome.DONE
        running.catch_up(pg.query, 120)
    lake.close()
    with LogReader.open(log, "0") as reader:
        end = reader.end().offset
    name, _, count = point.partition("@")
    write_and_die("mirror", tmp_path / "lake", log, end, list(KEYED), f"{name}=kill@{count or 1}")
    lake = place.mirror()
    lake.follow()
    lake.require_equal(pg, "items", "pairs", "parts")


def test_a_snapshot_of_some_rows_removes_nothing(place: SimpleNamespace) -> None:
    pg, log = place.pg, place.log
    create_tables(pg)
    with capturing(pg.dsn, log, **SMALL) as running:
        running.wait_for("streaming")
        asked = request(log, "public.items", where="id <= 10")
        assert await_end(running, log, asked).outcome is SnapshotOutcome.DONE
        running.catch_up(pg.query, 120)
        lake = place.mirror()
        lake.follow()
        lake.require_equal(pg, "items", "pairs", "parts")


def tables_to_read_again(error: TailraceError) -> tuple[str, ...]:
    """Return the tables in a hint's `tailrace snapshot FILE --table …`."""
    command = re.search(r"`(tailrace snapshot FILE --table .*?)`", error.hint)
    assert command is not None, error.hint
    words = shlex.split(command[1])
    assert words[:3] == ["tailrace", "snapshot", "FILE"]
    assert set(words[3::2]) == {"--table"}
    return tuple(words[4::2])


RENAMES = {
    "one is renamed": (
        ("public.*",),
        ["alter table orders rename to bills", "insert into bills values (31, 'renamed')"],
        {"public.bills"},
        ("bills", "orders_new"),
    ),
    "one gets the name of another": (
        ("public.*",),
        [
            "begin; alter table orders rename to orders_old; "  # noqa: ISC004
            "alter table orders_new rename to orders; commit",
            "insert into orders values (31, 'swapped')",
            "update orders_old set what = 'later' where id < 5",
        ],
        {"public.orders", "public.orders_old"},
        ("orders", "orders_old"),
    ),
    "a sink of the one name alone": (
        ("public.orders",),
        [
            "alter table orders rename to orders_old",
            "alter table orders_new rename to orders",
            "insert into orders values (31, 'swapped')",
        ],
        {"public.orders"},
        ("orders",),
    ),
    "to a name that the sink does not get, and back": (
        ("public.orders",),
        [
            "alter table orders rename to orders_old",
            "insert into orders_old values (31, 'under the other name')",
            "alter table orders_old rename to orders",
            "insert into orders values (32, 'after')",
        ],
        {"public.orders"},
        ("orders",),
    ),
}


@pytest.mark.follows("sink_schema_refused")
@pytest.mark.parametrize("case", RENAMES)
def test_a_mirror_stops_at_a_rename_and_its_hint_helps(place: SimpleNamespace, case: str) -> None:
    wanted, statements, named, there = RENAMES[case]
    pg, log = place.pg, place.log
    pg.execute("create table orders(id int primary key, what text)")
    pg.execute("create table orders_new(id int primary key, what text)")
    pg.execute("insert into orders select n, 'old' from generate_series(1, 20) n")
    with capturing(pg.dsn, log) as running:
        running.wait_for("streaming")
        pg.execute("insert into orders_new select n, 'new' from generate_series(11, 30) n")
        running.catch_up(pg.query, 60)
        lake = place.mirror(tables=wanted)
        lake.follow()
        lake.require_equal(pg, "orders")
        before = lake.rows("orders", "id", "what")
        for statement in statements:
            pg.execute(statement)
        running.catch_up(pg.query, 60)
        for _ in range(2):  # also if it is only started again
            with pytest.raises(TailraceError) as raised:
                lake.follow()
            assert raised.value.kind is Kind.SINK_SCHEMA_REFUSED
            assert lake.rows("orders", "id", "what") == before
        again = tables_to_read_again(raised.value)
        assert set(again) == named
        asked = request(log, *again)
        assert await_end(running, log, asked).outcome is SnapshotOutcome.DONE
        pg.execute(f"insert into {there[0]} values (40, 'after')")
        running.catch_up(pg.query, 60)
        lake.follow()
        lake.require_equal(pg, *there)


@pytest.mark.follows("sink_schema_refused", "table_missing")
def test_a_table_that_becomes_a_partition_of_one_with_its_name_is_mirrored_under_that_name(
    place: SimpleNamespace,
) -> None:
    pg, log = place.pg, place.log
    pg.execute("create table orders(id int primary key, what text)")
    pg.execute("insert into orders select n, 'old' from generate_series(1, 20) n")
    with capturing(pg.dsn, log) as running:
        running.wait_for("streaming")
        running.catch_up(pg.query, 60)
        lake = place.mirror(tables=None)
        lake.follow()
        pg.execute(
            "begin; alter table orders rename to orders_old; "
            "alter index orders_pkey rename to orders_old_pkey; "
            "create table orders(id int primary key, what text) partition by range (id); "
            "alter table orders attach partition orders_old for values from (0) to (100); "
            "create table orders_new partition of orders for values from (100) to (200); commit"
        )
        pg.execute("insert into orders values (21, 'first'), (121, 'second')")
        pg.execute(f"alter publication {SLOT} add table orders")
        running.catch_up(pg.query, 60)
        with pytest.raises(TailraceError) as raised:
            lake.follow()
        failed = await_end(running, log, request(log, *tables_to_read_again(raised.value)))
        assert failed.error is not None
        assert "it is a partition" in failed.error["message"]
        assert failed.error["hint"].startswith("take one of public.orders. If a mirror asks")
        lake.close()
        assert "is a partition now" in raised.value.hint
        lake = place.mirror(tables=(r"/public\.(?!orders_old$).*/",))
        asked = request(log, "public.orders")
        assert await_end(running, log, asked).outcome is SnapshotOutcome.DONE
        pg.execute("update orders set what = 'later' where id in (1, 121)")
        running.catch_up(pg.query, 60)
        lake.follow()
        lake.require_equal(pg, "orders")


def test_a_mirror_of_all_tables_from_the_logs_start_follows_a_swap_of_tables_without_a_snapshot(
    place: SimpleNamespace,
) -> None:
    pg, log = place.pg, place.log
    pg.execute("create table orders(id int primary key, what text)")
    with capturing(pg.dsn, log) as running:
        running.wait_for("streaming")
        pg.execute("create table orders_new(id int primary key, what text)")
        pg.execute(f"alter publication {SLOT} add table orders_new")
        pg.execute("insert into orders_new values (1, 'new')")
        pg.execute("drop table orders")
        pg.execute("alter table orders_new rename to orders")
        pg.execute("insert into orders values (2, 'swapped')")
        running.catch_up(pg.query, 60)
        every = place.mirror("every", ("public.*",))
        every.follow()
        every.require_equal(pg, "orders")
        lake = place.mirror(tables=("public.orders",))
        with pytest.raises(TailraceError, match=r"public\.orders had another name") as raised:
            lake.follow()
        asked = request(log, *tables_to_read_again(raised.value))
        assert await_end(running, log, asked).outcome is SnapshotOutcome.DONE
        lake.follow()
        lake.require_equal(pg, "orders")


@pytest.mark.follows("sink_schema_refused")
@pytest.mark.parametrize("way", ["read again", "new path", "left out again", "gone"])
def test_a_mirror_stops_at_a_table_that_its_settings_excluded_for_a_while(
    place: SimpleNamespace, tmp_path: Path, way: str
) -> None:
    pg, log = place.pg, place.log
    for table in ("kept", "spare"):
        pg.execute(f"create table {table}(id int primary key, n int)")
        pg.execute(f"insert into {table} select n, 0 from generate_series(1, 9) n")
    ids = itertools.count(10)
    with capturing(pg.dsn, log) as running:

        def follow(tables: tuple[str, ...] | None = None, name: str = "lake") -> Any:
            pg.execute(f"insert into kept values ({next(ids)}, 0)")
            running.catch_up(pg.query, 60)
            lake = place.mirror(name, tables)
            try:
                lake.follow()
            finally:
                lake.close()
            return lake

        def require_refused() -> TailraceError:
            with pytest.raises(
                TailraceError, match=r"the settings left out public\.spare, or columns"
            ) as raised:
                follow()
            assert raised.value.kind is Kind.SINK_SCHEMA_REFUSED
            return raised.value

        running.wait_for("streaming")
        follow().require_equal(pg, "kept", "spare")
        pg.execute("delete from spare where id = 1")
        pg.execute("update spare set n = 1 where id = 2")
        follow(("public.kept",)).require_equal(pg, "kept")
        refused = require_refused()
        if way == "read again":
            asked = request(log, *tables_to_read_again(refused))
            assert await_end(running, log, asked).outcome is SnapshotOutcome.DONE
            for _ in range(2):
                pg.execute("update spare set n = n + 1 where id = 3")
                follow().require_equal(pg, "kept", "spare")
        elif way == "new path":
            follow(name="other").require_equal(pg, "kept", "spare")
        elif way == "left out again":
            follow(("public.kept",)).require_equal(pg, "kept")
            require_refused()
        else:
            pg.execute("drop table spare")
            (tmp_path / "lake" / "public.spare").rename(tmp_path / "away")
            follow().require_equal(pg, "kept")


@pytest.mark.follows("sink_schema_refused")
def test_a_mirror_stops_at_a_column_that_its_settings_excluded_for_a_while(place: SimpleNamespace) -> None:
    pg, log = place.pg, place.log
    pg.execute("create table people(id int primary key, note text default 'none')")
    pg.execute("insert into people values (1, 'one')")
    ids = itertools.count(10)
    with capturing(pg.dsn, log) as running:

        def follow(*excluded: str) -> Any:
            pg.execute(f"insert into people values ({next(ids)}, 'more')")
            running.catch_up(pg.query, 60)
            lake = place.mirror(tables=None, columns_exclude=excluded)
            try:
                lake.follow()
            finally:
                lake.close()
            return lake

        running.wait_for("streaming")
        for _ in range(2):
            assert len(follow("public.people.note").rows("people", "id")) > 1
        pg.execute("alter table people rename note to remark")
        for name in ("note", "remark", "note"):  # excluded under each of its names
            assert len(follow(f"public.people.{name}").rows("people", "id")) > 1
        for _ in range(2):
            with pytest.raises(TailraceError, match=r"public\.people, or columns of it") as refused:
                follow()
            # Left out again, as the hint allows.
            assert len(follow("public.people.note").rows("people", "id")) > 1
        with pytest.raises(TailraceError, match=r"public\.people, or columns of it"):
            follow()
        asked = request(log, *tables_to_read_again(refused.value))
        assert await_end(running, log, asked).outcome is SnapshotOutcome.DONE
        for _ in range(2):
            follow().require_equal(pg, "people")
        assert len(follow("public.people.note").rows("people", "id")) > 1


@pytest.mark.follows("publication_mismatch")
@pytest.mark.each_postgres("column lists")
def test_the_repair_that_check_prints_for_a_column_list_gives_complete_columns(
    place: SimpleNamespace, tmp_path: Path
) -> None:
    pg, log = place.pg, place.log
    require_since(15, "column lists", pg.server.version)
    pg.execute("create table items(id int primary key, n int, note text)")
    pg.execute("insert into items select n, n, 'note ' || n from generate_series(1, 30) n")
    pg.execute(f"create publication {SLOT} for table items (id, n) where (id > 5)")
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        f"name: {NAME}\nsource:\n  host: 127.0.0.1\n  port: {pg.port}\n  user: postgres\n"
        f"  dbname: {pg.name}\nlog: {{path: {log}}}\n"
    )
    with capturing(pg.dsn, log) as running:
        running.wait_for("streaming")
        running.catch_up(pg.query, 60)
        lake = place.mirror(tables=None)
        lake.follow()
        assert len(lake.rows("items", "id", "n")) == 25
        (finding,) = [each for each in preflight(file) if "does not send the columns 'note'" in each.message]
        sql, _, then = finding.repair.partition(" -- ")
        with pg.connect(autocommit=True) as connection:
            connection.execute(sql)
        table = then.rpartition("--table ")[2]
        assert await_end(running, log, request(log, table)).outcome is SnapshotOutcome.DONE
        pg.execute("update items set note = 'changed' where id = 7")
        running.catch_up(pg.query, 60)
        lake.follow()
        assert lake.rows("items", "id", "n", "note") == sorted(
            pg.query("select id, n, note from items where id > 5")
        )


#: By type, a key in two notations that PostgreSQL treats as equal: a row is updated from the first to the
#: other.
EQUAL_KEYS = {"double precision": ("0", "-0"), "real": ("-0", "0"), "numeric": ("1.0", "1.000")}


@pytest.mark.parametrize("at_once", [True, pytest.param(False, marks=pytest.mark.ci)])
def test_equal_keys_in_different_notations_are_one_row(place: SimpleNamespace, at_once: bool) -> None:
    pg = place.pg
    tables = {f"t_{kind.split()[0]}": (kind, *texts) for kind, texts in EQUAL_KEYS.items()}

    def each(statement: str) -> None:
        for table, (kind, first, then) in tables.items():
            pg.execute(statement.format(table=table, kind=kind, first=first, then=then))

    each("create table {table}(k {kind} primary key, n int, big text)")
    each("alter table {table} alter big set storage external")
    each("insert into {table} values ('{first}', 0, repeat('x', 9000)), ('7', 0, 'y')")
    with capturing(pg.dsn, place.log) as running:
        running.wait_for("streaming")
        lake = place.mirror(tables=None)

        def follow(*, last: bool = False) -> None:
            running.catch_up(pg.query, 60)
            if not last and at_once:
                return
            lake.follow()
            for table in tables:
                both = lake.rows(table, "k", "n", "big"), pg.query(f"select k, n, big from {table}")
                found, source = (sorted((float(k), *rest) for k, *rest in rows) for rows in both)
                assert found == source, table

        follow()
        each("update {table} set k = '{then}', n = 1 where n = 0 and k <> 7")  # another key in PostgreSQL
        follow()
        each("update {table} set n = 2 where k <> 7")
        follow()
        each("update {table} set k = '{first}' where k <> 7")
        follow(last=True)
        each("delete from {table} where k <> 7")
        each("insert into {table} values ('{then}', 3, 'again')")
        follow(last=True)
        each("delete from {table} where k = '{first}'")
        follow(last=True)
