"""Compiled writers of the frames around rows: transactions, snapshots, a shard's position.

Source: `tailrace.protocol.frames` for the written frames; `binlogdata.proto` of Vitess for the input.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import compiled
from tailrace.model import POSTGRES_EPOCH_US
from tailrace.protocol import frames
from tailrace.protocol import pgoutput as pg
from tailrace.protocol.frames import FROZEN_BYTES
from tailrace.protocol.memory import address_of, put_u8, u8_at
from tailrace.sources.vitess.rows.events import BYTES, field, same
from tailrace.sources.vitess.rows.layout import (
    BEGIN_AT,
    CLOSED,
    GTID_AT,
    GTID_END,
    OPEN,
    POSITION,
    SNAPSHOT,
    TIME_US,
    TO,
    TRANSACTION,
    TRANSACTIONS,
)  # fmt: skip

#: Size in bytes, at most, of a shard's state frame without the position and the text before it.
_STATE_HEAD = 256

_QUOTE, _BACKSLASH = map(ord, '"\\')
_EMPTY_OBJECT = np.frombuffer(b"{}", np.uint8)
_CLOSING = np.frombuffer(b'"}}', np.uint8)


@nb.njit(inline="always")
def put(out, to, value, size):  # type: ignore[no-untyped-def]
    """Write a number of `size` bytes, the most significant first; return the offset after it."""
    for k in range(size):
        put_u8(out, to + k, (value >> (8 * (size - 1 - k))) & 255)
    return to + size


@nb.njit(inline="always")
def _put_all(out, to, text):  # type: ignore[no-untyped-def]
    for k in range(len(text)):
        put_u8(out, to + k, text[k])
    return to + len(text)


@nb.njit(inline="always")
def begin_frame(out, to, kind):  # type: ignore[no-untyped-def]
    """Begin a frame, whose length `end_frame` writes; return the offset after its kind."""
    put_u8(out, to, frames.COPY_DATA)
    put_u8(out, to + 5, kind)
    return to + 6


@nb.njit(inline="always")
def begin_message(out, to, position):  # type: ignore[no-untyped-def]
    """Begin the frame of a message of pgoutput; return the message's offset."""
    to = begin_frame(out, to, frames.XLOG)
    to = put(out, to, position, 8)
    to = put(out, to, position, 8)
    return put(out, to, 0, 8)


@nb.njit(inline="always")
def end_frame(out, begin, to):  # type: ignore[no-untyped-def]
    """Write the length of the frame that begins at `begin`; return its end."""
    put(out, begin + 1, to - begin - 1, 4)
    return to


@compiled(nb.int64(nb.int64, nb.int64, nb.int64, nb.int64, nb.int64))
def write_control(out, to, subtype, lsn, time_us):  # type: ignore[no-untyped-def]
    """Write a control frame whose content is `{}`; return the offset after it."""
    begin = to
    to = begin_frame(out, to, frames.CONTROL)
    put_u8(out, to, subtype)
    to = put(out, to + 1, lsn, 8)
    to = put(out, to, time_us, 8)
    return end_frame(out, begin, _put_all(out, to, _EMPTY_OBJECT))


@compiled(nb.void(nb.int64, nb.int64[::1], nb.int64))
def open_transaction(out, state, time_us):  # type: ignore[no-untyped-def]
    """Write the Begin of a transaction; `close` may correct its time."""
    to = state[TO]
    state[BEGIN_AT] = to
    state[TIME_US] = time_us
    state[OPEN] = TRANSACTION
    at = begin_message(out, to, state[POSITION])
    put_u8(out, at, pg.BEGIN)
    at = put(out, at + 1, state[POSITION], 8)
    at = put(out, at, time_us - POSTGRES_EPOCH_US, 8)
    at = put(out, at, 0, 4)
    state[TO] = end_frame(out, to, at)


@compiled(nb.void(nb.int64, nb.int64[::1], nb.int64))
def close(out, state, time_us):  # type: ignore[no-untyped-def]
    """End the open transaction or snapshot, with a frame if its rows have frames.

    :param time_us: the commit's time, microseconds since 1970; 0: not known.
    """
    to = state[TO]
    if state[OPEN] == SNAPSHOT:
        state[TO] = write_control(out, to, frames.SNAPSHOT_ENDS, state[POSITION] + 1, state[TIME_US])
    elif state[OPEN] == TRANSACTION:
        if time_us != 0:
            # The time so far is that of the event that began it.
            state[TIME_US] = time_us
            if state[BEGIN_AT] >= 0:
                at = state[BEGIN_AT] + frames.XLOG_PAYLOAD_AT + pg.BEGIN_TIME_AT
                put(out, at, time_us - POSTGRES_EPOCH_US, 8)
        at = begin_message(out, to, state[POSITION])
        put_u8(out, at, pg.COMMIT)
        put_u8(out, at + 1, 0)
        at = put(out, at + 2, state[POSITION], 8)
        at = put(out, at, state[POSITION] + 1, 8)
        at = put(out, at, state[TIME_US] - POSTGRES_EPOCH_US, 8)
        state[TO] = end_frame(out, to, at)
    if state[OPEN] >= TRANSACTION:
        state[POSITION] += 1
        state[TRANSACTIONS] += 1
        state[GTID_AT] = -1  # the position is in the log
    state[OPEN] = CLOSED


@compiled(
    nb.int64(
        FROZEN_BYTES, nb.int64, nb.int64, FROZEN_BYTES, nb.int64, nb.int64,
    )
)  # fmt: skip
def write_shard_state(buffer, at, end, before, out, to):  # type: ignore[no-untyped-def]
    """Write the frame of the shard's state, with the position of the ShardGtid between `at` and `end`.

    :param before: the content up to the position's text.
    :returns: the offset after it; `to` if the position has characters that JSON would escape; -1 if it is
        not a valid message. There must be room for `state_room` bytes.
    """
    b = address_of(buffer)
    begin = to
    to = begin_frame(out, to, frames.CONTROL)
    put_u8(out, to, frames.HAS_SHARD)
    to = put(out, to + 1, 0, 8)
    to = put(out, to, 0, 8)
    to = _put_all(out, to, before)
    p = at
    while p < end:
        tag, value, p = field(b, p, end)
        if p < 0:
            return np.int64(-1)
        if tag & 7 != BYTES:
            continue
        if tag >> 3 == 3:
            for k in range(p, p + value):
                letter = u8_at(b, k)
                if letter < 32 or letter > 126 or letter == _QUOTE or letter == _BACKSLASH:
                    return begin
                put_u8(out, to, letter)
                to += 1
        p += value
    return end_frame(out, begin, _put_all(out, to, _CLOSING))


@compiled(nb.int64(nb.int64, nb.int64))
def state_room(size, before):  # type: ignore[no-untyped-def]
    """Return the greatest size of a shard's state frame, for a ShardGtid of `size` bytes."""
    return _STATE_HEAD + before + size


@compiled(nb.boolean(nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64[::1]))
def find_own(b, p, end, keyspace, keyspace_size, shard, shard_size, state):  # type: ignore[no-untyped-def]
    """Find the ShardGtid of the stream's own shard in a VGTID, which has all shards of the stream.

    Writes its offsets to the state. Returns whether the message is valid.
    """
    while p < end:
        tag, size, p = field(b, p, end)
        if p < 0:
            return False
        if tag & 7 != BYTES:
            continue
        stop = p + size
        if tag >> 3 == 1:
            q = p
            is_own = True
            while q < stop:
                inner, value, q = field(b, q, stop)
                if q < 0:
                    return False
                if inner & 7 != BYTES:
                    continue
                if inner >> 3 == 1:
                    is_own = is_own and same(b, q, value, keyspace, keyspace_size)
                elif inner >> 3 == 2:
                    is_own = is_own and same(b, q, value, shard, shard_size)
                q += value
            if is_own:
                state[GTID_AT] = p
                state[GTID_END] = stop
        p = stop
    return True
