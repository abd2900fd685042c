"""The compiled loop from VStream's events to frames of the log.

It goes on until it needs more than numbers: a table is described, or a JSON document is sent as a change.
Then it returns, with what stopped it in `state[STOPPED]`, and is called again. Rows of binary logs become
Insert, Update and Delete of pgoutput, those of a copy become rows of a snapshot. Room is made sure of before
a frame is begun, so none is ever cut.

Every place on the wire is checked against its end, because numba checks none.

Source: `binlogdata.proto` and `query.proto` of Vitess; `tailrace.protocol.frames` for what is written.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from tailrace.compiled import KERNEL
from tailrace.protocol import frames
from tailrace.protocol.frames import FROZEN_BYTES
from tailrace.protocol.memory import address_of, u8_at
from tailrace.sources.vitess.rows import events as ev
from tailrace.sources.vitess.rows.events import BYTES, field, read_event, same
from tailrace.sources.vitess.rows.images import (
    AFTER_AT,
    BEFORE_AT,
    POINTS,
    find_images,
    read_change,
    write_change,
    write_line,
)
from tailrace.sources.vitess.rows.layout import (
    AT,
    BEGUN,
    BROKEN,
    CHANGE_AT,
    CLOSED,
    DESCRIBES,
    DONE,
    FACT_BODY_AT,
    FACT_BODY_END,
    FACT_CURRENT_NS,
    FACT_OUT_AT,
    FACT_TIME_S,
    FACT_TYPE,
    FACTS,
    GTID_AT,
    GTID_END,
    NAME_AT,
    NAME_END,
    NEEDED,
    NEEDS_FACTS,
    NEEDS_ROOM,
    NO_IMAGE,
    NO_TABLE,
    NO_TRANSACTION,
    ODD_POSITION,
    OPEN,
    ORDINAL,
    PATCHED,
    POSITION,
    RELATION,
    ROOM,
    ROWS,
    SNAPSHOT,
    SNAPSHOT_TIME_US,
    STATEMENTS,
    STOPPED,
    TABLE,
    TIME_US,
    TO,
    TRANSACTION,
    UNKNOWN_EVENT,
)  # fmt: skip
from tailrace.sources.vitess.rows.transactions import (
    begin_frame,
    close,
    end_frame,
    find_own,
    open_transaction,
    put,
    state_room,
    write_control,
    write_shard_state,
)
from tailrace.sources.vitess.rows.values import GROWTH

#: Rows of a copy that one frame holds, at most so many bytes and one row more.
_ROWS_FRAME_BYTES = 1 << 20

#: What frames take around a row.
_ROW_HEAD = 160


@nb.njit(nb.int64(FROZEN_BYTES, nb.int64, nb.int64), **KERNEL)
def name_hash(buffer, at, end):  # type: ignore[no-untyped-def]
    """Return a number from 0 for the name of a table between two places."""
    b = address_of(buffer)
    found = np.int64(0xCBF29CE4)
    for k in range(at, end):
        found = ((found ^ u8_at(b, k)) * 0x01000193) & 0xFFFFFFFF
    return found


@nb.njit(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, FROZEN_BYTES, nb.int64[:, ::1], nb.int64[::1]), **KERNEL)
def _table_of(buffer, at, end, names, tables, slots):  # type: ignore[no-untyped-def]
    # `slots` is a hash table with open addressing and room to spare; -1: the table is not described.
    mask = len(slots) - 1
    slot = name_hash(buffer, at, end) & mask
    while slots[slot] >= 0:
        table = slots[slot]
        size = tables[table, NAME_END] - tables[table, NAME_AT]
        if same(address_of(buffer), at, end - at, address_of(names) + tables[table, NAME_AT], size):
            return table
        slot = (slot + 1) & mask
    return np.int64(-1)


# What is found of a RowEvent before its changes.
_NAME_AT, _NAME_END, _IS_FOREIGN, _IS_INTERNAL = range(4)


@nb.njit(
    nb.boolean(nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64[::1]), **KERNEL
)
def _read_head(b, p, end, keyspace, keyspace_size, shard, shard_size, head):  # type: ignore[no-untyped-def]
    for k in range(4):
        head[k] = 0
    while p < end:
        tag, value, p = field(b, p, end)
        if p < 0:
            return False
        number = tag >> 3
        if tag & 7 == BYTES:
            if number == 1:
                head[_NAME_AT] = p
                head[_NAME_END] = p + value
            elif value > 0 and (
                (number == 3 and not same(b, p, value, keyspace, keyspace_size))
                or (number == 4 and not same(b, p, value, shard, shard_size))
            ):
                head[_IS_FOREIGN] = 1
            p += value
        elif number == 6:
            head[_IS_INTERNAL] = value
    return True


@nb.njit(nb.void(nb.int64, nb.int64, nb.int64, nb.int64[::1]), **KERNEL)
def _end_rows(out, begin, count, state):  # type: ignore[no-untyped-def]
    # Completes the frame of a copy's rows that is begun, if one is.
    if begin >= 0 and count > 0:
        put(out, begin + frames.ROWS_COUNT_AT, count, 4)
        state[TO] = end_frame(out, begin, state[TO])


_CALL = nb.void(
    FROZEN_BYTES, FROZEN_BYTES, FROZEN_BYTES, FROZEN_BYTES, FROZEN_BYTES, FROZEN_BYTES, nb.int64[:, ::1],
    nb.int64[::1], nb.int64[:, ::1], nb.int64[:, ::1], POINTS, nb.uint8[::1], nb.int64[:, ::1], nb.int64[::1],
    nb.int64[::1],
)  # fmt: skip


@nb.njit(_CALL, **KERNEL)
def transcode(  # type: ignore[no-untyped-def]
    buffer, keyspace_name, shard_name, before_state, patched, names, tables, slots, sources, targets, points,
    target, facts, state, scratch,
):  # fmt: skip
    """Write the frames of the events from `state[AT]` on to `target`, from `state[TO]` on.

    :param before_state: what a shard's state begins with, up to its position's text.
    :param patched: texts that take the place of values of the change at `state[CHANGE_AT]`, whose rows in
        `sources` point to them, if `state[PATCHED]` is 1.
    :param facts: gets what other events say, a row of `FACT_FIELDS` each.
    :param scratch: room for `SCRATCH_FIELDS` numbers. Its first are the event that stopped the loop.
    """
    b, out, patch = address_of(buffer), address_of(target), address_of(patched)
    keyspace, shard, texts = address_of(keyspace_name), address_of(shard_name), address_of(names)
    sizes = len(keyspace_name), len(shard_name)
    end, room = len(buffer), len(target)
    event, head, parts = scratch[: ev.EVENT_FIELDS], scratch[8:12], scratch[12:20]
    state[STOPPED] = DONE
    rows_at: Any = np.int64(-1)
    rows_table = np.int64(-1)
    rows: Any = np.int64(0)
    last = np.int64(-1)
    while state[AT] < end and state[STOPPED] == DONE:
        p = read_event(b, state[AT], end, keyspace, sizes[0], shard, sizes[1], event)
        kind = event[ev.TYPE]
        if p < 0:
            state[STOPPED] = BROKEN
            break
        if event[ev.IS_OWN] == 0:
            state[AT] = p
            continue
        if kind == ev.ROW:
            at, stop = event[ev.BODY_AT], event[ev.BODY_END]
            if not _read_head(b, at, stop, keyspace, sizes[0], shard, sizes[1], head):
                state[STOPPED] = BROKEN
                break
            if head[_IS_FOREIGN] == 1 or head[_IS_INTERNAL] == 1:
                state[AT] = p
                continue
            size = head[_NAME_END] - head[_NAME_AT]
            if last < 0 or not same(
                b, head[_NAME_AT], size, address_of(names) + tables[last, NAME_AT],
                tables[last, NAME_END] - tables[last, NAME_AT],
            ):  # fmt: skip
                last = _table_of(buffer, head[_NAME_AT], head[_NAME_END], names, tables, slots)
                if last < 0:
                    state[STOPPED] = NO_TABLE
                    break
            state[TABLE] = last
            table = tables[last]
            if table[RELATION] == 0:
                state[AT] = p
                continue
            is_copy = event[ev.TIME_S] == 0 and state[OPEN] != TRANSACTION
            if not is_copy and (state[OPEN] == CLOSED or state[OPEN] == SNAPSHOT):
                state[STOPPED] = NO_TRANSACTION
                break
            first = max(at, state[CHANGE_AT])
            while first < stop:
                tag, value, q = field(b, first, stop)
                if q < 0:
                    state[STOPPED] = BROKEN
                    break
                if tag & 7 != BYTES or tag >> 3 != 2:
                    first = q + value if tag & 7 == BYTES else q
                    continue
                need = 2 * (table[ROOM] + GROWTH * value) + len(patched) + _ROW_HEAD
                if room - state[TO] < need:
                    state[STOPPED] = NEEDS_ROOM
                    state[NEEDED] = need
                elif not read_change(b, q, q + value, parts):
                    state[STOPPED] = BROKEN
                elif parts[AFTER_AT] < 0 and (parts[BEFORE_AT] < 0 or is_copy):
                    state[STOPPED] = NO_IMAGE
                else:
                    state[STOPPED] = find_images(b, table, sources, targets, parts, state)
                if state[STOPPED] != DONE:
                    state[CHANGE_AT] = first
                    break
                state[PATCHED] = 0
                if not is_copy:
                    if state[OPEN] == BEGUN:
                        open_transaction(out, state, state[TIME_US])
                    write_change(b, patch, texts, table, sources, targets, parts, points, out, state)
                else:
                    if state[OPEN] != SNAPSHOT:
                        state[OPEN] = SNAPSHOT
                        state[TIME_US] = state[SNAPSHOT_TIME_US]
                        state[ORDINAL] = 0
                        state[TO] = write_control(
                            out, state[TO], frames.SNAPSHOT_BEGINS, state[POSITION] + 1, state[TIME_US]
                        )
                    if rows_at >= 0 and (rows_table != last or state[TO] - rows_at > _ROWS_FRAME_BYTES):
                        _end_rows(out, rows_at, rows, state)
                        rows_at = -1
                    if rows_at < 0:
                        rows_at, rows_table, rows = state[TO], last, 0
                        to = begin_frame(out, rows_at, frames.ROWS)
                        to = put(out, to, table[RELATION], 4)
                        state[TO] = put(out, to, state[ORDINAL], 8) + 4
                    state[TO] = write_line(b, texts, table, sources, targets, points, out, state[TO])
                    state[ORDINAL] += 1
                    state[ROWS] += 1
                    rows += 1
                first = q + value
            if state[STOPPED] == DONE:
                state[CHANGE_AT] = 0
                state[AT] = p
            continue
        _end_rows(out, rows_at, rows, state)
        rows_at = -1
        if kind == ev.FIELD:
            state[STOPPED] = DESCRIBES
            break
        if kind == ev.UNKNOWN or kind >= ev.EVENT_TYPES:
            state[STOPPED] = UNKNOWN_EVENT
            break
        if ev.INSERT <= kind <= ev.DELETE or (kind == ev.ROLLBACK and state[OPEN] >= TRANSACTION):
            state[STOPPED] = STATEMENTS
            break
        size = event[ev.BODY_END] - event[ev.BODY_AT]
        if state[FACTS] >= len(facts):
            state[STOPPED] = NEEDS_FACTS
            break
        need = state_room(size, len(before_state))
        if room - state[TO] < need:
            state[STOPPED] = NEEDS_ROOM
            state[NEEDED] = need
            break
        if kind == ev.BEGIN:
            if state[OPEN] == CLOSED:
                state[OPEN] = BEGUN
                state[TIME_US] = event[ev.TIME_S] * 1_000_000
        elif kind == ev.COMMIT:
            close(out, state, event[ev.TIME_S] * 1_000_000)
        elif kind == ev.COPY_COMPLETED or kind == ev.ROLLBACK:
            close(out, state, 0)
        elif kind == ev.VGTID:
            if not find_own(
                b, event[ev.BODY_AT], event[ev.BODY_END], keyspace, sizes[0], shard, sizes[1], state
            ):
                state[STOPPED] = BROKEN
                break
            if state[OPEN] >= TRANSACTION and state[GTID_AT] >= 0:
                to = write_shard_state(buffer, state[GTID_AT], state[GTID_END], before_state, out, state[TO])
                if to <= state[TO]:
                    state[STOPPED] = BROKEN if to < 0 else ODD_POSITION
                    break
                state[TO] = to
        fact = facts[state[FACTS]]
        fact[FACT_TYPE] = kind
        fact[FACT_TIME_S] = event[ev.TIME_S]
        fact[FACT_CURRENT_NS] = event[ev.CURRENT_NS]
        fact[FACT_BODY_AT] = event[ev.BODY_AT]
        fact[FACT_BODY_END] = event[ev.BODY_END]
        fact[FACT_OUT_AT] = state[TO]
        state[FACTS] += 1
        state[AT] = p
    _end_rows(out, rows_at, rows, state)


#: Numbers that `transcode` needs for itself.
SCRATCH_FIELDS = 20
