"""Parses PostgreSQL's transaction ids and `source.sequence`, as Debezium writes them. Pure.

An id is `<number>:<position>`, as `761:27303640`. A sequence is a list of two texts, as
`["27303512","27303640"]`: the position of a commit, and that of the row. In Debezium's it is the last commit
before the row's transaction, in Tailrace's that of the row's transaction, which is always after the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb
import numpy as np
import pyarrow as pa

from tailrace.compiled import compiled
from tailrace.join.merge import UNKNOWN, Integers
from tailrace.protocol.frames import FROZEN_BYTES

_ENDS = nb.types.Array(nb.int32, 1, "C", readonly=True)
_SPAN = (FROZEN_BYTES, nb.int64, nb.int64)
_INT64S, _BOOLEANS = nb.int64[::1], nb.boolean[::1]

_QUOTE, _COMMA, _COLON, _OPEN_LIST, _ZERO, _NINE = 34, 44, 58, 91, 48, 57
# Largest number of digits, which always fits into 64 bits without a sign.
_DIGITS_MAX = 19
_INT64_MAX = np.uint64(2**63 - 1)


@dataclass(frozen=True, slots=True)
class TransactionIds:
    """Parsed ids of transactions.

    :param keys: the number of PostgreSQL's ids, or the whole id of others; text, null if there is no id.
    :param positions: the position of PostgreSQL's ids, or `UNKNOWN` for others.
    """

    keys: pa.StringArray
    positions: Integers


@compiled(nb.int64(*_SPAN))
def _digits_end(b, p, end):  # type: ignore[no-untyped-def]
    while p < end and _ZERO <= b[p] <= _NINE:
        p += 1
    return p


@compiled(nb.int64(*_SPAN))
def _number(b, p, end):  # type: ignore[no-untyped-def]
    # Returns the number with the digits [p, end); UNKNOWN: there is no digit, or it exceeds 64 bits.
    if p == end or end - p > _DIGITS_MAX:
        return UNKNOWN
    value = np.uint64(0)
    for k in range(p, end):
        value = value * np.uint64(10) + np.uint64(b[k] - _ZERO)
    return np.int64(value) if value <= _INT64_MAX else UNKNOWN


@compiled(nb.void(FROZEN_BYTES, _ENDS, _BOOLEANS, nb.uint8[::1], nb.int32[::1], _INT64S))
def _split(b, ends, there, keys, key_ends, positions):  # type: ignore[no-untyped-def]
    # Writes the keys of ids one after another into `keys`, with their ends, and the positions.
    to = 0
    for r in range(len(there)):
        first, end = ends[r], ends[r + 1]
        key_end, positions[r] = end, UNKNOWN
        if there[r]:
            colon = _digits_end(b, first, end)
            is_number = first < colon < end and b[colon] == _COLON
            if is_number and _digits_end(b, colon + 1, end) == end:
                positions[r] = _number(b, colon + 1, end)
            if positions[r] != UNKNOWN:
                key_end = colon
            for p in range(first, key_end):
                keys[to] = b[p]
                to += 1
        key_ends[r + 1] = to


@compiled(nb.void(FROZEN_BYTES, _ENDS, _BOOLEANS, _INT64S, _INT64S))
def _split_sequences(b, ends, there, commits, rows):  # type: ignore[no-untyped-def]
    for r in range(len(there)):
        commits[r] = rows[r] = UNKNOWN
        p, end = np.int64(ends[r]), np.int64(ends[r + 1])
        if not there[r] or end - p < 2 or b[p] != _OPEN_LIST or b[p + 1] != _QUOTE:
            continue
        first = p + 2
        p = _digits_end(b, first, end)
        if end - p < 3 or b[p] != _QUOTE or b[p + 1] != _COMMA or b[p + 2] != _QUOTE:
            continue
        second = p + 3
        last = _digits_end(b, second, end)
        if last < end and b[last] == _QUOTE:
            commits[r], rows[r] = _number(b, first, p), _number(b, second, last)
        if commits[r] == UNKNOWN or rows[r] == UNKNOWN:
            commits[r] = rows[r] = UNKNOWN


def transaction_ids(ids: pa.StringArray) -> TransactionIds:
    """Return the parsed ids of transactions."""
    count = len(ids)
    data, ends, there = _texts(ids)
    keys, key_ends = np.empty(ends[-1] - ends[0], np.uint8), np.zeros(count + 1, np.int32)
    positions = np.empty(count, np.int64)
    _split(data, ends, there, keys, key_ends, positions)
    is_there = pa.py_buffer(np.packbits(there, bitorder="little"))
    found = pa.StringArray.from_buffers(count, pa.py_buffer(key_ends), pa.py_buffer(keys), is_there)
    return TransactionIds(found, positions)


def sequences(texts: pa.StringArray) -> tuple[Integers, Integers]:
    """Return the positions of the commits and of the rows; both are `UNKNOWN` if a text is not a sequence."""
    commits, rows = np.empty(len(texts), np.int64), np.empty(len(texts), np.int64)
    _split_sequences(*_texts(texts), commits, rows)
    return commits, rows


def _texts(texts: pa.StringArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    texts = texts.cast(pa.string())
    _, ends, data = texts.buffers()
    found = np.frombuffer(ends, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    return (
        np.frombuffer(data or b"", np.uint8),
        found if len(found) else np.zeros(1, np.int32),
        np.array(texts.is_valid()),
    )
