"""Compiled readers of whole and decimal numbers in the form in which PostgreSQL writes nearly all of them:
an optional sign, digits, an optional point.

Functions for one cell take the address of the buffer, see `protocol.memory`. If a cell of a column
has another form (NaN, infinities, more digits than 64 bits hold), Arrow reads the whole column: the
readers return false, and the values that they wrote are undefined.

Floating-point numbers are always read by Arrow: a kernel of our own saves 8 of 32 ns a value, and was as
large as the rest of this module.

Source: Daniel Lemire, "Number Parsing at a Gigabyte per Second" (2021).
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import compiled
from tailrace.decode.kernel import CELLS, TEXT
from tailrace.protocol.memory import address_of, i64_at, u8_at

#: Number of decimal digits that always fit 64 bits, unsigned.
DIGITS_MAX = 19

_ZEROS = np.uint64(0x3030303030303030)
_SIXES = np.uint64(0x0606060606060606)
_HIGH_HALVES = np.uint64(0xF0F0F0F0F0F0F0F0)
_ODD_BYTES = np.uint64(0x00FF00FF00FF00FF)
_ODD_PAIRS = np.uint64(0x0000FFFF0000FFFF)
_LOW_FOUR = np.uint64(0xFFFFFFFF)
_MINUS, _POINT, _ZERO = map(ord, "-.0")


@nb.njit(inline="always")
def eight(b, end, count):  # type: ignore[no-untyped-def]
    """Return the number of the `count` (1 to 8) digits before `end`, and bits that are 0 if they are
    digits. The eight bytes before `end` must be readable.
    """
    others = np.uint64(64 - 8 * count)
    word = ((np.uint64(i64_at(b, end - 8)) ^ _ZEROS) << others) >> others
    bad = (word | (word + _SIXES)) & _HIGH_HALVES
    word = (word & _ODD_BYTES) + ((word >> np.uint64(8)) & _ODD_BYTES) * np.uint64(10)
    word = (word & _ODD_PAIRS) + ((word >> np.uint64(16)) & _ODD_PAIRS) * np.uint64(100)
    return (word & _LOW_FOUR) + (word >> np.uint64(32)) * np.uint64(10_000), bad


@nb.njit(inline="always")
def unsigned(b, first, end):  # type: ignore[no-untyped-def]
    """Return the number of the digits in [first, end), and bits that are 0 if they are 1 to
    `DIGITS_MAX` digits.
    """
    count = end - first
    value = np.uint64(0)
    bad = np.uint64(0)
    if count < 1 or count > DIGITS_MAX:
        bad = np.uint64(1)
    elif end < 24:
        for k in range(first, end):
            digit = np.uint64(u8_at(b, k)) ^ np.uint64(_ZERO)
            bad |= np.uint64(digit > np.uint64(9))
            value = value * np.uint64(10) + digit
    elif count <= 8:
        value, bad = eight(b, end, count)
    else:
        value, bad = eight(b, end, 8)
        more, worse = eight(b, end - 8, min(count - 8, 8))
        value += more * np.uint64(100_000_000)
        bad |= worse
        if count > 16:
            more, worse = eight(b, end - 16, count - 16)
            value += more * np.uint64(10_000_000_000_000_000)
            bad |= worse
    return value, bad


@compiled(*[nb.boolean(*CELLS, nb.int64, whole[::1]) for whole in (nb.int16, nb.int32, nb.int64)])
def read_integers(buffer, start, length, kind, highest, values):  # type: ignore[no-untyped-def]
    """Read a column of integers from `-highest - 1` to `highest`; false if a cell is not one."""
    b = address_of(buffer)
    for r in range(len(start)):
        number = np.int64(0)
        if kind[r] == TEXT:
            first = np.int64(start[r])
            end = first + length[r]
            negative = np.uint64(length[r] > 0 and u8_at(b, first) == _MINUS)
            value, bad = unsigned(b, first + np.int64(negative), end)
            if bad != np.uint64(0) or value > np.uint64(highest) + negative:
                return False
            number = np.int64((value ^ (np.uint64(0) - negative)) + negative)
        values[r] = number
    return True


@compiled(nb.boolean(*CELLS, nb.int64, nb.int64, nb.int64, nb.int64[:, ::1]))
def read_decimals(buffer, start, length, kind, scale, unit, bound, values):  # type: ignore[no-untyped-def]
    """Read a column of numbers with `scale` digits after the point, or without a point if `scale` is 0;
    false if a cell is not such a number.

    :param unit: 10^scale.
    :param bound: exclusive limit of the absolute value without its point.
    :param values: the low and the high half of each 128-bit number.
    """
    b = address_of(buffer)
    for r in range(len(start)):
        number = np.int64(0)
        if kind[r] == TEXT:
            first = np.int64(start[r])
            end = first + length[r]
            negative = np.uint64(length[r] > 0 and u8_at(b, first) == _MINUS)
            first += np.int64(negative)
            point = end
            fraction = np.uint64(0)
            bad = np.uint64(0)
            if scale > 0:
                point = end - scale - 1
                if point <= first or u8_at(b, point) != _POINT:
                    return False
                fraction, bad = unsigned(b, point + 1, end)
            value, worse = unsigned(b, first, point)
            if (bad | worse) != np.uint64(0) or end - first > DIGITS_MAX:
                return False
            value = value * np.uint64(unit) + fraction
            if value >= np.uint64(bound):
                return False
            number = np.int64((value ^ (np.uint64(0) - negative)) + negative)
        values[r, 0] = number
        values[r, 1] = number >> 63
    return True
