"""Members of JSON texts, by a compiled reader: what `->` and `->>` take out.

A text is checked as a whole first (RFC 8259), so that something that only begins like JSON gives
nothing. Every index is checked against the text's end, and every loop advances.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.compiled import KERNEL

#: Arrays and objects within each other; deeper ones count as no JSON.
NESTING_MAX = 500

_BYTES: Any = nb.types.Array(nb.uint8, 1, "C", readonly=True)
_PAIR: Any = nb.types.UniTuple(nb.int64, 2)  # type: ignore[no-untyped-call]

_QUOTE, _BACKSLASH, _OPEN, _CLOSE, _OPEN_LIST, _CLOSE_LIST = 34, 92, 123, 125, 91, 93
_COMMA, _COLON, _MINUS, _PLUS, _POINT, _ZERO, _NINE = 44, 58, 45, 43, 46, 48, 57
_LETTER_U = 117
_REPLACEMENT = 0xFFFD

# What is taken out of a text.
CHECKED, AS_JSON, AS_TEXT = 0, 1, 2


@nb.njit(nb.int64(_BYTES, nb.int64, nb.int64), **KERNEL)
def _after_space(b, p, end):  # type: ignore[no-untyped-def]
    while p < end and (b[p] == 32 or b[p] == 10 or b[p] == 13 or b[p] == 9):
        p += 1
    return p


@nb.njit(nb.int64(_BYTES, nb.int64, nb.int64), **KERNEL)
def _hexadecimal(b, p, end):  # type: ignore[no-untyped-def]
    """The value of four hexadecimal digits, -1 if there are none."""
    if p + 4 > end:
        return np.int64(-1)
    value = np.int64(0)
    for k in range(p, p + 4):
        c = np.int64(b[k])
        if 48 <= c <= 57:
            digit = c - 48
        elif 65 <= c <= 70:
            digit = c - 55
        elif 97 <= c <= 102:
            digit = c - 87
        else:
            return np.int64(-1)
        value = value * 16 + digit
    return value


@nb.njit(nb.int64(_BYTES, nb.int64, nb.int64), **KERNEL)
def _string_end(b, p, end):  # type: ignore[no-untyped-def]
    """The place after the string whose quote is at `p`, -1 if it is none."""
    if p >= end or b[p] != _QUOTE:
        return np.int64(-1)
    p += 1
    while p < end:
        c = b[p]
        if c == _QUOTE:
            return p + 1
        if c < 32:
            return np.int64(-1)
        if c == _BACKSLASH:
            p += 1
            if p >= end:
                return np.int64(-1)
            c = b[p]
            if c == _LETTER_U:
                if _hexadecimal(b, p + 1, end) < 0:
                    return np.int64(-1)
                p += 4
            elif not (
                c == 34 or c == 92 or c == 47 or c == 98 or c == 102 or c == 110 or c == 114 or c == 116
            ):
                return np.int64(-1)
        p += 1
    return np.int64(-1)


@nb.njit(nb.int64(_BYTES, nb.int64, nb.int64), **KERNEL)
def _digits_end(b, p, end):  # type: ignore[no-untyped-def]
    """The place after one digit or more, -1 if there is none."""
    first = p
    while p < end and _ZERO <= b[p] <= _NINE:
        p += 1
    return p if p > first else np.int64(-1)


@nb.njit(nb.int64(_BYTES, nb.int64, nb.int64), **KERNEL)
def _number_end(b, p, end):  # type: ignore[no-untyped-def]
    if p < end and b[p] == _MINUS:
        p += 1
    if p < end and b[p] == _ZERO:
        p += 1
    else:
        p = _digits_end(b, p, end)
    if p >= 0 and p < end and b[p] == _POINT:
        p = _digits_end(b, p + 1, end)
    if p >= 0 and p < end and (b[p] == 101 or b[p] == 69):
        p += 1
        if p < end and (b[p] == _PLUS or b[p] == _MINUS):
            p += 1
        p = _digits_end(b, p, end)
    return p


@nb.njit(nb.int64(_BYTES, nb.int64, nb.int64), **KERNEL)
def _word_end(b, p, end):  # type: ignore[no-untyped-def]
    if p + 4 <= end and b[p] == 116 and b[p + 1] == 114 and b[p + 2] == 117 and b[p + 3] == 101:
        return p + 4
    if p + 4 <= end and b[p] == 110 and b[p + 1] == 117 and b[p + 2] == 108 and b[p + 3] == 108:
        return p + 4
    if p + 5 <= end and b[p] == 102 and b[p + 1] == 97 and b[p + 2] == 108 and b[p + 3] == 115:
        return p + 5 if b[p + 4] == 101 else np.int64(-1)
    return np.int64(-1)


@nb.njit(nb.int64(_BYTES, nb.int64, nb.int64), **KERNEL)
def _key_end(b, p, end):  # type: ignore[no-untyped-def]
    """The place after a member's name and colon, -1 if that is not what stands at `p`."""
    p = _string_end(b, _after_space(b, p, end), end)
    if p < 0:
        return np.int64(-1)
    p = _after_space(b, p, end)
    return p + 1 if p < end and b[p] == _COLON else np.int64(-1)


@nb.njit(nb.int64(_BYTES, nb.int64, nb.int64, nb.uint8[::1]), **KERNEL)
def value_end(b, p, end, stack):  # type: ignore[no-untyped-def]
    """Return the place after the JSON value that begins at `p` or after spaces; -1: there is none.

    `stack` is room for `NESTING_MAX` letters.
    """
    depth = 0
    while True:
        p = _after_space(b, p, end)
        if p >= end:
            return np.int64(-1)
        c = b[p]
        if c == _OPEN or c == _OPEN_LIST:
            if depth == len(stack):
                return np.int64(-1)
            p = _after_space(b, p + 1, end)
            if p < end and b[p] == c + 2:  # the bracket that closes is two further on
                p += 1
            else:
                stack[depth] = c
                depth += 1
                if c == _OPEN:
                    p = _key_end(b, p, end)
                    if p < 0:
                        return np.int64(-1)
                continue
        elif c == _QUOTE:
            p = _string_end(b, p, end)
        elif c == _MINUS or _ZERO <= c <= _NINE:
            p = _number_end(b, p, end)
        else:
            p = _word_end(b, p, end)
        if p < 0:
            return np.int64(-1)
        while True:
            if depth == 0:
                return p
            p = _after_space(b, p, end)
            if p >= end:
                return np.int64(-1)
            if b[p] == _COMMA:
                p += 1
                if stack[depth - 1] == _OPEN:
                    p = _key_end(b, p, end)
                    if p < 0:
                        return np.int64(-1)
                break
            if b[p] != stack[depth - 1] + 2:
                return np.int64(-1)
            depth -= 1
            p += 1


@nb.njit(nb.int64(nb.int64, nb.uint8[::1], nb.int64), **KERNEL)
def _put_character(point, out, to):  # type: ignore[no-untyped-def]
    if point < 0x80:
        out[to] = point
        return to + 1
    if point < 0x800:
        out[to], out[to + 1] = 0xC0 | (point >> 6), 0x80 | (point & 63)
        return to + 2
    if point < 0x10000:
        out[to], out[to + 1], out[to + 2] = (
            0xE0 | (point >> 12),
            0x80 | ((point >> 6) & 63),
            0x80 | (point & 63),
        )
        return to + 3
    out[to], out[to + 1] = 0xF0 | (point >> 18), 0x80 | ((point >> 12) & 63)
    out[to + 2], out[to + 3] = 0x80 | ((point >> 6) & 63), 0x80 | (point & 63)
    return to + 4


@nb.njit(nb.int64(_BYTES, nb.int64, nb.int64, nb.uint8[::1], nb.int64), **KERNEL)
def _unescape(b, p, end, out, to):  # type: ignore[no-untyped-def]
    """Write what a checked string says; `p` after its quote, `end` at the closing one."""
    while p < end:
        c = b[p]
        if c != _BACKSLASH:
            out[to] = c
            to += 1
            p += 1
            continue
        c = b[p + 1]
        p += 2
        if c == _LETTER_U:
            point = _hexadecimal(b, p, end)
            p += 4
            if 0xD800 <= point < 0xDC00 and p + 6 <= end and b[p] == _BACKSLASH and b[p + 1] == _LETTER_U:
                low = _hexadecimal(b, p + 2, end)
                if 0xDC00 <= low < 0xE000:
                    point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00)
                    p += 6
            if 0xD800 <= point < 0xE000:
                point = np.int64(_REPLACEMENT)
            to = _put_character(point, out, to)
            continue
        if c == 98:
            c = np.uint8(8)
        elif c == 102:
            c = np.uint8(12)
        elif c == 110:
            c = np.uint8(10)
        elif c == 114:
            c = np.uint8(13)
        elif c == 116:
            c = np.uint8(9)
        out[to] = c
        to += 1
    return to


@nb.njit(nb.boolean(_BYTES, nb.int64, nb.int64, _BYTES, nb.uint8[::1], nb.int64), **KERNEL)
def _is_named(b, p, end, name, room, to):  # type: ignore[no-untyped-def]
    # `room` has space from `to` on for whatever the name may become.
    for k in range(p, end):
        if b[k] == _BACKSLASH:
            used = _unescape(b, p, end, room, to) - to
            if used != len(name):
                return False
            same = True
            for at in range(used):
                same &= room[to + at] == name[at]
            return same
    if end - p != len(name):
        return False
    same = True
    for at in range(len(name)):
        same &= b[p + at] == name[at]
    return same


@nb.njit(
    _PAIR(_BYTES, nb.int64, nb.int64, _BYTES, nb.int64, nb.uint8[::1], nb.uint8[::1], nb.int64),
    **KERNEL,
)
def _member(b, p, end, name, index, stack, room, to):  # type: ignore[no-untyped-def]
    """Where the member of a checked document lies; (-1, -1): it has none. `index` < 0: by `name`."""
    none = (np.int64(-1), np.int64(-1))
    p = _after_space(b, p, end)
    by_name = index < 0
    if b[p] != (_OPEN if by_name else _OPEN_LIST):
        return none
    p = _after_space(b, p + 1, end)
    seen = np.int64(0)
    while b[p] != _CLOSE and b[p] != _CLOSE_LIST:
        found = seen == index
        if by_name:
            p = _after_space(b, p, end)
            after = _string_end(b, p, end)
            found = _is_named(b, p + 1, after - 1, name, room, to)
            p = _key_end(b, p, end)
        p = _after_space(b, p, end)
        after = value_end(b, p, end, stack)
        if found:
            return p, after
        p = _after_space(b, after, end)
        if b[p] == _COMMA:
            p = _after_space(b, p + 1, end)
        seen += 1
    return none


@nb.njit(
    nb.void(
        _BYTES, nb.int64[::1], nb.boolean[::1], nb.int64, _BYTES, nb.int64,
        nb.int32[::1], nb.uint8[::1], nb.boolean[::1], nb.uint8[::1],
    ),
    **KERNEL,
)  # fmt: skip
def _take_out(b, offsets, present, form, name, index, ends, out, valid, stack):  # type: ignore[no-untyped-def]
    to = np.int64(0)
    ends[0] = 0
    for r in range(len(offsets) - 1):
        first, end = offsets[r], offsets[r + 1]
        valid[r] = False
        ends[r + 1] = to
        if not present[r]:
            continue
        after = value_end(b, first, end, stack)
        if after < 0 or _after_space(b, after, end) != end:
            continue
        if form == CHECKED:
            valid[r] = True
            continue
        first, after = _member(b, first, end, name, index, stack, out, to)
        if first < 0:
            continue
        if form == AS_TEXT and b[first] == _QUOTE:
            to = _unescape(b, first + 1, after - 1, out, to)
        elif form == AS_TEXT and b[first] == 110:
            continue  # null
        else:
            for k in range(first, after):
                out[to] = b[k]
                to += 1
        valid[r] = True
        ends[r + 1] = to


def member_of(texts: pa.StringArray, key: str | int, *, as_text: bool) -> pa.StringArray:
    """Return a member of each JSON text: of an object by its name, of an array by its place from 0.

    Null where there is none, and where a text is not JSON.

    :param as_text: a string without quotes and escapes, and null for JSON's null; otherwise JSON.
    """
    name = np.frombuffer(key.encode() if isinstance(key, str) else b"", np.uint8)
    index = -1 if isinstance(key, str) else key
    form = AS_TEXT if as_text else AS_JSON
    ends, out, valid = _taken(texts, form, name, index)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(out[: ends[-1]])]
    found = pa.Array.from_buffers(pa.string(), len(texts), buffers)
    if valid.all():
        return found
    validity = pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(pa.string(), len(texts), [validity, *found.buffers()[1:]])


def are_json(texts: pa.StringArray) -> npt.NDArray[np.bool_]:
    """Return which of the texts are JSON; a null is none."""
    return _taken(texts, CHECKED, np.empty(0, np.uint8), -1)[2]


def _taken(
    texts: pa.StringArray, form: int, name: npt.NDArray[np.uint8], index: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    count = len(texts)
    _, places, data = texts.buffers()
    offsets = np.frombuffer(places, np.int32)[texts.offset : texts.offset + count + 1].astype(np.int64)
    ends, valid = np.empty(count + 1, np.int32), np.empty(count, np.bool_)
    # A member is never longer than its document, also while its name is looked at behind what was
    # written; and a document's name alone is shorter than it.
    out = np.empty(int(offsets[-1] - offsets[0]), np.uint8)
    _take_out(
        np.frombuffer(data or b"", np.uint8),
        offsets,
        np.ascontiguousarray(texts.is_valid().to_numpy(zero_copy_only=False)),
        form,
        name,
        index,
        ends,
        out,
        valid,
        np.empty(NESTING_MAX, np.uint8),
    )
    return ends, out, valid


def quoted(texts: pa.StringArray) -> pa.StringArray:
    """Return each text as a JSON text; null stays null."""
    for letter, escape in _ESCAPES.items():
        texts = pc.replace_substring(texts, letter, escape)
    return pc.binary_join_element_wise('"', texts, '"', "")


_ESCAPES = {"\\": "\\\\", '"': '\\"'} | {chr(code): f"\\u{code:04x}" for code in range(32)}
