"""The cells of one table's changes: what each row is after a change, and what it was before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tailrace.errors import Kind, TailraceError
from tailrace.model import Op, Relation
from tailrace.protocol.frames import Bytes, Numbers
from tailrace.sources.postgres.decode import kernel
from tailrace.sources.postgres.decode.gather import Cells, Int32s

#: Rows of a TRUNCATE have cells without bytes behind them; more than this many are never made at once.
EMPTY_CELLS_MAX = 1 << 22

WHOLE_ROW = ord("O")


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Cells of all columns: arrays of (column, change)."""

    start: npt.NDArray[np.int32]
    length: npt.NDArray[np.int32]
    kind: npt.NDArray[np.uint8]

    @classmethod
    def empty(cls, columns: int, changes: int) -> Spans:
        shape = (columns, changes)
        return cls(np.empty(shape, np.int32), np.empty(shape, np.int32), np.empty(shape, np.uint8))


@dataclass(frozen=True, slots=True, eq=False)
class Tuples:
    """Changes of one version of a table (or logical messages, with two columns), cell by cell.

    `current` is the row after the change; for a delete what was sent of the old row. `old` is
    what was sent of the row before, where `old_mark` is not 0: `in_key` columns of a key tuple
    ('K'), all of a whole row ('O'). `fields` are the kernel's numbers of each change.
    """

    relation: Relation | None
    fields: Numbers
    op: Bytes
    raw: Bytes  # the block
    log_offset: int  # of the block
    buffer: Bytes  # what the cells point into
    current: Spans
    old: Spans
    old_mark: Bytes
    in_key: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.op)

    def column(self, column: int) -> Cells:
        """Return a column's cells after the change."""
        current = self.current
        return Cells(self.buffer, current.start[column], current.length[column], current.kind[column])

    def old_column(self, column: int, rows: npt.NDArray[np.int64]) -> Cells:
        """Return a column's cells before the change, of the given rows."""

        def taken(cells: Int32s) -> Int32s:
            return np.ascontiguousarray(cells[column][rows])

        old = self.old
        return Cells(
            self.buffer, taken(old.start), taken(old.length), np.ascontiguousarray(old.kind[column][rows])
        )


def find_tuples(relation: Relation | None, raw: Bytes, log_offset: int, fields: Numbers) -> Tuples:
    """Find the cells of changes that `kernel.index_changes` found in the block `raw`.

    :raises TailraceError: `DECODE_FAILED` if a tuple does not fit its frame or its table.
    """
    op = fields[kernel.OP].astype(np.uint8)
    count = len(op)
    at, end = fields[kernel.AT], fields[kernel.END]
    columns = 2 if relation is None else len(relation.columns)
    snapshot = count > 0 and op[0] == ord(Op.READ)
    _require_room(relation, op, at, end, columns, snapshot)
    current = Spans.empty(columns, count)
    holds_old = bool(((op == ord(Op.UPDATE)) | (op == ord(Op.DELETE))).any())
    old = Spans.empty(columns, count if holds_old else 0)
    old_mark = np.zeros(count, np.uint8)
    in_key = np.array([c.in_identity for c in relation.columns] if relation else [], np.bool_)
    result = np.zeros(2, np.int64)
    buffer = raw
    spans = (current.start, current.length, current.kind)
    if relation is None:
        kernel.message_cells(raw, at, end, *spans, result)
    elif snapshot:
        first = int(at[0])
        buffer = raw[first : int(end[-1])].copy()  # escapes are undone in place
        kernel.copy_cells(buffer, at - first, end - first, *spans, result)
    else:
        olds = (old.start, old.length, old.kind)
        kernel.tuple_cells(raw, op, at, end, *spans, *olds, old_mark, result)
    if result[0]:
        raise _failure(relation, int(result[0]), int(fields[kernel.LOG_OFFSET, result[1]]))
    if old_mark.any():
        if not in_key.any():
            # A key tuple of a table that flags no key (seen from hosted servers): what is not
            # NULL in it is the key.
            in_key[:] = True
            old.kind[(old.kind == kernel.NULL) & (old_mark != WHOLE_ROW)] = kernel.ABSENT
        kernel.take_from_old(op, old_mark, in_key, *spans, old.start, old.length, old.kind)
    return Tuples(relation, fields, op, raw, log_offset, buffer, current, old, old_mark, in_key)


def _require_room(
    relation: Relation | None, op: Bytes, at: Numbers, end: Numbers, columns: int, snapshot: bool
) -> None:
    # Before anything is allocated by it: every cell takes a byte of its tuple at least.
    truncates = int(np.count_nonzero(op == ord(Op.TRUNCATE)))
    cells = (len(op) - truncates) * (columns - 1 if snapshot else columns)
    if cells > int((end - at).sum()) or truncates * columns > EMPTY_CELLS_MAX:
        raise _failure(relation, 5, None)


def _failure(relation: Relation | None, error: int, log_offset: int | None) -> TailraceError:
    context: dict[str, object] = {"table": relation.qualified_name if relation else ""}
    if log_offset is not None:
        context["log_offset"] = log_offset
    return TailraceError(
        Kind.DECODE_FAILED,
        f"decoded changes: {kernel.ERRORS[error]}",
        "run `tailrace log verify`; if the log is whole, please report it with the server's version",
        context,
    )
