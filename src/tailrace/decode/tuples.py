r"""The cells of one table's changes: the rows after the changes, and the rows before them.

A database in SQL_ASCII can contain texts that are not UTF-8. Such a text is replaced by bytea's form of
its bytes, as in `\x636166e9`, so that different texts remain different.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numba as nb
import numpy as np
import numpy.typing as npt

from tailrace.compiled import compiled
from tailrace.decode import kernel
from tailrace.decode.gather import Cells, Int32s
from tailrace.decode.kernel import SPANS, TEXT
from tailrace.decode.shards import ShardPositions
from tailrace.errors import REPORT_LOG, Kind, TailraceError
from tailrace.model import Op, Relation
from tailrace.protocol.frames import FROZEN_BYTES, Bytes, Numbers
from tailrace.protocol.memory import i64_at

#: Limit of the cells of TRUNCATEs that are made at once: no bytes of the block bound their number.
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

    @property
    def arrays(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """The arguments that kernels take."""
        return self.start, self.length, self.kind

    def of(self, columns: npt.NDArray[np.intp]) -> Spans:
        """Return the cells of some columns, copied."""
        return Spans(self.start[columns], self.length[columns], self.kind[columns])

    def copy(self) -> Spans:
        return Spans(self.start.copy(), self.length.copy(), self.kind.copy())


@dataclass(frozen=True, slots=True, eq=False)
class Tuples:
    """Changes of one version of a table (or logical messages, with two columns), cell by cell.

    `current` is the row after the change; for a delete, what was sent of the old row. `old` is
    what was sent of the row before, if `old_mark` is not 0: the `in_key` columns of a key tuple
    ('K'), all columns of a whole row ('O'). `fields` are the kernel's numbers of each change.
    """

    relation: Relation | None
    fields: Numbers
    op: Bytes
    buffer: Bytes  # which the cells point into
    current: Spans
    old: Spans
    old_mark: Bytes
    in_key: npt.NDArray[np.bool_]
    shards: ShardPositions | None = None  # of all their transactions

    def __len__(self) -> int:
        return len(self.op)

    def column(self, column: int) -> Cells:
        """Return a column's cells in the rows after the changes."""
        current = self.current
        return Cells(self.buffer, current.start[column], current.length[column], current.kind[column])

    def old_column(self, column: int, rows: npt.NDArray[np.int64]) -> Cells:
        """Return a column's cells in the rows before the changes `rows`."""

        def taken(cells: Int32s) -> Int32s:
            return np.ascontiguousarray(cells[column][rows])

        old = self.old
        return Cells(
            self.buffer, taken(old.start), taken(old.length), np.ascontiguousarray(old.kind[column][rows])
        )

    def with_texts(self, *texts: Bytes, attempted: str, hint: str) -> Tuples:
        """Return the changes with `texts` appended to the buffer, for cells to point to.

        :raises TailraceError: `DECODE_FAILED` if the block grows too large.
        """
        if len(self.buffer) + sum(map(len, texts)) > _BUFFER_BYTES_MAX:
            table = self.relation.qualified_name if self.relation else ""
            found = f"{attempted}: a block and the new texts are longer than 2 GiB"
            raise TailraceError(Kind.DECODE_FAILED, found, hint, {"table": table})
        return replace(self, buffer=np.concatenate((self.buffer, *texts)))


def find_tuples(
    relation: Relation | None,
    raw: Bytes,
    fields: Numbers,
    shards: ShardPositions | None = None,
) -> Tuples:
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
    in_key = np.zeros(columns, np.bool_)
    if relation is not None:
        in_key[:] = [column.in_identity for column in relation.columns]
    result = np.zeros(2, np.int64)
    buffer = raw
    if relation is None:
        kernel.message_cells(raw, at, end, *current.arrays, result)
    elif snapshot:
        first = int(at[0])
        buffer = raw[first : int(end[-1])].copy()  # escapes are undone in place
        kernel.copy_cells(buffer, at - first, end - first, *current.arrays, result)
    else:
        kernel.tuple_cells(raw, op, at, end, *current.arrays, *old.arrays, old_mark, result)
    if result[0]:
        raise _failure(relation, int(result[0]), int(fields[kernel.LOG_OFFSET, result[1]]))
    if old_mark.any():
        if not in_key.any():
            # A key tuple of a table without a flagged key (seen with hosted servers): its columns
            # that are not NULL are the key.
            in_key[:] = True
            old.kind[(old.kind == kernel.NULL) & (old_mark != WHOLE_ROW)] = kernel.ABSENT
        kernel.take_from_old(op, old_mark, in_key, *current.arrays, *old.arrays)
    return Tuples(relation, fields, op, buffer, current, old, old_mark, in_key, shards)


def _require_room(
    relation: Relation | None, op: Bytes, at: Numbers, end: Numbers, columns: int, snapshot: bool
) -> None:
    # Called before cells are allocated: every cell takes at least one byte of its tuple.
    truncates = int(np.count_nonzero(op == ord(Op.TRUNCATE)))
    cells = (len(op) - truncates) * (columns - 1 if snapshot else columns)
    if cells > int((end - at).sum()) or truncates * columns > EMPTY_CELLS_MAX:
        raise _failure(relation, kernel.WRONG_COLUMNS, None)


def _failure(relation: Relation | None, error: int, log_offset: int | None) -> TailraceError:
    context: dict[str, object] = {"table": relation.qualified_name if relation else ""}
    if log_offset is not None:
        context["log_offset"] = log_offset
    return TailraceError(
        Kind.DECODE_FAILED,
        f"decoded changes: {kernel.ERRORS[error]}",
        REPORT_LOG,
        context,
    )


#: Largest buffer, in bytes: places in it are 32-bit numbers.
_BUFFER_BYTES_MAX = 2**31 - 1

_HIGH_BITS = np.int64(-0x7F7F7F7F7F7F7F80)  # 0x80 in each byte

_BACKSLASH, _X = map(ord, "\\x")
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


@compiled(nb.boolean(FROZEN_BYTES, nb.int64, nb.int64))
def _is_utf8(b, p, length):  # type: ignore[no-untyped-def]
    # Unicode 15, table 3-7: well-formed byte sequences.
    end = p + length
    while p < end:
        first = b[p]
        if first < 0x80:
            while end - p >= 8 and i64_at(b, p) & _HIGH_BITS == 0:
                p += 8
            while p < end and b[p] < 0x80:
                p += 1
            continue
        more = (
            1 if 0xC2 <= first <= 0xDF else 2 if 0xE0 <= first <= 0xEF else 3 if 0xF0 <= first <= 0xF4 else 0
        )
        if more == 0 or end - p <= more:
            return False
        second = b[p + 1]
        lowest = 0xA0 if first == 0xE0 else 0x90 if first == 0xF0 else 0x80
        highest = 0x9F if first == 0xED else 0x8F if first == 0xF4 else 0xBF
        if second < lowest or second > highest:
            return False
        for k in range(p + 2, p + 1 + more):
            if b[k] & 0xC0 != 0x80:
                return False
        p += 1 + more
    return True


@compiled(nb.int64(FROZEN_BYTES, *SPANS))
def _hexadecimal_size(b, start, length, kind):  # type: ignore[no-untyped-def]
    # Returns the size of the hexadecimal forms of all texts that are not UTF-8, in bytes.
    size = np.int64(0)
    for c in range(start.shape[0]):
        for r in range(start.shape[1]):
            if kind[c, r] == TEXT and not _is_utf8(b, np.int64(start[c, r]), np.int64(length[c, r])):
                size += 2 + 2 * np.int64(length[c, r])
    return size


@compiled(nb.int64(FROZEN_BYTES, *SPANS, nb.int64, nb.uint8[::1], nb.int64))
def _write_hexadecimal(b, start, length, kind, first, out, to):  # type: ignore[no-untyped-def]
    # Writes these forms to `out`, which will begin at `first` in the buffer, and points the cells to them.
    for c in range(start.shape[0]):
        for r in range(start.shape[1]):
            p = np.int64(start[c, r])
            size = np.int64(length[c, r])
            if kind[c, r] != TEXT or _is_utf8(b, p, size):
                continue
            start[c, r] = first + to
            length[c, r] = 2 + 2 * size
            out[to] = _BACKSLASH
            out[to + 1] = _X
            to += 2
            for k in range(p, p + size):
                out[to] = _HEX[b[k] >> 4]
                out[to + 1] = _HEX[b[k] & 15]
                to += 2
    return to


def in_utf8(tuples: Tuples) -> Tuples:
    """Return the changes with all texts in UTF-8; `tuples` itself if they already are.

    :raises TailraceError: `DECODE_FAILED` if the block grows beyond 2 GiB.
    """
    if tuples.relation is None:
        return tuples  # the content of a logical message is bytes
    sides = (tuples.current, tuples.old)
    more = sum(_hexadecimal_size(tuples.buffer, *side.arrays) for side in sides)
    if more == 0:
        return tuples
    first = len(tuples.buffer)
    grown = tuples.with_texts(
        np.empty(more, np.uint8),
        attempted="decoded texts that are not UTF-8",
        hint="exclude the column, or repair its values",
    )
    out, to = grown.buffer[first:], 0
    current, old = (side.copy() for side in sides)
    for side in (current, old):
        to = _write_hexadecimal(tuples.buffer, *side.arrays, first, out, to)
    return replace(grown, current=current, old=old)
