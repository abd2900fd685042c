"""Random values, as texts, for which Debezium gives what we give, and the modes for which that holds.

Intended differences (docs/converters.md) are left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Context, Decimal

from tailrace.model import ValueModes

Make = Callable[[random.Random], str]

#: Our settings, and the same ones of Debezium.
MODES: dict[str, tuple[ValueModes, dict[str, str]]] = {
    name: (ValueModes(decimal, time, interval, binary), {
        "decimal.handling.mode": decimal, "time.precision.mode": time,
        "interval.handling.mode": interval, "binary.handling.mode": binary,
    })
    for name, decimal, time, interval, binary in (
        ("adaptive", "precise", "adaptive", "numeric", "bytes"),
        ("double", "double", "adaptive_time_microseconds", "string", "base64"),
        ("connect", "string", "connect", "numeric", "base64-url-safe"),
        ("iso", "precise", "isostring", "string", "hex"),
        ("micro", "double", "microseconds", "numeric", "bytes"),
        ("nano", "string", "nanoseconds", "string", "hex"),
    )
}  # fmt: skip

_WIDE = Context(prec=1000)


def _number(precision: int, scale: int) -> Make:
    def make(rng: random.Random) -> str:
        digits = rng.randint(1, precision)
        whole = rng.choice((rng.randrange(10**digits), 10**digits - 1, 1 << rng.randrange(3 * digits)))
        return format(Decimal(rng.choice((1, -1)) * whole).scaleb(-scale, _WIDE), "f")

    return make


def _whole(bits: int) -> Make:
    return lambda rng: str(rng.choice((rng.randrange(-1 << bits, 1 << bits), -1 << bits, (1 << bits) - 1, 0)))


def _clock(rng: random.Random) -> str:
    us = rng.choice((0, rng.randrange(10**6), 500_000, 120_000, 1, 999_999))
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}:{rng.randrange(60):02}.{us:06}"


def _date(first: int, last: int) -> Make:
    def make(rng: random.Random) -> str:
        year = rng.choice((rng.randint(1970, 2100), rng.randint(first, last)))
        era = "" if year > 0 else " BC"
        return f"{year if year > 0 else 1 - year:04}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}{era}"

    return make


def _stamp(first: int, last: int, zones: tuple[str, ...] = ("",)) -> Make:
    def make(rng: random.Random) -> str:
        date, _, era = _date(first, last)(rng).partition(" ")
        return f"{date} {_clock(rng)}{rng.choice(zones)} {era}"

    return make


def _interval(rng: random.Random) -> str:
    mons, days, ms = rng.randint(-1200, 1200), rng.randint(-9999, 9999), rng.randint(-(10**11), 10**11)
    parts = rng.choice((0, mons)), rng.choice((0, days)), rng.choice((0, 1, -1, ms))
    return "{} mons {} days {} milliseconds".format(*parts)


def _float(exponent: int) -> Make:
    return lambda rng: f"{rng.uniform(-10, 10)!r}e{rng.randint(-exponent, exponent)}"


def _text(rng: random.Random) -> str:
    return "".join(rng.choice('abcXYZ012 "\\{},=NUL\n\té€') for _ in range(rng.randrange(20)))


def _bytes(rng: random.Random) -> str:
    return "\\x" + rng.randbytes(rng.randrange(12)).hex()


def _bits(least: int, most: int) -> Make:
    return lambda rng: "".join(rng.choices("01", k=rng.randint(least, most)))


_ZONES = ("+00", "+02", "-05:30", "+14")

#: By type.
VALUES: dict[str, Make] = {
    "smallint": _whole(15), "integer": _whole(31), "bigint": _whole(63),
    "real": _float(30), "double precision": _float(290),
    "numeric(12,2)": _number(12, 2), "numeric(19,0)": _number(19, 0), "numeric(38,10)": _number(38, 10),
    "numeric(60,20)": _number(60, 20), "numeric": _number(50, 15), "money": _number(17, 2),
    "text": _text, "bytea": _bytes, "bit(10)": _bits(10, 10), "bit varying": _bits(0, 70),
    "date": _date(-4711, 294_000), "time": _clock, "time(3)": _clock,
    "timetz": lambda rng: _clock(rng) + rng.choice(_ZONES),
    "timestamp": _stamp(1700, 2200), "timestamp(0)": _stamp(1700, 2200), "timestamp(3)": _stamp(1700, 2200),
    "timestamptz": _stamp(-4711, 294_275, _ZONES), "timestamptz(3)": _stamp(-4711, 294_275, _ZONES),
    "interval": _interval,
}  # fmt: skip

#: Arrays of these types, with other values.
ITEMS: dict[str, Make] = {
    name: VALUES[name]
    for name in ("integer", "bigint", "text", "bytea", "numeric(12,2)", "numeric", "double precision")
} | {"date": _date(1, 9999), "timestamp": _stamp(1700, 2200), "timestamptz": _stamp(1700, 2200, _ZONES)}


def array(items: list[str | None]) -> str:
    """Return an array's text."""
    escaped = [item and item.replace("\\", "\\\\").replace('"', '\\"') for item in items]
    return "{" + ",".join("NULL" if item is None else f'"{item}"' for item in escaped) + "}"


def row(rng: random.Random) -> list[str | None]:
    """Return a value of each type, then an array of each; some are NULL."""
    found: list[str | None] = [None if rng.random() < 0.1 else make(rng) for make in VALUES.values()]
    for make in ITEMS.values():
        items = [None if rng.random() < 0.2 else make(rng) for _ in range(rng.randrange(4))]
        found.append(array(items))
    return found
