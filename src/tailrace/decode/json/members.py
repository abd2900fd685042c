r"""A compiled scan that reads some members of JSON documents as columns, and checks each document.

The scan leaves to a parser what it does not support, although it may be JSON: a document that is not an
object, escapes in a name, a wanted member that occurs twice or has another type than requested, a wanted text
that is not ASCII or has `\u` escapes, too many levels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numba as nb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.compiled import compiled
from tailrace.decode.values.json_texts import after_space, plain_end, value_end
from tailrace.protocol.frames import FROZEN_BYTES, Bytes

_QUOTE, _COMMA, _MINUS, _ZERO, _NINE, _COLON, _BACKSLASH, _OPEN_BRACE, _CLOSE_BRACE = map(ord, '",-09:\\{}')
_SMALL_N, _SMALL_U = map(ord, "nu")

Fields = Sequence[tuple[str, pa.DataType]]

#: A member whose object is searched, too: its members count like those of the document.
WRAPPER = "payload"

# Limit of the levels of wanted members, and of the levels within an unwanted member.
_DEPTH_MAX = 64
# A row of the table of members: its members are the rows [first, last), its name is in `names`. The first row
# is the document's.
_FIRST, _LAST, _NAME_AT, _NAME_BYTES, _KIND, _SLOT = range(6)
_TEXT, _NUMBER, _OBJECT = range(3)
# Lengths of a value that is missing, and of null. The length of a number is 0.
_MISSING, _NULL = -1, -2
# Number of decimal digits that always fit 64 bits.
_DIGITS_MAX = 18

# The character that a letter after a backslash stands for.
_MEANS = np.arange(256, dtype=np.uint8)
_MEANS[[98, 102, 110, 114, 116]] = 8, 12, 10, 13, 9

_INT64S = nb.int64[::1]
_ENDS = nb.types.Array(nb.int32, 1, "C", readonly=True)
_TABLE = (FROZEN_BYTES, nb.types.Array(nb.int64, 2, "C", readonly=True))
_SPAN = (FROZEN_BYTES, nb.int64, nb.int64)


@compiled(nb.int64(*_SPAN, *_TABLE, nb.int64), inlined=True)
def _row_of(b, p, end, names, table, within):  # type: ignore[no-untyped-def]
    # Returns the row of a member's name, in the object of the row `within`; -1: it is not wanted.
    for row in range(table[within, _FIRST], table[within, _LAST]):
        if table[row, _NAME_BYTES] == end - p:
            at, same = table[row, _NAME_AT], True
            for k in range(end - p):
                same &= names[at + k] == b[p + k]
            if same:
                return row
    return np.int64(-1)


@compiled(nb.boolean(*_SPAN, nb.int64, nb.int64, _INT64S, _INT64S), inlined=True)
def _keep(b, p, end, kind, slot, values, lengths):  # type: ignore[no-untyped-def]
    # Stores a wanted member's value, which is [p, end). Returns false if it needs a parser.
    if b[p] == _SMALL_N:
        lengths[slot] = _NULL
    elif kind == _TEXT and b[p] == _QUOTE:
        values[slot], lengths[slot] = p + 1, end - p - 2
    elif kind == _NUMBER and (_ZERO <= b[p] <= _NINE or b[p] == _MINUS):
        first = p + 1 if b[p] == _MINUS else p
        number = 0
        for k in range(first, end):
            if not _ZERO <= b[k] <= _NINE or k - first == _DIGITS_MAX:
                return False
            number = number * 10 + b[k] - _ZERO
        values[slot], lengths[slot] = -number if first > p else number, 0
    else:
        return False
    return True


@compiled(nb.boolean(*_SPAN, *_TABLE, _INT64S, nb.uint8[::1], _INT64S, _INT64S))
def _scan(b, p, end, names, table, around, stack, values, lengths):  # type: ignore[no-untyped-def]
    # Stores the wanted members of one document. Returns false if it needs a parser.
    p = after_space(b, p, end)
    if p >= end or b[p] != _OPEN_BRACE:
        return False
    depth, is_first = 0, True
    around[0] = 0
    p += 1
    while depth >= 0:
        p = after_space(b, p, end)
        if p < end and b[p] == _CLOSE_BRACE:
            depth, is_first, p = depth - 1, False, p + 1
            continue
        if not is_first:
            if p >= end or b[p] != _COMMA:
                return False
            p = after_space(b, p + 1, end)
        if p >= end or b[p] != _QUOTE:
            return False
        first, last = p + 1, plain_end(b, p + 1, end)
        if last >= end or b[last] != _QUOTE:
            return False
        p = after_space(b, last + 1, end)
        if p >= end or b[p] != _COLON:
            return False
        p = after_space(b, p + 1, end)
        row = _row_of(b, first, last, names, table, around[depth])
        is_first = False
        if row < 0:
            p = value_end(b, p, end, stack)
            if p < 0:
                return False
            continue
        if p >= end or lengths[table[row, _SLOT]] != _MISSING:
            return False
        kind, slot = table[row, _KIND], table[row, _SLOT]
        if b[p] == _OPEN_BRACE and kind == _OBJECT:
            depth, is_first, p = depth + 1, True, p + 1
            if depth == len(around):
                return False
            around[depth], lengths[slot] = row, 0
            continue
        first, p = p, value_end(b, p, end, stack)
        if p < 0 or not _keep(b, first, p, kind, slot, values, lengths):
            return False
    return after_space(b, p, end) == end


@compiled(nb.int64(*_SPAN, nb.uint8[::1], nb.int64), inlined=True)
def _write_text(b, p, end, out, to):  # type: ignore[no-untyped-def]
    # Writes a text without its escapes; returns the place after it, or -1 if it needs a parser.
    while p < end:
        c = b[p]
        if c == _BACKSLASH:
            p += 1
            if b[p] == _SMALL_U:
                return np.int64(-1)
            c = _MEANS[b[p]]
        if c >= 128:
            return np.int64(-1)
        out[to] = c
        to, p = to + 1, p + 1
    return to


@compiled(
    nb.boolean(
        FROZEN_BYTES, _ENDS, nb.boolean[::1], *_TABLE, _INT64S, nb.uint8[::1], _INT64S, _INT64S,
        nb.boolean[:, ::1], nb.int64[:, ::1], nb.int32[:, ::1], nb.uint8[:, ::1],
    )
)  # fmt: skip
def _scan_all(  # type: ignore[no-untyped-def]
    b, ends, there, names, table, around, stack, values, lengths, is_found, numbers, text_ends, texts
):  # fmt: skip
    # Writes whether each slot is there; numbers; and texts, whose slots are first, concatenated per slot.
    for r in range(len(there)):
        for slot in range(len(lengths)):
            lengths[slot] = _MISSING
        if there[r] and not _scan(b, ends[r], ends[r + 1], names, table, around, stack, values, lengths):
            return False
        for slot in range(len(is_found)):
            is_found[slot, r] = lengths[slot] >= 0
            if slot >= len(texts):
                numbers[slot - len(texts), r] = values[slot]
                continue
            to = np.int64(text_ends[slot, r])
            if lengths[slot] > 0:
                to = _write_text(b, values[slot], values[slot] + lengths[slot], texts[slot], to)
                if to < 0:
                    return False
            text_ends[slot, r + 1] = to
    return True


@dataclass(frozen=True, slots=True)
class _Table:
    # `slots`: those of texts, then of numbers, then of objects.
    names: Bytes
    rows: npt.NDArray[np.int64]
    slots: dict[tuple[str, ...], int]
    texts: int
    numbers: int


@functools.lru_cache(64)
def _table(fields: tuple[tuple[str, pa.DataType], ...]) -> _Table:
    names = b""
    kinds: dict[tuple[str, ...], int] = {}
    rows, paths = [[0] * 6], []
    waiting: list[tuple[int, tuple[str, ...], Fields]] = [(0, (), (*fields, (WRAPPER, pa.struct(fields))))]
    for row, path, members in waiting:  # which the loop extends
        rows[row][_FIRST : _LAST + 1] = len(rows), len(rows) + len(members)
        for name, kind in members:
            own = (*path, name)
            is_object = pa.types.is_struct(kind)
            of = _OBJECT if is_object else _NUMBER if pa.types.is_integer(kind) else _TEXT
            kinds[own] = of
            if is_object:
                inner = () if own == (WRAPPER,) else own
                waiting.append((len(rows), inner, [(each.name, each.type) for each in kind]))
            written = name.encode()
            rows.append([0, 0, len(names), len(written), of, 0])
            paths.append(own)
            names += written
    slots = {path: slot for slot, path in enumerate(sorted(kinds, key=kinds.__getitem__))}
    table = np.array(rows, np.int64)
    table[1:, _SLOT] = [slots[path] for path in paths]
    counts = [list(kinds.values()).count(of) for of in (_TEXT, _NUMBER)]
    return _Table(np.frombuffer(names, np.uint8), table, slots, *counts)


def members(documents: pa.BinaryArray, fields: Fields) -> dict[str, pa.Array] | None:
    """Return members of documents, or of the object `payload` in them; None if they need a parser.

    :param fields: names and types: texts, `int64`, or structs of them. No name may be `payload`.
    :returns: arrays by name; null for a missing member. Only the innermost fields of a struct are null.
    """
    count, table = len(documents), _table(tuple(fields))
    _, ends, data = documents.buffers()
    bounds = np.frombuffer(ends, np.int32)[documents.offset : documents.offset + count + 1]
    there, text = np.array(documents.is_valid()), np.frombuffer(data or b"", np.uint8)
    room = np.empty(_DEPTH_MAX, np.int64), np.empty(_DEPTH_MAX, np.uint8)
    of_one = np.empty(len(table.slots), np.int64), np.empty(len(table.slots), np.int64)
    is_found = np.empty((table.texts + table.numbers, count), np.bool_)
    numbers = np.empty((table.numbers, count), np.int64)
    text_ends = np.zeros((table.texts, count + 1), np.int32)
    texts = np.empty((table.texts, int(bounds[-1] - bounds[0]) if count else 0), np.uint8)
    found = is_found, numbers, text_ends, texts
    if not _scan_all(text, bounds, there, table.names, table.rows, *room, *of_one, *found):
        return None

    def column(path: tuple[str, ...], kind: pa.DataType) -> pa.Array:
        if pa.types.is_struct(kind):
            inner = [column((*path, each.name), each.type) for each in kind]
            return pa.StructArray.from_arrays(inner, fields=list(kind))
        slot = table.slots[path]
        if pa.types.is_integer(kind):
            return pa.array(numbers[slot - table.texts], mask=~is_found[slot])
        is_there = np.packbits(is_found[slot], bitorder="little")
        written = texts[slot, : text_ends[slot, -1]].copy()  # the buffer is as large as all documents
        return pa.StringArray.from_buffers(count, *map(pa.py_buffer, (text_ends[slot], written, is_there)))

    return {name: column((name,), kind) for name, kind in fields}
