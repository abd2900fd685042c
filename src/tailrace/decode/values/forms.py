"""Forms: how a value is given, in JSON and in typed columns. The vocabulary of `types`.

A form is a number; with its parameter (a scale) and, for an array, its delimiter it makes a
*style* (`style_of`). The functions here turn PostgreSQL's text into a form that is a number or a
text; what JSON alone has (objects, quotes) is in `jsontext`.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import compiled
from tailrace.decode.gather import copy_bytes
from tailrace.decode.kernel import CELLS, PAIR, TEXT
from tailrace.decode.values.decimals import trimmed, write_money, write_unscaled
from tailrace.decode.values.floats import write_bits
from tailrace.decode.values.hstore import write_object
from tailrace.decode.values.literals import (
    DATE,
    OUT_OF_RANGE,
    PLAIN,
    SPECIAL_KEPT,
    SPECIAL_NULL,
    TIMESTAMP,
    TIMESTAMPTZ,
    is_hex,
    read_temporal,
)
from tailrace.decode.values.text_writers import (
    PLAIN_LETTERS,
    RAW_BYTES,
    URL_LETTERS,
    write_base64,
)
from tailrace.decode.values.times import (
    interval_us,
    read_time,
    read_time_utc,
    write_interval_iso,
    write_iso,
    write_time_iso,
)
from tailrace.protocol.frames import FROZEN_BYTES

# What JSON writes from the text as it is.
QUOTED, INTEGER, FLOATING, BOOLEAN, BASE64 = range(5)

# Whole numbers. The STAMPs are Debezium's, whose infinities are numbers, too.
NUMBERS = 5
DAYS, MICROSECONDS, STAMP_MS, STAMP_US, STAMP_NS, TIME_MS, TIME_US, TIME_NS, INTERVAL_US = range(5, 14)

# Texts.
TEXTS = 14
(
    ISO_DATE, ISO_STAMP, ISO_UTC, ISO_TIME, ISO_TIME_UTC, ISO_INTERVAL, HEX_BASE64, HEX_BASE64_URL, HEX,
    AMOUNT, UNSCALED, AMOUNT_UNSCALED, PAIRS,
) = range(14, 27)  # fmt: skip

# What only JSON has: numbers with a point, objects, a JSON document within a string; floating-point
# numbers as Java writes them, bits as a boolean or as bytes, and what is JSON already.
DOUBLE, AMOUNT_DOUBLE, VARIABLE_SCALE, PAIRS_QUOTED, JAVA, BIT, BITS, RAW = range(27, 35)

# What columns of bytes alone have: the bytes of which JSON has base64.
UNSCALED_BYTES, AMOUNT_BYTES, BITS_BYTES = range(35, 38)

#: Parameter of `JAVA`: the number is a `real`.
REAL = 1

#: A form's text is longer than PostgreSQL's by at most so many bytes; a JSON document by a factor,
#: too, since it may escape every byte.
TEXT_GROWTH_FIXED, PAIRS_GROWTH = 48, 6

#: What pgjdbc, and so Debezium, makes of a timestamp's infinities, in microseconds.
INFINITY_US, MINUS_INFINITY_US = 9_223_372_036_825_200_000, -9_223_372_036_832_400_000

_NS_OF_US_MAX = (2**63 - 1) // 1000

_PARAMETER_AT, _DELIMITER_AT = 16, 8


def style_of(form: int, parameter: int = 0) -> int:
    """Return the style of a form; the parameter is not negative."""
    return form | parameter << _PARAMETER_AT


def array_style(items: int, delimiter: str) -> int:
    """Return the style of an array of items of a style that is no array's."""
    return items | ord(delimiter) << _DELIMITER_AT


def of_items(style: int, items: int) -> int:
    """Return the style of an array with items of another style; its delimiter is kept."""
    return style & 255 << _DELIMITER_AT | items


def with_form(style: int, form: int) -> int:
    """Return the style with another form, its delimiter and parameter kept."""
    return style & ~255 | form


def utc_style(digits: int) -> int:
    """Return the style of a stamp in UTC whose fraction has at least so many digits."""
    return style_of(ISO_UTC, digits + 1)


def form_of(style: int) -> int:
    """Return a style's form."""
    return style & 255


def parameter_of(style: int) -> int:
    """Return a style's parameter."""
    return style >> _PARAMETER_AT


@nb.njit(inline="always")
def form_in(style):  # type: ignore[no-untyped-def]
    """Return a style's form, in kernels."""
    return style & 255


@nb.njit(inline="always")
def delimiter_in(style):  # type: ignore[no-untyped-def]
    """Return what separates an array's items; 0 for what is no array."""
    return (style >> _DELIMITER_AT) & 255


@nb.njit(inline="always")
def parameter_in(style):  # type: ignore[no-untyped-def]
    """Return a style's parameter, in kernels."""
    return style >> _PARAMETER_AT


@compiled(PAIR(FROZEN_BYTES, nb.int64, nb.int64, nb.int64), error_model="numpy")
def read_number(b, p, length, form):  # type: ignore[no-untyped-def]
    """Return the number that a text is in a form of numbers, and `PLAIN`; else 0 and something else."""
    if form == DAYS or form == MICROSECONDS:
        return read_temporal(b, p, length, DATE if form == DAYS else TIMESTAMP)
    nothing = np.int64(0), np.int64(SPECIAL_NULL)
    if form == STAMP_MS or form == STAMP_US or form == STAMP_NS:
        value, became = read_temporal(b, p, length, TIMESTAMP)
        if became >= SPECIAL_NULL:
            return nothing
        if became == SPECIAL_KEPT and form == STAMP_NS:
            return value, np.int64(PLAIN)
        if became == SPECIAL_KEPT:
            value = np.int64(INFINITY_US) if value > 0 else np.int64(MINUS_INFINITY_US)
        if form == STAMP_MS:
            return value // 1000, np.int64(PLAIN)
        if form == STAMP_US:
            return value, np.int64(PLAIN)
        if abs(value) > _NS_OF_US_MAX:
            return nothing
        return value * 1000, np.int64(PLAIN)
    if form == INTERVAL_US:
        value, good = interval_us(b, p, length)
        return (value, np.int64(PLAIN)) if good == 1 else nothing
    value = read_time(b, p, length)
    if value < 0:
        return nothing
    if form == TIME_MS:
        return value // 1000, np.int64(PLAIN)
    return (value * 1000 if form == TIME_NS else value), np.int64(PLAIN)


@compiled(
    nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.int64, nb.int64, nb.uint8[::1], nb.int64), allocates=True
)
def _write_amount_unscaled(b, p, length, scale, letters, out, to):  # type: ignore[no-untyped-def]
    plain = np.empty(80, np.uint8)
    end = write_money(b, p, length, scale, plain, 0)
    return write_unscaled(plain, 0, end, scale, letters, out, to) if end >= 0 else np.int64(-1)


@compiled(nb.int64(nb.uint8[::1], nb.int64, nb.int64, nb.int64))
def _filled(out, begin, end, digits):  # type: ignore[no-untyped-def]
    # Zeros at the end of a stamp's fraction, up to so many digits; it ends with Z.
    if digits <= 0:
        return end
    point = end
    for k in range(begin, end):
        if out[k] == 46:
            point = k
    there = max(end - 2 - point, 0)
    if there >= digits:
        return end
    if there == 0:
        out[end - 1] = 46
    to = end - 1 + (there == 0)
    for _ in range(digits - there):
        out[to] = 48
        to += 1
    out[to] = 90
    return to + 1


@compiled(nb.int64(FROZEN_BYTES, nb.int64, nb.int64, nb.int64, nb.uint8[::1], nb.int64))
def write_text(b, p, length, style, out, to):  # type: ignore[no-untyped-def]
    """Write what a text is in a form of texts, without quotes; -1 if it does not have that form."""
    form = form_in(style)
    if form == ISO_DATE or form == ISO_STAMP or form == ISO_UTC:
        flavour = DATE if form == ISO_DATE else TIMESTAMP if form == ISO_STAMP else TIMESTAMPTZ
        became = read_temporal(b, p, length, flavour)[1]
        if became == PLAIN or became == OUT_OF_RANGE:
            end = write_iso(b, p, length, flavour, out, to)
            return _filled(out, to, end, parameter_in(style) - 1)
    elif form == ISO_TIME or form == ISO_TIME_UTC:
        us = read_time(b, p, length) if form == ISO_TIME else read_time_utc(b, p, length)
        if us >= 0:
            return write_time_iso(us, out, to)
    elif form == ISO_INTERVAL:
        return write_interval_iso(b, p, length, out, to)
    elif form == HEX_BASE64 or form == HEX_BASE64_URL or form == HEX:
        if is_hex(b, p, length):
            if form == HEX:
                copy_bytes(out, to, b, p + 2, length - 2)
                return to + length - 2
            letters = URL_LETTERS if form == HEX_BASE64_URL else PLAIN_LETTERS
            return write_base64(b, p, length, True, letters, out, to)
    elif form == AMOUNT:
        return write_money(b, p, length, parameter_in(style), out, to)
    elif form == UNSCALED or form == UNSCALED_BYTES:
        letters = PLAIN_LETTERS if form == UNSCALED else RAW_BYTES
        return write_unscaled(b, p, length, parameter_in(style), letters, out, to)
    elif form == AMOUNT_UNSCALED or form == AMOUNT_BYTES:
        letters = PLAIN_LETTERS if form == AMOUNT_UNSCALED else RAW_BYTES
        return _write_amount_unscaled(b, p, length, parameter_in(style), letters, out, to)
    elif form == BITS or form == BITS_BYTES:
        return write_bits(b, p, length, PLAIN_LETTERS if form == BITS else RAW_BYTES, out, to)
    elif form == PAIRS:
        return write_object(b, p, length, out, to)
    return np.int64(-1)


@compiled(nb.int64(*CELLS, nb.int64, nb.int64[::1], nb.uint8[::1], nb.uint8[::1]))
def read_numbers(b, start, length, kind, form, values, valid, outcome):  # type: ignore[no-untyped-def]
    """Read a column in a form of numbers; returns how many cells have another form.

    `valid` is a bit map, zeroed before.
    """
    specials = 0
    for r in range(len(start)):
        values[r] = 0
        outcome[r] = PLAIN
        if kind[r] == TEXT:
            values[r], became = read_number(b, start[r], length[r], form)
            if became == PLAIN:
                valid[r >> 3] |= np.uint8(1 << (r & 7))
            else:
                outcome[r] = SPECIAL_NULL
                specials += 1
    return specials


@compiled(nb.int64(*CELLS, nb.int64, nb.int64[::1], nb.uint8[::1], nb.uint8[::1], nb.uint8[::1]))
def read_texts(b, start, length, kind, style, offsets, out, valid, outcome):  # type: ignore[no-untyped-def]
    """Read a column in a form of texts; returns how many cells have another form.

    `out` has room for what `TEXT_GROWTH_FIXED` and `PAIRS_GROWTH` say; `valid` is a bit map, zeroed before.
    """
    specials = 0
    to = np.int64(0)
    offsets[0] = 0
    for r in range(len(start)):
        outcome[r] = PLAIN
        if kind[r] == TEXT:
            end = write_text(b, start[r], length[r], style, out, to)
            if end >= 0:
                valid[r >> 3] |= np.uint8(1 << (r & 7))
                to = end
            else:
                outcome[r] = SPECIAL_NULL
                specials += 1
        offsets[r + 1] = to
    return specials


@compiled(nb.int64(*CELLS, nb.int32[::1], nb.int64[::1], nb.uint8[::1], nb.uint8[::1], nb.uint8[::1]))
def read_variable_scales(b, start, length, kind, scales, offsets, out, valid, outcome):  # type: ignore[no-untyped-def]
    """Read numbers of any scale: the digits after the point, and the bytes of the unscaled number.

    As `read_texts` otherwise.
    """
    specials = 0
    to = np.int64(0)
    offsets[0] = 0
    for r in range(len(start)):
        outcome[r] = PLAIN
        scales[r] = 0
        if kind[r] == TEXT:
            size, scale = trimmed(b, start[r], length[r])
            end = write_unscaled(b, start[r], size, scale, RAW_BYTES, out, to)
            if end >= 0:
                valid[r >> 3] |= np.uint8(1 << (r & 7))
                scales[r] = scale
                to = end
            else:
                outcome[r] = SPECIAL_NULL
                specials += 1
        offsets[r + 1] = to
    return specials
