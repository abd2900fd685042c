"""Compiled readers of protobuf's wire format, and of the events in VStream's responses.

Concatenated responses are one valid response, because all of its fields are repeated. Every index is checked
against the buffer's end, because numba checks none.

Source: "Encoding" in the documentation of Protocol Buffers; `binlogdata.proto` of Vitess for the numbers.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from tailrace.compiled import compiled
from tailrace.protocol.frames import FROZEN_BYTES
from tailrace.protocol.memory import address_of, u8_at

# Types of events: `VEventType`.
(
    UNKNOWN, GTID, BEGIN, COMMIT, ROLLBACK, DDL, INSERT, REPLACE, UPDATE, DELETE, SET, OTHER, ROW, FIELD,
    HEARTBEAT, VGTID, JOURNAL, VERSION, LASTPK, SAVEPOINT, COPY_COMPLETED, PREVIOUS_GTIDS, ROWS_QUERY,
) = range(23)  # fmt: skip
EVENT_TYPES = 23

# Fields of an event that `read_event` returns. The body is the message, or text, of the event's type.
TYPE, TIME_S, BODY_AT, BODY_END, IS_OWN, AFTER = range(6)
EVENT_FIELDS = 6

# Protobuf's wire types.
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5

PAIR: Any = nb.types.UniTuple(nb.int64, 2)  # type: ignore[no-untyped-call]
TRIPLE: Any = nb.types.UniTuple(nb.int64, 3)  # type: ignore[no-untyped-call]

# Field numbers: of a response, of an event.
_EVENTS = 1
_TYPE, _TIMESTAMP, _STATEMENT, _FIRST_BODY, _LAST_BODY = 1, 2, 4, 5, 8
_LAST_PK, _KEYSPACE, _SHARD = 21, 22, 23


@nb.njit(inline="always")
def varint(b, p, end):  # type: ignore[no-untyped-def]
    """Return a number and the offset after it, or -1 if the number is cut off."""
    value = np.int64(0)
    if p < end:
        byte = u8_at(b, p)
        if byte < 128:
            return byte, p + 1
    shift = np.int64(0)
    while p < end and shift < 64:
        byte = u8_at(b, p)
        p += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, p
        shift += 7
    return np.int64(0), np.int64(-1)


@compiled(TRIPLE(nb.int64, nb.int64, nb.int64))
def field(b, p, end):  # type: ignore[no-untyped-def]
    """Return the tag of the field at `p`, its value, and the offset after it, or -1.

    For a field with a length, the value is the length, and the offset is that of the content's first byte:
    the caller skips the content, which is not beyond `end`.
    """
    bad = np.int64(0), np.int64(0), np.int64(-1)
    tag, p = varint(b, p, end)
    if p < 0:
        return bad
    kind = tag & 7
    if kind == VARINT or kind == BYTES:
        value, p = varint(b, p, end)
        if p < 0 or (kind == BYTES and (value < 0 or value > end - p)):
            return bad
        return tag, value, p
    size = 8 if kind == FIXED64 else 4
    if (kind != FIXED64 and kind != FIXED32) or end - p < size:
        return bad
    return tag, np.int64(0), p + size


@nb.njit(inline="always")
def same(b, p, length, name, size):  # type: ignore[no-untyped-def]
    """Return whether `length` bytes at `p` are the `size` bytes at the address `name`."""
    if length != size:
        return False
    for k in range(size):  # noqa: SIM110 - a generator is not compiled
        if u8_at(b, p + k) != u8_at(name, k):
            return False
    return True


@compiled(nb.int64(nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64[::1]))
def read_event(b, p, end, keyspace, keyspace_size, shard, shard_size, event):  # type: ignore[no-untyped-def]
    """Read the event of the response at `p` into `event`; return the offset after it, or -1.

    :param keyspace: address of the stream's own keyspace, and its size; likewise `shard`.
        `event[IS_OWN]` is 0 if the event names another shard.
    """
    for k in range(EVENT_FIELDS):
        event[k] = 0
    event[IS_OWN] = 1
    tag, length, p = field(b, p, end)
    if p < 0 or tag & 7 != BYTES:
        return np.int64(-1)
    stop = p + length
    event[AFTER] = stop
    if tag >> 3 != _EVENTS:
        event[IS_OWN] = 0
        return stop
    while p < stop:
        tag, value, p = field(b, p, stop)
        if p < 0:
            return np.int64(-1)
        number = tag >> 3
        if tag & 7 == BYTES:
            if number == _STATEMENT or _FIRST_BODY <= number <= _LAST_BODY or number == _LAST_PK:
                event[BODY_AT] = p
                event[BODY_END] = p + value
            elif number == _KEYSPACE:
                if value > 0 and not same(b, p, value, keyspace, keyspace_size):
                    event[IS_OWN] = 0
            elif number == _SHARD and value > 0 and not same(b, p, value, shard, shard_size):
                event[IS_OWN] = 0
            p += value
        elif number == _TYPE:
            event[TYPE] = value
        elif number == _TIMESTAMP:
            event[TIME_S] = value
    return stop


@compiled(nb.int64(FROZEN_BYTES, nb.int64[::1]))
def change_or_end(buffer, event):  # type: ignore[no-untyped-def]
    """Return the type of the first event that is a change of a row, or the end of a copy; `UNKNOWN` if there
    is none, or the responses are malformed. Rows of a copy have no time.

    `event` has room for `EVENT_FIELDS`.
    """
    b = address_of(buffer)
    end = len(buffer)
    p = np.int64(0)
    while p < end:
        p = read_event(b, p, end, 0, 0, 0, 0, event)
        if p < 0:
            break
        if event[TYPE] == COPY_COMPLETED or (event[TYPE] == ROW and event[TIME_S] != 0):
            return event[TYPE]
    return np.int64(UNKNOWN)


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.int64[::1]))
def next_of(buffer, p, kind, event):  # type: ignore[no-untyped-def]
    """Read the next event of a type, from `p` on, into `event`; return the offset after it, or -1 if there is
    none, or the responses are malformed.
    """
    b = address_of(buffer)
    end = len(buffer)
    while p < end:
        p = read_event(b, p, end, 0, 0, 0, 0, event)
        if p < 0:
            break
        if event[TYPE] == kind:
            return p
    return np.int64(-1)


@compiled(nb.int64(FROZEN_BYTES, FROZEN_BYTES, FROZEN_BYTES, nb.int64[::1], nb.int64[::1]))
def last_boundary(buffer, keyspace, shard, is_open, event):  # type: ignore[no-untyped-def]
    """Return the offset after the last event behind which no transaction of the shard is open; 0 if there is
    none; -1 if the responses are malformed.

    `is_open` has one number, carried from call to call; `event` has room for `EVENT_FIELDS`.
    """
    b = address_of(buffer)
    names = address_of(keyspace), address_of(shard)
    end = len(buffer)
    p = np.int64(0)
    found = np.int64(0)
    while p < end:
        p = read_event(b, p, end, names[0], len(keyspace), names[1], len(shard), event)
        if p < 0:
            return np.int64(-1)
        if event[IS_OWN] == 1:
            kind = event[TYPE]
            if kind == BEGIN or kind == ROW:
                is_open[0] = 1
            elif kind == COMMIT or kind == ROLLBACK or kind == COPY_COMPLETED:
                is_open[0] = 0
        if is_open[0] == 0:
            found = p
    return found
