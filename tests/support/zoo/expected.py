"""The values that a typed reader must return, computed without Tailrace.

PostgreSQL's text is read by Python, and by PostgreSQL's own arithmetic where Python's types are too small.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa

from tailrace.model import ValueModes
from tests.support.zoo.keeping import texts

#: A mode for each option, other than the form without one.
MODES = ValueModes("double", "adaptive", "numeric", "hex", "map")

#: Expected for a value that its column can't hold: `_special` has the text.
UNHELD = object()


@dataclass(frozen=True)
class Selected:
    """A table's rows as PostgreSQL's texts."""

    columns: tuple[str, ...]
    rows: dict[int, dict[str, str | None]]  # by id, by column
    items: dict[tuple[str, int], list[str | None]]  # arrays with one dimension and the lower bound 1


def select(connection: psycopg.Connection[Any], table: str, columns: tuple[str, ...]) -> Selected:
    """Return what SELECT gives for a table whose first column is `id`."""
    rows = texts(connection, f"select * from public.{table} order by id")
    return Selected(
        columns,
        {int(row[0] or 0): dict(zip(columns, row[1:], strict=True)) for row in rows},
        {key: found for name in columns for key, found in _items(connection, table, name)},
    )


def _items(
    connection: psycopg.Connection[Any], table: str, name: str
) -> list[tuple[tuple[str, int], list[str | None]]]:
    column = f'w."{name}"'
    kind = texts(
        connection,
        "select 1 from pg_attribute a join pg_type t on t.oid = a.atttypid "
        f"left join pg_type b on b.oid = t.typbasetype where attrelid = 'public.{table}'::regclass "
        f"and attname = '{name}' and ('A' in (t.typcategory, b.typcategory)) "
        "and t.oid not in (22, 30)",  # int2vector and oidvector: text
    )
    if not kind:
        return []
    found: dict[tuple[str, int], list[str | None]] = {}
    of_one = f"(array_ndims({column}) = 1 and array_lower({column}, 1) = 1)"
    for (row,) in texts(
        connection, f"select id from public.{table} w where cardinality({column}) = 0 or {of_one}"
    ):
        found[name, int(row or 0)] = []
    for row, item in texts(
        connection,
        f"select w.id, {column}[place] from public.{table} w, generate_subscripts({column}, 1) place "
        f"where {of_one} order by w.id, place",
    ):
        found[name, int(row or 0)].append(item)
    return list(found.items())


class Expectation:
    """The values that a typed reader must return, from PostgreSQL's text and the column's Arrow type."""

    def __init__(self, selected: Selected, connection: psycopg.Connection[Any], modes: ValueModes) -> None:
        self._selected = selected
        self._connection = connection
        self._modes = modes
        self._answers: dict[tuple[str, str], str | None] = {}

    def value(self, column: str, row: int, arrow: pa.DataType) -> Any:
        """Return the value of a column of the selected row, or `UNHELD`."""
        text = self._selected.rows[row][column]
        if text is None:
            return None
        if not pa.types.is_list(arrow):
            return self._scalar(column, text, arrow)
        items = self._selected.items.get((column, row))
        if items is None:
            return UNHELD
        found = [None if item is None else self._scalar(column, item, arrow.value_type) for item in items]
        return UNHELD if UNHELD in found else found

    def _scalar(self, column: str, text: str, arrow: pa.DataType) -> Any:
        kind = column.removeprefix("z_").removesuffix("_array")
        if self._modes == MODES and (form := _FORMS.get(kind)):
            text_or_none = form(self, text)
            if text_or_none is UNHELD:
                return UNHELD
            text = text_or_none
        return self._read(kind, text, arrow)

    def _read(self, kind: str, text: Any, arrow: pa.DataType) -> Any:
        if pa.types.is_boolean(arrow):
            return {"t": True, "f": False}[text]
        if pa.types.is_integer(arrow):
            number = int(text)
            return number if -(1 << arrow.bit_width - 1) <= number < 1 << arrow.bit_width - 1 else UNHELD
        if pa.types.is_float32(arrow):
            return repr(struct.unpack("f", struct.pack("f", float(text)))[0])
        if pa.types.is_float64(arrow):
            return repr(float(text))
        if pa.types.is_decimal(arrow):
            return Decimal(text) if Decimal(text).is_finite() else UNHELD
        if pa.types.is_binary(arrow):
            return bytes.fromhex(text.removeprefix("\\x"))
        if pa.types.is_date(arrow):
            days = self.ask("case when isfinite($1::date) then $1::date - date '1970-01-01' end", text)
            return UNHELD if days is None else int(days)
        if pa.types.is_timestamp(arrow):
            zoned = "timestamptz" if arrow.tz else "timestamp"
            us = self.ask(f"round(1000000 * extract(epoch from $1::{zoned}))", text)
            return int(us) if us and "Inf" not in us and abs(int(us)) < 1 << 63 else UNHELD
        return text

    def ask(self, expression: str, text: str) -> str | None:
        """Return PostgreSQL's result of `expression` with a text as `$1`."""
        if (expression, text) not in self._answers:
            result = self._connection.pgconn.exec_params(f"select {expression}".encode(), [text.encode()])
            assert result.ntuples == 1, result.error_message
            value = result.get_value(0, 0)
            self._answers[expression, text] = None if value is None else value.decode()
        return self._answers[expression, text]


def plain(array: pa.ChunkedArray) -> list[Any]:
    """Return values that Python can hold and compare: dates as days, timestamps as microseconds,
    floats as their digits.
    """
    kind = array.type
    if pa.types.is_list(kind):
        values = plain(pa.chunked_array([chunk.flatten() for chunk in array.chunks], kind.value_type))
        lengths = [len(item) if item.is_valid else None for item in array]
        found, at = [], 0
        for length in lengths:
            found.append(None if length is None else values[at : at + length])
            at += length or 0
        return found
    if pa.types.is_date(kind):
        return array.cast(pa.int32()).to_pylist()
    if pa.types.is_timestamp(kind):
        assert kind.unit == "us"
        return array.cast(pa.int64()).to_pylist()
    if pa.types.is_floating(kind):
        return [None if value is None else repr(value) for value in array.to_pylist()]
    return array.to_pylist()


def _interval(expected: Expectation, text: str) -> Any:
    parts = {"year": 12 * 2_629_800, "month": 2_629_800, "day": 86_400, "hour": 3600, "minute": 60}
    total = " + ".join(f"{s}::numeric * 1000000 * extract({p} from $1::interval)" for p, s in parts.items())
    us = expected.ask(
        f"case when isfinite($1::interval) then trunc({total} + extract(microseconds from $1::interval)) end",
        text,
    )
    return UNHELD if us is None else us


def _time(unit_us: int) -> Callable[[Expectation, str], Any]:
    return lambda expected, text: expected.ask(
        f"trunc(1000000 * extract(epoch from $1::time)) / {unit_us}", text
    ).partition(".")[0]


def _timetz(expected: Expectation, text: str) -> Any:
    utc = expected.ask("to_char(($1::timetz at time zone interval '0')::time, 'HH24:MI:SS.US')", text)
    seconds, _, fraction = utc.partition(".")
    if text.startswith("24:00:00+00"):
        seconds = "24:00:00"
    fraction = fraction.rstrip("0")
    return f"{seconds}{'.' if fraction else ''}{fraction}Z"


def _hstore(_expected: Expectation, text: str) -> Any:
    def plain(quoted: str) -> str:
        return re.sub(r"\\(.)", r"\1", quoted)

    pairs = re.findall(r'"((?:\\.|[^"\\])*)"=>(NULL|"((?:\\.|[^"\\])*)")', text)
    return [(plain(key), None if value == "NULL" else plain(inner)) for key, value, inner in pairs]


#: How values of a type are read under `MODES`, where that differs.
_FORMS: dict[str, Callable[[Expectation, str], Any]] = {
    "money": lambda expected, text: expected.ask("$1::money::numeric", text),
    "bytea": lambda _, text: text.removeprefix("\\x"),
    "raw": lambda _, text: text.removeprefix("\\x"),
    "time": _time(1),
    "time_3": _time(1000),
    "time_0": _time(1000),
    "timetz": _timetz,
    "timetz_3": _timetz,
    "interval": _interval,
    "interval_infinity": _interval,
    "interval_day": _interval,
    "hstore": _hstore,
}
