"""Compiled readers of numbers in the form in which PostgreSQL writes nearly all of them: an optional
sign, digits, an optional point, an optional exponent.

Functions for one cell take the address of the buffer, see `protocol.memory`. If a cell of a column
has another form (NaN, infinities, more digits than 64 bits hold), Arrow reads the whole column: the
readers return false, and the values that they wrote are undefined.

Sources: Daniel Lemire, "Number Parsing at a Gigabyte per Second" (2021); Noble Mushtak and Daniel
Lemire, "Fast Number Parsing Without Fallback" (2023), for the rounding of floating-point numbers.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.extending import intrinsic

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
_PLUS, _MINUS, _POINT, _ZERO, _E = map(ord, "+-.0e")

# Exponents of ten of all normal doubles, written as integers of up to `DIGITS_MAX` digits.
_EXPONENT_MIN, _EXPONENT_MAX = -342, 308


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


def _powers_of_five() -> npt.NDArray[np.uint64]:
    # The leading 128 bits of each power, truncated; rounded up for the reciprocals of powers that fit
    # 64 bits, so that exact products can be recognised.
    rows = []
    for exponent in range(_EXPONENT_MIN, _EXPONENT_MAX + 1):
        power: int = 5 ** abs(exponent)
        size = power.bit_length()
        if exponent >= 0:
            bits = power << 128 >> size
        else:
            bits = (1 << (127 + size)) // power + (1 if exponent >= -27 else 0)
        rows.append((bits >> 64, bits & (2**64 - 1)))
    return np.array(rows, np.uint64)


_POWERS_OF_FIVE = _powers_of_five()
_POWERS_OF_TEN = np.array([10**n for n in range(DIGITS_MAX + 1)], np.uint64)


@intrinsic
def _multiply_high(typing_context, a, b):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the high 64 bits of the product of two unsigned 64-bit numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        return builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))

    return nb.uint64(nb.uint64, nb.uint64), generate


@intrinsic
def _count_leading_zeros(typing_context, a):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the number of leading zero bits of a 64-bit number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.ctlz(arguments[0], ir.IntType(1)(1))

    return nb.int64(nb.uint64), generate


# The intrinsics, whose Python signatures have one argument more than their calls.
_high_product: Any = _multiply_high
_leading_zeros: Any = _count_leading_zeros


@nb.njit(inline="always")
def _nearest_double(w, exponent):  # type: ignore[no-untyped-def]
    """Return the bits of the double nearest to w * 10^exponent, with `w` not 0, and whether it is a
    normal double.
    """
    zeros = _leading_zeros(w)
    w <<= np.uint64(zeros)
    place = exponent - _EXPONENT_MIN
    high = _high_product(w, _POWERS_OF_FIVE[place, 0])
    low = w * _POWERS_OF_FIVE[place, 0]
    if high & np.uint64(0x1FF) == np.uint64(0x1FF):
        more = _high_product(w, _POWERS_OF_FIVE[place, 1])
        low += more
        if more > low:
            high += np.uint64(1)
    top = high >> np.uint64(63)
    shift = top + np.uint64(9)
    mantissa = high >> shift
    power = ((217_706 * exponent) >> 16) + 63 + np.int64(top) - zeros + 1023
    exact = low <= np.uint64(1) and -4 <= exponent <= 23
    if exact and mantissa & np.uint64(3) == np.uint64(1) and (mantissa << shift) == high:
        mantissa &= ~np.uint64(1)  # half-way between two doubles: the even one
    mantissa = (mantissa + (mantissa & np.uint64(1))) >> np.uint64(1)
    if mantissa >= np.uint64(1 << 53):
        mantissa = np.uint64(1 << 52)
        power += 1
    bits = (mantissa & np.uint64((1 << 52) - 1)) | (np.uint64(power) << np.uint64(52))
    return bits, 0 < power < 2047


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


@nb.njit(inline="always")
def _exponent_at(b, first, end):  # type: ignore[no-untyped-def]
    """Return the exponent of a number, which PostgreSQL writes with a sign and two or three digits,
    and the place where it begins; 0 and `end` if there is no exponent.
    """
    for digits in range(2, 4):
        at = end - digits - 2
        if at > first and u8_at(b, at) == _E:
            value, bad = unsigned(b, at + 2, end)
            sign = u8_at(b, at + 1)
            if bad == np.uint64(0) and (sign == _PLUS or sign == _MINUS):
                return (np.int64(value) if sign == _PLUS else -np.int64(value)), at
    return np.int64(0), end


@compiled(nb.boolean(*CELLS, nb.uint64[::1]))
def read_doubles(buffer, start, length, kind, values):  # type: ignore[no-untyped-def]
    """Read a column of floating-point numbers as the bits of doubles; false if a cell is not a number,
    is not finite, or is too close to 0 to be a normal double.
    """
    b = address_of(buffer)
    for r in range(len(start)):
        bits = np.uint64(0)
        if kind[r] == TEXT:
            first = np.int64(start[r])
            end = first + length[r]
            negative = np.uint64(length[r] > 0 and u8_at(b, first) == _MINUS)
            first += np.int64(negative)
            exponent, end = _exponent_at(b, first, end)
            point = first
            while point < end and u8_at(b, point) != _POINT:
                point += 1
            w, bad = unsigned(b, first, point)
            if point < end:
                digit = point + 1
                if w == np.uint64(0):
                    while digit < end - 1 and u8_at(b, digit) == _ZERO:
                        digit += 1
                fraction, worse = unsigned(b, digit, end)
                bad |= worse
                if w != np.uint64(0):
                    if end - first - 1 > DIGITS_MAX:
                        return False
                    w *= _POWERS_OF_TEN[end - digit]
                w += fraction
                exponent -= end - point - 1
            if bad != np.uint64(0) or exponent < _EXPONENT_MIN or exponent > _EXPONENT_MAX:
                return False
            if w != np.uint64(0):
                bits, normal = _nearest_double(w, exponent)
                if not normal:
                    return False
            bits |= negative << np.uint64(63)
        values[r] = bits
    return True
