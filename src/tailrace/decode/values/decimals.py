"""Compiled writers of numeric and money: as Kafka Connect's Decimal, and as plain numbers.

Source: java.math.BigInteger.toByteArray (the bytes of a Decimal: two's complement, big-endian, the
shortest form); PostgreSQL manual, "Monetary Types".
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import compiled
from tailrace.decode.kernel import PAIR
from tailrace.decode.values.text_writers import RAW_BYTES, write_base64, write_triple
from tailrace.protocol.frames import FROZEN_BYTES

_OPEN_PARENTHESIS, _COMMA, _MINUS, _POINT, _ZERO, _NINE = map(ord, "(,-.09")

#: Limit of the digits of money: 64 bits have 19, and a locale has at most ten after the point.
_MONEY_DIGITS_MAX = 40

_BILLION = 1_000_000_000

#: Characters of a number that always fits 64 bits.
_SHORT_MAX = 18


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64))
def scale_of(b, p, length):  # type: ignore[no-untyped-def]
    """Return the digits after a number's point."""
    for k in range(p, p + length):
        if b[k] == _POINT:
            return p + length - k - 1
    return np.int64(0)


@compiled(nb.int64(nb.int64[::1], nb.int64, nb.int64, nb.int64))
def _take(limbs, used, factor, more):  # type: ignore[no-untyped-def]
    # Computes number * factor + more in limbs of 32 bits, the lowest first; returns the number of limbs.
    carry = more
    for k in range(used):
        value = limbs[k] * factor + carry
        limbs[k] = value & 0xFFFFFFFF
        carry = value >> 32
    if carry > 0:
        limbs[used] = carry
        used += 1
    return used


@compiled(nb.int64(nb.int64[::1], nb.int64, nb.boolean, nb.uint8[::1]))
def _two_complement(limbs, used, negative, out):  # type: ignore[no-untyped-def]
    # Writes the number big-endian, in the fewest bytes for it and its sign; returns the number of bytes.
    size = 4 * (used + 1)
    carry = np.int64(1)
    for k in range(used + 1):
        limb = limbs[k] if k < used else np.int64(0)
        if negative:
            limb = (limb ^ 0xFFFFFFFF) + carry
            carry = limb >> 32
        for part in range(4):
            out[size - 1 - 4 * k - part] = (limb >> (8 * part)) & 255
    first = 0
    while first < size - 1 and (
        (out[first] == 0 and out[first + 1] < 128) or (out[first] == 255 and out[first + 1] >= 128)
    ):
        first += 1
    for k in range(first, size):
        out[k - first] = out[k]
    return size - first


@compiled(PAIR(FROZEN_BYTES, nb.int64, nb.int64))
def trimmed(b, p, length):  # type: ignore[no-untyped-def]
    """Return a number's length without the zeros at the end of its fraction, and the fraction's digits."""
    scale = scale_of(b, p, length)
    while scale > 0 and b[p + length - 1] == _ZERO:
        length -= 1
        scale -= 1
    if length > 0 and b[p + length - 1] == _POINT:
        length -= 1
    return length, scale


_WRITER = nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.int64, nb.int64, nb.uint8[::1], nb.int64)


@compiled(_WRITER)
def _write_short(b, p, length, scale, letters, out, to):  # type: ignore[no-untyped-def]
    # `write_unscaled` for a number that fits 64 bits, without allocating memory.
    end = p + length
    negative = p < end and b[p] == _MINUS
    if negative:
        p += 1
    value = np.int64(0)
    digits = np.int64(0)
    fraction = np.int64(-1)
    while p < end:
        letter = b[p]
        p += 1
        if letter == _POINT and fraction < 0 and digits > 0:
            fraction = np.int64(0)
            continue
        if letter < _ZERO or letter > _NINE:
            return np.int64(-1)
        digits += 1
        if fraction >= 0:
            fraction += 1
        value = value * 10 + (letter - _ZERO)
    if digits == 0 or max(fraction, np.int64(0)) != scale:
        return np.int64(-1)
    if negative:
        value = -value
    size = np.int64(1)
    while size < 8 and not (-1 << (8 * size - 1)) <= value < 1 << (8 * size - 1):
        size += 1
    if letters == RAW_BYTES:
        for k in range(size):
            out[to + k] = (value >> (8 * (size - 1 - k))) & 255
        return to + size
    for first in range(0, size, 3):
        count = min(np.int64(3), size - first)
        x = (value >> (8 * (size - 1 - first))) & 255
        y = (value >> (8 * (size - 2 - first))) & 255 if count > 1 else np.int64(0)
        z = (value >> (8 * (size - 3 - first))) & 255 if count > 2 else np.int64(0)
        to = write_triple(x, y, z, count, letters, out, to)
    return to


@compiled(_WRITER, allocates=True)
def write_unscaled(b, p, length, scale, letters, out, to):  # type: ignore[no-untyped-def]
    """Write base64 (or `RAW_BYTES`) of the number times 10^scale; -1 if it does not have `scale` digits
    after its point.
    """
    if length <= _SHORT_MAX:
        return _write_short(b, p, length, scale, letters, out, to)
    end = p + length
    negative = p < end and b[p] == _MINUS
    if negative:
        p += 1
    limbs = np.zeros(length // 9 + 2, np.int64)
    used = np.int64(0)
    chunk = np.int64(0)
    factor = np.int64(1)
    digits = np.int64(0)
    fraction = np.int64(-1)
    while p < end:
        letter = b[p]
        p += 1
        if letter == _POINT and fraction < 0 and digits > 0:
            fraction = np.int64(0)
            continue
        if letter < _ZERO or letter > _NINE:
            return np.int64(-1)
        digits += 1
        if fraction >= 0:
            fraction += 1
        chunk = chunk * 10 + letter - _ZERO
        factor *= 10
        if factor == _BILLION:
            used = _take(limbs, used, factor, chunk)
            chunk = np.int64(0)
            factor = np.int64(1)
    if digits == 0 or max(fraction, np.int64(0)) != scale:
        return np.int64(-1)
    used = _take(limbs, used, factor, chunk)
    raw = np.empty(4 * (used + 1), np.uint8)
    size = _two_complement(limbs, used, negative and used > 0, raw)
    return write_base64(raw, 0, size, False, letters, out, to)


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.int64, nb.uint8[::1], nb.int64), allocates=True)
def write_money(b, p, length, scale, out, to):  # type: ignore[no-untyped-def]
    """Write an amount of money, in the format of any locale, as a number with `scale` digits after
    the point (half a unit is rounded away from zero); -1 if it is not an amount.

    The last point or comma between digits is the decimal separator; if three digits follow it, only
    if `scale` is 3.
    """
    digits = np.zeros(_MONEY_DIGITS_MAX + 12, np.int64)
    count = np.int64(1)  # a leading zero, for the carry of rounding
    negative = False
    sign_between = False
    since = np.int64(-1)
    for k in range(p, p + length):
        letter = b[k]
        if _ZERO <= letter <= _NINE:
            if count >= _MONEY_DIGITS_MAX:
                return np.int64(-1)
            if sign_between:
                since = np.int64(0)
                sign_between = False
            digits[count] = np.int64(letter) - _ZERO
            count += 1
            if since >= 0:
                since += 1
        elif letter == _POINT or letter == _COMMA:
            sign_between = bool(count > 1)
        elif letter == _MINUS or letter == _OPEN_PARENTHESIS:
            negative = True
        elif letter == 0xE2 and k + 2 < p + length and b[k + 1] == 0x88 and b[k + 2] == 0x92:
            negative = True  # U+2212, some locales' minus sign
    if count == 1:
        return np.int64(-1)
    fraction = since if since > 0 and (since != 3 or scale == 3) else np.int64(0)
    if fraction > scale:
        up = bool(digits[count - (fraction - scale)] >= 5)
        count -= fraction - scale
        k = count - 1
        while up:
            digits[k] += 1
            up = bool(digits[k] == 10)
            if up:
                digits[k] = 0
            k -= 1
    else:
        count += scale - fraction  # the array holds zeros there
    whole = count - scale
    first = np.int64(0)
    while first < whole - 1 and digits[first] == 0:
        first += 1
    if negative and np.any(digits[:count] != 0):
        out[to] = _MINUS
        to += 1
    for k in range(first, count):
        if k == whole:
            out[to] = _POINT
            to += 1
        out[to] = _ZERO + digits[k]
        to += 1
    return to
