"""Compiled readers and writers of times of day and intervals, and writers of ISO 8601's forms.

Source: PostgreSQL manual, "Date/Time Output" (ISO style) and "Interval Output" (postgres style).
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np

from tailrace.compiled import compiled
from tailrace.decode.kernel import PAIR
from tailrace.decode.values.literals import TIMESTAMPTZ, US_A_DAY, fraction, zone
from tailrace.decode.values.stamps import write_clock, write_date, write_fraction, write_two
from tailrace.decode.values.text_writers import write_integer
from tailrace.protocol.frames import FROZEN_BYTES

_SPACE, _PLUS, _MINUS, _POINT, _ZERO, _NINE, _COLON = map(ord, " +-.09:")
_SMALL_A, _SMALL_D, _SMALL_M, _SMALL_Y, _SMALL_Z, _CAPITAL_C, _CAPITAL_D, _CAPITAL_H = map(ord, "admyzCDH")
_CAPITAL_M, _CAPITAL_P, _CAPITAL_S, _CAPITAL_T, _CAPITAL_Y, _CAPITAL_Z = map(ord, "MPSTYZ")

#: Microseconds of a month as Debezium calculates them: 365.25 / 12 days.
US_A_MONTH = 2_629_800_000_000

_QUAD: Any = nb.types.UniTuple(nb.int64, 4)  # type: ignore[no-untyped-call]
_WRITER = nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.uint8[::1], nb.int64)


@compiled(PAIR(FROZEN_BYTES, nb.int64, nb.int64))
def _digits(b, p, end):  # type: ignore[no-untyped-def]
    # Returns a number of up to twelve digits and the place after it, or -1.
    value = np.int64(0)
    first = p
    while p < end and p < first + 12 and _ZERO <= b[p] <= _NINE:
        value = value * 10 + (b[p] - _ZERO)
        p += 1
    return value, (p if p > first else np.int64(-1))


@compiled(PAIR(FROZEN_BYTES, nb.int64, nb.int64))
def _after_hours(b, p, end):  # type: ignore[no-untyped-def]
    # Returns the microseconds of `:mm:ss[.ffffff]` and the place after it, or -1.
    nothing = np.int64(0), np.int64(-1)
    if end - p < 6 or b[p] != _COLON or b[p + 3] != _COLON:
        return nothing
    minutes, after = _digits(b, p + 1, p + 3)
    if after != p + 3 or minutes > 59:
        return nothing
    seconds, after = _digits(b, p + 4, p + 6)
    if after != p + 6 or seconds > 60:
        return nothing
    microseconds, after = fraction(b, p + 6, end)
    return (minutes * 60 + seconds) * 1_000_000 + microseconds, after


@compiled(PAIR(FROZEN_BYTES, nb.int64, nb.int64))
def _time_of_day(b, p, end):  # type: ignore[no-untyped-def]
    # Returns the microseconds since midnight, up to 24:00:00, and the place after the time, or -1.
    if end - p < 8:
        return np.int64(0), np.int64(-1)
    hours, after = _digits(b, p, p + 2)
    if after != p + 2:
        return np.int64(0), np.int64(-1)
    rest, after = _after_hours(b, p + 2, end)
    value = hours * 3_600_000_000 + rest
    return value, (after if value <= US_A_DAY else np.int64(-1))


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64))
def read_time(b, p, length):  # type: ignore[no-untyped-def]
    """Return the microseconds since midnight of a time without zone, or -1."""
    value, after = _time_of_day(b, p, p + length)
    return value if after == p + length else np.int64(-1)


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64))
def read_time_utc(b, p, length):  # type: ignore[no-untyped-def]
    """Return the microseconds since midnight UTC of a time with zone, or -1; only 24:00:00 in UTC
    is 24 hours.
    """
    end = p + length
    value, after = _time_of_day(b, p, end)
    if after < 0 or after >= end or (b[after] != _PLUS and b[after] != _MINUS):
        return np.int64(-1)
    ahead, after = zone(b, after, end)
    if after != end:
        return np.int64(-1)
    if value == US_A_DAY and ahead == 0:
        return value
    return (value - ahead * 1_000_000) % US_A_DAY


@compiled(_QUAD(FROZEN_BYTES, nb.int64, nb.int64))
def read_interval(b, p, length):  # type: ignore[no-untyped-def]
    """Return months, days and microseconds of an interval, and 1; the last is 0 if it is not an interval."""
    end = p + length
    nothing = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    months = np.int64(0)
    days = np.int64(0)
    us = np.int64(0)
    if p == end:
        return nothing
    while p < end:
        sign = np.int64(-1) if b[p] == _MINUS else np.int64(1)
        if b[p] == _MINUS or b[p] == _PLUS:
            p += 1
        number, after = _digits(b, p, end)
        if after < 0 or after >= end:
            return nothing
        p = after
        if b[p] == _COLON:
            rest, after = _after_hours(b, p, end)
            if after != end or number > 2_562_047_788:
                return nothing
            us = sign * (number * 3_600_000_000 + rest)
            break
        if end - p < 4 or b[p] != _SPACE or number > 2_147_483_648:
            return nothing
        unit = b[p + 1]
        if unit == _SMALL_Y:
            months += sign * number * 12
        elif unit == _SMALL_M:
            months += sign * number
        elif unit == _SMALL_D:
            days += sign * number
        else:
            return nothing
        p += 2
        while p < end and _SMALL_A <= b[p] <= _SMALL_Z:
            p += 1
        if p < end and (b[p] != _SPACE or p + 1 == end):
            return nothing
        p += 1
    return months, days, us, np.int64(1)


@compiled(PAIR(FROZEN_BYTES, nb.int64, nb.int64))
def interval_us(b, p, length):  # type: ignore[no-untyped-def]
    """Return an interval's microseconds, a month taken as `US_A_MONTH`, and 1; 0 and 0 if it is not an
    interval or they do not fit 64 bits.
    """
    months, days, us, good = read_interval(b, p, length)
    about = float(months) * US_A_MONTH + float(days) * US_A_DAY + float(us)
    if good == 0 or abs(about) > 9.2e18:
        return np.int64(0), np.int64(0)
    return months * US_A_MONTH + days * US_A_DAY + us, np.int64(1)


@compiled(nb.int64(nb.int64, nb.uint8[::1], nb.int64))
def write_time_iso(us, out, to):  # type: ignore[no-untyped-def]
    """Write microseconds since midnight as `04:05:11.789Z`."""
    to = write_clock(us // 1_000_000, out, to)
    to = write_fraction(us % 1_000_000, out, to)
    out[to] = _CAPITAL_Z
    return to + 1


@compiled(nb.int64(nb.int64, nb.uint8[::1], nb.int64))
def write_stamp_iso(ms, out, to):  # type: ignore[no-untyped-def]
    """Write milliseconds since 1970 as `2018-06-20T15:13:16.945Z`; for years from 1 on."""
    days = ms // 86_400_000
    of_day = ms - days * 86_400_000
    to = write_date(days, False, out, to)
    out[to] = _CAPITAL_T
    to = write_clock(of_day // 1000, out, to + 1)
    out[to] = _POINT
    out[to + 1] = _ZERO + of_day % 1000 // 100
    to = write_two(of_day % 100, out, to + 2)
    out[to] = _CAPITAL_Z
    return to + 1


@compiled(_WRITER)
def write_interval_iso(b, p, length, out, to):  # type: ignore[no-untyped-def]
    """Write an interval as `P1Y2M3DT4H5M6.78S`, with all parts, each with its own sign; -1 if it is not
    an interval.
    """
    months, days, us, good = read_interval(b, p, length)
    if good == 0:
        return np.int64(-1)
    sign = np.int64(-1) if us < 0 else np.int64(1)
    years = abs(months) // 12 * (np.int64(-1) if months < 0 else np.int64(1))
    # The lowest 64-bit number has no absolute value, its seconds have one.
    whole = us // 1_000_000
    fraction = us - whole * 1_000_000
    if sign < 0 and fraction > 0:
        whole += 1
        fraction = 1_000_000 - fraction
    seconds = abs(whole)
    out[to] = _CAPITAL_P
    to = write_integer(years, out, to + 1)
    out[to] = _CAPITAL_Y
    to = write_integer(months - years * 12, out, to + 1)
    out[to] = _CAPITAL_M
    to = write_integer(days, out, to + 1)
    out[to] = _CAPITAL_D
    out[to + 1] = _CAPITAL_T
    to = write_integer(sign * (seconds // 3600), out, to + 2)
    out[to] = _CAPITAL_H
    to = write_integer(sign * (seconds // 60 % 60), out, to + 1)
    out[to] = _CAPITAL_M
    to += 1
    if sign < 0 and (seconds % 60 != 0 or fraction != 0):
        out[to] = _MINUS
        to += 1
    to = write_integer(seconds % 60, out, to)
    to = write_fraction(fraction, out, to)
    out[to] = _CAPITAL_S
    return to + 1


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.int64, nb.uint8[::1], nb.int64))
def write_iso(b, p, length, flavour, out, to):  # type: ignore[no-untyped-def]
    """Write a date or timestamp that `read_temporal` accepts: `2024-01-01 00:00:00+00` as
    `2024-01-01T00:00:00Z`; years before 0 and after 9999 as ISO's signed years.
    """
    end = p + length
    before_christ = b[end - 1] == _CAPITAL_C
    if before_christ:
        end -= 3
    year = np.int64(0)
    first = p
    while b[p] != _MINUS:
        year = year * 10 + (b[p] - _ZERO)
        p += 1
    if before_christ:
        year -= 1
        if year > 0:
            out[to] = _MINUS
            to += 1
    elif p - first > 4:
        out[to] = _PLUS
        to += 1
    digits = max(4, p - first)
    for k in range(digits - 1, -1, -1):
        out[to + k] = _ZERO + year % 10
        year //= 10
    to += digits
    while p < end:
        out[to] = _CAPITAL_T if b[p] == _SPACE else b[p]
        to += 1
        p += 1
    if flavour != TIMESTAMPTZ:
        out[to] = _CAPITAL_Z
        to += 1
    elif b[end - 3] == _PLUS and b[end - 2] == _ZERO and b[end - 1] == _ZERO:
        to -= 3
        out[to] = _CAPITAL_Z
        to += 1
    return to
