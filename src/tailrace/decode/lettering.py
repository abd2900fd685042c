"""Compiled writers of what every text form is made of: whole numbers, JSON's strings, base64, hex.

Each writes to `out` from `to` on and returns the place after what it wrote; the caller has made
room. Nothing here fails.

Source: RFC 8259 (JSON), RFC 4648 (base64).
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.decode.literals import hex_digit
from tailrace.protocol.frames import FROZEN_BYTES

#: Letters of base64, as they are and as they go into URLs and file names.
PLAIN_LETTERS, URL_LETTERS = 0, 64

_BASE64 = np.frombuffer(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_",
    np.uint8,
)
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)

#: For each control character the letter of its short escape, or 0.
_SHORT = np.zeros(32, np.uint8)
for _code, _letter in ((8, "b"), (9, "t"), (10, "n"), (12, "f"), (13, "r")):
    _SHORT[_code] = ord(_letter)


@nb.njit(nb.int64(nb.int64, nb.uint8[::1], nb.int64), nogil=True, cache=True)
def write_integer(value, out, to):  # type: ignore[no-untyped-def]
    """Write a whole number of 64 bits."""
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


@nb.njit(inline="always")
def write_letter(letter, out, to):  # type: ignore[no-untyped-def]
    """Write one byte of a JSON string, escaped where JSON asks for it."""
    if letter >= 32 and letter != 34 and letter != 92:
        out[to] = letter
        return to + 1
    out[to] = 92
    if letter >= 32:
        out[to + 1] = letter
        return to + 2
    if _SHORT[letter] != 0:
        out[to + 1] = _SHORT[letter]
        return to + 2
    out[to + 1] = 117  # 'u'
    out[to + 2] = 48
    out[to + 3] = 48
    out[to + 4] = _HEX[letter >> 4]
    out[to + 5] = _HEX[letter & 15]
    return to + 6


@nb.njit(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.uint8[::1], nb.int64), nogil=True, cache=True)
def write_quoted(b, p, length, out, to):  # type: ignore[no-untyped-def]
    """Write a JSON string: at most six bytes for each, and the quotes."""
    out[to] = 34
    to += 1
    for k in range(p, p + length):
        to = write_letter(b[k], out, to)
    out[to] = 34
    return to + 1


@nb.njit(inline="always")
def _triple(a, b, c, count, letters, out, to):  # type: ignore[no-untyped-def]
    # Four letters of base64 for `count` (1 to 3) bytes.
    out[to] = _BASE64[letters + (a >> 2)]
    out[to + 1] = _BASE64[letters + (((a & 3) << 4) | (b >> 4))]
    out[to + 2] = _BASE64[letters + (((b & 15) << 2) | (c >> 6))] if count > 1 else 61
    out[to + 3] = _BASE64[letters + (c & 63)] if count > 2 else 61
    return to + 4


@nb.njit(
    nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.boolean, nb.int64, nb.uint8[::1], nb.int64),
    nogil=True,
    cache=True,
)
def write_base64(b, p, length, from_hex, letters, out, to):  # type: ignore[no-untyped-def]
    """Write base64 of bytes, or of bytea in hex form, with padding; no quotes."""
    size = (length - 2) // 2 if from_hex else length
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
        to = _triple(three[0], three[1], three[2], count, letters, out, to)
    return to
