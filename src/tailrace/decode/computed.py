"""Columns computed from a table's own, as cells with the texts that PostgreSQL would have sent.

Rows of every form, old keys and JSON therefore treat them like columns of the source.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.decode.gather import text_buffers
from tailrace.decode.kernel import ABSENT, NULL, TEXT, UNCHANGED
from tailrace.decode.tuples import WHOLE_ROW, Spans, Tuples
from tailrace.model import Op, Relation
from tailrace.protocol.frames import Bytes, Numbers

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ComputedColumn:
    """The texts of one computed column, one entry per change.

    :param place: index of the column of the former relation that it replaces; -1: a new column.
    :param current: text in the row after the change, of a delete in the row before; null: NULL.
    :param old: text in the row before.
    :param unsent: where the value is unknown, because a value that it is computed from was not sent.
    :param is_cast: the column is the former column in another form. A value that was not sent remains
        unsent, and where the text is null, PostgreSQL's text is kept.
    """

    place: int
    current: pa.StringArray
    old: pa.StringArray
    unsent: Mask
    is_cast: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ComputedColumns:
    """A table with computed columns, for the changes that they were computed from.

    :param relation: the table with these columns; new columns follow the former ones.
    """

    relation: Relation
    columns: tuple[ComputedColumn, ...]

    def part(self, first: int, last: int) -> ComputedColumns:
        """Return the columns for the changes at the indexes `[first, last)`."""
        return self.take(np.arange(first, last))

    def take(self, places: Numbers) -> ComputedColumns:
        """Return the columns for the changes at the indexes `places` (ascending)."""
        rows = pa.array(places)
        columns = (
            replace(
                each, current=each.current.take(rows), old=each.old.take(rows), unsent=each.unsent[places]
            )
            for each in self.columns
        )
        return ComputedColumns(self.relation, tuple(columns))

    def apply(self, tuples: Tuples) -> Tuples:
        """Return `tuples` with these columns.

        :raises TailraceError: `DECODE_FAILED` if the block grows too large.
        """
        former = len(tuples.current.kind)
        added = sum(1 for column in self.columns if column.place < 0)
        current, old = _widened(tuples.current, former + added), _widened(tuples.old, former + added)
        has_row, whole = tuples.op != ord(Op.TRUNCATE), tuples.old_mark == WHOLE_ROW
        sides = ((current, has_row), (old, whole[: old.kind.shape[1]]))
        texts: list[Bytes] = []
        size, new = len(tuples.buffer), former
        for column in self.columns:
            at, new = (new, new + 1) if column.place < 0 else (column.place, new)
            for (spans, wanted), values in zip(sides, (column.current, column.old), strict=True):
                if len(wanted):
                    texts.append(_put(spans, at, values, size, None if column.is_cast else wanted))
                    size += len(texts[-1])
            unsent = column.unsent & (tuples.op == ord(Op.UPDATE))
            current.kind[at][unsent], current.length[at][unsent] = UNCHANGED, 0
        hint = "lower source.frame_bytes_max, or compute fewer columns"
        grown = tuples.with_texts(*texts, attempted="computed columns", hint=hint)
        in_key = np.append(tuples.in_key, np.zeros(added, np.bool_))
        return replace(grown, relation=self.relation, current=current, old=old, in_key=in_key)


def _widened(spans: Spans, columns: int) -> Spans:
    former, count = spans.kind.shape
    found = Spans.empty(columns, count)
    for new, before in ((found.start, spans.start), (found.length, spans.length), (found.kind, spans.kind)):
        new[:former] = before
        new[former:] = 0
    return found


def _put(
    spans: Spans, at: int, values: pa.StringArray, first: int, wanted: npt.NDArray[np.bool_] | None
) -> Bytes:
    """Write the cells of a column's texts, and return the texts' bytes, which begin at `first` in the buffer.

    :param wanted: the rows that have a value or NULL; None: replace the cells that have a text.
    """
    texts, offsets = text_buffers(values)
    valid = values.is_valid().to_numpy(zero_copy_only=False)
    start, length, kind = spans.start[at], spans.length[at], spans.kind[at]
    if wanted is None:
        there = valid & (kind == TEXT)
    else:
        there = valid & wanted
        kind[:] = np.where(there, TEXT, np.where(wanted, NULL, ABSENT))
        length[:] = 0
    start[there] = (offsets[:-1] - offsets[0] + first)[there]
    length[there] = np.diff(offsets)[there]
    return texts[offsets[0] : offsets[-1]]
