"""Compiled readers of row images, and writers of rows as pgoutput's tuples and COPY's lines.

Every offset in the input is checked against its end, because numba checks none. The caller ensures that the
output has room.

Source: `binlogdata.proto` and `query.proto` of Vitess; PostgreSQL manual, "Logical Replication Message
Formats" and "COPY", text format.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import compiled
from tailrace.protocol import pgoutput as pg
from tailrace.protocol.memory import move_bytes, put_u8, u8_at
from tailrace.sources.vitess.rows.events import BYTES, field, varint
from tailrace.sources.vitess.rows.layout import (
    A_CHANGE,
    A_DOCUMENT,
    BEGIN,
    BROKEN,
    CODE,
    COLUMN,
    CONSTANT,
    DONE,
    FIRST_SOURCE,
    FIRST_TARGET,
    IN_KEY,
    IS_FULL,
    IS_JSON,
    LACKS_KEY,
    LACKS_VALUES,
    MAY_LACK,
    MISSING_AT,
    MISSING_SIZE,
    NEEDS_JSON,
    NO_DOCUMENT,
    NOT_SENT,
    NULL_SIZE,
    OLD_BEGIN,
    OLD_SIZE,
    OTHER_COLUMNS,
    PARAMETER,
    PATCHED,
    POSITION,
    RELATION,
    ROWS,
    SIZE,
    SOURCE_OF,
    SOURCES,
    TARGETS,
    TO,
)  # fmt: skip
from tailrace.sources.vitess.rows.transactions import begin_message, end_frame, put
from tailrace.sources.vitess.rows.values import write_value

POINTS = nb.types.Array(nb.int32, 1, "C", readonly=True)

_TAB, _NEWLINE, _RETURN, _BACKSLASH = map(ord, "\t\n\r\\")
_LETTER_T, _LETTER_N, _LETTER_R, _CAPITAL_N = map(ord, "tnrN")


@nb.njit(inline="always")
def _bit(b, at, end, number):  # type: ignore[no-untyped-def]
    # Returns a bit of a bit map; 0 behind its end.
    place = at + (number >> 3)
    return (u8_at(b, place) >> (number & 7)) & 1 if place < end else np.int64(0)


@compiled(nb.int64(nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64[:, ::1], nb.int64))
def _find_values(b, p, end, first, count, sources, begin_field):  # type: ignore[no-untyped-def]
    # Finds the values of a Row; returns their size in bytes, or -1 (broken), -2 (other columns).
    lengths = np.int64(0)
    lengths_end = np.int64(0)
    values = np.int64(0)
    values_end = np.int64(0)
    while p < end:
        tag, value, p = field(b, p, end)
        if p < 0:
            return np.int64(-1)
        if tag & 7 == BYTES:
            if tag >> 3 == 1:
                lengths = p
                lengths_end = p + value
            elif tag >> 3 == 2:
                values = p
                values_end = p + value
            p += value
        elif tag >> 3 == 1:
            return np.int64(-1)  # not packed: no server writes this
    total = values_end - values
    for c in range(first, first + count):
        if lengths >= lengths_end:
            return np.int64(-2)
        number, lengths = varint(b, lengths, lengths_end)
        if lengths < 0:
            return np.int64(-1)
        size = ((number >> 1) & 0x7FFFFFFFFFFFFFFF) ^ -(number & 1)
        sources[c, begin_field] = values
        sources[c, begin_field + 1] = size if size >= 0 else np.int64(NULL_SIZE)
        if size > 0:
            if size > values_end - values:
                return np.int64(-1)
            values += size
    return total if lengths == lengths_end else np.int64(-2)


@nb.njit(inline="always")
def _cell(b, patch, source, begin_field, points, out, to):  # type: ignore[no-untyped-def]
    # Writes one column of a tuple. A negative offset is one in the texts that were made for this row.
    size = source[begin_field + 1]
    if size == NULL_SIZE:
        put_u8(out, to, pg.NULL)
        return to + 1
    if size == NOT_SENT:
        put_u8(out, to, pg.UNCHANGED)
        return to + 1
    put_u8(out, to, pg.TEXT)
    begin = to + 5
    place = source[begin_field]
    if place < 0:
        to = begin + size
        move_bytes(0, patch - place - 1, patch - place - 1 + size, out + begin)
    else:
        to = write_value(b, place, size, source[CODE], source[PARAMETER], points, out, begin)
    put(out, begin - 4, to - begin, 4)
    return to


@compiled(
    nb.int64(
        nb.int64, nb.int64, nb.int64, nb.int64[::1], nb.int64[:, ::1], nb.int64[:, ::1], nb.int64, nb.boolean,
        nb.boolean, POINTS, nb.int64, nb.int64,
    )
)  # fmt: skip
def _write_tuple(b, patch, texts, table, sources, targets, begin_field, only_key, keeps, points, out, to):  # type: ignore[no-untyped-def]
    # `keeps`: a column that this shard lacks is unchanged. Else it has the value of rows older than the
    # column; a constant is the same in all rows.
    count = table[TARGETS]
    to = put(out, to, count, 2)
    for k in range(table[FIRST_TARGET], table[FIRST_TARGET] + count):
        source = targets[k, SOURCE_OF]
        if only_key and targets[k, IN_KEY] == 0:
            put_u8(out, to, pg.NULL)
            to += 1
        elif source >= 0:
            to = _cell(b, patch, sources[table[FIRST_SOURCE] + source], begin_field, points, out, to)
        elif (keeps and source != CONSTANT) or targets[k, MISSING_SIZE] < 0:
            put_u8(out, to, pg.UNCHANGED if keeps else pg.NULL)
            to += 1
        else:
            size = targets[k, MISSING_SIZE]
            put_u8(out, to, pg.TEXT)
            to = put(out, to + 1, size, 4)
            begin = texts + targets[k, MISSING_AT]
            move_bytes(0, begin, begin + size, out + to)
            to += size
    return to


@compiled(nb.boolean(nb.int64, nb.int64[::1], nb.int64[:, ::1], nb.int64[:, ::1]))
def _key_changed(b, table, sources, targets):  # type: ignore[no-untyped-def]
    for k in range(table[FIRST_TARGET], table[FIRST_TARGET] + table[TARGETS]):
        if targets[k, IN_KEY] == 0 or targets[k, SOURCE_OF] < 0:
            continue
        c = table[FIRST_SOURCE] + targets[k, SOURCE_OF]
        size = sources[c, SIZE]
        if size != sources[c, OLD_SIZE]:
            return True
        for i in range(size):
            if u8_at(b, sources[c, BEGIN] + i) != u8_at(b, sources[c, OLD_BEGIN] + i):
                return True
    return False


@compiled(nb.int64(nb.int64))
def _escape_of(letter):  # type: ignore[no-untyped-def]
    # Returns the character that follows the backslash in COPY's escape; -1: it is not escaped.
    if letter == _TAB:
        return np.int64(_LETTER_T)
    if letter == _NEWLINE:
        return np.int64(_LETTER_N)
    if letter == _RETURN:
        return np.int64(_LETTER_R)
    return np.int64(_BACKSLASH) if letter == _BACKSLASH else np.int64(-1)


@compiled(nb.int64(nb.int64, nb.int64, nb.int64))
def _escaped(out, begin, end):  # type: ignore[no-untyped-def]
    # Escapes a text in place; returns its new end.
    more = 0
    for i in range(begin, end):
        letter = u8_at(out, i)
        if letter == _TAB or letter == _NEWLINE or letter == _RETURN or letter == _BACKSLASH:
            more += 1
    at = end + more - 1
    i = end - 1
    while at > i:
        letter = u8_at(out, i)
        escape = _escape_of(letter)
        put_u8(out, at, letter if escape < 0 else escape)
        at -= 1
        if escape >= 0:
            put_u8(out, at, _BACKSLASH)
            at -= 1
        i -= 1
    return end + more


@compiled(
    nb.int64(
        nb.int64, nb.int64, nb.int64[::1], nb.int64[:, ::1], nb.int64[:, ::1], POINTS, nb.int64, nb.int64
    )
)
def write_line(b, texts, table, sources, targets, points, out, to):  # type: ignore[no-untyped-def]
    """Write a row as a line of COPY's text format; return the offset after it."""
    for k in range(table[FIRST_TARGET], table[FIRST_TARGET] + table[TARGETS]):
        source = targets[k, SOURCE_OF]
        c = table[FIRST_SOURCE] + source
        size = targets[k, MISSING_SIZE] if source < 0 else sources[c, SIZE]
        if size < 0:
            put_u8(out, to, _BACKSLASH)
            put_u8(out, to + 1, _CAPITAL_N)
            to += 2
        else:
            begin = to
            if source < 0:
                place = texts + targets[k, MISSING_AT]
                move_bytes(0, place, place + size, out + to)
                to += size
            else:
                code, parameter = sources[c, CODE], sources[c, PARAMETER]
                to = write_value(b, sources[c, BEGIN], size, code, parameter, points, out, to)
            to = _escaped(out, begin, to)
        put_u8(out, to, _TAB)
        to += 1
    put_u8(out, to - 1, _NEWLINE)
    return to


@compiled(
    nb.int64(
        nb.int64, nb.int64[::1], nb.int64[:, ::1], nb.int64, nb.int64, nb.int64, nb.int64, nb.boolean,
        nb.boolean, nb.int64[::1],
    )
)  # fmt: skip
def _mark_partial(b, table, sources, data, data_end, json, json_end, has_old, is_patched, state):  # type: ignore[no-untyped-def]
    """Mark each value of an image as sent or not; return the code that stops the loop, or `DONE`.

    One bit map has the columns that an image contains (`binlog_row_image`), another the JSON documents that
    are changes of the previous document (`binlog_row_value_options`): an empty one is unchanged.
    """
    documents = 0
    stops = np.int64(DONE)
    for c in range(table[FIRST_SOURCE], table[FIRST_SOURCE] + table[SOURCES]):
        number = c - table[FIRST_SOURCE]
        is_sent = data < 0 or _bit(b, data, data_end, number) == 1
        if sources[c, IS_JSON] != NO_DOCUMENT:
            is_change = json >= 0 and _bit(b, json, json_end, documents) == 1 and is_sent
            documents += 1
            if not is_patched:
                sources[c, IS_JSON] = A_DOCUMENT
            if is_change and sources[c, SIZE] == 0:
                is_sent = False
            elif is_change and sources[c, SIZE] > 0 and not is_patched:
                sources[c, IS_JSON] = A_CHANGE
                stops = np.int64(NEEDS_JSON)
        if not is_sent:
            if not has_old:
                if sources[c, MAY_LACK] == 0:
                    state[COLUMN] = number
                    return np.int64(LACKS_VALUES)
                sources[c, SIZE] = NULL_SIZE
            elif sources[c, OLD_SIZE] >= 0:
                sources[c, BEGIN] = sources[c, OLD_BEGIN]
                sources[c, SIZE] = sources[c, OLD_SIZE]
            else:
                sources[c, SIZE] = NOT_SENT
    return stops


# Begin and end of each part of a RowChange, in pairs; the begin is -1 if the part is absent.
BEFORE_AT, AFTER_AT, _DATA, _JSON = range(0, 8, 2)


@compiled(nb.boolean(nb.int64, nb.int64, nb.int64, nb.int64[::1]))
def read_change(b, p, end, parts):  # type: ignore[no-untyped-def]
    """Find the parts of a RowChange; return whether the message is valid."""
    for k in range(8):
        parts[k] = -1
    while p < end:
        tag, value, p = field(b, p, end)
        if p < 0:
            return False
        number = tag >> 3
        if tag & 7 != BYTES:
            continue
        if number == 1 or number == 2:
            parts[2 * number - 2] = p
            parts[2 * number - 1] = p + value
        elif number == 3 or number == 4:
            q = p
            parts[2 * number - 2] = p
            parts[2 * number - 1] = p  # empty
            while q < p + value:
                inner, size, q = field(b, q, p + value)
                if q < 0:
                    return False
                if inner & 7 == BYTES:
                    if inner >> 3 == 2:
                        parts[2 * number - 2] = q
                        parts[2 * number - 1] = q + size
                    q += size
        p += value
    return True


@compiled(
    nb.void(
        nb.int64, nb.int64, nb.int64, nb.int64[::1], nb.int64[:, ::1], nb.int64[:, ::1], nb.int64[::1],
        POINTS, nb.int64, nb.int64[::1],
    )
)  # fmt: skip
def write_change(b, patch, texts, table, sources, targets, parts, points, out, state):  # type: ignore[no-untyped-def]
    """Write the frame of a row's change in a transaction."""
    has_old = parts[BEFORE_AT] >= 0
    has_new = parts[AFTER_AT] >= 0
    to = state[TO]
    at = begin_message(out, to, state[POSITION])
    put_u8(out, at, pg.UPDATE if has_old and has_new else pg.DELETE if has_old else pg.INSERT)
    at = put(out, at + 1, table[RELATION], 4)
    is_full = table[IS_FULL] == 1
    if has_old and (is_full or not has_new or _key_changed(b, table, sources, targets)):
        put_u8(out, at, pg.OLD_ROW if is_full else pg.OLD_KEY)
        at = _write_tuple(
            b, patch, texts, table, sources, targets, OLD_BEGIN, not is_full, False, points, out, at + 1
        )
    if has_new:
        put_u8(out, at, pg.NEW_ROW)
        keeps = has_old and not is_full
        at = _write_tuple(b, patch, texts, table, sources, targets, BEGIN, False, keeps, points, out, at + 1)
    state[TO] = end_frame(out, to, at)
    state[ROWS] += 1


@compiled(nb.int64(nb.int64[::1], nb.int64[:, ::1], nb.int64[:, ::1], nb.int64, nb.int64[::1]))
def _lacking_key(table, sources, targets, size_field, state):  # type: ignore[no-untyped-def]
    for k in range(table[FIRST_TARGET], table[FIRST_TARGET] + table[TARGETS]):
        source = targets[k, SOURCE_OF]
        if targets[k, IN_KEY] == 1 and source >= 0 and sources[table[FIRST_SOURCE] + source, size_field] < 0:
            state[COLUMN] = source
            return LACKS_KEY
    return DONE


@compiled(nb.int64(nb.int64, nb.int64[::1], nb.int64[:, ::1], nb.int64[:, ::1], nb.int64[::1], nb.int64[::1]))
def find_images(b, table, sources, targets, parts, state):  # type: ignore[no-untyped-def]
    """Find the values of a change's images; return the code that stops the loop, or `DONE`."""
    first, count = table[FIRST_SOURCE], table[SOURCES]
    has_old = parts[BEFORE_AT] >= 0
    found = np.int64(0)
    if has_old:
        found = _find_values(b, parts[BEFORE_AT], parts[BEFORE_AT + 1], first, count, sources, OLD_BEGIN)
    is_patched = state[PATCHED] == 1
    if found >= 0 and parts[AFTER_AT] >= 0 and not is_patched:
        found = _find_values(b, parts[AFTER_AT], parts[AFTER_AT + 1], first, count, sources, BEGIN)
    if found < 0:
        return BROKEN if found == -1 else OTHER_COLUMNS
    stops = np.int64(DONE)
    if parts[_DATA] >= 0 or parts[_JSON] >= 0:
        stops = _mark_partial(
            b, table, sources, parts[_DATA], parts[_DATA + 1], parts[_JSON], parts[_JSON + 1], has_old,
            is_patched, state,
        )  # fmt: skip
    if stops == DONE and parts[AFTER_AT] >= 0:
        stops = _lacking_key(table, sources, targets, SIZE, state)
    if stops == DONE and has_old and table[IS_FULL] == 0:
        stops = _lacking_key(table, sources, targets, OLD_SIZE, state)
    return stops
