"""Compiled writers of floating-point numbers and bits in the form of Debezium's JSON.

PostgreSQL and Java both write the fewest digits that identify the number, in different forms: the
digits of the text are kept, and only their arrangement changes.

Source: Java SE API 19, `Double.toString` (the form and the digits); java.util.BitSet, `toByteArray` (the
order of bits).
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import compiled
from tailrace.decode.kernel import CELLS, TEXT
from tailrace.decode.values.text_writers import write_base64, write_integer
from tailrace.protocol.frames import FROZEN_BYTES

_PLUS, _MINUS, _POINT, _ZERO, _ONE, _NINE = map(ord, "+-.019")
_SMALL_E, _CAPITAL_E = map(ord, "eE")
_CASE_BIT = 32  # set in lower-case letters, not in upper-case ones

#: Limit of the digits of an exponent; no double has more.
_EXPONENT_DIGITS_MAX = 4

#: Smallest length of a `real` beyond 2^24, the first numbers that `has_long_and_large` looks for.
_LONG_MIN = 12

#: Numbers with so few bits that one digit identifies them; Java writes the nearest number with two digits.
#: One digit and its exponent, two digits and their exponent: `1e-45` is `1.4E-45`.
_OF_REAL = np.array(
    [
        (1, -45, 14, -45), (3, -45, 28, -45), (4, -45, 42, -45), (6, -45, 56, -45), (8, -45, 84, -45),
        (1, -44, 98, -45), (3, -44, 29, -44), (4, -44, 41, -44), (1, -43, 99, -44),
    ],
    np.int64,
)  # fmt: skip
_OF_DOUBLE = np.array(
    [
        (5, -324, 49, -324), (1, -323, 99, -324), (5, -323, 49, -323), (6, -323, 59, -323),
        (7, -323, 69, -323), (8, -323, 79, -323), (9, -323, 89, -323), (1, -322, 99, -323),
    ],
    np.int64,
)  # fmt: skip


@nb.njit(inline="always")
def _write_zeros(count, out, to):  # type: ignore[no-untyped-def]
    for k in range(count):
        out[to + k] = _ZERO
    return to + count


@compiled(
    nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.uint8[::1], nb.int64)
)  # fmt: skip
def _write_digits(b, p, count, out, to):  # type: ignore[no-untyped-def]
    # Writes `count` digits from `p` on, and skips a point among them.
    while count > 0:
        if b[p] != _POINT:
            out[to] = b[p]
            to += 1
            count -= 1
        p += 1
    return to


@compiled(nb.int64(nb.int64, nb.int64, nb.int64, nb.uint8[::1], nb.int64))
def _write_smallest(digit, power, is_real, out, to):  # type: ignore[no-untyped-def]
    # Writes one of the numbers of `_OF_REAL` or `_OF_DOUBLE`; -1 if it is not one of them.
    for row in _OF_REAL if is_real else _OF_DOUBLE:
        if row[0] == digit and row[1] == power:
            out[to] = _ZERO + row[2] // 10
            out[to + 1] = _POINT
            out[to + 2] = _ZERO + row[2] % 10
            out[to + 3] = _CAPITAL_E
            return write_integer(row[3], out, to + 4)
    return np.int64(-1)


@nb.njit(inline="always")
def _read_exponent(b, p, end):  # type: ignore[no-untyped-def]
    # Returns the exponent at `p`, 0 if there is none; and whether the text ends after it.
    power = np.int64(0)
    if p < end and (b[p] | _CASE_BIT) == _SMALL_E:
        p += 1
        below = p < end and b[p] == _MINUS
        if p < end and (b[p] == _MINUS or b[p] == _PLUS):
            p += 1
        if p == end or end - p > _EXPONENT_DIGITS_MAX:
            return power, False
        while p < end and _ZERO <= b[p] <= _NINE:
            power = power * 10 + (b[p] - _ZERO)
            p += 1
        power = -power if below else power
    return power, p == end


@nb.njit(inline="always")
def _write_arranged(b, first_at, count, power, out, to):  # type: ignore[no-untyped-def]
    # Writes `count` digits, the first of which has the weight 10^power, with a point, and an exponent if
    # Java writes one.
    has_exponent = power < -3 or power >= 7
    if has_exponent:
        to = _write_digits(b, first_at, 1, out, to)
        after = np.int64(1)
    elif power < 0:
        out[to] = _ZERO
        to += 1
        after = np.int64(0)
    else:
        after = min(count, power + 1)
        to = _write_digits(b, first_at, after, out, to)
        to = _write_zeros(power + 1 - after, out, to)
    out[to] = _POINT
    to += 1
    if -3 <= power < 0:
        to = _write_zeros(-power - 1, out, to)
    p = first_at
    done = np.int64(0)
    while done < after:
        if b[p] != _POINT:
            done += 1
        p += 1
    if after == count:
        out[to] = _ZERO
        to += 1
    else:
        to = _write_digits(b, p, count - after, out, to)
    if has_exponent:
        out[to] = _CAPITAL_E
        to = write_integer(power, out, to + 1)
    return to


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.int64, nb.uint8[::1], nb.int64))
def write_java(b, p, length, is_real, out, to):  # type: ignore[no-untyped-def]
    """Write a decimal number like `Double.toString` or `Float.toString`: `1.0`, `1.0E23`; -1: no number."""
    end = p + length
    if p < end and b[p] == _MINUS:
        out[to] = _MINUS
        to += 1
        p += 1
    digits = np.int64(0)
    whole = np.int64(-1)  # digits before the point
    first = np.int64(-1)  # the first digit that is not 0: its ordinal, and its place
    first_at = np.int64(0)
    last = np.int64(-1)
    while p < end and (_ZERO <= b[p] <= _NINE or (b[p] == _POINT and whole < 0 and digits > 0)):
        if b[p] == _POINT:
            whole = digits
        else:
            if b[p] != _ZERO:
                last = digits
                if first < 0:
                    first = digits
                    first_at = p
            digits += 1
        p += 1
    power, is_read = _read_exponent(b, p, end)
    if digits == 0 or whole == digits or not is_read:
        return np.int64(-1)
    if first < 0:
        out[to] = _ZERO
        out[to + 1] = _POINT
        out[to + 2] = _ZERO
        return to + 3
    count = last - first + 1
    power += (digits if whole < 0 else whole) - 1 - first
    if count == 1 and power < -42:
        end = _write_smallest(np.int64(b[first_at]) - _ZERO, power, is_real, out, to)
        if end >= 0:
            return end
    return _write_arranged(b, first_at, count, power, out, to)


@compiled(
    nb.boolean(*CELLS)
)  # fmt: skip
def has_long_and_large(b, start, length, kind):  # type: ignore[no-untyped-def]
    """Return whether there may be a number that PostgreSQL writes with more digits than Java does: one
    half-way between a shorter number and its neighbour, such as 1e23. It has many digits and a positive
    exponent. The text of an array is checked as a whole.
    """
    for r in range(len(start)):
        if kind[r] == TEXT and length[r] >= _LONG_MIN:
            for p in range(start[r] + 1, start[r] + length[r]):
                if b[p] == _PLUS and b[p - 1] == _SMALL_E:
                    return True
    return False


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.int64, nb.uint8[::1], nb.int64), allocates=True)
def write_bits(b, p, length, letters, out, to):  # type: ignore[no-untyped-def]
    """Write bits as base64 (or `RAW_BYTES`) of the fewest bytes, the lowest first; -1: not a bit string."""
    packed = np.zeros((length + 7) // 8, np.uint8)
    size = 0
    for k in range(length):
        letter = b[p + length - 1 - k]
        if letter == _ONE:
            packed[k >> 3] |= np.uint8(1 << (k & 7))
            size = (k >> 3) + 1
        elif letter != _ZERO:
            return np.int64(-1)
    return write_base64(packed, 0, size, False, letters, out, to)
