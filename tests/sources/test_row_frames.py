"""Frames of a source that has rows as text: rows that could not be read from a log are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.sources.row_frames import ColumnShape, Row, RowFrames, TableShape

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
