"""Mirrors written by Spark: one log with a table for each hard case, in two ranges, read back by Spark.

All tables share the jobs, so that the suite pays for few of them.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tailrace.errors import TailraceError
from tailrace.model import Relation, ReplicaIdentity
from tailrace.protocol import frames
from tailrace.protocol.facts import ColumnFacts, Facts
from tailrace.sinks.contract import SparkNeededError
from tailrace.sinks.delta.mirror.files import open_net
from tailrace.sinks.names import table_directory
from tests.support.sinks.rig import (
    delete_whole,
    mirror_rows,
    opened,
    rekey,
    relation,
    update_whole,
    write,
    write_alone,
)
from tests.support.spark.wire import (
    DATE,
    FLOAT8,
    INT4,
    INT8,
    TEXT,
    TIMESTAMP,
    TIMESTAMPTZ,
    UNCHANGED,
    HandmadeLog,
    delete,
    insert,
    numeric,
    truncate,
    update,
)

NOTED = {"id": INT8, "note": TEXT, "n": INT4}
XID8, FLOAT8_ARRAY = 5069, 1022


class Story:
    """A table, its changes before and after the first range, and the rows that it must end with."""

    def __init__(self, oid: int, name: str, columns: dict[str, Any] | None = None, **more: Any) -> None:
        self.oid = oid
        self.name = f"s.{name}"
        self.described = relation(oid, self.name, columns or NOTED, **more)
        self.first: list[bytes] = []
        self.then: list[bytes] = []
        self.expected: list[tuple[Any, ...]] = []


def stories() -> list[Story]:
    told: list[Story] = []

    def story(name: str, columns: dict[str, Any] | None = None, **more: Any) -> Story:
        told.append(Story(100 + len(told), name, columns, **more))
        return told[-1]

    one = story("unchanged values stay, as they were sent before in the range or lie in the target")
    o = one.oid
    one.first = [insert(o, 1, "long one", 1), insert(o, 2, "long two", 2)]
    one.then = [update(o, 1, UNCHANGED, 10), update(o, 2, "new two", 20), update(o, 2, UNCHANGED, 21)]
    one.then += [insert(o, 3, "long three", 3), update(o, 3, UNCHANGED, 30)]
    one.expected = [(1, "long one", 10), (2, "new two", 21), (3, "long three", 30)]

    swap = story("two rows swap keys and bring unchanged values along")
    o = swap.oid
    swap.first = [insert(o, 1, "one", 1), insert(o, 2, "two", 2), insert(o, 5, "five", 5)]
    swap.then = [
        rekey(o, (1, None, None), (9, UNCHANGED, 1)),
        rekey(o, (2, None, None), (1, UNCHANGED, 2)),
        rekey(o, (9, None, None), (2, UNCHANGED, 1)),
        rekey(o, (5, None, None), (6, UNCHANGED, 50)),
    ]
    swap.expected = [(1, "two", 2), (2, "one", 1), (6, "five", 50)]

    gone = story("what is deleted is gone, what comes back is there")
    o = gone.oid
    gone.first = [insert(o, 1, "a", 1), insert(o, 2, "b", 2), insert(o, 3, "c", 3)]
    gone.then = [delete(o, 1, None, None), delete(o, 2, None, None), insert(o, 2, "again", 4)]
    gone.then += [insert(o, 7, "brief", 7), delete(o, 7, None, None)]
    gone.expected = [(2, "again", 4), (3, "c", 3)]

    emptied = story("a truncate empties the table, and what follows it is there")
    o = emptied.oid
    emptied.first = [insert(o, 1, "a", 1), insert(o, 2, "b", 2)]
    emptied.then = [insert(o, 3, "c", 3), truncate(o), insert(o, 2, "after", 5), insert(o, 4, "d", 6)]
    emptied.then += [update(o, 4, UNCHANGED, 7)]
    emptied.expected = [(2, "after", 5), (4, "d", 7)]

    only = story("a truncate alone leaves an empty table")
    only.first = [insert(only.oid, 1, "a", 1)]
    only.then = [truncate(only.oid)]

    odd = story(
        "keys that need their text", {"id": numeric(6, 2), "at": TIMESTAMP, "note": TEXT}, key=("id", "at")
    )
    o = odd.oid
    odd.first = [insert(o, "NaN", "infinity", "a"), insert(o, "NaN", "2020-01-01 00:00:00", "b")]
    odd.first += [insert(o, "1.50", "-infinity", "c"), insert(o, "NaN", "500000-01-01 00:00:00", "d")]
    odd.then = [update(o, "NaN", "infinity", "a2"), delete(o, "NaN", "500000-01-01 00:00:00", None)]
    odd.expected = []  # compared apart: Python has no such times

    long = story("keys that are too long for their column", {"id": XID8, "note": TEXT})
    o = long.oid
    long.first = [insert(o, 2**64 - 1, "a"), insert(o, 2**64 - 2, "b"), insert(o, 7, "c")]
    long.then = [update(o, 2**64 - 1, "a2"), delete(o, 2**64 - 2, None)]
    long.expected = [(None, "a2"), (7, "c")]

    real = story("floats as keys", {"id": FLOAT8, "note": TEXT})
    o = real.oid
    real.first = [insert(o, "NaN", "a"), insert(o, "0", "b"), insert(o, "Infinity", "c")]
    real.then = [update(o, "NaN", "a2"), update(o, "-0", "b2"), delete(o, "Infinity", None)]
    real.expected = [(math.nan, "a2"), (-0.0, "b2")]

    reals = story("arrays of floats as keys", {"id": FLOAT8_ARRAY, "note": TEXT})
    o = reals.oid
    reals.first = [insert(o, "{0,NaN}", "a"), insert(o, "{1,NULL}", "b"), insert(o, "{2}", "c")]
    reals.then = [rekey(o, ("{0,NaN}", None), ("{-0,NaN}", "a2")), update(o, "{1,NULL}", "b2")]
    reals.then += [rekey(o, ("{2}", None), ("{3}", "c2"))]
    reals.expected = [([-0.0, math.nan], "a2"), ([1.0, None], "b2"), ([3.0], "c2")]

    wider = story("a column that is added has values from then on")
    o = wider.oid
    wider.first = [insert(o, 1, "a", 1), insert(o, 2, "b", 2)]
    wider.then = [insert(o, 3, "c", 3)]
    wider.then += [relation(o, wider.name, {**NOTED, "extra": DATE}), insert(o, 4, "d", 4, "2024-02-29")]
    wider.then += [update(o, 1, UNCHANGED, 10, "2024-03-01")]
    wider.expected = [
        (1, "a", 10, dt.date(2024, 3, 1)),
        (2, "b", 2, None),
        (3, "c", 3, None),
        (4, "d", 4, dt.date(2024, 2, 29)),
    ]

    quoted = story("names", {"id": INT8, 'it`s"x"\'y\\z.w': TEXT, "order": INT4, "key": TIMESTAMPTZ})
    o = quoted.oid
    quoted.first = [insert(o, 1, "a", 1, "2020-01-01 00:00:00+00"), insert(o, 2, "b", 2, None)]
    quoted.then = [
        update(o, 1, UNCHANGED, 2, UNCHANGED),
        rekey(o, (2, None, None, None), (3, UNCHANGED, 3, None)),
    ]
    utc = dt.UTC
    quoted.expected = [(1, "a", 2, dt.datetime(2020, 1, 1, tzinfo=utc)), (3, "b", 3, None)]

    whole = story(
        "full rows without a key, equal ones counted", {"a": TEXT, "b": FLOAT8}, key=(), identity="f"
    )
    o = whole.oid
    whole.first = [
        insert(o, "x", 1),
        insert(o, "x", 1),
        insert(o, "x", 1),
        insert(o, None, None),
        insert(o, "y", "NaN"),
    ]
    whole.then = [delete_whole(o, "x", 1), update_whole(o, ("x", 1), ("z", 2)), delete_whole(o, None, None)]
    whole.then += [insert(o, "q", 1), insert(o, "q", 1), delete_whole(o, "q", 1)]
    whole.then += [update_whole(o, ("y", "NaN"), ("y", 3))]
    whole.expected = [("q", 1.0), ("x", 1.0), ("y", 3.0), ("z", 2.0)]

    zeros = story(
        "full rows that differ only in 0 and -0",
        {"a": TEXT, "b": FLOAT8, "c": FLOAT8_ARRAY},
        key=(),
        identity="f",
    )
    o = zeros.oid
    zeros.first = [insert(o, "a", 0, "{0}"), insert(o, "a", "-0", "{0}"), insert(o, "a", 0, "{-0}")]
    zeros.first += [insert(o, "b", 0, "{0}"), insert(o, "c", 0, "{0}")]
    zeros.then = [delete_whole(o, "a", "-0", "{0}"), delete_whole(o, "a", 0, "{-0}")]
    zeros.then += [update_whole(o, ("b", 0, "{0}"), ("b", "-0", "{0}"))]
    zeros.then += [update_whole(o, ("c", 0, "{0}"), ("c", 0, "{-0}"))]
    zeros.expected = [("a", 0.0, [0.0]), ("b", -0.0, [0.0]), ("c", 0.0, [-0.0])]

    named = story(
        "full rows with names of columns that the merge might take for itself",
        {"_rank": INT4, "_more": TEXT, "o": TEXT},
        key=(),
        identity="f",
    )
    o = named.oid
    named.first = [insert(o, 1, "x", "y"), insert(o, 1, "x", "y"), insert(o, 2, None, "z")]
    named.then = [insert(o, 3, "q", "y"), delete_whole(o, 1, "x", "y")]
    named.expected = [(1, "x", "y"), (2, None, "z"), (3, "q", "y")]

    both = {"id": INT8, "no": INT8, "note": TEXT}
    keyed = story("rows move under one key and then under another in one range", both)
    o = keyed.oid
    keyed.first = [insert(o, 1, 1, "a"), insert(o, 2, 2, "b"), insert(o, 3, 3, "c"), insert(o, 4, 4, "d")]
    keyed.then = [rekey(o, (1, None, None), (11, 1, UNCHANGED)), *(insert(o, n, n, "") for n in (5, 6, 7))]
    keyed.then += [rekey(o, (2, None, None), (12, 2, UNCHANGED))]
    keyed.then += [relation(o, keyed.name, both, key=("no",)), rekey(o, (None, 3, None), (3, 13, UNCHANGED))]
    keyed.then += [relation(o, keyed.name, {**both, "more": INT4}, key=("no",))]
    keyed.then += [rekey(o, (None, 4, None, None), (4, 14, UNCHANGED, 1))]
    moved = [(11, 1, "a", None), (12, 2, "b", None), (3, 13, "c", None), (4, 14, "d", 1)]
    keyed.expected = [*moved, *((n, n, "", None) for n in (5, 6, 7))]

    fresh = story("a table that first comes later")
    o = fresh.oid
    fresh.then = [
        insert(o, 1, "a", 1),
        update(o, 1, UNCHANGED, 2),
        insert(o, 2, "b", 1),
        delete(o, 2, None, None),
    ]
    fresh.expected = [(1, "a", 2)]
    return told


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    with HandmadeLog(tmp_path_factory.mktemp("mirror") / "log") as written:
        yield written


def shown(row: tuple[Any, ...]) -> tuple[Any, ...]:
    # Texts, because NaN does not equal NaN, and 0 equals -0.
    return tuple(repr(value) if isinstance(value, float | list) else value for value in row)


def rows_of(path: Path, name: str) -> list[tuple[Any, ...]]:
    rows = mirror_rows(path / table_directory(*name.split(".", 1)))
    return sorted((shown(tuple(row.values())) for row in rows), key=str)


@pytest.mark.ci
def test_mirrors_have_the_rows_of_the_source(spark, log, tmp_path):
    told = stories()
    log.commit(*(part for story in told for part in (story.described, *story.first)))
    middle = log.writer.tail.offset
    # Two transactions for each table, in different blocks: net changes of splits are merged across them.
    for story in told:
        half = len(story.then) // 2
        log.commit(*story.then[:half])
        log.commit(*story.then[half:])
    end = log.writer.tail.offset

    lake = tmp_path / "lake [1] {a,b} *"  # Spark would take this for a pattern
    sink = opened("mirror", lake, log, keyless="full_row")
    for start, upto in ((0, middle), (middle, end)):
        with contextlib.suppress(SparkNeededError):  # Spark does the merges; this range is written again
            write_alone(sink, log, start, upto)
        write(sink, log, start, upto, spark)
    sink.close()

    odd = next(story for story in told if "text" in story.name)
    for story in told:
        if story is not odd:  # Python has no such times
            found = rows_of(lake, story.name)
            assert found == sorted((shown(row) for row in story.expected), key=str), story.name
    table = DeltaTable(str(lake / table_directory(*odd.name.split(".", 1))))
    assert sorted(table.to_pyarrow_table(columns=["note"])["note"].to_pylist()) == ["a2", "b", "c"]


@pytest.mark.parametrize("cuts", [(), (0, 1, 2, 3)], ids=["in one range", "in a range each"])
def test_while_the_key_changes_rows_are_identified_by_the_old_and_the_new_key(spark, tmp_path, cuts):
    log = HandmadeLog(tmp_path / "log")

    def described(version: int, key: str, may_be_key: str = "") -> bytes:
        columns = tuple(
            ColumnFacts(name, number, type_oid=kind, base_oid=kind, may_be_key=name == may_be_key)
            for number, (name, kind) in enumerate(NOTED.items(), 1)
        )
        facts = Facts(1, "public", "accounts", (key,), columns, version=version)
        told = frames.control_frame(frames.FACTS, 0, 0, facts.as_json())
        return told + relation(1, "public.accounts", NOTED, identity="f")

    ends = [
        log.commit(described(1, "id"), insert(1, 1, "a", None), insert(1, 2, "b", 20)),
        # From here on the key may be `n`: some rows have the same `id`, some have no `n`.
        log.commit(described(2, "id", "n"), insert(1, 3, "c", None), insert(1, 2, "d", 21)),
        log.commit(
            update_whole(1, (1, "a", None), (1, "a", 10)), update_whole(1, (2, "b", 20), (2, "e", 22))
        ),
        log.commit(update_whole(1, (3, "c", None), (3, "c", 30)), delete_whole(1, 2, "d", 21)),
        log.commit(
            described(3, "n"), insert(1, 1, "f", 11), update_whole(1, (2, "e", 22), (1, "e", 22))
        ),
    ]  # fmt: skip
    sink, start = opened("mirror", tmp_path / "lake", log), 0
    for end in (*(ends[cut] for cut in cuts), ends[-1]):
        write(sink, log, start, end, spark)
        start = end
    log.close()
    found = [(row["n"], row["id"], row["note"]) for row in mirror_rows(tmp_path / "lake" / "public.accounts")]
    assert sorted(found) == [(10, 1, "a"), (11, 1, "f"), (22, 1, "e"), (30, 3, "c")]


@pytest.mark.ci
@pytest.mark.parametrize("oid", [1, 2], ids=["emptied and altered", "created again"])
def test_a_table_without_a_key_that_begins_again_has_its_new_rows_and_keeps_them(oid, spark, tmp_path):
    def described(oid: int, columns: dict[str, int], numbers: tuple[int, ...], **more: Any) -> bytes:
        held = tuple(
            ColumnFacts(name, number, type_oid=kind, base_oid=kind)
            for number, (name, kind) in zip(numbers, columns.items(), strict=True)
        )
        facts = Facts(oid, "public", "rows", (), held, **more)
        told = frames.control_frame(frames.FACTS, 0, 0, facts.as_json())
        return told + relation(oid, "public.rows", columns, key=(), identity="f")

    log = HandmadeLog(tmp_path / "log")
    again = described(oid, {"a": TEXT, "n": INT4}, (1, 3), version=2, replaced=oid - 1)
    ends = [
        log.commit(described(1, {"a": TEXT, "gone": TEXT}, (1, 2), version=1), insert(1, "x", "x")),
        log.commit(again, truncate(oid), insert(oid, "p", 1), insert(oid, "q", 2), delete_whole(oid, "q", 2)),
        log.commit(insert(oid, "r", 3)),
    ]
    sink, start, found = opened("mirror", tmp_path / "lake", log, keyless="full_row"), 0, []
    for end in ends:
        write(sink, log, start, end, spark)
        start = end
        found.append([tuple(row.values()) for row in mirror_rows(tmp_path / "lake" / "public.rows")])
    log.close()
    assert found == [[("x", "x")], [("p", 1)], [("p", 1), ("r", 3)]]


def test_the_hint_for_a_table_with_whole_old_rows_has_no_statement_for_them(tmp_path: Path) -> None:
    keyless = Relation(1, "shop", "visits", ReplicaIdentity.FULL, ())
    with pytest.raises(TailraceError) as refused:
        open_net(str(tmp_path / "net"), keyless, reads_once=False)
    assert "mirror it by whole rows (`keyless: full_row` for the sink)" in refused.value.hint
    assert "ALTER TABLE shop.visits ADD PRIMARY KEY" in refused.value.hint  # MySQL knows no double quotes
