"""The compiled writer of JSON: one change a line, from a template and the cells of its row.

A template is a list of constant texts, each followed by a number of the change (or its letter),
so that the writer knows nothing of Debezium. How a value is written is its column's *style*; a
value that does not have its style's form is written as PostgreSQL's text, in quotes.

Source: RFC 8259 (JSON), RFC 4648 (base64), ISO 8601 (timestamps).
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.decode.gather import copy_bytes
from tailrace.decode.kernel import NONE, NULL, TEXT, TRIPLE, UNCHANGED
from tailrace.decode.literals import (
    DATE,
    PLAIN,
    TIMESTAMP,
    TIMESTAMPTZ,
    hex_digit,
    is_hex,
    is_null_item,
    item_end,
    read_temporal,
    unquote_item,
)
from tailrace.protocol.frames import FROZEN_BYTES

# Styles. An array's style is that of its items, with `ARRAY_OF` added.
QUOTED, INTEGER, FLOATING, BOOLEAN, DAYS, MICROSECONDS, ISO_UTC, HEX_BASE64, BASE64 = range(9)
ARRAY_OF = 16

# What stands after a constant of the template, in place of the row of a number.
NO_NUMBER, OP_LETTER = -1, -2

#: A value grows at most so much: every byte as \\u00xx, and a constant for what has no bytes.
GROWTH, GROWTH_FIXED = 6, 48

#: A number of 64 bits with its sign.
NUMBER_BYTES_MAX = 20

_BASE64 = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8)
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_NULL = np.frombuffer(b"null", np.uint8)
_TRUE = np.frombuffer(b"true", np.uint8)
_FALSE = np.frombuffer(b"false", np.uint8)
_UNAVAILABLE = np.frombuffer(b'"__debezium_unavailable_value"', np.uint8)

#: For each control character the letter of its short escape, or 0.
_SHORT = np.zeros(32, np.uint8)
for _code, _letter in ((8, "b"), (9, "t"), (10, "n"), (12, "f"), (13, "r")):
    _SHORT[_code] = ord(_letter)

_WRITER = nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.uint8[::1], nb.int64)
_SPANS = (nb.int32[:, ::1], nb.int32[:, ::1], nb.uint8[:, ::1])


@nb.njit(nb.int64(nb.int64, nb.uint8[::1], nb.int64), nogil=True, cache=True)
def _write_number(value, out, to):  # type: ignore[no-untyped-def]
    if value == NONE:
        for k in range(4):
            out[to + k] = _NULL[k]
        return to + 4
    if value < 0:
        out[to] = 45
        to += 1
    rest = np.uint64(abs(value))
    digits = 1
    limit = np.uint64(10)
    while digits < 19 and rest >= limit:
        digits += 1
        limit *= np.uint64(10)
    for k in range(digits - 1, -1, -1):
        out[to + k] = np.uint8(48 + rest % np.uint64(10))
        rest //= np.uint64(10)
    return to + digits


@nb.njit(_WRITER, nogil=True, cache=True)
def _write_quoted(b, p, length, out, to):  # type: ignore[no-untyped-def]
    out[to] = 34
    to += 1
    for k in range(p, p + length):
        letter = b[k]
        if letter >= 32 and letter != 34 and letter != 92:
            out[to] = letter
            to += 1
        elif letter >= 32:
            out[to] = 92
            out[to + 1] = letter
            to += 2
        elif _SHORT[letter] != 0:
            out[to] = 92
            out[to + 1] = _SHORT[letter]
            to += 2
        else:
            out[to] = 92
            out[to + 1] = 117  # 'u'
            out[to + 2] = 48
            out[to + 3] = 48
            out[to + 4] = _HEX[letter >> 4]
            out[to + 5] = _HEX[letter & 15]
            to += 6
    out[to] = 34
    return to + 1


@nb.njit(inline="always")
def _triple(a, b, c, count, out, to):  # type: ignore[no-untyped-def]
    # Four letters of base64 for `count` (1 to 3) bytes.
    out[to] = _BASE64[a >> 2]
    out[to + 1] = _BASE64[((a & 3) << 4) | (b >> 4)]
    out[to + 2] = _BASE64[((b & 15) << 2) | (c >> 6)] if count > 1 else 61
    out[to + 3] = _BASE64[c & 63] if count > 2 else 61
    return to + 4


@nb.njit(
    nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.boolean, nb.uint8[::1], nb.int64), nogil=True, cache=True
)
def _write_base64(b, p, length, from_hex, out, to):  # type: ignore[no-untyped-def]
    size = (length - 2) // 2 if from_hex else length
    out[to] = 34
    to += 1
    three = np.zeros(3, np.int64)
    for first in range(0, size, 3):
        count = min(3, size - first)
        for k in range(3):
            three[k] = 0
            if k < count and from_hex:
                at = p + 2 + 2 * (first + k)
                three[k] = hex_digit(b[at]) * 16 + hex_digit(b[at + 1])
            elif k < count:
                three[k] = b[p + first + k]
        to = _triple(three[0], three[1], three[2], count, out, to)
    out[to] = 34
    return to + 1


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
def _write_iso(b, p, length, out, to):  # type: ignore[no-untyped-def]
    # `2024-01-01 00:00:00+00` as `2024-01-01T00:00:00Z`; years before 1 and after 9999 as ISO's
    # signed years. read_temporal has accepted the text.
    end = p + length
    before_christ = b[end - 1] == 67
    if before_christ:
        end -= 3
    year = np.int64(0)
    first = p
    while b[p] != 45:
        year = year * 10 + (b[p] - 48)
        p += 1
    out[to] = 34
    to += 1
    if before_christ:
        year -= 1
        if year > 0:
            out[to] = 45
            to += 1
    elif p - first > 4:
        out[to] = 43
        to += 1
    digits = max(4, p - first)
    for k in range(digits - 1, -1, -1):
        out[to + k] = 48 + year % 10
        year //= 10
    to += digits
    while p < end:
        out[to] = 84 if b[p] == 32 else b[p]
        to += 1
        p += 1
    if b[end - 3] == 43 and b[end - 2] == 48 and b[end - 1] == 48:
        to -= 3
        out[to] = 90
        to += 1
    out[to] = 34
    return to + 1


@nb.njit(
    nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.int64, nb.uint8[::1], nb.int64), nogil=True, cache=True
)
def _write_scalar(b, p, length, style, out, to):  # type: ignore[no-untyped-def]
    if style == INTEGER or style == FLOATING:
        if _is_number(b, p, length, style == FLOATING):
            copy_bytes(out, to, b, p, length)
            return to + length
    elif style == BOOLEAN:
        if length == 1 and b[p] == 116:
            copy_bytes(out, to, _TRUE, np.int64(0), np.int64(4))
            return to + 4
        if length == 1 and b[p] == 102:
            copy_bytes(out, to, _FALSE, np.int64(0), np.int64(5))
            return to + 5
    elif style == DAYS or style == MICROSECONDS:
        value, became = read_temporal(b, p, length, DATE if style == DAYS else TIMESTAMP)
        if became == PLAIN:
            return _write_number(value, out, to)
    elif style == ISO_UTC:
        if read_temporal(b, p, length, TIMESTAMPTZ)[1] == PLAIN:
            return _write_iso(b, p, length, out, to)
    elif style == HEX_BASE64:
        if is_hex(b, p, length):
            return _write_base64(b, p, length, True, out, to)
    elif style == BASE64:
        return _write_base64(b, p, length, False, out, to)
    return _write_quoted(b, p, length, out, to)


@nb.njit(
    nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.int64, nb.uint8[::1], nb.uint8[::1], nb.int64),
    nogil=True,
    cache=True,
)
def _write_array(b, p, length, style, scratch, out, to):  # type: ignore[no-untyped-def]
    # Arrays of any depth, without recursion. What is no array, or has its own bounds
    # (`[0:1]={…}`), is written as text.
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
        elif letter == 44 and not item_next and depth > 0:
            out[to] = 44
            to += 1
            p += 1
            item_next = True
        elif item_next and depth > 0:
            after, size, quoted = item_end(b, p, end)
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
        return _write_quoted(b, start, length, out, begun)
    return to


@nb.njit(
    nb.int64(
        FROZEN_BYTES, nb.int64, nb.boolean[::1], FROZEN_BYTES, nb.int64[::1], nb.int64[::1], *_SPANS,
        nb.uint8[::1], nb.uint8[::1], nb.int64,
    ),
    nogil=True,
    cache=True,
)  # fmt: skip
def _write_object(b, r, wanted, names, name_at, styles, start, length, kind, scratch, out, to):  # type: ignore[no-untyped-def]
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
            copy_bytes(out, to, _UNAVAILABLE, np.int64(0), np.int64(len(_UNAVAILABLE)))
            to += len(_UNAVAILABLE)
        elif styles[c] >= ARRAY_OF:
            to = _write_array(b, p, size, styles[c] - ARRAY_OF, scratch, out, to)
        else:
            to = _write_scalar(b, p, size, styles[c], out, to)
    out[to] = 125
    return to + 1


@nb.njit(
    TRIPLE(
        FROZEN_BYTES, nb.int64, nb.uint8[::1], nb.int64[:, ::1], FROZEN_BYTES, nb.int64[::1], nb.int64[::1],
        nb.int64, nb.uint8[:, ::1], nb.boolean[:, ::1], FROZEN_BYTES, nb.int64[::1], nb.int64[::1],
        *_SPANS, *_SPANS, nb.uint8[::1], nb.uint8[::1], nb.int64[::1],
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
    columns. Each other constant is followed by what `slots` names: a row of `numbers` or more.

    Returns the change to go on with, the bytes written and the bytes that the next change needs.
    `ends` gets the place after each line.
    """
    columns = start.shape[0]
    fixed = text_at[len(text_at) - 1] + len(slots) * NUMBER_BYTES_MAX
    fixed += images * (2 + name_at[columns] + columns * (GROWTH_FIXED + 1))
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
                        start,
                        length,
                        kind,
                        scratch,
                        out,
                        to,
                    )
                else:
                    to = _write_object(
                        b, r, wanted[chosen - 1], names, name_at, styles,
                        old_start, old_length, old_kind, scratch, out, to,
                    )  # fmt: skip
            elif slots[part] == OP_LETTER:
                out[to] = op[r]
                to += 1
            elif slots[part] >= 0:
                to = _write_number(numbers[slots[part], r], out, to)
        ends[r] = to
    return np.int64(len(op)), to, np.int64(0)
