"""Exactly the updates that change no captured column are dropped before the log."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrace.config.source.postgres import PostgresSource
from tailrace.model import parse_lsn
from tailrace.pipeline.preflight.preflight import preflight
from tailrace.protocol import frames, metadata_frames
from tailrace.protocol.facts import ColumnFacts, Facts
from tailrace.protocol.renames import Renames
from tailrace.sources.findings import Severity
from tailrace.sources.postgres.schema.table_facts import KnownFacts
from tailrace.sources.postgres.streaming.unchanged_updates import UnchangedUpdates
from tests.support.capture.captured import NAME, capturing
from tests.support.capture.folded import fold
from tests.support.capture.resumed import RUN, life
from tests.support.capture.stream_of import insert, transaction, xlog
from tests.support.postgres import Database

Row = list[bytes | str | None]  # 'u': unchanged, not sent again

NONE_KNOWN = KnownFacts()


def cells(row: Row) -> bytes:
    found = struct.pack("!H", len(row))
    for value in row:
        if isinstance(value, str):
            found += value.encode()
        else:
            found += b"n" if value is None else b"t" + struct.pack("!i", len(value)) + value
    return found


def update(oid: int, old: Row, new: Row, mark: bytes = b"O") -> bytes:
    return xlog(b"U" + struct.pack("!I", oid) + mark + cells(old) + b"N" + cells(new))


def relation(oid: int, *columns: str, identity: str = "f", table: str = "t") -> bytes:
    body = b"R" + struct.pack("!I", oid) + b"public\0" + table.encode() + b"\0" + identity.encode()
    body += struct.pack("!H", len(columns))
    for name in columns:
        body += struct.pack("!B", identity == "f") + name.encode() + b"\0" + struct.pack("!Ii", 25, -1)
    return xlog(body)


def facts(oid: int, *columns: str, pending: int = 0, table: str = "t") -> bytes:
    found = Facts(
        oid, "public", table, ("id",), tuple(ColumnFacts(name, n + 1) for n, name in enumerate(columns)),
        version=1, pending=pending,
    )  # fmt: skip
    return frames.control_frame(frames.FACTS, 5, 0, found.as_json())


def leaving_out(renames: Renames | None = None, **options: Any) -> UnchangedUpdates:
    source = PostgresSource(dsn="postgresql://u@localhost/d", skip_unchanged_updates=True, **options)
    return UnchangedUpdates(source, lambda: renames or Renames())


def left(filter_: UnchangedUpdates, *parts: bytes, in_force: KnownFacts = NONE_KNOWN) -> list[bytes]:
    """Return the frames that are left of a chunk, without its first ones that describe tables."""
    chunk = np.frombuffer(b"".join(parts), np.uint8)
    has_schema = bool(metadata_frames.schema_frames(chunk))
    found = filter_.apply(chunk, in_force, has_schema)
    return [bytes(frame) for _, frame in frames.each_frame(found)]


SAME = update(1, [b"1", b"a", None], [b"1", b"a", None])


@pytest.mark.parametrize(
    ("old", "new", "stays"),
    [
        ([b"1", b"a", None], [b"1", b"a", None], False),
        ([b"1", b"a", b"big"], [b"1", b"a", "u"], False),
        ([b"1", b"a", None], [b"1", b"b", None], True),
        ([b"1", b"a", None], [b"1", b"aa", None], True),
        ([b"1", b"a", None], [b"1", b"a", b""], True),
        ([b"1", b"a", b""], [b"1", b"a", None], True),
        ([b"1", b"a", b"x"], [b"2", b"a", "u"], True),
        ([b"1", b"a"], [b"1", b"a"], True),  # another number of columns than the table's
        ([b"1", b"a", None], [b"1", b"a"], True),
    ],
)
def test_old_and_new_row_are_compared_as_sent(old: Row, new: Row, stays: bool) -> None:
    filter_ = leaving_out()
    change = update(1, old, new)
    described = relation(1, "id", "a", "b")
    assert left(filter_, described, insert(1), change)[2:] == ([change] if stays else [])
    assert left(filter_, change, change) == ([change, change] if stays else [])


def test_without_the_whole_old_row_nothing_is_dropped() -> None:
    filter_ = leaving_out()
    for identity, mark in (("d", b"K"), ("i", b"K"), ("d", b"O")):
        change = update(1, [b"1", b"a"], [b"1", b"a"], mark)
        assert left(filter_, relation(1, "id", "a", identity=identity), change)[1:] == [change]
    unknown = update(99, [b"1"], [b"1"])
    assert left(filter_, unknown) == [unknown]


def test_every_prefix_of_an_update_is_handled() -> None:
    filter_ = leaving_out()
    left(filter_, relation(1, "id", "a", "b"))
    body = SAME[frames.XLOG_PAYLOAD_AT :]
    for size in range(1, len(body)):
        cut = xlog(body[:size])
        assert left(filter_, cut) == [cut]
    rng = random.Random(7)
    for _ in range(3000):
        changed = bytearray(body)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(5, len(body))] = rng.randrange(256)
        left(filter_, xlog(bytes(changed)))


@pytest.mark.parametrize("count", [1, 31, 32, 33, 5000])
def test_many_tables_and_updates(count: int) -> None:
    filter_ = leaving_out()
    described = b"".join(relation(oid, "id", *["c"] * (oid % 2)) for oid in range(1, count + 1))
    left(filter_, described)
    kept = [update(oid, [b"1"] * (1 + oid % 2), [b"2"] * (1 + oid % 2)) for oid in range(1, count + 1)]
    same = [update(oid, [b"1"] * (1 + oid % 2), [b"1"] * (1 + oid % 2)) for oid in range(1, count + 1)]
    mixed = [each for pair in zip(same, kept, strict=True) for each in pair]
    assert left(filter_, *mixed) == kept
    assert left(filter_, *same) == []


def test_excluded_columns_do_not_count() -> None:
    change = update(1, [b"1", b"a", b"x"], [b"1", b"a", b"y"])
    described = facts(1, "id", "a", "seen"), relation(1, "id", "a", "seen")
    excluded: Any = {"columns_exclude": ("public.t.seen",)}
    assert left(leaving_out(**excluded), *described, change)[2:] == []
    assert left(leaving_out(), *described, change)[2:] == [change]
    assert left(leaving_out(columns=("public.t.a",)), *described, change)[2:] == []
    # The key counts, listed or not.
    key = update(1, [b"1", b"a", b"x"], [b"2", b"a", b"x"])
    assert left(leaving_out(columns=("public.t.a",)), *described, key)[2:] == [key]
    # With facts that are pending or missing, all columns count; once they are known, no longer.
    filter_ = leaving_out(**excluded)
    pending = facts(1, "id", "a", "seen", pending=7)
    assert left(filter_, pending, described[1], change)[2:] == [change]
    assert left(filter_, change, described[0], change) == [change, described[0]]
    assert left(filter_, change) == []


def test_the_rules_of_all_its_names_apply_to_a_renamed_column() -> None:
    names = (("public", "t", "a"), ("public", "t", "b"))
    renames = Renames({1: {"2": names}})
    change = update(1, [b"1", b"x"], [b"1", b"y"])
    described = facts(1, "id", "b"), relation(1, "id", "b")
    assert left(leaving_out(renames, columns=("public.t.a",)), *described, change)[2:] == [change]
    assert left(leaving_out(renames, columns_exclude=("public.t.a",)), *described, change)[2:] == []


def test_a_table_may_change_within_a_chunk() -> None:
    filter_ = leaving_out()
    short, long = update(1, [b"1"], [b"1"]), update(1, [b"1", b"a"], [b"1", b"a"])
    described = relation(1, "id"), relation(1, "id", "a")
    assert left(filter_, described[0], short, long, described[1], long, short) == [
        described[0], long, described[1], short,
    ]  # fmt: skip
    assert left(filter_, transaction(5, 6, long)) == left(filter_, transaction(5, 6))


def make(pg: Database) -> None:
    pg.execute("create table items(id bigint primary key, n int not null default 0, big text, seen int)")
    pg.execute("alter table items alter column big set storage external")
    pg.execute("alter table items replica identity full")
    pg.execute("create table pairs(a text, b int, n int not null default 0, primary key (a, b))")
    pg.execute("create table parts(id int primary key, n int not null default 0) partition by range (id)")
    pg.execute("create table parts_low partition of parts for values from (0) to (1500)")
    pg.execute("create table plain(id int, n int not null default 0)")
    for table in ("parts", "parts_low", "plain"):
        pg.execute(f"alter table {table} replica identity full")
    pg.execute("insert into items select n, 0, repeat('x', 9000), 0 from generate_series(1, 50) n")


@pytest.mark.each_postgres("what pgoutput sends")
def test_updates_without_a_change_are_not_in_the_log(pg: Database, tmp_path: Path) -> None:
    make(pg)
    options = {"skip_unchanged_updates": True, "columns_exclude": ("public.items.seen",)}
    log = tmp_path / "log"
    with capturing(pg.dsn, log, **options) as running:
        running.wait_for("streaming")
        pg.execute("update items set n = n")
        pg.execute("update items set seen = seen + 1")
        pg.execute("begin; update items set n = 0; update items set n = 1 where id = 7; commit")
        pg.execute("insert into plain values (1)")
        pg.execute("update plain set n = n")
        pg.execute("insert into parts values (1)")
        pg.execute("update parts set n = n")
        pg.execute("insert into pairs values ('a', 1)")
        pg.execute("update pairs set n = n")  # not FULL: it stays
        pg.execute("alter table items rename seen to looked")
        pg.execute("update items set looked = 9 where id = 8")
        pg.execute("alter table items add more int")
        pg.execute("update items set more = 1 where id = 9")
        pg.execute("update items set more = 1 where id = 9")
        running.catch_up(pg.query)
    # After a restart the server describes the tables again.
    with capturing(pg.dsn, log, **options) as running:
        running.wait_for("streaming")
        pg.execute("update items set n = n")
        pg.execute("update items set n = 5 where id = 3")
        running.catch_up(pg.query)
    tables = fold(log)
    assert {name: table.ops.get("u", 0) for name, table in tables.items()} == {
        "items": 3, "plain": 0, "parts": 0, "pairs": 1,
    }  # fmt: skip


def test_a_transaction_larger_than_a_chunk_may_be_dropped_completely(pg: Database, tmp_path: Path) -> None:
    make(pg)
    pg.execute("insert into plain select n from generate_series(1, 60000) n")
    with capturing(pg.dsn, tmp_path / "log", skip_unchanged_updates=True) as running:
        running.wait_for("streaming")
        pg.execute("update plain set n = n")
        pg.execute("update plain set n = n + (id = 60000)::int")
        running.catch_up(pg.query)
    assert fold(tmp_path / "log")["plain"].ops == {"r": 60000, "u": 1}


@pytest.mark.ci
def test_after_kills_the_log_folds_to_the_rows_of_the_source(pg: Database, tmp_path: Path) -> None:
    make(pg)
    pg.execute("alter table items drop seen")
    log = tmp_path / "log"
    script = RUN.replace("snapshot_connections=3,", "snapshot_connections=3, skip_unchanged_updates=True,")
    assert life(pg, log, "", script=script) == 0
    rng = random.Random(3)
    for point in (
        "capture.after_append=kill@1",
        "log.after_fsync=kill@1",
        "capture.before_append=kill@1",
        "",
    ):
        for _ in range(40):
            pg.execute(
                f"update items set n = {rng.choice(['n', 'n', 'n + 1'])} where id % 5 = {rng.randrange(5)}"
            )
            pg.execute(
                f"update items set big = {rng.choice(['big', '$$x$$'])} where id = {rng.randrange(50)}"
            )
        end = parse_lsn(pg.query("select pg_current_wal_insert_lsn()::text")[0][0])
        pg.execute("select pg_switch_wal()")
        ended = life(pg, log, point, script=script.replace("caught_up(1)", f"caught_up({end})"))
        assert ended == (-9 if point else 0)
    items = fold(log)["items"]
    rows = pg.query("select id::text, n::text, big from items")
    assert items.values == sorted(tuple(row) for row in rows)
    changed = items.ops["u"]
    assert 0 < changed < 40 * 4 * 10 * 0.6


def test_check_names_the_tables_of_which_all_updates_are_kept(pg: Database, tmp_path: Path) -> None:
    make(pg)
    file = tmp_path / "pipeline.yaml"

    def findings(more: str) -> list[Any]:
        file.write_text(
            f"name: {NAME}\nsource:\n  host: 127.0.0.1\n  port: {pg.port}\n  user: postgres\n"
            f"  dbname: {pg.name}\n{more}log: {{path: ./checked}}\n"
        )
        return [each for each in preflight(file) if "skip_unchanged_updates" in each.message]

    [finding] = findings("  skip_unchanged_updates: true\n")
    assert (finding.table, finding.severity) == ("public.pairs", Severity.WARNING)
    assert findings("  skip_unchanged_updates: true\n  replica_identity: {public.pairs: full}\n") == []
    assert findings("") == []
    # The setting would undo the SQL at the next start.
    [undone] = findings("  skip_unchanged_updates: true\n  replica_identity: {public.pair*: default}\n")
    assert undone.repair == "name public.pairs with full in source.replica_identity, as its first entry"
    first = "  replica_identity: {public.pairs: full, public.pair*: default}\n"
    assert findings(f"  skip_unchanged_updates: true\n{first}") == []
    pg.execute(finding.repair.split(";")[0])
    assert findings("  skip_unchanged_updates: true\n") == []
