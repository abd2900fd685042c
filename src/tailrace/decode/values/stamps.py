"""Writers of Arrow's dates and timestamps in PostgreSQL's text form, also of those that Python's `date` and
`datetime` can't hold. In Arrow, an infinity is the outermost value of its type, as in decoding.

Source: PostgreSQL manual, "Date/Time Output" (ISO style).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.compiled import compiled
from tailrace.decode.gather import array_mask, bit_map
from tailrace.protocol.frames import Numbers

_SPACE, _PLUS, _MINUS, _POINT, _ZERO, _COLON = map(ord, " +-.0:")
_CAPITAL_B, _CAPITAL_C, _CAPITAL_T, _CAPITAL_Z = map(ord, "BCTZ")

#: Limit of the size of a text: a year of up to seven digits, the rest with its zone, and ` BC`.
_BYTES_MAX = 48

#: Limit of the rows whose texts are written at once: their offsets are 32-bit numbers.
_ROWS_MAX = 1 << 24

_US_OF = {"s": 1_000_000, "ms": 1000}


@compiled(nb.int64(nb.int64, nb.uint8[::1], nb.int64))
def write_fraction(us, out, to):  # type: ignore[no-untyped-def]
    """Write the fraction of a second: `.789` for 789000 microseconds, nothing for 0."""
    if us == 0:
        return to
    out[to] = _POINT
    to += 1
    unit = np.int64(100_000)
    while us > 0:
        out[to] = _ZERO + us // unit
        us %= unit
        unit //= 10
        to += 1
    return to


@nb.njit(inline="always")
def write_two(value, out, to):  # type: ignore[no-untyped-def]
    """Write a number below 100 with two digits."""
    out[to] = _ZERO + value // 10
    out[to + 1] = _ZERO + value % 10
    return to + 2


@nb.njit(inline="always")
def write_clock(seconds, out, to):  # type: ignore[no-untyped-def]
    """Write seconds since midnight as `04:05:11`."""
    to = write_two(seconds // 3600, out, to)
    out[to] = _COLON
    to = write_two(seconds // 60 % 60, out, to + 1)
    out[to] = _COLON
    return write_two(seconds % 60, out, to + 1)


@compiled(nb.int64(nb.int64, nb.boolean, nb.uint8[::1], nb.int64))
def write_date(days, is_iso, out, to):  # type: ignore[no-untyped-def]
    """Write days since 1970 as `2018-06-20`.

    A year before 1 is written as the year BC: the caller appends ` BC`. In ISO 8601, years before 0 and after
    9999 have a sign.
    """
    # Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms", civil_from_days.
    shifted = days + 719_468
    era = shifted // 146_097
    of_era = shifted - era * 146_097
    year_of_era = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted_month = (5 * of_year + 2) // 153
    day = of_year - (153 * shifted_month + 2) // 5 + 1
    month = shifted_month + 3 if shifted_month < 10 else shifted_month - 9
    year = year_of_era + era * 400 + (1 if month <= 2 else 0)
    if is_iso and (year < 0 or year > 9999):
        out[to] = _MINUS if year < 0 else _PLUS
        to += 1
        year = abs(year)
    elif year < 1 and not is_iso:
        year = 1 - year
    digits = np.int64(4)
    limit = np.int64(10_000)
    while year >= limit:
        digits += 1
        limit *= 10
    for k in range(digits - 1, -1, -1):
        out[to + k] = _ZERO + year % 10
        year //= 10
    to += digits
    out[to] = _MINUS
    to = write_two(month, out, to + 1)
    out[to] = _MINUS
    return write_two(day, out, to + 1)


_FIRST_DAY = -719_162  # of year 1


@compiled(
    nb.void(
        nb.types.Array(nb.int64, 1, "C", readonly=True), nb.boolean, nb.boolean, nb.int64, nb.int32[::1],
        nb.uint8[::1],
    )
)  # fmt: skip
def _write_stamps(values, is_date, in_utc, iso_digits, ends, out):  # type: ignore[no-untyped-def]
    """Write days or microseconds since 1970 as PostgreSQL does: `2018-06-20 15:13:16.945+00`, ` BC`,
    `infinity`. Or, if `iso_digits` is not negative, in ISO 8601 with at least that many digits of a fraction.

    `out` has `_BYTES_MAX` bytes for each value; `ends` gets 0 and the place after each text.
    """
    highest = np.int64(2**31 - 1) if is_date else np.int64(2**63 - 1)
    to = np.int64(0)
    ends[0] = 0
    for r in range(len(values)):
        if values[r] == highest or values[r] == -highest - 1:
            if values[r] < 0:
                out[to] = _MINUS
                to += 1
            for letter in (105, 110, 102, 105, 110, 105, 116, 121):  # infinity
                out[to] = letter
                to += 1
            ends[r + 1] = to
            continue
        days = values[r] if is_date else values[r] // 86_400_000_000
        is_iso = iso_digits >= 0
        to = write_date(days, is_iso, out, to)
        if not is_date:
            us = values[r] - days * 86_400_000_000
            out[to] = _CAPITAL_T if is_iso else _SPACE
            point = to = write_clock(us // 1_000_000, out, to + 1)
            to = write_fraction(us % 1_000_000, out, to)
            if iso_digits > 0 and to == point:
                out[to] = _POINT
                to += 1
            while iso_digits > 0 and to - point <= iso_digits:
                out[to] = _ZERO
                to += 1
            if in_utc and not is_iso:
                out[to] = _PLUS
                out[to + 1] = _ZERO
                out[to + 2] = _ZERO
                to += 3
        if is_iso:
            out[to] = _CAPITAL_Z
            to += 1
        elif days < _FIRST_DAY:
            out[to] = _SPACE
            out[to + 1] = _CAPITAL_B
            out[to + 2] = _CAPITAL_C
            to += 3
        ends[r + 1] = to


def stamp_texts(array: pa.Array, iso_digits: int = -1) -> pa.StringArray:
    """Return the texts of dates or timestamps; null for null.

    :param iso_digits: smallest number of digits of a fraction in ISO 8601; -1: PostgreSQL's form.
    """
    if len(array) > _ROWS_MAX:
        parts = [
            stamp_texts(array.slice(at, _ROWS_MAX), iso_digits) for at in range(0, len(array), _ROWS_MAX)
        ]
        return pa.concat_arrays(parts)
    arrow = array.type
    is_date = pa.types.is_date(arrow)
    if is_date:
        values = array.cast(pa.date32()).cast(pa.int32()).fill_null(0)
        numbers = np.ascontiguousarray(values.to_numpy(zero_copy_only=False).astype(np.int64))
    else:
        numbers = microseconds(array)
    ends, out = np.empty(len(array) + 1, np.int32), np.empty(len(array) * _BYTES_MAX, np.uint8)
    _write_stamps(numbers, is_date, not is_date and arrow.tz is not None, iso_digits, ends, out)
    buffers = pa.py_buffer(ends), pa.py_buffer(out)
    return pa.StringArray.from_buffers(len(array), *buffers, bit_map(array_mask(array)))


def microseconds(array: pa.Array) -> Numbers:
    """Return timestamps as microseconds since 1970, rounded down; 0 for null."""
    numbers, unit = array.cast(pa.int64()), array.type.unit
    if unit in _US_OF:
        numbers = pc.multiply(numbers, _US_OF[unit])
    found: Numbers = np.ascontiguousarray(numbers.fill_null(0).to_numpy(zero_copy_only=False))
    return found // 1000 if unit == "ns" else found


def finite(values: Any) -> Any:
    """Return dates or timestamps with infinities replaced by null."""
    lowest, highest = (pa.scalar(bound, values.type) for bound in _outermost(values.type))
    odd = pc.or_(pc.equal(values, highest), pc.equal(values, lowest))
    return pc.if_else(odd, pa.scalar(None, values.type), values)


def with_infinities(values: Any, target: pa.DataType, of_finite: Callable[[Any], Any]) -> Any:
    """Return dates or timestamps converted to `target`: infinities here, finite values by `of_finite`."""
    found = of_finite(finite(values))
    for old, new in zip(_outermost(values.type), _outermost(target), strict=True):
        found = pc.if_else(pc.equal(values, pa.scalar(old, values.type)), pa.scalar(new, target), found)
    return found


def _outermost(arrow: pa.DataType) -> tuple[int, int]:
    bits = 31 if pa.types.is_date32(arrow) else 63
    return -(2**bits), 2**bits - 1
