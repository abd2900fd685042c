"""Compiled writers of values: from the texts and bytes that MySQL sends to PostgreSQL's texts.

Input and output are given by their addresses. The caller ensures that there is room for `room_of` bytes. A
value that doesn't have the format of its type is written as it came: readers then return this value as text,
and the others as usual.

Source: PostgreSQL manual, "Numeric Types" (output of floating-point numbers), "bytea Hex Format",
"Bit Strings"; the Unicode Standard, chapter 3.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import compiled
from tailrace.protocol.frames import FROZEN_BYTES
from tailrace.protocol.memory import address_of, move_bytes, put_u8, u8_at, u16_at, u32_at
from tailrace.sources.vitess.rows import layout
from tailrace.sources.vitess.rows.charsets import NO_CHARACTER, TWO_BYTES

#: Greatest growth of a value as text: a factor, and a number of bytes in addition; see `room_of`.
GROWTH, GROWTH_FIXED = 3, 64

#: Limit of a floating-point number's digits: more than MySQL or PostgreSQL ever write.
_DIGITS_MAX = 40

_MINUS, _PLUS, _POINT, _ZERO, _NINE, _E, _LOWER_E = map(ord, "-+.09Ee")
_BACKSLASH, _X = map(ord, "\\x")

# Exponents from which PostgreSQL uses scientific notation: for float4, for float8; and below it, for both.
_EXPONENT_FLOAT4, _EXPONENT_FLOAT8, _EXPONENT_MIN = 6, 15, -4


@nb.njit(inline="always")
def _copied(b, p, length, out, to):  # type: ignore[no-untyped-def]
    # Short values byte by byte: a call costs more.
    if length <= 16:
        for k in range(length):
            put_u8(out, to + k, u8_at(b, p + k))
    else:
        move_bytes(0, b + p, b + p + length, out + to)
    return to + length


@compiled(nb.int64(nb.int64, nb.int64, nb.int64, nb.int64, nb.int64))
def _write_number(b, p, length, out, to):  # type: ignore[no-untyped-def]
    # Writes `000042` as 42, `.50` as 0.50, `-.00` as 0.00: binary logs and ZEROFILL contain such numbers.
    end = p + length
    first = p
    is_negative = length > 0 and u8_at(b, p) == _MINUS
    if is_negative:
        p += 1
    if p < end and u8_at(b, p) > _ZERO:
        return _copied(b, first, length, out, to)
    is_zero = True
    for k in range(p, end):
        letter = u8_at(b, k)
        if letter != _POINT and (letter < _ZERO or letter > _NINE):
            return _copied(b, first, length, out, to)
        is_zero = is_zero and (letter == _ZERO or letter == _POINT)
    if p == end:
        return _copied(b, first, length, out, to)
    while p < end and u8_at(b, p) == _ZERO:
        p += 1
    if is_negative and not is_zero:
        put_u8(out, to, _MINUS)
        to += 1
    if p == end or u8_at(b, p) == _POINT:
        put_u8(out, to, _ZERO)
        to += 1
    return _copied(b, p, end - p, out, to)


@nb.njit(inline="always")
def _read_float(b, p, end, digits_at):  # type: ignore[no-untyped-def]
    # Writes the digits, without leading and trailing zeros, to `digits_at`. Returns their number and the
    # first one's exponent; -1 and 0 if the text is not a number, or has more than `_DIGITS_MAX` digits.
    count = 0
    exponent = -1
    is_behind = False
    seen = False
    while p < end:
        letter = u8_at(b, p)
        if letter == _POINT and not is_behind:
            is_behind = True
        elif letter >= _ZERO and letter <= _NINE:
            seen = True
            if count == 0 and letter == _ZERO:
                exponent -= 1 if is_behind else 0
            else:
                if count >= _DIGITS_MAX:
                    return -1, 0
                put_u8(digits_at, count, letter)
                count += 1
                exponent += 0 if is_behind else 1
        else:
            break
        p += 1
    power = 0
    if seen and p < end and (u8_at(b, p) == _E or u8_at(b, p) == _LOWER_E):
        p += 1
        falls = p < end and u8_at(b, p) == _MINUS
        if falls or (p < end and u8_at(b, p) == _PLUS):
            p += 1
        seen = p < end
        while p < end and u8_at(b, p) >= _ZERO and u8_at(b, p) <= _NINE and power < 10000:
            power = power * 10 + u8_at(b, p) - _ZERO
            p += 1
        power = -power if falls else power
    if not seen or p != end:
        return -1, 0
    while count > 0 and u8_at(digits_at, count - 1) == _ZERO:
        count -= 1
    return count, exponent + power


@nb.njit(inline="always")
def _write_scientific(digits_at, count, exponent, out, to):  # type: ignore[no-untyped-def]
    put_u8(out, to, u8_at(digits_at, 0))
    to += 1
    if count > 1:
        put_u8(out, to, _POINT)
        move_bytes(0, digits_at + 1, digits_at + count, out + to + 1)
        to += count
    put_u8(out, to, _LOWER_E)
    put_u8(out, to + 1, _MINUS if exponent < 0 else _PLUS)
    to += 2
    exponent = abs(exponent)
    if exponent >= 100:
        put_u8(out, to, _ZERO + exponent // 100)
        to += 1
    put_u8(out, to, _ZERO + exponent // 10 % 10)
    put_u8(out, to + 1, _ZERO + exponent % 10)
    return to + 2


@compiled(nb.int64(nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64))
def _write_float(b, p, length, highest, out, to):  # type: ignore[no-untyped-def]
    # Writes `1.5E+00` as 1.5, `1E+20` as 1e+20. The digits are first written behind the text.
    begin = to
    is_negative = length > 0 and u8_at(b, p) == _MINUS
    if is_negative:
        put_u8(out, to, _MINUS)
        to += 1
    digits_at = out + to + 24
    count, exponent = _read_float(b, p + (1 if is_negative else 0), p + length, digits_at)
    if count < 0:
        return _copied(b, p, length, out, begin)
    if count == 0:
        put_u8(out, to, _ZERO)
        return to + 1
    if exponent < _EXPONENT_MIN or exponent >= highest:
        return _write_scientific(digits_at, count, exponent, out, to)
    if exponent < 0:
        put_u8(out, to, _ZERO)
        put_u8(out, to + 1, _POINT)
        to += 2
        for _ in range(-exponent - 1):
            put_u8(out, to, _ZERO)
            to += 1
        move_bytes(0, digits_at, digits_at + count, out + to)
        return to + count
    whole = min(count, exponent + 1)
    move_bytes(0, digits_at, digits_at + whole, out + to)
    to += whole
    for _ in range(exponent + 1 - whole):
        put_u8(out, to, _ZERO)
        to += 1
    if count > whole:
        put_u8(out, to, _POINT)
        move_bytes(0, digits_at + whole, digits_at + count, out + to + 1)
        to += 1 + count - whole
    return to


@nb.njit(inline="always")
def _digit(value):  # type: ignore[no-untyped-def]
    return value + (48 if value < 10 else 87)


@compiled(nb.int64(nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64))
def _write_hex(b, p, length, size, out, to):  # type: ignore[no-untyped-def]
    # Writes bytea's text, padded to `size` bytes with the trailing zeros that binary logs omit.
    put_u8(out, to, _BACKSLASH)
    put_u8(out, to + 1, _X)
    to += 2
    for k in range(p, p + length):
        byte = u8_at(b, k)
        put_u8(out, to, _digit(byte >> 4))
        put_u8(out, to + 1, _digit(byte & 15))
        to += 2
    for _ in range(2 * (size - length)):
        put_u8(out, to, _ZERO)
        to += 1
    return to


@compiled(nb.int64(nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64))
def _write_bits(b, p, length, bits, out, to):  # type: ignore[no-untyped-def]
    # Writes the last `bits` bits of a number whose most significant byte comes first.
    for k in range(bits - 1, -1, -1):
        at = length - 1 - (k >> 3)
        is_set = at >= 0 and (u8_at(b, p + at) >> (k & 7)) & 1 == 1
        put_u8(out, to, _ZERO + (1 if is_set else 0))
        to += 1
    return to


@compiled(nb.int64(nb.int64, nb.int64, nb.int64))
def _put_point(point, out, to):  # type: ignore[no-untyped-def]
    # Writes one code point in UTF-8.
    if point < 0x80:
        put_u8(out, to, point)
        return to + 1
    if point < 0x800:
        put_u8(out, to, 0xC0 | point >> 6)
    else:
        if point < 0x10000:
            put_u8(out, to, 0xE0 | point >> 12)
        else:
            put_u8(out, to, 0xF0 | point >> 18)
            put_u8(out, to + 1, 0x80 | (point >> 12) & 63)
            to += 1
        put_u8(out, to + 1, 0x80 | (point >> 6) & 63)
        to += 1
    put_u8(out, to + 1, 0x80 | point & 63)
    return to + 2


@compiled(
    nb.int64(
        nb.int64, nb.int64, nb.int64, nb.types.Array(nb.int32, 1, "C", readonly=True), nb.int64, nb.int64,
        nb.int64,
    )
)  # fmt: skip
def _write_by_table(b, p, length, points, table, out, to):  # type: ignore[no-untyped-def]
    end = p + length
    at = p
    begin = to
    while at < end:
        byte = u8_at(b, at)
        point = np.int64(points[table + byte])
        at += 1
        if point == TWO_BYTES:
            if at == end:
                return _copied(b, p, length, out, begin)
            point = np.int64(points[table + 256 + 256 * byte + u8_at(b, at)])
            at += 1
        if point == NO_CHARACTER:
            return _copied(b, p, length, out, begin)
        to = _put_point(point, out, to)
    return to


@compiled(nb.int64(nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.int64))
def _write_units(b, p, length, code, out, to):  # type: ignore[no-untyped-def]
    # Converts UTF-16 in either byte order, and UTF-32.
    begin = to
    width = 4 if code == layout.UTF32 else 2
    if length % width != 0:
        return _copied(b, p, length, out, begin)
    end = p + length
    at = p
    while at < end:
        point = u32_at(b, at) if width == 4 else u16_at(b, at)
        if code == layout.UTF16LE:
            point = (point & 255) << 8 | point >> 8
        at += width
        if width == 2 and point >= 0xD800 and point < 0xDC00 and at < end:
            low = u16_at(b, at)
            if code == layout.UTF16LE:
                low = (low & 255) << 8 | low >> 8
            at += 2
            point = 0x10000 + ((point - 0xD800) << 10) + low - 0xDC00 if low >> 10 == 0x37 else 0xD800
        if point > 0x10FFFF or (point >= 0xD800 and point < 0xE000):
            return _copied(b, p, length, out, begin)
        to = _put_point(point, out, to)
    return to


@compiled(
    nb.int64(
        nb.int64, nb.int64, nb.int64, nb.int64, nb.int64, nb.types.Array(nb.int32, 1, "C", readonly=True),
        nb.int64, nb.int64,
    )
)  # fmt: skip
def write_value(b, p, length, code, parameter, points, out, to):  # type: ignore[no-untyped-def]
    """Write a value of `length` bytes at `p` as PostgreSQL's text; return the offset after it.

    `code` and `parameter` are those of `types.ColumnPlan`; for a text that is converted by a table of code
    points, the parameter is the table's index in `points`.
    """
    if code == layout.PLAIN:
        return _copied(b, p, length, out, to)
    if code == layout.NUMBER:
        return _write_number(b, p, length, out, to)
    if code == layout.UTC:
        to = _copied(b, p, length, out, to)
        put_u8(out, to, _PLUS)
        put_u8(out, to + 1, _ZERO)
        put_u8(out, to + 2, _ZERO)
        return to + 3
    if code == layout.FLOAT4 or code == layout.FLOAT8:
        highest = _EXPONENT_FLOAT4 if code == layout.FLOAT4 else _EXPONENT_FLOAT8
        return _write_float(b, p, length, highest, out, to)
    if code == layout.HEX or code == layout.PADDED_HEX:
        return _write_hex(b, p, length, parameter if code == layout.PADDED_HEX else 0, out, to)
    if code == layout.BITS:
        return _write_bits(b, p, length, parameter, out, to)
    if code == layout.SINGLE_BYTES or code == layout.DOUBLE_BYTES:
        return _write_by_table(b, p, length, points, parameter, out, to)
    return _write_units(b, p, length, code, out, to)


@compiled(
    nb.int64(
        FROZEN_BYTES, nb.int64, nb.int64, nb.types.Array(nb.int32, 1, "C", readonly=True), nb.uint8[::1]
    )
)  # fmt: skip
def write_alone(value, code, parameter, points, out):  # type: ignore[no-untyped-def]
    """Write one value to the start of `out`, as `write_value` does; return its size in bytes."""
    return write_value(
        address_of(value),
        np.int64(0),
        np.int64(len(value)),
        code,
        parameter,
        points,
        address_of(out),
        np.int64(0),
    )


def room_of(code: int, parameter: int) -> int:
    """Return the greatest size of a value's text, in addition to `GROWTH` for each byte of the value."""
    more = 2 * parameter if code == layout.PADDED_HEX else parameter if code == layout.BITS else 0
    return GROWTH_FIXED + _DIGITS_MAX + more
