"""The compiled loop from VStream's events to frames of the log.

The loop runs until it needs Python code: a table is described, or a JSON document is sent as a change. Then
it returns, with the reason in `state[STOPPED]`, and is called again. Rows of binary logs become Insert,
Update and Delete of pgoutput, rows of a copy become rows of a snapshot. There is room for a frame before it
is begun, so no frame is ever cut.

Every offset in the input is checked against its end, because numba checks none.

Source: `binlogdata.proto` and `query.proto` of Vitess; `tailrace.protocol.frames` for the written frames.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import compiled
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
    BEGUN_AGAIN,
    BROKEN,
    CHANGE_AT,
    CLOSED,
    DESCRIBES,
    DONE,
    FACT_BODY_AT,
    FACT_BODY_END,
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

#: Size in bytes from which a frame of a copy's rows is ended.
_ROWS_FRAME_BYTES = 1 << 20

#: Greatest size in bytes of the frames around a row, without the row.
_ROW_HEAD = 160


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64))
def name_hash(buffer, at, end):  # type: ignore[no-untyped-def]
    """Return a hash of the table name between two offsets, 0 or more."""
    b = address_of(buffer)
    found = np.int64(0xCBF29CE4)
    for k in range(at, end):
        found = ((found ^ u8_at(b, k)) * 0x01000193) & 0xFFFFFFFF
    return found


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, FROZEN_BYTES, nb.int64[:, ::1], nb.int64[::1]))
def _table_of(buffer, at, end, names, tables, slots):  # type: ignore[no-untyped-def]
    # `slots` is a hash table with open addressing and free slots. Returns -1 if the table is not described.
    mask = len(slots) - 1
    slot = name_hash(buffer, at, end) & mask
    while slots[slot] >= 0:
        table = slots[slot]
        size = tables[table, NAME_END] - tables[table, NAME_AT]
        if same(address_of(buffer), at, end - at, address_of(names) + tables[table, NAME_AT], size):
            return table
        slot = (slot + 1) & mask
    return np.int64(-1)


# Fields of a RowEvent's head.
_NAME_AT, _NAME_END, _IS_FOREIGN, _IS_INTERNAL = range(4)


@compiled(nb.boolean(nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64[::1]))
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


# The begun frame of a copy's rows: its offset, or -1; its table; its rows. Then the last event's table.
_FRAME_AT, _FRAME_TABLE, _FRAME_ROWS, _LAST_TABLE = range(4)


@compiled(nb.void(nb.int64, nb.int64[::1], nb.int64[::1]))
def _end_rows(out, frame, state):  # type: ignore[no-untyped-def]
    # Completes the frame of a copy's rows, if one is begun.
    if frame[_FRAME_AT] >= 0 and frame[_FRAME_ROWS] > 0:
        put(out, frame[_FRAME_AT] + frames.ROWS_COUNT_AT, frame[_FRAME_ROWS], 4)
        state[TO] = end_frame(out, frame[_FRAME_AT], state[TO])
    frame[_FRAME_AT] = -1


@compiled(nb.void(nb.int64, nb.int64, nb.int64, nb.int64[::1], nb.int64[::1]))
def _begin_line(out, table, relation, frame, state):  # type: ignore[no-untyped-def]
    # Begins the snapshot, and a frame of the table's rows, if a row of a copy needs it.
    if state[OPEN] != SNAPSHOT:
        state[OPEN] = SNAPSHOT
        state[TIME_US] = state[SNAPSHOT_TIME_US]
        state[ORDINAL] = 0
        state[TO] = write_control(out, state[TO], frames.SNAPSHOT_BEGINS, state[POSITION] + 1, state[TIME_US])
    if frame[_FRAME_TABLE] != table or state[TO] - frame[_FRAME_AT] > _ROWS_FRAME_BYTES:
        _end_rows(out, frame, state)
    if frame[_FRAME_AT] < 0:
        frame[_FRAME_AT], frame[_FRAME_TABLE], frame[_FRAME_ROWS] = state[TO], table, 0
        to = begin_frame(out, state[TO], frames.ROWS)
        to = put(out, to, relation, 4)
        state[TO] = put(out, to, state[ORDINAL], 8) + 4


@nb.njit(inline="always")
def _find_table(  # type: ignore[no-untyped-def]
    buffer, at, end, names, keyspace, keyspace_size, shard, shard_size, tables, slots, head, last
):  # fmt: skip
    # Returns the table of the RowEvent between two offsets, and DONE; or -1, and why it failed. An event that
    # is not for the log returns -1 and DONE. `last` is the previous event's table, most often the same.
    b = address_of(buffer)
    if not _read_head(b, at, end, keyspace, keyspace_size, shard, shard_size, head):
        return np.int64(-1), BROKEN
    if head[_IS_FOREIGN] == 1 or head[_IS_INTERNAL] == 1:
        return np.int64(-1), DONE
    first, size = head[_NAME_AT], head[_NAME_END] - head[_NAME_AT]
    if last >= 0:
        name, name_size = tables[last, NAME_AT], tables[last, NAME_END] - tables[last, NAME_AT]
        if same(b, first, size, address_of(names) + name, name_size):
            return last, DONE
    table = _table_of(buffer, first, head[_NAME_END], names, tables, slots)
    return table, DONE if table >= 0 else NO_TABLE


@compiled(
    nb.boolean(
        nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64[:, ::1],
        nb.int64[:, ::1], nb.int64[:, ::1], POINTS, nb.int64, nb.int64, nb.int64[::1], nb.int64[::1],
        nb.int64[::1],
    )
)  # fmt: skip
def _write_row_event(  # type: ignore[no-untyped-def]
    b, at, stop, is_copy, patch, patch_size, texts, tables, sources, targets, points, out, room, parts, frame,
    state,
):  # fmt: skip
    # Writes the RowEvent's changes up to `stop`, from `state[CHANGE_AT]` on. Returns whether it is done.
    table = tables[state[TABLE]]
    first = max(at, state[CHANGE_AT])
    while first < stop:
        tag, value, q = field(b, first, stop)
        if q < 0:
            state[STOPPED] = BROKEN
            return False
        if tag & 7 != BYTES or tag >> 3 != 2:
            first = q + value if tag & 7 == BYTES else q
            continue
        need = 2 * (table[ROOM] + GROWTH * value) + patch_size + _ROW_HEAD
        if room - state[TO] < need:
            state[STOPPED] = NEEDS_ROOM
            state[NEEDED] = need
        elif not read_change(b, q, q + value, parts):
            state[STOPPED] = BROKEN
        elif parts[AFTER_AT] < 0 and (parts[BEFORE_AT] < 0 or is_copy == 1):
            state[STOPPED] = NO_IMAGE
        else:
            state[STOPPED] = find_images(b, table, sources, targets, parts, state)
        if state[STOPPED] != DONE:
            state[CHANGE_AT] = first
            return False
        state[PATCHED] = 0
        if is_copy == 0:
            if state[OPEN] == BEGUN:
                open_transaction(out, state, state[TIME_US])
            write_change(b, patch, texts, table, sources, targets, parts, points, out, state)
        else:
            _begin_line(out, state[TABLE], table[RELATION], frame, state)
            state[TO] = write_line(b, texts, table, sources, targets, points, out, state[TO])
            state[ORDINAL] += 1
            state[ROWS] += 1
            frame[_FRAME_ROWS] += 1
        first = q + value
    state[CHANGE_AT] = 0
    return True


@nb.njit(inline="always")
def _check_event(event, room, state_size, facts, state):  # type: ignore[no-untyped-def]
    # Returns DONE if an event without rows can be written, or why not.
    kind = event[ev.TYPE]
    if kind == ev.FIELD:
        return DESCRIBES
    if kind == ev.UNKNOWN or kind >= ev.EVENT_TYPES:
        return UNKNOWN_EVENT
    if ev.INSERT <= kind <= ev.DELETE or (kind == ev.ROLLBACK and state[OPEN] >= TRANSACTION):
        return STATEMENTS
    if kind == ev.BEGIN and state[OPEN] == TRANSACTION:
        return BEGUN_AGAIN  # a part of the transaction's rows would be in the log twice
    if state[FACTS] >= len(facts):
        return NEEDS_FACTS
    need = state_room(event[ev.BODY_END] - event[ev.BODY_AT], state_size)
    if room - state[TO] < need:
        state[NEEDED] = need
        return NEEDS_ROOM
    return DONE


@nb.njit(inline="always")
def _write_event(  # type: ignore[no-untyped-def]
    buffer, event, keyspace, keyspace_size, shard, shard_size, before_state, out, state
):  # fmt: skip
    # Writes an event that `_check_event` has accepted. Returns DONE, or why it can't be written.
    kind = event[ev.TYPE]
    if kind == ev.BEGIN:
        if state[OPEN] == CLOSED:
            state[OPEN] = BEGUN
            state[TIME_US] = event[ev.TIME_S] * 1_000_000
    elif kind == ev.COMMIT:
        close(out, state, event[ev.TIME_S] * 1_000_000)
    elif kind == ev.COPY_COMPLETED or kind == ev.ROLLBACK:
        close(out, state, 0)
    elif kind == ev.VGTID:
        b, at, end = address_of(buffer), event[ev.BODY_AT], event[ev.BODY_END]
        if not find_own(b, at, end, keyspace, keyspace_size, shard, shard_size, state):
            return BROKEN
        if state[OPEN] >= TRANSACTION and state[GTID_AT] >= 0:
            to = write_shard_state(buffer, state[GTID_AT], state[GTID_END], before_state, out, state[TO])
            if to <= state[TO]:
                return BROKEN if to < 0 else ODD_POSITION
            state[TO] = to
    return DONE


@nb.njit(inline="always")
def _note(event, facts, state):  # type: ignore[no-untyped-def]
    fact = state[FACTS]
    facts[fact, FACT_TYPE] = event[ev.TYPE]
    facts[fact, FACT_TIME_S] = event[ev.TIME_S]
    facts[fact, FACT_BODY_AT] = event[ev.BODY_AT]
    facts[fact, FACT_BODY_END] = event[ev.BODY_END]
    facts[fact, FACT_OUT_AT] = state[TO]
    state[FACTS] += 1


_CALL = nb.void(
    FROZEN_BYTES, FROZEN_BYTES, FROZEN_BYTES, FROZEN_BYTES, FROZEN_BYTES, FROZEN_BYTES, nb.int64[:, ::1],
    nb.int64[::1], nb.int64[:, ::1], nb.int64[:, ::1], POINTS, nb.uint8[::1], nb.int64[:, ::1], nb.int64[::1],
    nb.int64[::1],
)  # fmt: skip


@compiled(_CALL)
def transcode(  # type: ignore[no-untyped-def]
    buffer, keyspace_name, shard_name, before_state, patched, names, tables, slots, sources, targets, points,
    target, facts, state, scratch,
):  # fmt: skip
    """Write the frames of the events from `state[AT]` on to `target`, from `state[TO]` on.

    :param before_state: a shard's state up to its position's text.
    :param patched: if `state[PATCHED]` is 1, texts that replace values of the change at `state[CHANGE_AT]`;
        its columns in `sources` have their offsets.
    :param facts: receives the events without rows, `FACT_FIELDS` numbers each.
    :param scratch: room for `SCRATCH_FIELDS` numbers. Its first are the event that stopped the loop.
    """
    b, out, patch = address_of(buffer), address_of(target), address_of(patched)
    keyspace, shard, texts = address_of(keyspace_name), address_of(shard_name), address_of(names)
    sizes = len(keyspace_name), len(shard_name)
    end, room = len(buffer), len(target)
    event, head, parts, frame = scratch[: ev.EVENT_FIELDS], scratch[8:12], scratch[12:20], scratch[20:24]
    frame[_FRAME_AT] = frame[_LAST_TABLE] = -1
    state[STOPPED] = DONE
    while state[AT] < end:
        p = read_event(b, state[AT], end, keyspace, sizes[0], shard, sizes[1], event)
        if p < 0:
            state[STOPPED] = BROKEN
            break
        if event[ev.IS_OWN] == 0:
            state[AT] = p
            continue
        if event[ev.TYPE] == ev.ROW:
            at, stop = event[ev.BODY_AT], event[ev.BODY_END]
            table, state[STOPPED] = _find_table(
                buffer, at, stop, names, keyspace, sizes[0], shard, sizes[1], tables, slots, head,
                frame[_LAST_TABLE],
            )  # fmt: skip
            if state[STOPPED] != DONE:
                break
            if table >= 0:
                frame[_LAST_TABLE] = state[TABLE] = table
            if table < 0 or tables[table, RELATION] == 0:
                state[AT] = p
                continue
            is_copy = event[ev.TIME_S] == 0 and state[OPEN] != TRANSACTION
            if not is_copy and (state[OPEN] == CLOSED or state[OPEN] == SNAPSHOT):
                state[STOPPED] = NO_TRANSACTION
                break
            if not _write_row_event(
                b, at, stop, 1 if is_copy else 0, patch, len(patched), texts, tables, sources, targets,
                points, out, room, parts, frame, state,
            ):  # fmt: skip
                break
        else:
            _end_rows(out, frame, state)
            state[STOPPED] = _check_event(event, room, len(before_state), facts, state)
            if state[STOPPED] == DONE:
                state[STOPPED] = _write_event(
                    buffer, event, keyspace, sizes[0], shard, sizes[1], before_state, out, state
                )  # fmt: skip
            if state[STOPPED] != DONE:
                break
            _note(event, facts, state)
        state[AT] = p
    _end_rows(out, frame, state)


#: Size of `transcode`'s scratch array.
SCRATCH_FIELDS = 24
