"""Compiled readers of what JSON is made of, and writers of what Avro's binary form is.

Places in the text are checked against its end by whoever calls; room in `out` is made before.

Source: RFC 8259 (strings), RFC 4648 (base64); Avro 1.11 specification, "Binary Encoding".
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import KERNEL
from tailrace.protocol.frames import FROZEN_BYTES

#: For each letter of base64 its six bits; 255: it is none.
_SIX = np.full(256, 255, np.uint8)
for _bits, _letter in enumerate(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"):
    _SIX[_letter] = _bits


@nb.njit(inline="always")
def write_long(value, out, to):  # type: ignore[no-untyped-def]
    """Write a whole number: zigzag, then seven bits a byte."""
    rest = (np.uint64(value) << np.uint64(1)) ^ np.uint64(value >> 63)
    while rest >= np.uint64(128):
        out[to] = np.uint8(rest & np.uint64(127)) | np.uint8(128)
        rest >>= np.uint64(7)
        to += 1
    out[to] = np.uint8(rest)
    return to + 1


@nb.njit(nb.int64(FROZEN_BYTES, nb.int64, nb.int64), **KERNEL)
def string_end(b, p, end):  # type: ignore[no-untyped-def]
    """Return the place of the quote that ends the string whose first letter is at `p`, or `end`."""
    while p < end and b[p] != 34:
        p += 2 if b[p] == 92 else 1
    return min(p, end)


@nb.njit(nb.int64(FROZEN_BYTES, nb.int64, nb.int64), **KERNEL)
def count_items(b, p, end):  # type: ignore[no-untyped-def]
    """Return how many items or entries the array or object at `p` has, which is not empty."""
    depth = 0
    count = np.int64(1)
    while p < end:
        letter = b[p]
        if letter == 34:
            p = string_end(b, p + 1, end)
        elif letter == 91 or letter == 123:
            depth += 1
        elif letter == 93 or letter == 125:
            depth -= 1
            if depth == 0:
                break
        elif letter == 44 and depth == 1:
            count += 1
        p += 1
    return count


@nb.njit(nb.int64(FROZEN_BYTES, nb.int64, nb.int64), **KERNEL)
def code_unit(b, p, end):  # type: ignore[no-untyped-def]
    """Return four hexadecimal digits as a number; -1 if they are none."""
    if p + 4 > end:
        return np.int64(-1)
    code = np.int64(0)
    for k in range(p, p + 4):
        letter = np.int64(b[k])
        if 48 <= letter <= 57:
            digit = letter - 48
        elif 97 <= (letter | 32) <= 102:
            digit = (letter | 32) - 87
        else:
            return np.int64(-1)
        code = code * 16 + digit
    return code


@nb.njit(nb.int64(FROZEN_BYTES, nb.int64, nb.int64), **KERNEL)
def escaped_length(b, p, end):  # type: ignore[no-untyped-def]
    """Return the bytes of a string without its escapes; -1 if one of those is none of ours."""
    length = np.int64(0)
    while p < end:
        if b[p] != 92:
            length += 1
            p += 1
        elif p + 1 < end and b[p + 1] == 117:
            code = code_unit(b, p + 2, end)
            if code < 0 or 0xD800 <= code < 0xE000:
                return np.int64(-1)
            length += 1 if code < 0x80 else 2 if code < 0x800 else 3
            p += 6
        else:
            length += 1
            p += 2
    return length


@nb.njit(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.uint8[::1], nb.int64), **KERNEL)
def unescape(b, p, end, out, to):  # type: ignore[no-untyped-def]
    """Write a string without its escapes, which `escaped_length` has looked at."""
    while p < end:
        letter = b[p]
        if letter != 92:
            out[to] = letter
            to += 1
            p += 1
            continue
        letter = b[p + 1]
        p += 2
        if letter == 117:
            code = code_unit(b, p, end)
            p += 4
            if code < 0x80:
                out[to] = code
            elif code < 0x800:
                out[to] = 0xC0 | code >> 6
                to += 1
                out[to] = 0x80 | code & 63
            else:
                out[to] = 0xE0 | code >> 12
                out[to + 1] = 0x80 | code >> 6 & 63
                to += 2
                out[to] = 0x80 | code & 63
        elif letter == 98:
            out[to] = 8
        elif letter == 102:
            out[to] = 12
        elif letter == 110:
            out[to] = 10
        elif letter == 114:
            out[to] = 13
        elif letter == 116:
            out[to] = 9
        else:
            out[to] = letter
        to += 1
    return to


@nb.njit(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.uint8[::1], nb.int64), **KERNEL)
def write_bytes(b, p, end, out, to):  # type: ignore[no-untyped-def]
    """Write base64 as bytes, their length before them; -1 if it is none."""
    size = end - p
    if size % 4 != 0:
        return np.int64(-1)
    padding = 0
    if size > 0 and b[end - 1] == 61:
        padding = 2 if b[end - 2] == 61 else 1
    length = size // 4 * 3 - padding
    to = write_long(length, out, to)
    done = 0
    for first in range(p, end, 4):
        word = np.int64(0)
        for k in range(first, first + 4):
            six = np.int64(_SIX[b[k]])
            if six == 255:
                if k < end - padding:
                    return np.int64(-1)
                six = np.int64(0)
            word = word << 6 | six
        for k in range(3):
            if done < length:
                out[to] = np.uint8(word >> (16 - 8 * k) & 255)
                to += 1
                done += 1
    return to


@nb.njit(inline="always")
def put_bits(bits, width, out, to):  # type: ignore[no-untyped-def]
    """Write a number in so many bytes, the lowest first."""
    for k in range(width):
        out[to + k] = np.uint8(bits >> np.uint64(8 * k) & np.uint64(255))
    return to + width


@nb.njit(
    nb.types.UniTuple(nb.int64, 3)(FROZEN_BYTES, nb.int64, nb.int64),  # type: ignore[no-untyped-call]
    **KERNEL,
)
def decimal(b, p, end):  # type: ignore[no-untyped-def]
    """Return a number as (digits, power of ten, place after it).

    Digits: -1 if they are more than 15, -2 if it is no number.
    """
    digits, exponent, count = np.int64(0), np.int64(0), 0
    is_after_point, seen = False, False
    if p < end and b[p] == 45:
        p += 1
    while p < end and (48 <= b[p] <= 57 or (b[p] == 46 and not is_after_point)):
        if b[p] == 46:
            is_after_point = True
        else:
            seen = True
            if digits != 0 or b[p] != 48:
                count += 1
            if count <= 18:
                digits = digits * 10 + (b[p] - 48)
            exponent -= is_after_point
        p += 1
    if p < end and (b[p] | 32) == 101:
        p += 1
        negative = p < end and b[p] == 45
        if p < end and (b[p] == 45 or b[p] == 43):
            p += 1
        power, seen = np.int64(0), False
        while p < end and 48 <= b[p] <= 57:
            power = min(power * 10 + (b[p] - 48), np.int64(100_000))
            seen = True
            p += 1
        exponent += -power if negative else power
    if not seen:
        return np.int64(-2), exponent, p
    return (digits if count <= 15 else np.int64(-1)), exponent, p
