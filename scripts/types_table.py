"""Generates the tables of docs/types.md by decoding examples of each type.

Types and examples are listed here; Arrow's and Spark's types, JSON and `_special` are the results
of decoding the examples as rows of a stream. A built-in type that is not listed here and is not
decoded as text is an error.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from tailrace.config import values as options
from tailrace.decode.changes import TableChanges, decode_block
from tailrace.decode.json.debezium import SourceInfo
from tailrace.decode.postgres_types import BUILT_IN, ITEMS, OIDS
from tailrace.decode.types import value_type
from tailrace.model import OWN_FORMS, ValueModes, ValueType
from tailrace.protocol.frames import xlog_frame
from tailrace.records.group import Group
from tailrace.records.record import Record
from tailrace.spark.schema import to_spark

_NOT_BUILT_IN = 20_000


@dataclass(frozen=True)
class Subject:
    """A type with its name on the page, and PostgreSQL's text of one or several values."""

    name: str
    type_name: str
    examples: tuple[str, ...]
    modifier: int = -1

    @property
    def oid(self) -> int:
        return OIDS.get(self.type_name, _NOT_BUILT_IN)

    @property
    def value(self) -> ValueType:
        return ValueType(self.oid, self.modifier, "" if self.oid < _NOT_BUILT_IN else self.type_name)


def _numeric(precision: int, scale: int) -> int:
    return (precision << 16 | scale & 0x7FF) + 4


SUBJECTS = (
    Subject("boolean", "bool", ("t",)),
    Subject("smallint", "int2", ("7",)),
    Subject("integer", "int4", ("7",)),
    Subject("bigint", "int8", ("7",)),
    Subject("oid", "oid", ("4294967295",)),
    Subject("xid", "xid", ("4294967295",)),
    Subject("cid", "cid", ("7",)),
    Subject("xid8", "xid8", ("7",)),
    Subject("real", "float4", ("0.1",)),
    Subject("double precision", "float8", ("0.1",)),
    Subject("numeric(12,2)", "numeric", ("-1.28",), _numeric(12, 2)),
    Subject("numeric", "numeric", ("123.456",)),
    Subject("money", "money", ("$1,234.56",)),
    Subject("bytea", "bytea", ("\\xfbff00",)),
    Subject("date", "date", ("2018-06-20",)),
    Subject("time", "time", ("04:05:11.789",)),
    Subject("time(3)", "time", ("04:05:11.789",), 3),
    Subject("timetz", "timetz", ("12:00:00+05:30",)),
    Subject("timestamp", "timestamp", ("2018-06-20 15:13:16.945104",)),
    Subject("timestamp(3)", "timestamp", ("2018-06-20 15:13:16.945",), 3),
    Subject("timestamptz", "timestamptz", ("2018-06-20 15:13:16.945104+00",)),
    Subject("interval", "interval", ("1 year 2 mons 3 days 04:05:06.78",)),
    Subject("hstore", "hstore", ('"a"=>"1", "b"=>NULL',)),
    Subject("integer[]", "_int4", ("{1,NULL}",)),
    Subject("numeric(12,2)[]", "_numeric", ("{1.50,2.00}",), _numeric(12, 2)),
)

EDGES = (
    Subject("numeric(12,2)", "numeric", ("NaN",), _numeric(12, 2)),
    Subject("numeric", "numeric", ("NaN", "Infinity", "1" * 45)),
    Subject("numeric(40,2)", "numeric", ("1.50",), _numeric(40, 2)),
    Subject("numeric(4,-2)", "numeric", ("12300",), _numeric(4, -2)),
    Subject("double precision", "float8", ("NaN", "-Infinity", "-0")),
    Subject("date", "date", ("infinity", "0044-03-15 BC", "12024-01-01")),
    Subject(
        "timestamp", "timestamp", ("-infinity", "4713-01-01 00:00:00 BC", "294276-12-31 23:59:59.999999")
    ),
    Subject("timestamptz", "timestamptz", ("infinity",)),
    Subject("time", "time", ("24:00:00",)),
    Subject("xid8", "xid8", ("18446744073709551615",)),
    Subject("integer[]", "_int4", ("{}", "{{1,2},{3,NULL}}", "[0:1]={1,2}")),
    Subject("numeric(12,2)[]", "_numeric", ("{1.50,NaN}",), _numeric(12, 2)),
    Subject("int4range", "int4range", ("[1,5)", "empty")),
    Subject("composite", "pair", ('(1,"a b")',)),
    Subject("jsonb", "jsonb", ('{"a": 1}',)),
)

#: A source's option, the field of `ValueModes` and the values it may have.
OPTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "decimal_handling_mode": ("decimal", get_args(options.Decimal)),
    "time_precision_mode": ("time", get_args(options.Time)),
    "interval_handling_mode": ("interval", get_args(options.Interval)),
    "binary_handling_mode": ("binary", get_args(options.Binary)),
    "hstore_handling_mode": ("hstore", get_args(options.Hstore)),
}


def types() -> str:
    """Return the table of the types in Tailrace's own forms."""
    named = {subject.oid for subject in SUBJECTS}
    texts = [name for oid, name, _ in BUILT_IN if oid not in named]
    for name in texts:
        if value_type(ValueType(OIDS[name]), OWN_FORMS) is not value_type(ValueType(OIDS["text"]), OWN_FORMS):
            raise SystemExit(f"types_table: {name} is not text, and has no row of its own")
    rows = [_row(code(subject.name), *_given(subject, OWN_FORMS)) for subject in SUBJECTS]
    rest = ", ".join(code(name) for name in sorted(texts) if ITEMS.get(OIDS[name]) is None)
    heads = ("PostgreSQL", "Arrow", "Spark, Delta", "Text", "JSON")
    return _table(heads, rows) + f"\nPostgreSQL's text, in Arrow and Spark `string`: {rest}.\n"


def modes(option: str) -> str:
    """Return the table of the types that an option affects, for each of its values."""
    field, possible = OPTIONS[option]
    chosen = [OWN_FORMS] + [replace(OWN_FORMS, **{field: value}) for value in possible]
    rows = []
    for subject in SUBJECTS:
        if not any(_differs(subject.value, mode) for mode in chosen):
            continue
        named: dict[tuple[str, ...], list[str]] = {}
        for value, mode in zip(("not set", *map(code, possible)), chosen, strict=True):
            named.setdefault(tuple(_given(subject, mode)), []).append(value)
        rows += [_row(code(subject.name), ", ".join(values), *given) for given, values in named.items()]
    return _table(("PostgreSQL", code(option), "Arrow", "Spark, Delta", "Text", "JSON"), rows)


def edges() -> str:
    """Return the table of the values at the edges of their types, in Tailrace's own forms."""
    rows = []
    for subject in EDGES:
        changes = _decoded(subject, OWN_FORMS)
        typed = changes.rows()
        group = Group.of_changes("", np.arange(len(changes)), changes)
        records = [Record(group, row, {}) for row in range(len(group))]
        for text, value, special, record, json in zip(
            subject.examples, typed.column(0), typed.column("_special"), records, _json(changes), strict=True
        ):
            note = "" if special.as_py() is None else code(dict(special.as_py())["v"])
            python = repr((record.after or {})["v"])
            rows.append(
                _row(code(subject.name), code(text), _shown(value, text), note, code(python), code(json))
            )
    return _table(("PostgreSQL", "Text", "Typed column", "`_special`", "Python", "JSON"), rows)


def code(text: str) -> str:
    """Return `text` as code within a table; a long text is shortened."""
    text = text if len(text) <= 50 else f"{text[:20]}…{text[-5:]}"
    return f"`{text}`".replace("|", "\\|")


def _differs(value: ValueType, mode: ValueModes) -> bool:
    own, chosen = value_type(value, OWN_FORMS), value_type(value, mode)
    # Arrays are converted like their items, which the page says once.
    return value.oid not in ITEMS and (own.arrow, own.json) != (chosen.arrow, chosen.json)


def _given(subject: Subject, mode: ValueModes) -> Iterator[str]:
    arrow = value_type(subject.value, mode).arrow
    yield code(_arrow_name(arrow))
    yield code(to_spark(pa.schema([("v", arrow)]))["v"].dataType.simpleString())
    yield code(subject.examples[0])
    yield code(_json(_decoded(subject, mode))[0])


def _arrow_name(arrow: pa.DataType) -> str:
    if pa.types.is_list(arrow):
        return f"list<{arrow.value_type}>"
    return "map<string, string>" if pa.types.is_map(arrow) else str(arrow)


def _shown(value: pa.Scalar, text: str) -> str:
    if not value.is_valid:
        return "null"
    if text.endswith("infinity"):
        return f"the type's {'smallest' if text.startswith('-') else 'largest'} value"
    try:
        shown = value.as_py()
    except (ValueError, OverflowError):
        return "exact, and outside of what Python's own type holds"
    if isinstance(shown, list):
        return code("[" + ", ".join("null" if item is None else str(item) for item in shown) + "]")
    return code(str(shown))


def _json(changes: TableChanges) -> list[str]:
    lines = changes.json_lines("0", SourceInfo("", "", "")).to_pylist()
    return [line.partition('"after":{"v":')[2].rpartition('},"source":')[0] for line in lines]


def _decoded(subject: Subject, mode: ValueModes) -> TableChanges:
    """Return the subject's examples as rows of a stream, with one column `v`."""
    oid = struct.pack("!I", subject.oid)
    described = b"R\0\0\0\1public\0t\0d\0\1\0v\0" + oid + struct.pack("!i", subject.modifier)
    payloads = [b"B" + struct.pack("!QqI", 1000, 0, 1), described]
    if subject.oid >= _NOT_BUILT_IN:
        payloads.insert(0, b"Y" + oid + b"public\0" + subject.type_name.encode() + b"\0")
    for text in map(str.encode, subject.examples):
        payloads += [b"I\0\0\0\1N\0\1t" + struct.pack("!I", len(text)) + text]
    payloads.append(b"C" + struct.pack("!BQQq", 0, 1000, 1010, 0))
    raw = b"".join(xlog_frame(100, 100, 0, payload) for payload in payloads)
    [changes] = decode_block(np.frombuffer(raw, np.uint8), 0, None, (), modes=mode)
    return changes


def _row(*cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def _table(heads: Iterable[str], rows: list[str]) -> str:
    heads = list(heads)
    return "\n".join([_row(*heads), "|" + "---|" * len(heads), *rows]) + "\n"
