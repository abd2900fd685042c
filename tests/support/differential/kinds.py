"""Column types: their names in SQL, random values, and the types that they can be widened to.

Values are texts that PostgreSQL reads; the text that it makes of them is read back (`source`).
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

Make = Callable[[random.Random], str]

#: Made once in each database, before its tables.
TYPES = (
    "create type mood as enum ('sad', 'ok', 'so, so', 'it''s \"fine\"')",
    "create domain posint as int check (value > 0)",
    "create domain code as varchar(12)",
    "create type pair as (a int, b text)",
)

_ODD_TEXTS = (
    "", " ", "NULL", "null", "\\N", "\\", "a\tb\nc\\d\re", "€ü漢字\U0001f980", '"quoted" \'too\'',
    "{1,2}", "__debezium_unavailable_value_", "\x01\x7f", "0", "ß\u0301", "x" * 300,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """A type and its random values.

    :ivar wider: types that `ALTER COLUMN … TYPE` may convert it to without changing any text.
    """

    sql: str
    make: Make
    wider: tuple[str, ...] = ()


def _text(rng: random.Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(_ODD_TEXTS)
    return "".join(rng.choices(string.ascii_letters + " é,;", k=rng.randint(1, 20)))


def _short_text(rng: random.Random) -> str:
    return _text(rng)[:12]


def _integer(bits: int) -> Make:
    def make(rng: random.Random) -> str:
        if rng.random() < 0.1:
            return str(rng.choice((-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, 0, -1)))
        return str(rng.randint(-1000, 1000))

    return make


def _decimal(digits: int, scale: int) -> Make:
    def make(rng: random.Random) -> str:
        if rng.random() < 0.05:
            return "NaN"
        return f"{rng.randint(-(10 ** (digits - 1)), 10 ** (digits - 1)) / 10**scale:.{scale}f}"

    return make


def _numeric(rng: random.Random) -> str:
    return rng.choice(("NaN", "0", "-0.00", "1e20", "12345678901234567890.0987654321", "0.1", "Infinity"))


def _float(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return rng.choice(("NaN", "Infinity", "-Infinity", "-0", "1e-300", "0.1", "1e15", "123456.7"))
    return repr(rng.uniform(-1e6, 1e6))


def _real(rng: random.Random) -> str:
    return rng.choice(("NaN", "Infinity", "-0", "1e-30", "0.1", "1e7", "1.5", "-3.25"))


def _bytes(rng: random.Random) -> str:
    return "\\x" + rng.randbytes(rng.choice((0, 1, 7, 40))).hex()


def _date(rng: random.Random) -> str:
    return rng.choice(("infinity", "0044-03-15 BC", "1970-01-01", "1582-10-10", "9999-12-31", "2024-02-29"))


def _timestamp(rng: random.Random) -> str:
    if rng.random() < 0.1:
        return rng.choice(("infinity", "-infinity", "0044-03-15 12:00:00 BC"))
    day, us = rng.randint(1, 28), rng.choice((0, 1, 120_000, 999_999))
    date = f"{rng.randint(1900, 2200)}-{rng.randint(1, 12):02d}-{day:02d}"
    return f"{date} {rng.randint(0, 23):02d}:04:05.{us:06d}"


def _timestamptz(rng: random.Random) -> str:
    return _timestamp(rng).replace(" BC", "+00 BC") if rng.random() < 0.5 else "2024-03-31 03:30:00+02"


def _time(rng: random.Random) -> str:
    return rng.choice(("00:00:00", "24:00:00", "12:34:56.789", "23:59:59.999999"))


def _interval(rng: random.Random) -> str:
    return rng.choice(("1 mon 3 days", "-1 year", "0", "36:00:00.000001", "-00:00:01", "1 day -01:00:00"))


def _uuid(rng: random.Random) -> str:
    digits = f"{rng.getrandbits(128):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _json(rng: random.Random) -> str:
    return rng.choice(
        ("null", "{}", '{"a": [1, 2.50, "x\\ny"], "a": null}', '"\\u20ac"', "[]", "-0", '{"z":1,"b":{}}')
    )


def _array(*items: str) -> Make:
    def make(rng: random.Random) -> str:
        if rng.random() < 0.2:
            return "{}"
        return "{" + ",".join(rng.choices((*items, "NULL"), k=rng.randint(1, 4))) + "}"

    return make


def _int_array(rng: random.Random) -> str:
    if rng.random() < 0.1:
        return rng.choice(("{{1,2},{3,NULL}}", "[2:3]={5,6}"))
    return _array("0", "-1", "2147483647")(rng)


def _one_of(*texts: str) -> Make:
    return lambda rng: rng.choice(texts)


def _large(rng: random.Random) -> str:
    # Incompressible, so that it goes out of line; short ones do not.
    return rng.randbytes(rng.choice((10, 1_500, 2_000, 6_000))).hex()


def _large_bytes(rng: random.Random) -> str:
    return "\\x" + _large(rng)


SMALL = (
    Kind("smallint", _integer(16), ("integer", "bigint")),
    Kind("integer", _integer(32), ("bigint",)),
    Kind("bigint", _integer(64)),
    Kind("numeric(12,2)", _decimal(12, 2), ("numeric(18,2)", "numeric(30,2)")),
    Kind("numeric(30,10)", _decimal(18, 10)),
    Kind("numeric", _numeric),
    Kind("real", _real),
    Kind("double precision", _float),
    Kind("boolean", _one_of("t", "f")),
    Kind("text", _text),
    Kind("varchar(12)", _short_text, ("varchar(30)", "varchar", "text")),
    Kind("char(12)", _short_text),
    Kind("bytea", _bytes),
    Kind("date", _date),
    Kind("timestamp", _timestamp),
    Kind("timestamptz", _timestamptz),
    Kind("time", _time),
    Kind("interval", _interval),
    Kind("uuid", _uuid),
    Kind("json", _json),
    Kind("jsonb", _json),
    Kind("inet", _one_of("10.0.0.1", "10.0.0.0/8", "::1", "2001:db8::/32")),
    Kind("mood", _one_of("sad", "ok", "so, so", 'it\'s "fine"')),
    Kind("posint", _one_of("1", "7", "2147483647")),
    Kind("code", _short_text),
    Kind("pair", _one_of("(1,x)", "(,)", '(2,"a,""b")', '(3,"")')),
    Kind("int4range", _one_of("empty", "[1,5)", "(,)", "[3,)")),
    Kind("integer[]", _int_array),
    Kind("text[]", _array("a", '"b,c"', '""', '"NULL"', '"\\"q\\\\"')),
    Kind("numeric(8,2)[]", _array("1.50", "-0.01", "NaN")),
    Kind("timestamp[]", _array('"2024-01-01 00:00:00"', "infinity")),
    Kind("mood[]", _array("sad", '"so, so"')),
    Kind("bit(5)", _one_of("00000", "10101")),
    Kind("tsvector", _one_of("'a':1 'b'", "")),
)
#: Values that are stored out of line, so that updates leave them unsent.
LARGE = (Kind("text", _large), Kind("bytea", _large_bytes))

#: Types of keys. Their values repeat: rows are deleted and inserted again with the same key.
KEYS = (
    Kind("integer", lambda rng: str(rng.randint(-40, 40))),
    Kind("bigint", lambda rng: str(rng.choice((-(2**63), 2**53 + 1, *range(60))))),
    Kind("text", lambda rng: rng.choice((*_ODD_TEXTS[1:8], *string.ascii_letters))),
    Kind("uuid", lambda rng: f"00000000-0000-4000-8000-{rng.randint(0, 60):012d}"),
    Kind("numeric(8,2)", lambda rng: rng.choice(("NaN", f"{rng.randint(-50, 50) / 4:.2f}"))),
    Kind("date", lambda rng: f"2024-{rng.randint(1, 12):02d}-{rng.randint(1, 9):02d}"),
    Kind("char(3)", lambda rng: "".join(rng.choices("ab c", k=3))),
)
#: Types of the further columns of composite keys.
KEY_PARTS = (
    Kind("integer", lambda rng: str(rng.randint(0, 3))),
    Kind("text", lambda rng: rng.choice("xyz")),
    Kind("uuid", lambda rng: f"00000000-0000-4000-8000-{rng.randint(0, 2):012d}"),
)

BY_SQL = {kind.sql: kind for kind in (*LARGE, *SMALL)}
