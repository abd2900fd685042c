"""A compiled check of which texts are JSON (RFC 8259): those are written into documents unchanged.

Libraries that read columns of JSON also accept `NaN` and a comma before a bracket. Every index is checked
against the text's end, and every loop advances.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from numba.cpython.unsafe.numbers import trailing_zeros

from tailrace.compiled import compiled
from tailrace.decode.gather import array_mask, text_buffers, word_at

_BYTES: Any = nb.types.Array(nb.uint8, 1, "C", readonly=True)

_QUOTE, _BACKSLASH, _OPEN, _CLOSE, _OPEN_LIST, _CLOSE_LIST = 34, 92, 123, 125, 91, 93
_COMMA, _COLON, _MINUS, _PLUS, _POINT, _ZERO, _NINE = 44, 58, 45, 43, 46, 48, 57
_SPACE, _NEWLINE, _RETURN, _TAB = 32, 10, 13, 9
_LETTER_U, _SMALL_A, _SMALL_F, _SMALL_E, _CAPITAL_A, _CAPITAL_F, _CAPITAL_E = map(ord, "uafeAFE")
_trailing_zeros: Any = trailing_zeros  # whose Python signature has one argument more than its calls
# A character repeated in eight bytes; control characters are below spaces.
_ONES = np.uint64(0x0101010101010101)
_HIGHEST, _QUOTES, _BACKSLASHES, _SPACES = (np.uint64(code * int(_ONES)) for code in (128, 34, 92, 32))


@compiled(nb.int64(_BYTES, nb.int64, nb.int64), inlined=True)
def after_space(b, p, end):  # type: ignore[no-untyped-def]
    """Return the first place from `p` on that is not white space."""
    while p < end and (b[p] == _SPACE or b[p] == _NEWLINE or b[p] == _RETURN or b[p] == _TAB):
        p += 1
    return p


@compiled(nb.int64(_BYTES, nb.int64, nb.int64))
def _hexadecimal(b, p, end):  # type: ignore[no-untyped-def]
    """Return the value of four hexadecimal digits, -1 if they are not digits."""
    if p + 4 > end:
        return np.int64(-1)
    value = np.int64(0)
    for k in range(p, p + 4):
        c = np.int64(b[k])
        if _ZERO <= c <= _NINE:
            digit = c - _ZERO
        elif _CAPITAL_A <= c <= _CAPITAL_F:
            digit = c - 55  # from 'A', which is 10
        elif _SMALL_A <= c <= _SMALL_F:
            digit = c - 87  # from 'a', which is 10
        else:
            return np.int64(-1)
        value = value * 16 + digit
    return value


@compiled(nb.int64(_BYTES, nb.int64, nb.int64), inlined=True)
def plain_end(b, p, end):  # type: ignore[no-untyped-def]
    """Return the first place from `p` on with a quote, backslash or control character, at most `end`."""
    while p + 8 <= end:
        # A subtraction sets the highest bit of a byte that was 0, or below the subtrahend; only the
        # lowest such bit is reliable.
        word = word_at(b, p)
        quote, backslash = word ^ _QUOTES, word ^ _BACKSLASHES
        found = (quote - _ONES) & ~quote | (backslash - _ONES) & ~backslash | (word - _SPACES) & ~word
        if found & _HIGHEST:
            return p + (np.int64(_trailing_zeros(found & _HIGHEST)) >> 3)
        p += 8
    while p < end and b[p] >= _SPACE and b[p] != _QUOTE and b[p] != _BACKSLASH:
        p += 1
    return p


@compiled(nb.int64(_BYTES, nb.int64, nb.int64), inlined=True)
def string_end(b, p, end):  # type: ignore[no-untyped-def]
    """Return the place after the string whose quote is at `p`, -1 if it is not a string."""
    if p >= end or b[p] != _QUOTE:
        return np.int64(-1)
    p = plain_end(b, p + 1, end)
    while p < end:
        c = b[p]
        if c == _QUOTE:
            return p + 1
        if c != _BACKSLASH or p + 1 >= end:
            return np.int64(-1)
        c = b[p + 1]
        if c == _LETTER_U:
            if _hexadecimal(b, p + 2, end) < 0:
                return np.int64(-1)
            p += 6
        elif c == 34 or c == 92 or c == 47 or c == 98 or c == 102 or c == 110 or c == 114 or c == 116:
            p += 2  # one of "\/bfnrt
        else:
            return np.int64(-1)
        p = plain_end(b, p, end)
    return np.int64(-1)


@compiled(nb.int64(_BYTES, nb.int64, nb.int64), inlined=True)
def _digits_end(b, p, end):  # type: ignore[no-untyped-def]
    """Return the place after one digit or more, -1 if there is none."""
    first = p
    while p < end and _ZERO <= b[p] <= _NINE:
        p += 1
    return p if p > first else np.int64(-1)


@compiled(nb.int64(_BYTES, nb.int64, nb.int64))
def number_end(b, p, end):  # type: ignore[no-untyped-def]
    """Return the place after the number at `p`, -1 if it is not a number."""
    if p < end and b[p] == _MINUS:
        p += 1
    if p < end and b[p] == _ZERO:
        p += 1
    else:
        p = _digits_end(b, p, end)
    if p >= 0 and p < end and b[p] == _POINT:
        p = _digits_end(b, p + 1, end)
    if p >= 0 and p < end and (b[p] == _SMALL_E or b[p] == _CAPITAL_E):
        p += 1
        if p < end and (b[p] == _PLUS or b[p] == _MINUS):
            p += 1
        p = _digits_end(b, p, end)
    return p


@compiled(nb.int64(_BYTES, nb.int64, nb.int64))
def _word_end(b, p, end):  # type: ignore[no-untyped-def]
    # Returns the place after `true`, `null` or `false` at `p`, -1 if there is none of them.
    if p + 4 <= end and b[p] == 116 and b[p + 1] == 114 and b[p + 2] == 117 and b[p + 3] == 101:
        return p + 4
    if p + 4 <= end and b[p] == 110 and b[p + 1] == 117 and b[p + 2] == 108 and b[p + 3] == 108:
        return p + 4
    if p + 5 <= end and b[p] == 102 and b[p + 1] == 97 and b[p + 2] == 108 and b[p + 3] == 115:
        return p + 5 if b[p + 4] == 101 else np.int64(-1)
    return np.int64(-1)


@compiled(nb.int64(_BYTES, nb.int64, nb.int64), inlined=True)
def _key_end(b, p, end):  # type: ignore[no-untyped-def]
    """Return the place after the member's name and colon at `p`, -1 if there are none."""
    p = string_end(b, after_space(b, p, end), end)
    if p < 0:
        return np.int64(-1)
    p = after_space(b, p, end)
    return p + 1 if p < end and b[p] == _COLON else np.int64(-1)


@compiled(nb.int64(_BYTES, nb.int64, nb.int64, nb.uint8[::1]))
def value_end(b, p, end, stack):  # type: ignore[no-untyped-def]
    """Return the place after the JSON value that begins at `p` or after white space; -1: there is none.

    `stack` has one byte for each level of arrays and objects that may be open.
    """
    depth = 0
    while True:
        p = after_space(b, p, end)
        if p >= end:
            return np.int64(-1)
        c = b[p]
        if c == _OPEN or c == _OPEN_LIST:
            if depth == len(stack):
                return np.int64(-1)
            p = after_space(b, p + 1, end)
            if p < end and b[p] == c + 2:  # the closing bracket's code is two higher
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
            p = string_end(b, p, end)
        elif c == _MINUS or _ZERO <= c <= _NINE:
            p = number_end(b, p, end)
        else:
            p = _word_end(b, p, end)
        if p < 0:
            return np.int64(-1)
        while True:
            if depth == 0:
                return p
            p = after_space(b, p, end)
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


@compiled(nb.void(_BYTES, nb.int64[::1], nb.boolean[::1], nb.boolean[::1], nb.uint8[::1]))
def _check(b, offsets, present, valid, stack):  # type: ignore[no-untyped-def]
    for r in range(len(offsets) - 1):
        valid[r] = False
        if present[r]:
            after = value_end(b, offsets[r], offsets[r + 1], stack)
            valid[r] = after >= 0 and after_space(b, after, offsets[r + 1]) == offsets[r + 1]


def are_json(texts: pa.StringArray) -> npt.NDArray[np.bool_]:
    """Return which of the texts are JSON; a null is not."""
    data, offsets = text_buffers(texts)
    valid = np.empty(len(texts), np.bool_)
    stack = np.empty(int(np.diff(offsets).max(initial=0)), np.uint8)
    _check(data, offsets, np.ascontiguousarray(array_mask(texts)), valid, stack)
    return valid


def quoted(texts: pa.StringArray) -> pa.StringArray:
    """Return each text as a JSON string; null remains null."""
    for letter, escape in _ESCAPES.items():
        texts = pc.replace_substring(texts, letter, escape)
    return pc.binary_join_element_wise('"', texts, '"', "")


_ESCAPES = {"\\": "\\\\", '"': '\\"'} | {chr(code): f"\\u{code:04x}" for code in range(32)}
