"""Frames of a source that has rows as text: rows that could not be read from a log are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.protocol.frames import new_state, summarise
from tailrace.protocol.metadata_frames import kept_frames
from tailrace.sources.row_frames import UNCHANGED, ColumnShape, Row, RowFrames, TableShape

COLUMNS = (ColumnShape("id", "int8", 1), ColumnShape("note", "text", 2))
KEYED = TableShape(1, "public", "orders", COLUMNS, ("id",))
KEYLESS = TableShape(2, "public", "notes", COLUMNS, ())


@pytest.mark.parametrize(
    "write",
    [
        lambda frames, row: frames.insert(KEYED, row),
        lambda frames, row: frames.update(KEYED, row),
        lambda frames, row: frames.update(KEYED, ["1", "a"], row),
        lambda frames, row: frames.delete(KEYED, row),
        lambda frames, row: frames.delete(KEYLESS, row),
        lambda frames, row: frames.rows(KEYED, [row]),
    ],
    ids=["insert", "update", "old row", "delete", "delete without a key", "snapshot"],
)
@pytest.mark.parametrize("row", [["1"], ["1", "a", "b"]], ids=["too few", "too many"])
def test_a_row_with_another_number_of_columns_than_its_table_is_refused(
    write: Callable[[RowFrames, Row], None], row: Row
) -> None:
    frames = RowFrames()
    with pytest.raises(TailraceError, match=f"it has {len(row)} values, but its table 2 columns") as refused:
        write(frames, row)
    assert refused.value.kind is Kind.RECORD_INVALID
    assert len(frames.take()) == 0


@pytest.mark.parametrize("value", [1, b"a", "\ud800", UNCHANGED], ids=repr)
def test_a_value_that_is_no_text_is_refused(value: Any) -> None:
    frames = RowFrames()
    writes = [
        lambda row: frames.rows(KEYED, [row]),
        lambda row: frames.insert(KEYED, row),
        lambda row: frames.update(KEYED, ["1", "a"], row[::-1]),
        lambda row: frames.update(KEYLESS, ["1", "a"], row),
        lambda row: frames.delete(KEYED, row[::-1]),
        lambda row: frames.delete(KEYLESS, row),
    ]
    if value is not UNCHANGED:
        writes.append(lambda row: frames.update(KEYED, row))
    for write in writes:
        with pytest.raises(TailraceError, match="neither text nor None") as refused:
            write(["1", value])
        assert refused.value.kind is Kind.RECORD_INVALID
    assert len(frames.take()) == 0


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"relation": 0}, "relation"),
        ({"relation": 1 << 32}, "relation"),
        ({"schema": ""}, "a name is empty"),
        ({"table": "or\0ders"}, "zero character"),
        ({"columns": (replace(COLUMNS[0], name=""), COLUMNS[1])}, "a name is empty"),
        ({"columns": (COLUMNS[0], replace(COLUMNS[1], name="id"))}, "two columns have one name"),
        ({"columns": (COLUMNS[0], replace(COLUMNS[1], number=1))}, "different numbers"),
        ({"columns": (COLUMNS[0], replace(COLUMNS[1], number=0))}, "from 1"),
        ({"columns": tuple(ColumnShape(f"c{n}", "text", n + 1) for n in range(1665)), "key": ()}, "1664"),
        ({"key": ("id", "nope")}, "no column's"),
        ({"key": ("id", "id")}, "twice"),
        ({"numbered": 1}, "`numbered`"),
    ],
)
def test_a_shape_that_no_table_has_is_refused(changed: dict[str, Any], found: str) -> None:
    frames = RowFrames()
    with pytest.raises(TailraceError, match=found) as refused:
        frames.describe(replace(KEYED, **changed))
    assert refused.value.kind is Kind.CONFIG_INVALID
    assert len(frames.take()) == 0


def test_an_update_without_the_old_row_is_refused_if_its_table_has_no_key() -> None:
    frames = RowFrames()
    with pytest.raises(TailraceError, match="lacks the old row") as refused:
        frames.update(KEYLESS, ["1", UNCHANGED])
    assert refused.value.kind is Kind.RECORD_INVALID
    assert len(frames.take()) == 0
    frames.update(KEYED, ["1", UNCHANGED])
    frames.update(KEYLESS, ["1", UNCHANGED], ["1", "a"])


@pytest.mark.parametrize(
    "changed",
    [
        {"columns": (COLUMNS[0], replace(COLUMNS[1], type="int8"))},
        {"columns": (replace(COLUMNS[0], type="numeric", modifier=(5 << 16) + 4), COLUMNS[1])},
        {"key": ("note",)},
        {"key": ()},
        {"table": "renamed"},
        {"schema": "sales"},
    ],
    ids=["type", "modifier", "key", "no key", "table", "schema"],
)
def test_a_row_of_a_table_that_was_described_otherwise_is_refused(changed: dict[str, Any]) -> None:
    """Its readers would read the row by the description: a delete with another key removes no row."""
    frames = RowFrames()
    frames.describe(KEYED)
    frames = RowFrames(dict(kept_frames(frames.take())))
    altered = replace(KEYED, **changed)
    with pytest.raises(TailraceError, match="other columns, types, name or key"):
        frames.delete(altered, ["1", "2"])
    frames.delete(replace(KEYED, version=2, read_from=7), ["1", "2"])
    frames.describe(altered)
    frames.delete(altered, ["1", "2"])


@pytest.mark.parametrize("where", ["here", "in the log"])
def test_a_row_of_columns_with_which_its_table_was_not_described_is_refused(where: str) -> None:
    frames = RowFrames()
    frames.describe(KEYED)
    described = frames.take()
    if where == "in the log":
        frames = RowFrames(dict(kept_frames(described)))
    frames.insert(KEYED, ["1", "a"])
    frames.take()
    wider = replace(KEYED, columns=(*COLUMNS, ColumnShape("more", "text", 3)), version=2)
    with pytest.raises(TailraceError, match="described with other columns") as refused:
        frames.insert(wider, ["1", "a", "b"])
    assert refused.value.kind is Kind.RECORD_INVALID
    assert len(frames.take()) == 0
    frames.describe(wider)
    frames.insert(wider, ["1", "a", "b"])
    with pytest.raises(TailraceError, match="described with other columns"):
        frames.insert(KEYED, ["1", "a"])


@pytest.mark.parametrize(
    "write",
    [
        lambda frames, position, time_us: frames.begin(position, time_us),
        lambda frames, position, time_us: frames.begin_snapshot(position, time_us),
        lambda frames, position, time_us: frames.progress(position, time_us),
    ],
    ids=["transaction", "snapshot", "progress"],
)
@pytest.mark.parametrize(
    ("position", "time_us"), [(-1, 0), ((1 << 63) - 1, 0), (1.5, 0), ("1", 0), (1, 1 << 63), (1, None)]
)
def test_numbers_that_a_log_cannot_hold_are_refused(
    write: Callable[[RowFrames, Any, Any], None], position: Any, time_us: Any
) -> None:
    frames = RowFrames()
    with pytest.raises(TailraceError, match="a number is not whole, or out of range") as refused:
        write(frames, position, time_us)
    assert refused.value.kind is Kind.RECORD_INVALID
    with pytest.raises(TailraceError, match="a number is not whole"):
        frames.begin(1, 0, 1 << 32)
    assert len(frames.take()) == 0


def test_the_largest_numbers_can_be_read_from_a_log() -> None:
    frames = RowFrames()
    frames.describe(KEYED)
    frames.begin((1 << 63) - 2, (1 << 63) - 1, (1 << 32) - 1)
    frames.insert(KEYED, ["1", "a"])
    frames.commit()
    summary = summarise(frames.take(), new_state())
    assert (summary.position, summary.position_time_us) == ((1 << 63) - 1, (1 << 63) - 1)


def test_a_position_that_does_not_increase_is_for_the_sources_package_to_correct() -> None:
    frames = RowFrames()
    for position in (5, 4):
        frames.begin(position, 0)
        frames.commit()
    with pytest.raises(TailraceError, match="commits before an earlier one") as refused:
        summarise(frames.take(), new_state())
    assert "for its package to correct" in refused.value.hint
