"""Compiled readers of PostgreSQL's text forms for which Arrow has no cast, or an incomplete one:
booleans, dates and timestamps (BC, infinities, years of six digits), bytea, arrays.

Each takes a column's cells and marks the rows that it can't read exactly; no value makes them fail.
The scalar readers are shared with the JSON writer.

Source: PostgreSQL manual, "Date/Time Output" (ISO style), "bytea Hex Format", "Array Input and
Output Syntax".
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import compiled
from tailrace.decode.gather import copy_bytes
from tailrace.decode.kernel import CELLS, NULL, PAIR, TEXT, TRIPLE
from tailrace.decode.values.digits import eight
from tailrace.protocol.frames import FROZEN_BYTES
from tailrace.protocol.memory import address_of, i64_at, u8_at, u16_at, u32_at

_SPACE, _QUOTE, _PLUS, _MINUS, _POINT, _ZERO, _NINE, _COLON, _BACKSLASH, _OPEN_BRACE = map(ord, ' "+-.09:\\{')
_CLOSE_BRACE = ord("}")
_SMALL_A, _SMALL_F, _SMALL_I, _SMALL_L, _SMALL_N, _SMALL_T, _SMALL_U, _SMALL_X = map(ord, "afilntux")
_CAPITAL_A, _CAPITAL_B, _CAPITAL_C, _CAPITAL_F = map(ord, "ABCF")
_CASE_BIT = 32  # set in lower-case letters, not in upper-case ones

# Outcomes of reading a cell. OUT_OF_RANGE, only for timestamps: microseconds do not fit 64 bits.
PLAIN, SPECIAL_KEPT, SPECIAL_NULL, OUT_OF_RANGE = range(4)

DATE, TIMESTAMP, TIMESTAMPTZ = range(3)

US_A_DAY = 86_400_000_000

# Microseconds of the last digit of a second's fraction, by its number of digits.
_MICROSECONDS = np.array([10 ** (6 - digits) for digits in range(7)], np.uint64)

_INT64_MAX = 2**63 - 1
_INT32_MAX = 2**31 - 1


@nb.njit(inline="always")
def days_from_civil(year, month, day):  # type: ignore[no-untyped-def]
    """Return days since 1970-01-01 in the proleptic Gregorian calendar; year 0 is 1 BC.

    Years count from -400 000 up, so that all divisions are of unsigned numbers, which is fast.
    Source: Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms".
    """
    shifted = np.uint32(year + 400_000 - (month <= 2))
    era = shifted // np.uint32(400)
    of_era = shifted - era * np.uint32(400)
    of_year = (np.uint32(153) * np.uint32((month + 9) % 12) + np.uint32(2)) // np.uint32(5)
    of_era_days = of_era * np.uint32(365) + of_era // np.uint32(4) - of_era // np.uint32(100) + of_year
    return np.int64(era) * 146097 + np.int64(of_era_days) + day - 1 - 719468 - 1000 * 146097


@nb.njit(inline="always")
def days_of_month(year, month):  # type: ignore[no-untyped-def]
    """Return the days of a month. MySQL can contain dates that are in no calendar."""
    if month == 2:
        return 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    return 30 + ((month ^ (month >> 3)) & 1)


@nb.njit(inline="always")
def _two(b, p):  # type: ignore[no-untyped-def]
    # Returns the number of two digits; -1 if they are not digits.
    tens = np.int64(b[p]) - _ZERO
    ones = np.int64(b[p + 1]) - _ZERO
    return tens * 10 + ones if 0 <= tens <= 9 and 0 <= ones <= 9 else np.int64(-1)


@compiled(PAIR(FROZEN_BYTES, nb.int64, nb.int64))
def zone(b, p, end):  # type: ignore[no-untyped-def]
    """Return the offset of the zone `+hh[:mm[:ss]]` at `p` from UTC, in seconds, and the place after
    it; the place is -1 if there is no zone.
    """
    seconds = np.int64(0)
    unit = np.int64(3600)
    sign = np.int64(-1) if b[p] == _MINUS else np.int64(1)
    while unit > 0:
        part = _two(b, p + 1) if end - p >= 3 else np.int64(-1)
        if part < 0:
            return seconds, np.int64(-1)
        seconds += sign * unit * part
        p += 3
        unit //= 60
        if p >= end or b[p] != _COLON:
            break
    return seconds, p


@nb.njit(inline="always")
def fraction(b, p, end):  # type: ignore[no-untyped-def]
    """Return the microseconds of a second's fraction at `p`, 0 if there is none, and the place after it."""
    found = np.int64(0)
    if p < end and b[p] == _POINT:
        unit = np.int64(100_000)
        p += 1
        while p < end and unit > 0 and _ZERO <= b[p] <= _NINE:
            found += unit * (b[p] - _ZERO)
            unit //= 10
            p += 1
    return found, p


@compiled(PAIR(FROZEN_BYTES, nb.int64, nb.int64, nb.int64), error_model="numpy")
def read_temporal(b, p, length, flavour):  # type: ignore[no-untyped-def]
    """Read a date (days since 1970) or timestamp (microseconds since 1970, UTC if it has a zone).

    Returns the value and `PLAIN`, `SPECIAL_KEPT` (an infinity: the type's outermost value),
    `SPECIAL_NULL` (not a date or timestamp) or `OUT_OF_RANGE`.
    """
    nothing = np.int64(0), np.int64(SPECIAL_NULL)
    end = p + length
    if (length == 8 and b[p] == _SMALL_I) or (length == 9 and b[p] == _MINUS and b[p + 1] == _SMALL_I):
        highest = np.int64(_INT32_MAX) if flavour == DATE else np.int64(_INT64_MAX)
        return (highest if length == 8 else -highest - 1), np.int64(SPECIAL_KEPT)
    year = np.int64(0)
    first = p
    while p < end and p < first + 7 and _ZERO <= b[p] <= _NINE:
        year = year * 10 + (b[p] - _ZERO)
        p += 1
    if p - first < 4 or year > 5_900_000 or end - p < 6 or b[p] != _MINUS or b[p + 3] != _MINUS:
        return nothing
    month = _two(b, p + 1)
    day = _two(b, p + 4)
    if month < 1 or month > 12:
        return nothing
    p += 6
    if b[end - 1] == _CAPITAL_C and end - p >= 3 and b[end - 2] == _CAPITAL_B and b[end - 3] == _SPACE:
        year = 1 - year
        end -= 3
    if day < 1 or day > days_of_month(year, month):
        return nothing
    days = days_from_civil(year, month, day)
    if flavour == DATE:
        return (days, np.int64(PLAIN)) if p == end else nothing
    if end - p < 9 or b[p] != _SPACE or b[p + 3] != _COLON or b[p + 6] != _COLON:
        return nothing
    hour = _two(b, p + 1)
    minute = _two(b, p + 4)
    second = _two(b, p + 7)
    if hour < 0 or minute < 0 or second < 0:
        return nothing
    microseconds, p = fraction(b, p + 9, end)
    ahead = np.int64(0)
    if flavour == TIMESTAMPTZ:
        if p >= end or (b[p] != _PLUS and b[p] != _MINUS):
            return nothing
        ahead, p = zone(b, p, end)
    if p != end:
        return nothing
    # The bound is some days inside the range of 64 bits (294247-01-10): an offset may add to it.
    if days < -106751986 or days > 106751986:
        return np.int64(0), np.int64(OUT_OF_RANGE)
    seconds = hour * 3600 + minute * 60 + second - ahead
    return days * US_A_DAY + seconds * 1_000_000 + microseconds, np.int64(PLAIN)


@nb.njit(inline="always")
def _usual_date(b, p):  # type: ignore[no-untyped-def]
    # Returns the days since 1970 of `yyyy-mm-dd`, and bits that are 0 if the text has that form.
    # XOR with "0000-00-00" leaves the digits' values; of a value above 9, adding 6 sets a high bit.
    word = np.uint64(i64_at(b, p)) ^ np.uint64(0x303030302D30302D)
    rest = np.uint64(u16_at(b, p + 8)) ^ np.uint64(0x3030)
    bad = (word | (word + np.uint64(0x0606060600060600))) & np.uint64(0xF0F0F0F0FFF0F0FF)
    bad |= (rest | (rest + np.uint64(0x0606))) & np.uint64(0xF0F0)
    year = _nibble(word, 56) * 1000 + _nibble(word, 48) * 100 + _nibble(word, 40) * 10 + _nibble(word, 32)
    month = _nibble(word, 16) * 10 + _nibble(word, 8)
    day = _nibble(rest, 8) * 10 + _nibble(rest, 0)
    bad |= np.uint64(month < 1 or month > 12 or day < 1 or day > days_of_month(year, month))
    return days_from_civil(year, month, day), bad


@nb.njit(inline="always")
def _nibble(word, at):  # type: ignore[no-untyped-def]
    return np.int64((word >> np.uint64(at)) & np.uint64(15))


@nb.njit(inline="always")
def _usual_stamp(b, p, end):  # type: ignore[no-untyped-def]
    # Returns the microseconds since 1970 of `yyyy-mm-dd hh:mm:ss[.f]`, without its zone, and bits as above.
    days, bad = _usual_date(b, p)
    word = np.uint64(i64_at(b, p + 11)) ^ np.uint64(0x30303A30303A3030)
    bad |= np.uint64(u8_at(b, p + 10) ^ _SPACE)
    bad |= (word | (word + np.uint64(0x0606000606000606))) & np.uint64(0xF0F0FFF0F0FFF0F0)
    hour = _nibble(word, 56) * 10 + _nibble(word, 48)
    minute = _nibble(word, 32) * 10 + _nibble(word, 24)
    second = _nibble(word, 8) * 10 + _nibble(word, 0)
    fraction = np.uint64(0)
    digits = end - p - 20
    if digits >= 1 and digits <= 6 and u8_at(b, p + 19) == _POINT:
        fraction, worse = eight(b, end, digits)
        fraction *= _MICROSECONDS[digits]
        bad |= worse
    elif digits != -1:
        bad |= np.uint64(1)
    seconds = hour * 3600 + minute * 60 + second
    return days * US_A_DAY + seconds * 1_000_000 + np.int64(fraction), bad


@compiled(nb.int64(*CELLS, nb.int64, nb.int64[::1], nb.uint8[::1]))
def read_temporals(buffer, start, length, kind, flavour, values, outcome):  # type: ignore[no-untyped-def]
    """Read a column of dates or timestamps; returns how many cells are not `PLAIN`."""
    specials = 0
    zone_size = 3 if flavour == TIMESTAMPTZ else 0
    b = address_of(buffer)
    for r in range(len(start)):
        values[r] = 0
        outcome[r] = PLAIN
        if kind[r] == TEXT:
            first = np.int64(start[r])
            size = np.int64(length[r])
            end = first + size - zone_size
            bad = np.uint64(1)
            # Nearly all have a year of four digits, and the session's zone, which is UTC.
            if flavour == DATE:
                if size == 10:
                    values[r], bad = _usual_date(b, first)
            elif end - first >= 19 and (zone_size == 0 or u32_at(b, end - 1) & 0xFFFFFF == 0x2B3030):
                values[r], bad = _usual_stamp(b, first, end)
            if bad != np.uint64(0):
                values[r], became = read_temporal(buffer, first, size, flavour)
                outcome[r] = min(became, np.int64(SPECIAL_NULL))
                specials += became != PLAIN
    return specials


@compiled(nb.int64(*CELLS, nb.uint8[::1], nb.uint8[::1]))
def read_booleans(buffer, start, length, kind, values, outcome):  # type: ignore[no-untyped-def]
    """Read a column of booleans; returns how many cells are not booleans."""
    specials = 0
    b = address_of(buffer)
    for r in range(len(start)):
        letter = np.int64(0)
        if length[r] == 1:
            letter = u8_at(b, start[r])
        values[r] = letter == _SMALL_T
        none = kind[r] == TEXT and letter != _SMALL_T and letter != _SMALL_F
        outcome[r] = SPECIAL_NULL if none else PLAIN
        specials += none
    return specials


@nb.njit(inline="always")
def hex_digit(letter):  # type: ignore[no-untyped-def]
    """Return the value of a hexadecimal digit, or -1."""
    if _ZERO <= letter <= _NINE:
        return np.int64(letter) - _ZERO
    if _SMALL_A <= letter <= _SMALL_F:
        return np.int64(letter) - 87  # from 'a', which is 10
    if _CAPITAL_A <= letter <= _CAPITAL_F:
        return np.int64(letter) - 55  # from 'A', which is 10
    return np.int64(-1)


@compiled(nb.boolean(FROZEN_BYTES, nb.int64, nb.int64))
def is_hex(b, p, length):  # type: ignore[no-untyped-def]
    """Return whether a text is bytea in hex form."""
    if length < 2 or length % 2 or b[p] != _BACKSLASH or b[p + 1] != _SMALL_X:
        return False
    for k in range(p + 2, p + length):  # noqa: SIM110 (a generator is slow in a kernel)
        if hex_digit(b[k]) < 0:
            return False
    return True


@compiled(nb.int64(*CELLS, nb.int32[::1], nb.uint8[::1], nb.uint8[::1], nb.uint8[::1]))
def read_byteas(b, start, length, kind, offsets, out, valid, outcome):  # type: ignore[no-untyped-def]
    """Read a column of bytea in hex form; returns how many cells have another form.

    `out` has room for half of the cells' lengths.
    """
    specials = 0
    to = np.int64(0)
    offsets[0] = 0
    for r in range(len(start)):
        outcome[r] = PLAIN
        if kind[r] == TEXT:
            if is_hex(b, start[r], length[r]):
                for k in range(start[r] + 2, start[r] + length[r], 2):
                    out[to] = hex_digit(b[k]) * 16 + hex_digit(b[k + 1])
                    to += 1
                valid[r >> 3] |= np.uint8(1 << (r & 7))
            else:
                outcome[r] = SPECIAL_NULL
                specials += 1
        offsets[r + 1] = to
    return specials


@compiled(TRIPLE(FROZEN_BYTES, nb.int64, nb.int64, nb.int64))
def item_end(b, p, end, delimiter):  # type: ignore[no-untyped-def]
    """Find the end of the array item that begins at `p`.

    Returns the place after it, the length of its text without quotes and backslashes, and
    whether it was quoted; the place is -1 if the item is malformed or an array itself.
    """
    if p < end and b[p] == _QUOTE:
        p += 1
        size = 0
        while p < end and b[p] != _QUOTE:
            if b[p] == _BACKSLASH:
                p += 1
            p += 1
            size += 1
        if p >= end:
            return np.int64(-1), np.int64(0), np.int64(1)
        return p + 1, size, np.int64(1)
    first = p
    while p < end and b[p] != delimiter and b[p] != _CLOSE_BRACE:
        if b[p] == _QUOTE or b[p] == _BACKSLASH or b[p] == _OPEN_BRACE:
            return np.int64(-1), np.int64(0), np.int64(0)
        p += 1
    return (p if p > first else np.int64(-1)), p - first, np.int64(0)


@compiled(nb.boolean(FROZEN_BYTES, nb.int64, nb.int64, nb.int64))
def is_null_item(b, p, length, quoted):  # type: ignore[no-untyped-def]
    """Return whether an array item is NULL, which is unquoted, in upper or lower case."""
    return (
        quoted == 0
        and length == 4
        and (b[p] | _CASE_BIT) == _SMALL_N
        and (b[p + 1] | _CASE_BIT) == _SMALL_U
        and (b[p + 2] | _CASE_BIT) == _SMALL_L
        and (b[p + 3] | _CASE_BIT) == _SMALL_L
    )


@compiled(PAIR(FROZEN_BYTES, nb.int64, nb.int64, nb.int64))
def measure_array(b, p, length, delimiter):  # type: ignore[no-untyped-def]
    """Return the number of items and of their bytes; -1 if it is not a plain one-dimensional array."""
    end = p + length - 1
    if length < 2 or b[p] != _OPEN_BRACE or b[end] != _CLOSE_BRACE:
        return np.int64(-1), np.int64(0)
    p += 1
    items = np.int64(0)
    size = np.int64(0)
    while p < end:
        p, length, _ = item_end(b, p, end, delimiter)
        if p < 0 or (p < end and (b[p] != delimiter or p + 1 == end)):
            return np.int64(-1), np.int64(0)
        items += 1
        size += length
        p += 1
    return items, size


@compiled(TRIPLE(*CELLS, nb.int64, nb.int32[::1], nb.uint8[::1], nb.uint8[::1]))
def measure_arrays(b, start, length, kind, delimiter, offsets, valid, outcome):  # type: ignore[no-untyped-def]
    """Return the numbers of special cells, of items and of bytes of items; `offsets` counts items."""
    specials = np.int64(0)
    items = np.int64(0)
    size = np.int64(0)
    offsets[0] = 0
    for r in range(len(start)):
        outcome[r] = PLAIN
        if kind[r] == TEXT:
            count, more = measure_array(b, start[r], length[r], delimiter)
            if count < 0:
                outcome[r] = SPECIAL_NULL
                specials += 1
            else:
                items += count
                size += more
                valid[r >> 3] |= np.uint8(1 << (r & 7))
        offsets[r + 1] = items
    return specials, items, size


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.uint8[::1], nb.int64))
def unquote_item(b, p, end, out, to):  # type: ignore[no-untyped-def]
    """Write a quoted item's text, which begins at the quote `p`; returns the place after it."""
    p += 1
    while p < end - 1:
        if b[p] == _BACKSLASH:
            p += 1
        out[to] = b[p]
        to += 1
        p += 1
    return to


@compiled(
    nb.void(
        FROZEN_BYTES,
        nb.int32[::1],
        nb.int32[::1],
        nb.int64,
        nb.int32[::1],
        nb.uint8[::1],
        nb.int32[::1],
        nb.int32[::1],
        nb.uint8[::1],
    )
)
def read_arrays(b, start, length, delimiter, offsets, out, item_start, item_length, item_kind):  # type: ignore[no-untyped-def]
    """Write the items of arrays that `measure_arrays` accepted to `out`, and the cells that point there."""
    to = np.int64(0)
    for r in range(len(start)):
        p = np.int64(start[r]) + 1
        end = np.int64(start[r]) + length[r] - 1
        for item in range(offsets[r], offsets[r + 1]):
            after, size, quoted = item_end(b, p, end, delimiter)
            item_start[item] = to
            item_length[item] = size
            item_kind[item] = TEXT
            if quoted != 0:
                to = unquote_item(b, p, after, out, to)
            elif is_null_item(b, p, size, quoted):
                item_kind[item] = NULL
                item_length[item] = 0
            else:
                copy_bytes(out, to, b, p, size)
                to += size
            p = after + 1
