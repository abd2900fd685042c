"""Random built-in types with random values, as texts that PostgreSQL reads."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from decimal import Decimal

from hypothesis import strategies as st

Texts = st.SearchStrategy[str]


@dataclass(frozen=True)
class Filled:
    """A column's type, and the text of its value in each row."""

    type: str
    values: tuple[str | None, ...]


LETTERS = st.characters(codec="utf-8", exclude_characters="\0")
_INT4 = st.integers(-(2**31), 2**31 - 1)
_CLOCK = st.builds("{:02}:{:02}:{:02}.{:06}".format, *(st.integers(0, n) for n in (23, 59, 59, 999_999)))
_OFFSET = st.builds("{}{:02}:{:02}".format, st.sampled_from("+-"), st.integers(0, 15), st.integers(0, 59))
_OFTEN = st.integers(1900, 2100)


def _stamp(year: int, month: int, day: int, clock: str, zone: str = "") -> str:
    era = "" if year > 0 else " BC"
    return f"{year if year > 0 else 1 - year:04}-{month:02}-{day:02} {clock}{zone}{era}"


def _stamps(zone: str) -> Texts:
    years = _OFTEN | st.integers(-4712, 294_275)
    made = st.builds(_stamp, years, st.integers(1, 12), st.integers(1, 28), _CLOCK, st.just(zone))
    return made | st.sampled_from(("infinity", "-infinity"))


def _decimal(precision: int, scale: int) -> Texts:
    point = precision - scale
    digits = st.text("0123456789", min_size=precision, max_size=precision)
    signed = st.tuples(st.sampled_from(("", "-")), digits)
    numbers = signed.map(lambda parts: f"{parts[0]}{parts[1][:point]}.{parts[1][point:]}")
    return numbers | st.just("NaN")


def _within(ends: st.SearchStrategy[int]) -> Texts:
    return st.tuples(ends, ends).map(sorted).map(lambda both: f"[{both[0]},{both[1]})")


def _apart(numbers: list[int]) -> str:
    ends = sorted(numbers)
    return "{" + ",".join(f"[{a},{b})" for a, b in zip(ends[::2], ends[1::2], strict=False)) + "}"


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(LETTERS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(LETTERS), inner, max_size=3),
    max_leaves=6,
).map(lambda value: json.dumps(value, ensure_ascii=False))

_PLAIN: dict[str, Texts] = {
    "boolean": st.sampled_from(("t", "f")),
    "smallint": st.integers(-(2**15), 2**15 - 1).map(str),
    "integer": _INT4.map(str),
    "bigint": st.integers(-(2**63), 2**63 - 1).map(str),
    "oid": st.integers(0, 2**32 - 1).map(str),
    "xid8": st.integers(0, 2**64 - 1).map(str),
    "real": st.floats(width=32).map(repr),
    "double precision": st.floats().map(repr),
    "numeric": st.builds("{}e{}".format, st.integers(), st.integers(-200, 200))
    | st.sampled_from(("NaN", "Infinity", "-Infinity")),
    "money": st.integers(-(2**63), 2**63 - 1).map(lambda cents: str(Decimal(cents).scaleb(-2))),
    "text": st.text(LETTERS),
    "bytea": st.binary().map(lambda value: "\\x" + value.hex()),
    "date": st.integers(0, 2_147_483_493).map("J{}".format)
    | st.integers(2_400_000, 2_500_000).map("J{}".format)
    | st.sampled_from(("infinity", "-infinity")),
    "time": _CLOCK | st.just("24:00:00"),
    "timetz": st.builds("{}{}".format, _CLOCK | st.just("24:00:00"), _OFFSET),
    "timestamp": _stamps(""),
    "timestamptz": _stamps("+00"),
    "interval": st.builds(
        "{} mons {} days {} microseconds".format, _INT4, _INT4, st.integers(-(10**17), 10**17)
    ),
    "uuid": st.uuids().map(str),
    "json": _JSON,
    "jsonb": _JSON,
    "inet": st.ip_addresses().map(str),
    "macaddr": st.integers(0, 2**48 - 1).map("{:012x}".format),
    "varbit": st.text("01", max_size=70),
    "point": st.builds("({!r},{!r})".format, st.floats(), st.floats()),
    "pg_lsn": st.builds("{:X}/{:X}".format, *[st.integers(0, 2**32 - 1)] * 2),
    "int4range": _within(_INT4) | st.sampled_from(("empty", "(,)")),
    "int8multirange": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6, unique=True).map(_apart),
}


@st.composite
def _sized(draw: st.DrawFn) -> tuple[str, Texts]:
    size = draw(st.integers(1, 12))
    scale = draw(st.integers(0, size))
    digits = draw(st.integers(0, 6))
    return draw(
        st.sampled_from(
            (
                (f"numeric({size},{scale})", _decimal(size, scale)),
                (f"numeric({size + 26},{scale})", _decimal(size + 26, scale)),
                (f"varchar({size})", st.text(LETTERS, max_size=size)),
                (f"char({size})", st.text(LETTERS, max_size=size)),
                (f"bit({size})", st.text("01", min_size=size, max_size=size)),
                (f"time({digits})", _PLAIN["time"]),
                (f"timestamp({digits})", _PLAIN["timestamp"]),
            )
        )
    )


_TYPES = st.sampled_from(sorted(_PLAIN)).map(lambda name: (name, _PLAIN[name])) | _sized()


@st.composite
def _arrays(draw: st.DrawFn, item: Texts) -> str:
    """An array of up to three dimensions, with explicit bounds or PostgreSQL's default."""
    shape = draw(st.lists(st.integers(1, 3), max_size=3))
    if not shape:
        return "{}"
    count = math.prod(shape)
    items = draw(st.lists(st.none() | item, min_size=count, max_size=count))
    parts = ["NULL" if each is None else _quoted(each) for each in items]
    for size in reversed(shape):
        parts = ["{" + ",".join(parts[at : at + size]) + "}" for at in range(0, len(parts), size)]
    if draw(st.booleans()):
        return parts[0]
    first = draw(st.lists(st.integers(-3, 3), min_size=len(shape), max_size=len(shape)))
    return "".join(f"[{a}:{a + size - 1}]" for a, size in zip(first, shape, strict=True)) + "=" + parts[0]


def _quoted(item: str) -> str:
    return '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'


@st.composite
def tables(draw: st.DrawFn, columns_max: int = 12, rows_max: int = 10) -> list[Filled]:
    """Columns of a table, all of the same length."""
    rows = draw(st.integers(1, rows_max))
    found = []
    for name, values in draw(st.lists(_TYPES, min_size=1, max_size=columns_max)):
        array = draw(st.booleans())
        made = _arrays(values) if array else values
        column = draw(st.lists(st.none() | made, min_size=rows, max_size=rows))
        found.append(Filled(f"{name}[]" if array else name, tuple(column)))
    return found
