"""Compiled writers of the parts of all text forms: integers, JSON's strings, base64.

Each writes to `out` from `to` on and returns the place after what it wrote; the caller provides the
room. None of them fails.

Source: RFC 8259 (JSON), RFC 4648 (base64).
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import compiled
from tailrace.decode.gather import copy_bytes
from tailrace.decode.values.literals import hex_digit
from tailrace.protocol.frames import FROZEN_BYTES

_SPACE, _QUOTE, _MINUS, _ZERO, _EQUALS, _BACKSLASH = map(ord, ' "-0=\\')
_SMALL_U = ord("u")

#: Alphabets of base64, as offsets in `_BASE64`: the standard one, and the one for URLs and file names.
PLAIN_LETTERS, URL_LETTERS = 0, 64
#: In place of an alphabet: write the bytes themselves.
RAW_BYTES = -1

_BASE64 = np.frombuffer(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_",
    np.uint8,
)
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)

#: For each control character, the letter of its short escape in JSON, or 0.
_SHORT = np.zeros(32, np.uint8)
for _code, _letter in ((8, "b"), (9, "t"), (10, "n"), (12, "f"), (13, "r")):
    _SHORT[_code] = ord(_letter)


@compiled(nb.int64(nb.int64, nb.uint8[::1], nb.int64))
def write_integer(value, out, to):  # type: ignore[no-untyped-def]
    """Write a signed 64-bit integer in decimal digits."""
    if value < 0:
        out[to] = _MINUS
        to += 1
    rest = np.uint64(abs(value))
    digits = 1
    limit = np.uint64(10)
    while digits < 19 and rest >= limit:
        digits += 1
        limit *= np.uint64(10)
    for k in range(digits - 1, -1, -1):
        out[to + k] = np.uint8(_ZERO + rest % np.uint64(10))
        rest //= np.uint64(10)
    return to + digits


@nb.njit(inline="always")
def write_letter(letter, out, to):  # type: ignore[no-untyped-def]
    """Write one byte of a JSON string, escaped if JSON requires it."""
    if letter >= _SPACE and letter != _QUOTE and letter != _BACKSLASH:
        out[to] = letter
        return to + 1
    out[to] = _BACKSLASH
    if letter >= _SPACE:
        out[to + 1] = letter
        return to + 2
    if _SHORT[letter] != 0:
        out[to + 1] = _SHORT[letter]
        return to + 2
    out[to + 1] = _SMALL_U
    out[to + 2] = _ZERO
    out[to + 3] = _ZERO
    out[to + 4] = _HEX[letter >> 4]
    out[to + 5] = _HEX[letter & 15]
    return to + 6


@nb.njit(inline="always")
def write_string(b, p, length, out, to):  # type: ignore[no-untyped-def]
    """Write a JSON string, inlined into the caller: `write_quoted` without the cost of a call."""
    out[to] = _QUOTE
    to += 1
    odd = 0
    for k in range(p, p + length):
        letter = b[k]
        odd += (letter < _SPACE) | (letter == _QUOTE) | (letter == _BACKSLASH)
    if odd == 0:
        copy_bytes(out, np.int64(to), b, np.int64(p), np.int64(length))
        to += length
    else:
        for k in range(p, p + length):
            to = write_letter(b[k], out, to)
    out[to] = _QUOTE
    return to + 1


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.uint8[::1], nb.int64))
def write_quoted(b, p, length, out, to):  # type: ignore[no-untyped-def]
    """Write a JSON string: at most six bytes per byte of the text, and the quotes."""
    return write_string(b, p, length, out, to)


@nb.njit(inline="always")
def write_triple(a, b, c, count, letters, out, to):  # type: ignore[no-untyped-def]
    """Write four letters of base64 for `count` (1 to 3) bytes."""
    out[to] = _BASE64[letters + (a >> 2)]
    out[to + 1] = _BASE64[letters + (((a & 3) << 4) | (b >> 4))]
    out[to + 2] = _BASE64[letters + (((b & 15) << 2) | (c >> 6))] if count > 1 else _EQUALS
    out[to + 3] = _BASE64[letters + (c & 63)] if count > 2 else _EQUALS
    return to + 4


@nb.njit(inline="always")
def _byte(b, p, place, from_hex):  # type: ignore[no-untyped-def]
    # Returns a byte of the input, or of bytea in hex form: from its two digits after `\\x`.
    if from_hex:
        at = p + 2 + 2 * place
        return np.int64(hex_digit(b[at])) * 16 + hex_digit(b[at + 1])
    return np.int64(b[p + place])


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.boolean, nb.int64, nb.uint8[::1], nb.int64))
def write_base64(b, p, length, from_hex, letters, out, to):  # type: ignore[no-untyped-def]
    """Write base64 of bytes or of bytea in hex form, with padding, without quotes; or, with `RAW_BYTES`, the
    bytes.
    """
    size = (length - 2) // 2 if from_hex else length
    if letters == RAW_BYTES:
        for k in range(size):
            out[to + k] = _byte(b, p, k, from_hex)
        return to + size
    for first in range(0, size, 3):
        count = min(3, size - first)
        x = _byte(b, p, first, from_hex)
        y = _byte(b, p, first + 1, from_hex) if count > 1 else np.int64(0)
        z = _byte(b, p, first + 2, from_hex) if count > 2 else np.int64(0)
        to = write_triple(x, y, z, count, letters, out, to)
    return to
