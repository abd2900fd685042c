"""Compiled scans of frames, tuples and COPY lines, which find every change and every cell.

They know the wire format and no types. Nothing is copied: a cell is a place in a buffer, given by
`start`, `length` and `kind` (`TEXT`, `NULL`, `UNCHANGED` or `ABSENT`), one array row per column.
numba checks no bounds, so every index is checked against the buffer's end before it is used, and
every loop advances whatever the bytes are.

Source: PostgreSQL manual, "Logical Replication Message Formats" and "COPY", text format.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from tailrace.compiled import compiled
from tailrace.protocol import pgoutput as pg
from tailrace.protocol.frames import (
    COMMIT_LSN,
    COMMIT_TIME_US,
    CONTROL,
    CONTROL_JSON_AT,
    CONTROL_LSN_AT,
    CONTROL_TIME_AT,
    FROZEN_BYTES,
    HAS_FACTS,
    KIND_AT,
    NOTHING_OPEN,
    OPEN,
    ORDINAL,
    ROWS,
    ROWS_COUNT_AT,
    ROWS_ORDINAL_AT,
    ROWS_RELATION_AT,
    SNAPSHOT_BEGINS,
    SNAPSHOT_ENDS,
    SNAPSHOT_OPEN,
    SNAPSHOT_TEXT_AT,
    SUBTYPE_AT,
    TRANSACTION_OPEN,
    XID,
    XLOG,
    XLOG_PAYLOAD_AT,
    XLOG_START_AT,
    frame_size,
    open_transaction,
)
from tailrace.protocol.memory import address_of, i64_at, put_i32, put_u8, u8_at, u16_at, u32_at

# Types of the results of kernels that return several numbers.
PAIR: Any = nb.types.UniTuple(nb.int64, 2)  # type: ignore[no-untyped-call]
TRIPLE: Any = nb.types.UniTuple(nb.int64, 3)  # type: ignore[no-untyped-call]
#: Types of arguments. The cells of a column: the block's bytes, and the cells' starts, lengths and kinds;
#: and `SPANS`, the starts, lengths and kinds of the cells of all columns.
CELLS = (FROZEN_BYTES, nb.int32[::1], nb.int32[::1], nb.uint8[::1])
SPANS = (nb.int32[:, ::1], nb.int32[:, ::1], nb.uint8[:, ::1])

# Kinds of cells. The first three are pgoutput's own letters.
NULL, TEXT, UNCHANGED, ABSENT = pg.NULL, pg.TEXT, pg.UNCHANGED, 0

# Operations, by Debezium's letters: create, update, delete, truncate, read (of a snapshot), message.
CREATE, UPDATE, DELETE, TRUNCATE, READ, MESSAGE = map(ord, "cudtrm")

# Rows of the array of changes, which has one column per change.
GROUP, OP, LOG_OFFSET, LSN, AT_COMMIT_LSN, AT_COMMIT_TIME, AT_XID, AT_ORDINAL, AT, END = range(10)
CHANGE_FIELDS = 10

# COPY's text format: the separators of fields and rows, the escape character, and the letter of `\N`.
_TAB, _NEWLINE, _BACKSLASH, _NULL_LETTER = map(ord, "\t\n\\N")
_ESCAPE_LETTERS = np.frombuffer(b"bfnrtv", np.uint8)
_ESCAPED = np.frombuffer(b"\b\f\n\r\t\v", np.uint8)

#: Value of a commit time or transaction id that a change does not have.
NONE = -(2**63)

# Columns of the array of groups: key, schema messages seen before its first change, wanted.
GROUP_KEY, GROUP_SCHEMA, GROUP_WANTED = range(3)

# The key of a group: the relation's oid. Rows of a snapshot are grouped separately, because their text is
# COPY's: `SNAPSHOT_KEY` is added to the oid. Logical messages have no relation.
OID_BITS = 0xFFFFFFFF
SNAPSHOT_KEY = 1 << 40
MESSAGE_KEY = 1 << 41
# Knuth's multiplicative hash: 2**32 divided by the golden ratio.
_HASH_FACTOR = 0x9E3779B1

# Fields of the result of `index_changes`.
CHANGES, GROUPS, SCHEMAS, ERROR, ERROR_AT = range(5)
RESULT_FIELDS = 5

# Numbers of errors; 0 is none.
BAD_FRAME, TOO_MANY_CHANGES, WRONG_LINES, CUT_SHORT, WRONG_COLUMNS = range(1, 6)
BAD_COLUMN, NO_TUPLE, BYTES_LEFT, ENDS_IN_BACKSLASH, BAD_MESSAGE = range(6, 11)
ERRORS = {
    BAD_FRAME: "a frame is cut short or has an impossible length",
    TOO_MANY_CHANGES: "there are more changes than were counted",
    WRONG_LINES: "the number of lines in a snapshot frame differs from its header",
    CUT_SHORT: "a tuple or line is cut short",
    WRONG_COLUMNS: "a tuple or line has another number of columns than its table",
    BAD_COLUMN: "a column is neither text nor NULL nor unchanged",
    NO_TUPLE: "a message has no tuple, which its type requires",
    BYTES_LEFT: "bytes are left over after a tuple",
    ENDS_IN_BACKSLASH: "a line of COPY ends in a backslash",
    BAD_MESSAGE: "a logical message's prefix or length does not fit",
}


@nb.njit(inline="always")
def _listed(values, value):  # type: ignore[no-untyped-def]
    k = np.searchsorted(values, value)
    return k < len(values) and values[k] == value


@compiled(
    nb.int64(
        nb.int64, nb.int64, nb.int64, nb.int64, nb.int64[:, ::1], nb.int64[:, ::1], nb.int64[::1], nb.boolean
    )
)
def _group_of(key, schemas, count, forgotten, groups, slots, tables, every_table):  # type: ignore[no-untyped-def]
    # A hash table with open addressing: slots hold (key + 1, group, schema messages before the group).
    # `forgotten` is the number of the last schema message that invalidated all groups. A key keeps its
    # slot, so the slots bound the tables, not the groups. Returns -1 if no slot is left.
    mask = len(slots) - 1
    slot = (key * _HASH_FACTOR) & mask
    for _ in range(len(slots)):
        if slots[slot, 0] == 0 or slots[slot, 0] == key + 1:
            break
        slot = (slot + 1) & mask
    if slots[slot, 0] != 0 and slots[slot, 0] != key + 1:
        return -1
    if slots[slot, 0] == key + 1 and slots[slot, 1] >= 0 and slots[slot, 2] >= forgotten:
        return slots[slot, 1]
    slots[slot, 0] = key + 1
    slots[slot, 1] = count
    slots[slot, 2] = schemas
    groups[count, GROUP_KEY] = key
    groups[count, GROUP_SCHEMA] = schemas
    groups[count, GROUP_WANTED] = every_table or _listed(tables, key & OID_BITS)
    return count


@compiled(nb.void(nb.int64, nb.int64[:, ::1]))
def _forget(key, slots):  # type: ignore[no-untyped-def]
    # Invalidates a key's group: its next change opens another one.
    mask = len(slots) - 1
    slot = (key * _HASH_FACTOR) & mask
    for _ in range(len(slots)):
        if slots[slot, 0] == 0:
            return
        if slots[slot, 0] == key + 1:
            slots[slot, 1] = -1
            return
        slot = (slot + 1) & mask


# Values in place of the oid of the table that a schema frame describes: all tables, a type, no schema frame.
_EVERY_TABLE, _TYPE, _NO_SCHEMA = -3, -2, -1


@nb.njit(inline="always")
def _message_meaning(b, i, end, state):  # type: ignore[no-untyped-def]
    # `_frame_meaning` of a frame with a pgoutput message.
    p = i + XLOG_PAYLOAD_AT
    room = end - p
    op, key, count, at, schema_key = 0, -1, 1, end, _NO_SCHEMA
    message = u8_at(b, p) if room > 0 else np.int64(0)
    is_change = message == pg.INSERT or message == pg.UPDATE or message == pg.DELETE
    if is_change and room >= pg.CHANGE_SIZE_MIN:
        op = CREATE if message == pg.INSERT else UPDATE if message == pg.UPDATE else DELETE
        key = u32_at(b, p + pg.RELATION_AT)
        at = p + pg.TUPLES_AT
    elif message == pg.BEGIN and room >= pg.BEGIN_SIZE:
        open_transaction(b, p, state)
    elif message == pg.COMMIT:
        state[OPEN] = NOTHING_OPEN
    elif message == pg.TRUNCATE and room >= pg.TRUNCATED_AT:
        op = TRUNCATE
        count = min(u32_at(b, p + pg.TRUNCATE_COUNT_AT), (room - pg.TRUNCATED_AT) // pg.RELATION_SIZE)
    elif message == pg.MESSAGE:
        op = MESSAGE
        key = MESSAGE_KEY
        at = p + pg.MESSAGE_FLAGS_AT
        if state[OPEN] != TRANSACTION_OPEN:
            state[ORDINAL] = 0
    elif (message == pg.RELATION or message == pg.TYPE) and room >= pg.TUPLES_AT:
        schema_key = u32_at(b, p + pg.RELATION_AT) if message == pg.RELATION else _TYPE
    return op, key, count, at, schema_key


@nb.njit(inline="always")
def _control_meaning(b, i, size, state):  # type: ignore[no-untyped-def]
    # `_frame_meaning` of a control frame; returns only what schema it describes.
    subtype = u8_at(b, i + SUBTYPE_AT) if size > SUBTYPE_AT else np.int64(0)
    if subtype == SNAPSHOT_BEGINS and size >= CONTROL_JSON_AT:
        state[OPEN] = SNAPSHOT_OPEN
        state[XID] = NONE
        state[COMMIT_LSN] = i64_at(b, i + CONTROL_LSN_AT) - 1
        state[COMMIT_TIME_US] = i64_at(b, i + CONTROL_TIME_AT)
        state[ORDINAL] = 0
    elif subtype == SNAPSHOT_ENDS:
        state[OPEN] = NOTHING_OPEN
    return _EVERY_TABLE if subtype == HAS_FACTS else _NO_SCHEMA


@nb.njit(inline="always")
def _frame_meaning(b, i, size, state):  # type: ignore[no-untyped-def]
    # Advances `state` past the frame at `i`. Returns the operation or 0, the table's key, the number of
    # changes, where tuples or lines begin, what schema it describes. The caller reads a Truncate's tables.
    kind = u8_at(b, i + KIND_AT)
    op, key, count, at, schema_key = 0, -1, 1, i + size, _NO_SCHEMA
    if kind == XLOG:
        op, key, count, at, schema_key = _message_meaning(b, i, i + size, state)
    elif kind == ROWS and size >= SNAPSHOT_TEXT_AT:
        key = u32_at(b, i + ROWS_RELATION_AT) + SNAPSHOT_KEY
        count = u32_at(b, i + ROWS_COUNT_AT)
        at = i + SNAPSHOT_TEXT_AT
        op = READ if count > 0 or size > SNAPSHOT_TEXT_AT else 0
        state[ORDINAL] = i64_at(b, i + ROWS_ORDINAL_AT)
    elif kind == CONTROL:
        schema_key = _control_meaning(b, i, size, state)
    return op, key, count, at, schema_key


@nb.njit(inline="always")
def _put_change(b, i, op, group, place, at, end, state, changes, n):  # type: ignore[no-untyped-def]
    changes[GROUP, n] = group
    changes[OP, n] = op
    changes[LOG_OFFSET, n] = place
    changes[LSN, n] = i64_at(b, i + XLOG_START_AT)
    changes[AT_COMMIT_LSN, n] = state[COMMIT_LSN]
    changes[AT_COMMIT_TIME, n] = state[COMMIT_TIME_US]
    changes[AT_XID, n] = state[XID]
    changes[AT_ORDINAL, n] = state[ORDINAL]
    changes[AT, n] = at
    changes[END, n] = end
    if op == MESSAGE and state[OPEN] != TRANSACTION_OPEN:
        has_lsn = end - at >= pg.PREFIX_AT - pg.MESSAGE_FLAGS_AT
        changes[AT_COMMIT_LSN, n] = i64_at(b, at + 1) if has_lsn else 0
        changes[AT_COMMIT_TIME, n] = NONE
        changes[AT_XID, n] = NONE


@compiled(nb.boolean(FROZEN_BYTES, *[nb.int64] * 5, nb.int64[::1], nb.int64[:, ::1], nb.int64))
def _put_lines(b, group, log_offset, at, end, rows, state, changes, first):  # type: ignore[no-untyped-def]
    # Returns whether there are exactly `rows` lines.
    for n in range(first, first + rows):
        stop = at
        while stop < end and u8_at(b, stop) != _NEWLINE:
            stop += 1
        if stop == end:
            return False
        changes[GROUP, n] = group
        changes[OP, n] = READ
        changes[LOG_OFFSET, n] = log_offset + at
        changes[LSN, n] = state[COMMIT_LSN]
        changes[AT_COMMIT_LSN, n] = state[COMMIT_LSN]
        changes[AT_COMMIT_TIME, n] = state[COMMIT_TIME_US]
        changes[AT_XID, n] = state[XID]
        changes[AT_ORDINAL, n] = state[ORDINAL] + n - first
        changes[AT, n] = at
        changes[END, n] = stop
        at = stop + 1
    return at == end


@compiled(
    nb.void(
        FROZEN_BYTES,
        nb.int64,
        nb.int64[::1],
        nb.int64[::1],
        nb.boolean,
        nb.int64[:, ::1],
        nb.int64[:, ::1],
        nb.int64[:, ::1],
        nb.int64[::1],
        nb.int64[::1],
    )
)
def index_changes(b, log_offset, state, tables, every_table, changes, groups, slots, schema_at, result):  # type: ignore[no-untyped-def]
    """Find every change in complete frames, in log order, with its ordinal and group.

    `state` is a scan state as in `protocol.frames`, whose scan has already accepted the frames;
    `changes` and `groups` have room for as many changes as that scan counted, `schema_at` for every
    schema frame. `slots` is zeroed; its length is a power of two and greater than twice the number of
    tables in these frames plus one. A table whose shape changes needs more groups, but not more slots.
    """
    result[:] = 0
    forgotten = 0
    found = 0
    schemas = 0
    group_count = 0
    last_key = -1
    group = -1
    i = 0
    while i < len(b) and result[ERROR] == 0:
        size = frame_size(b, i)
        if size == 0:
            result[ERROR] = BAD_FRAME
            break
        end = i + size
        op, key, count, at, schema_key = _frame_meaning(b, i, size, state)
        if schema_key != _NO_SCHEMA:
            if schemas >= len(schema_at):
                result[ERROR] = TOO_MANY_CHANGES
                break
            schema_at[schemas] = i
            schemas += 1
            last_key = -1
            if schema_key == _EVERY_TABLE:
                forgotten = schemas
            elif schema_key != _TYPE:
                _forget(schema_key, slots)
                _forget(schema_key + SNAPSHOT_KEY, slots)
        elif op != 0:
            for k in range(count if op == TRUNCATE else 1):
                place, rows = i, count
                if op == TRUNCATE:
                    place, rows = i + XLOG_PAYLOAD_AT + pg.TRUNCATED_AT + pg.RELATION_SIZE * k, 1
                    key = u32_at(b, place)
                if key != last_key:
                    group = -1
                    if op == READ:
                        # Rows of a snapshot end the group of the changes before them, and the earlier rows'
                        # group, if changes came in between: groups of a table follow each other in log order.
                        _forget(key - SNAPSHOT_KEY, slots)
                        _forget(key, slots)
                    if group_count < len(groups):
                        group = _group_of(
                            key, schemas, group_count, forgotten, groups, slots, tables, every_table
                        )
                    if group < 0:
                        result[ERROR] = TOO_MANY_CHANGES
                        break
                    group_count += 1 if group == group_count else 0
                    last_key = key
                if groups[group, GROUP_WANTED] != 0:
                    if found + rows > changes.shape[1]:
                        result[ERROR] = TOO_MANY_CHANGES
                        break
                    if op != READ:
                        _put_change(b, i, op, group, log_offset + place, at, end, state, changes, found)
                    elif not _put_lines(b, group, log_offset, at, end, rows, state, changes, found):
                        result[ERROR] = WRONG_LINES
                        break
                    found += rows
                state[ORDINAL] += rows
        if result[ERROR] == 0:
            i = end
    result[CHANGES] = found
    result[GROUPS] = group_count
    result[SCHEMAS] = schemas
    result[ERROR_AT] = i


@compiled(nb.void(nb.int64[:, ::1], nb.int64, nb.int64[::1], nb.int64[::1], nb.int64[:, ::1]))
def sort_by_group(changes, count, group_of, next_at, target):  # type: ignore[no-untyped-def]
    """Copy the first `count` changes to `target`, group by group, in log order within a group.

    `next_at` has the start of each group in `target`, and is overwritten.
    """
    for k in range(count):
        group = group_of[changes[GROUP, k]]
        to = next_at[group]
        next_at[group] = to + 1
        for field in range(CHANGE_FIELDS):
            target[field, to] = changes[field, k]


@nb.njit(inline="always")
def _walk(b, p, end, columns, r, rows, start, length, kind):  # type: ignore[no-untyped-def]
    # Writes the cells of one TupleData at `p`, of change `r` of `rows`; returns the place after it, or a
    # negated error number. Buffer and arrays are passed as addresses.
    if end - p < 2:
        return -CUT_SHORT
    if u16_at(b, p) != columns:
        return -WRONG_COLUMNS
    p += 2
    at = r
    for _ in range(columns):
        if p >= end:
            return -CUT_SHORT
        letter = u8_at(b, p)
        p += 1
        size = np.int64(0)
        if letter == TEXT:
            if end - p < 4:
                return -CUT_SHORT
            size = u32_at(b, p)
            p += 4
            if size > end - p:
                return -CUT_SHORT
        elif letter != NULL and letter != UNCHANGED:
            return -BAD_COLUMN
        put_u8(kind, at, letter)
        put_i32(start, at, p)
        put_i32(length, at, size)
        p += size
        at += rows
    return p


@nb.njit(inline="always")
def _clear(start, length, kind, r):  # type: ignore[no-untyped-def]
    for c in range(start.shape[0]):
        start[c, r] = 0
        length[c, r] = 0
        kind[c, r] = ABSENT


@compiled(
    nb.void(
        FROZEN_BYTES,
        nb.uint8[::1],
        nb.int64[::1],
        nb.int64[::1],
        *SPANS,
        *SPANS,
        nb.uint8[::1],
        nb.int64[::1],
    )
)
def tuple_cells(b, op, at, end, start, length, kind, old_start, old_length, old_kind, old_mark, result):  # type: ignore[no-untyped-def]
    """Find the cells of the new and old tuples of changes of one table.

    The arrays of old cells are empty if no change can have an old tuple. `old_mark` gets 'K' (key),
    'O' (whole row) or 0 per change. `result` gets the number of an error, and the index of its change.
    """
    result[0] = 0
    columns, rows = start.shape
    old_columns = old_start.shape[0]
    olds = old_start.shape[1]
    memory = address_of(b)
    starts, lengths, kinds = address_of(start), address_of(length), address_of(kind)
    old_starts, old_lengths, old_kinds = address_of(old_start), address_of(old_length), address_of(old_kind)
    for r in range(len(op)):
        p = at[r]
        stop = end[r]
        code = op[r]
        old_mark[r] = 0
        error = 0
        if code == TRUNCATE:  # has no tuple
            p = stop
        elif p >= stop:
            error = NO_TUPLE
        if error == 0 and code != TRUNCATE and (u8_at(b, p) == pg.OLD_KEY or u8_at(b, p) == pg.OLD_ROW):
            if code == CREATE or olds == 0:
                error = NO_TUPLE
            else:
                old_mark[r] = u8_at(b, p)
                p = _walk(memory, p + 1, stop, old_columns, r, olds, old_starts, old_lengths, old_kinds)
                if p < 0:
                    error = -p
        if error == 0 and (code == DELETE or code == TRUNCATE):
            _clear(start, length, kind, r)
            if code == DELETE and old_mark[r] == 0:
                error = NO_TUPLE
        elif error == 0:
            if p >= stop or u8_at(b, p) != pg.NEW_ROW:
                error = NO_TUPLE
            else:
                p = _walk(memory, p + 1, stop, columns, r, rows, starts, lengths, kinds)
                if p < 0:
                    error = -p
        if error == 0 and p != stop:
            error = BYTES_LEFT
        if error != 0:
            result[0] = error
            result[1] = r
            return
        if olds > 0 and old_mark[r] == 0:
            _clear(old_start, old_length, old_kind, r)


@nb.njit(inline="always")
def _unescaped(letter):  # type: ignore[no-untyped-def]
    for k in range(len(_ESCAPE_LETTERS)):
        if letter == _ESCAPE_LETTERS[k]:
            return _ESCAPED[k]
    return letter


@compiled(nb.void(nb.uint8[::1], nb.int64[::1], nb.int64[::1], *SPANS, nb.int64[::1]))
def copy_cells(b, at, end, start, length, kind, result):  # type: ignore[no-untyped-def]
    """Find the cells of lines in COPY's text format, and unescape them in place.

    Unescaping never lengthens a cell, so each keeps its start. `result` as in `tuple_cells`.
    """
    result[0] = 0
    columns = start.shape[0]
    for r in range(len(at)):
        p = at[r]
        stop = end[r]
        error = 0
        c = 0
        while c < columns:
            first = p
            to = p
            while p < stop and b[p] != _TAB and b[p] != _BACKSLASH:
                p += 1
            to = p
            escaped = p < stop and b[p] == _BACKSLASH
            while p < stop and b[p] != _TAB:
                if b[p] == _BACKSLASH:
                    if p + 1 >= stop:
                        error = ENDS_IN_BACKSLASH
                        break
                    p += 1
                    b[to] = _unescaped(b[p])
                else:
                    b[to] = b[p]
                to += 1
                p += 1
            if error != 0:
                break
            start[c, r] = first
            length[c, r] = to - first
            kind[c, r] = TEXT
            # `\N` alone is NULL. It was unescaped to one N; no other two bytes become that, because
            # COPY never escapes the letter N.
            if escaped and p - first == 2 and b[first] == _NULL_LETTER:
                kind[c, r] = NULL
                length[c, r] = 0
            c += 1
            if c < columns:
                if p >= stop:
                    error = WRONG_COLUMNS
                    break
                p += 1  # the tab
        if error == 0 and p != stop:
            error = WRONG_COLUMNS
        if error != 0:
            result[0] = error
            result[1] = r
            return


@compiled(nb.void(FROZEN_BYTES, nb.int64[::1], nb.int64[::1], *SPANS, nb.int64[::1]))
def message_cells(b, at, end, start, length, kind, result):  # type: ignore[no-untyped-def]
    """Find prefix and content of logical messages, as the two cells of a row."""
    result[0] = 0
    for r in range(len(at)):
        p = at[r] + pg.PREFIX_AT - pg.MESSAGE_FLAGS_AT
        stop = end[r]
        first = p
        while p < stop and b[p] != 0:
            p += 1
        if stop - p < 5 or u32_at(b, p + 1) != stop - p - 5:
            result[0] = BAD_MESSAGE
            result[1] = r
            return
        start[0, r] = first
        length[0, r] = p - first
        start[1, r] = p + 5
        length[1, r] = stop - p - 5
        kind[0, r] = TEXT
        kind[1, r] = TEXT


@compiled(nb.void(nb.uint8[::1], nb.uint8[::1], nb.boolean[::1], *SPANS, *SPANS))
def take_from_old(op, old_mark, in_key, start, length, kind, old_start, old_length, old_kind):  # type: ignore[no-untyped-def]
    """Complete the new cells from the old ones, in place.

    A delete gets its old cells; from a key tuple, only those of key columns (the others are NULL
    without meaning). A cell that was not sent is copied from the old tuple, if that has it.
    """
    for c in range(start.shape[0]):
        for r in range(len(op)):
            is_held = old_mark[r] == pg.OLD_ROW or (old_mark[r] == pg.OLD_KEY and in_key[c])
            is_value = old_kind[c, r] == TEXT or old_kind[c, r] == NULL
            is_deleted = op[r] == DELETE and (old_mark[r] == pg.OLD_ROW or in_key[c])
            if is_deleted or (kind[c, r] == UNCHANGED and is_held and is_value):
                start[c, r] = old_start[c, r]
                length[c, r] = old_length[c, r]
                kind[c, r] = old_kind[c, r]


@compiled(nb.void(FROZEN_BYTES, nb.uint8[::1], nb.uint8[::1], nb.int64[::1], *SPANS, *SPANS, nb.boolean[::1]))
def mark_changed_keys(  # type: ignore[no-untyped-def]
    b, op, old_mark, columns, start, length, kind, old_start, old_length, old_kind, changed
):
    """Mark the updates that sent an old tuple in which a key column has a different text."""
    for r in range(len(op)):
        changed[r] = False
        if op[r] != UPDATE or old_mark[r] == 0:
            continue
        for c in columns:
            if old_kind[c, r] == ABSENT or kind[c, r] == UNCHANGED:
                continue
            same = old_kind[c, r] == kind[c, r] and old_length[c, r] == length[c, r]
            for k in range(length[c, r] if same else 0):
                same &= b[start[c, r] + k] == b[old_start[c, r] + k]
            changed[r] |= not same
