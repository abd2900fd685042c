"""The compiled writer of JSON: one change a line, from a template and the cells of its row.

A template is a list of constant texts, each followed by a number of the change (or its letter),
so that the writer knows nothing of Debezium. How a value is written is its column's *style*; a
value that does not have its style's form is written as PostgreSQL's text, in quotes.

Source: RFC 8259 (JSON), RFC 4648 (base64), ISO 8601 (timestamps).
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.decode.decimals import scale_of, write_money, write_unscaled
from tailrace.decode.forms import (
    AMOUNT_DOUBLE,
    BASE64,
    BOOLEAN,
    DOUBLE,
    FLOATING,
    INTEGER,
    NUMBERS,
    PAIRS,
    PAIRS_QUOTED,
    TEXTS,
    VARIABLE_SCALE,
    delimiter_in,
    form_in,
    parameter_in,
    read_number,
    write_text,
)
from tailrace.decode.gather import copy_bytes
from tailrace.decode.kernel import NONE, NULL, TEXT, TRIPLE, UNCHANGED
from tailrace.decode.lettering import PLAIN_LETTERS, write_base64, write_integer, write_quoted
from tailrace.decode.literals import PLAIN, is_null_item, item_end, unquote_item
from tailrace.protocol.frames import FROZEN_BYTES

# What stands after a constant of the template, in place of the row of a number.
NO_NUMBER, OP_LETTER = -1, -2

#: A value grows at most so much: every byte of a JSON document within a string as \\\\u00xx, and
#: a constant for what has no bytes.
GROWTH, GROWTH_FIXED = 7, 64

#: A number of 64 bits with its sign.
NUMBER_BYTES_MAX = 20

_NULL = np.frombuffer(b"null", np.uint8)
_TRUE = np.frombuffer(b"true", np.uint8)
_FALSE = np.frombuffer(b"false", np.uint8)
_SCALE = np.frombuffer(b'{"scale":', np.uint8)
_VALUE = np.frombuffer(b',"value":"', np.uint8)

_WRITER = nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.int64, nb.uint8[::1], nb.int64)
_SPANS = (nb.int32[:, ::1], nb.int32[:, ::1], nb.uint8[:, ::1])


@nb.njit(nb.int64(nb.int64, nb.uint8[::1], nb.int64), nogil=True, cache=True)
def _write_number(value, out, to):  # type: ignore[no-untyped-def]
    if value == NONE:
        for k in range(4):
            out[to + k] = _NULL[k]
        return to + 4
    return write_integer(value, out, to)


@nb.njit(nb.boolean(FROZEN_BYTES, nb.int64, nb.int64, nb.boolean), nogil=True, cache=True)
def _is_number(b, p, length, floating):  # type: ignore[no-untyped-def]
    # The grammar of JSON: sign, digits without a leading zero, fraction, exponent.
    end = p + length
    if p < end and b[p] == 45:
        p += 1
    first = p
    while p < end and 48 <= b[p] <= 57:
        p += 1
    if p == first or (b[first] == 48 and p - first > 1):
        return False
    if floating and p < end and b[p] == 46:
        p += 1
        first = p
        while p < end and 48 <= b[p] <= 57:
            p += 1
        if p == first:
            return False
    if floating and p < end and (b[p] | 32) == 101:
        p += 1
        if p < end and (b[p] == 43 or b[p] == 45):
            p += 1
        first = p
        while p < end and 48 <= b[p] <= 57:
            p += 1
        if p == first:
            return False
    return p == end


@nb.njit(_WRITER, nogil=True, cache=True)
def _write_double(b, p, length, style, out, to):  # type: ignore[no-untyped-def]
    # A number with a point, so that every reader takes it for a double; -1 if it is none.
    if form_in(style) == AMOUNT_DOUBLE:
        end = write_money(b, p, length, parameter_in(style), out, to)
    else:
        if not _is_number(b, p, length, True):
            return np.int64(-1)
        copy_bytes(out, to, b, p, length)
        end = to + length
    for k in range(to, end):
        if out[k] == 46:
            return end
    if end >= 0:
        out[end] = 46
        out[end + 1] = 48
        end += 2
    return end


@nb.njit(_WRITER, nogil=True, cache=True)
def _write_variable_scale(b, p, length, _style, out, to):  # type: ignore[no-untyped-def]
    # Debezium's VariableScaleDecimal; -1 if it is no number.
    scale = scale_of(b, p, length)
    copy_bytes(out, to, _SCALE, np.int64(0), np.int64(len(_SCALE)))
    to = write_integer(scale, out, to + len(_SCALE))
    copy_bytes(out, to, _VALUE, np.int64(0), np.int64(len(_VALUE)))
    to = write_unscaled(b, p, length, scale, out, to + len(_VALUE))
    if to >= 0:
        out[to] = 34
        out[to + 1] = 125
        to += 2
    return to


@nb.njit(_WRITER, nogil=True, cache=True)
def _write_form(b, p, length, style, out, to):  # type: ignore[no-untyped-def]
    # A value in a form that is not the text as it is; -1 if it does not have it.
    form = form_in(style)
    if form == DOUBLE or form == AMOUNT_DOUBLE:
        return _write_double(b, p, length, style, out, to)
    if form == VARIABLE_SCALE:
        return _write_variable_scale(b, p, length, style, out, to)
    if form == PAIRS:
        return write_text(b, p, length, style, out, to)
    if form == PAIRS_QUOTED:
        document = np.empty(6 * length + 16, np.uint8)
        end = write_text(b, p, length, PAIRS, document, 0)
        return end if end < 0 else write_quoted(document, 0, end, out, to)
    if form < TEXTS:
        value, became = read_number(b, p, length, form)
        return write_integer(value, out, to) if became == PLAIN else np.int64(-1)
    end = write_text(b, p, length, style, out, to + 1)
    if end >= 0:
        out[to] = 34
        out[end] = 34
        end += 1
    return end


@nb.njit(_WRITER, nogil=True, cache=True)
def _write_scalar(b, p, length, style, out, to):  # type: ignore[no-untyped-def]
    form = form_in(style)
    if form == INTEGER or form == FLOATING:
        if _is_number(b, p, length, form == FLOATING):
            copy_bytes(out, to, b, p, length)
            return to + length
    elif form == BOOLEAN:
        if length == 1 and b[p] == 116:
            copy_bytes(out, to, _TRUE, np.int64(0), np.int64(4))
            return to + 4
        if length == 1 and b[p] == 102:
            copy_bytes(out, to, _FALSE, np.int64(0), np.int64(5))
            return to + 5
    elif form == BASE64:
        out[to] = 34
        to = write_base64(b, p, length, False, PLAIN_LETTERS, out, to + 1)
        out[to] = 34
        return to + 1
    elif form >= NUMBERS:
        end = _write_form(b, p, length, style, out, to)
        if end >= 0:
            return end
    return write_quoted(b, p, length, out, to)


@nb.njit(
    nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.int64, nb.uint8[::1], nb.uint8[::1], nb.int64),
    nogil=True,
    cache=True,
)
def _write_array(b, p, length, style, scratch, out, to):  # type: ignore[no-untyped-def]
    # Arrays of any depth, without recursion. What is no array, or has its own bounds
    # (`[0:1]={…}`), is written as text.
    delimiter = delimiter_in(style)
    start = p
    begun = to
    end = p + length
    depth = 0
    item_next = True
    while p < end:
        letter = b[p]
        if letter == 123 and item_next:
            depth += 1
            out[to] = 91
            to += 1
            p += 1
            item_next = p >= end or b[p] != 125
        elif letter == 125 and not item_next and depth > 0:
            depth -= 1
            out[to] = 93
            to += 1
            p += 1
            if depth == 0:
                break
        elif letter == delimiter and not item_next and depth > 0:
            out[to] = 44
            to += 1
            p += 1
            item_next = True
        elif item_next and depth > 0:
            after, size, quoted = item_end(b, p, end, delimiter)
            if after < 0:
                break
            if quoted != 0:
                unquote_item(b, p, after, scratch, 0)
                to = _write_scalar(scratch, 0, size, style, out, to)
            elif is_null_item(b, p, size, quoted):
                copy_bytes(out, to, _NULL, np.int64(0), np.int64(4))
                to += 4
            else:
                to = _write_scalar(b, p, size, style, out, to)
            p = after
            item_next = False
        else:
            break
    if depth != 0 or p != end or p == start:
        return write_quoted(b, start, length, out, begun)
    return to


@nb.njit(
    nb.int64(
        FROZEN_BYTES, nb.int64, nb.boolean[::1], FROZEN_BYTES, nb.int64[::1], nb.int64[::1], FROZEN_BYTES,
        *_SPANS, nb.uint8[::1], nb.uint8[::1], nb.int64,
    ),
    nogil=True,
    cache=True,
)  # fmt: skip
def _write_object(  # type: ignore[no-untyped-def]
    b, r, wanted, names, name_at, styles, unavailable, start, length, kind, scratch, out, to
):
    out[to] = 123
    to += 1
    first = True
    for c in range(start.shape[0]):
        held = kind[c, r]
        if not wanted[c] or (held != TEXT and held != NULL and held != UNCHANGED):
            continue
        if not first:
            out[to] = 44
            to += 1
        first = False
        copy_bytes(out, to, names, name_at[c], name_at[c + 1] - name_at[c])
        to += name_at[c + 1] - name_at[c]
        p = np.int64(start[c, r])
        size = np.int64(length[c, r])
        if held == NULL:
            copy_bytes(out, to, _NULL, np.int64(0), np.int64(4))
            to += 4
        elif held == UNCHANGED:
            copy_bytes(out, to, unavailable, np.int64(0), np.int64(len(unavailable)))
            to += len(unavailable)
        elif delimiter_in(styles[c]) != 0:
            to = _write_array(b, p, size, styles[c], scratch, out, to)
        else:
            to = _write_scalar(b, p, size, styles[c], out, to)
    out[to] = 125
    return to + 1


@nb.njit(
    TRIPLE(
        FROZEN_BYTES, nb.int64, nb.uint8[::1], nb.int64[:, ::1], FROZEN_BYTES, nb.int64[::1], nb.int64[::1],
        nb.int64, nb.uint8[:, ::1], nb.boolean[:, ::1], FROZEN_BYTES, nb.int64[::1], nb.int64[::1],
        FROZEN_BYTES, *_SPANS, *_SPANS, nb.uint8[::1], nb.uint8[::1], nb.int64[::1],
    ),
    nogil=True,
    cache=True,
)  # fmt: skip
def write_lines(  # type: ignore[no-untyped-def]
    b,
    first,
    op,
    numbers,
    texts,
    text_at,
    slots,
    images,
    choice,
    wanted,
    names,
    name_at,
    styles,
    unavailable,
    old_start,
    old_length,
    old_kind,
    start,
    length,
    kind,
    scratch,
    out,
    ends,
):
    """Write changes from `first` on, as far as `out` has room for what they may need at most.

    The template's first `images` constants are each followed by an object (the row before, the
    row after) or null, as `choice` says: 0 null, else the row of `wanted`, from 1, with its
    columns, where a value that was not sent is `unavailable`. Each other constant is followed by
    what `slots` names: a row of `numbers` or more.

    Returns the change to go on with, the bytes written and the bytes that the next change needs.
    `ends` gets the place after each line.
    """
    columns = start.shape[0]
    fixed = text_at[len(text_at) - 1] + len(slots) * NUMBER_BYTES_MAX
    fixed += images * (2 + name_at[columns] + columns * (max(GROWTH_FIXED, len(unavailable)) + 1))
    to = np.int64(0)
    for r in range(first, len(op)):
        need = fixed
        for c in range(columns):
            need += GROWTH * np.int64(length[c, r])
            if old_start.shape[1] > 0:
                need += GROWTH * np.int64(old_length[c, r])
        if need > len(out) - to:
            return r, to, need
        for part in range(len(slots)):
            size = text_at[part + 1] - text_at[part]
            copy_bytes(out, to, texts, text_at[part], size)
            to += size
            if part < images:
                chosen = choice[part, r]
                if chosen == 0:
                    to = _write_number(NONE, out, to)
                elif part + 1 == images:
                    to = _write_object(
                        b,
                        r,
                        wanted[chosen - 1],
                        names,
                        name_at,
                        styles,
                        unavailable,
                        start,
                        length,
                        kind,
                        scratch,
                        out,
                        to,
                    )
                else:
                    to = _write_object(
                        b, r, wanted[chosen - 1], names, name_at, styles, unavailable,
                        old_start, old_length, old_kind, scratch, out, to,
                    )  # fmt: skip
            elif slots[part] == OP_LETTER:
                out[to] = op[r]
                to += 1
            elif slots[part] >= 0:
                to = _write_number(numbers[slots[part], r], out, to)
        ends[r] = to
    return np.int64(len(op)), to, np.int64(0)
