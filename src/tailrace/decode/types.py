"""The mapping of PostgreSQL's types and the handling modes to Arrow's types and JSON's forms.

A type that is not in the mapping remains PostgreSQL's text, which loses nothing; a domain is mapped
like its base type. A value that its Arrow type can't hold exactly becomes null, an infinity the type's
outermost value; its row is then listed in `Typed.special_rows`, and the row's `_special` contains
PostgreSQL's text. A mode that the user chose may round, as in Debezium: such values are not special.

`columns` reads the cells.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import replace

import pyarrow as pa

from tailrace.decode import columns
from tailrace.decode.columns import ColumnType
from tailrace.decode.gather import text_cells
from tailrace.decode.postgres_types import OIDS, item_of
from tailrace.decode.values import forms, literals
from tailrace.errors import Kind, TailraceError
from tailrace.model import Column, Relation, ValueModes, ValueType

_NUMERIC, _MONEY, _BYTEA, _DATE, _TIME, _TIMETZ, _TIMESTAMP, _TIMESTAMPTZ, _INTERVAL = (
    1700, 790, 17, 1082, 1083, 1266, 1114, 1184, 1186,
)  # fmt: skip

_MAP = pa.map_(pa.string(), pa.string())

#: Different decimals of so many digits are different doubles.
_DOUBLE_DIGITS = 15

#: Columns of every row after the table's own columns.
METADATA = (
    pa.field("_op", pa.string()),
    pa.field("_commit_lsn", pa.int64()),
    pa.field("_ordinal", pa.int64()),
    pa.field("_xid", pa.int64()),
    pa.field("_commit_ts", pa.timestamp("us", tz="UTC")),
    pa.field("_log_offset", pa.int64()),
    pa.field("_unchanged", pa.list_(pa.string())),
    pa.field("_special", _MAP),
)
#: Additional column of a history: the key before an update that changed it, as text by column.
OLD_KEY = pa.field("_old_key", _MAP)
_RESERVED = frozenset(field.name for field in METADATA)


@functools.lru_cache(maxsize=256)
def row_schema(relation: Relation) -> pa.Schema:
    """Return the schema of a table's typed rows: its own columns, then `METADATA`.

    :raises TailraceError: `DECODE_FAILED` if a column has the name of a metadata column.
    """
    fields = []
    for column, given in zip(relation.columns, column_types(relation), strict=True):
        if column.name in _RESERVED:
            raise TailraceError(
                Kind.DECODE_FAILED,
                f"described typed rows: the table's own column {column.name!r} has a reserved name",
                "rename the column, or exclude the table; the envelope and JSON forms can hold it",
                {"table": relation.qualified_name},
            )
        fields.append(pa.field(column.name, given.arrow))
    return pa.schema([*fields, *METADATA])


@functools.lru_cache(maxsize=256)
def column_types(relation: Relation) -> tuple[ColumnType, ...]:
    """Return how each column of a table is represented; PostgreSQL's text for an unknown type."""
    return tuple(value_type(known_type(column), relation.modes) for column in relation.columns)


def known_type(column: Column) -> ValueType:
    """Return a column's type, as facts or a Type message describe it, else as the Relation message does."""
    return column.value_type or ValueType(column.type_oid, column.type_modifier)


def cast_as_sent(relation: Relation) -> frozenset[str]:
    """Return the columns whose values, cast to text, equal what the source sends: all but booleans."""
    return frozenset(c.name for c in relation.columns if known_type(c).oid != OIDS["bool"])


def as_text(relation: Relation, names: Collection[str]) -> Relation:
    """Return a table in which the columns `names` have the type `text`."""
    columns = (
        replace(c, type_oid=OIDS["text"], type_modifier=-1, value_type=None) if c.name in names else c
        for c in relation.columns
    )
    return replace(relation, columns=tuple(columns))


@functools.lru_cache(maxsize=4096)
def value_type(value: ValueType, modes: ValueModes) -> ColumnType:
    """Return how values of a type are represented."""
    found = item_of(value)
    if found is not None:
        item, delimiter = found
        # Only domains make arrays of arrays possible; the items remain PostgreSQL's text of an array.
        return columns.array_of(_TEXT if item_of(item) else value_type(item, modes), delimiter)
    if value.oid in _FIXED:
        return _FIXED[value.oid]
    choose = _CHOSEN.get(value.oid) or _CHOSEN_BY_NAME.get(value.name)
    return _TEXT if choose is None else choose(value, modes)


def numeric_shape(modifier: int) -> tuple[int, int] | None:
    """Return (precision, scale) of a numeric's modifier, or None if it has none.

    The scale is signed, 11 bits (PostgreSQL 15).
    """
    if modifier < 4:
        return None
    return ((modifier - 4) >> 16) & 0xFFFF, (((modifier - 4) & 0x7FF) ^ 1024) - 1024


def rounded_by(value: ValueType, modes: ValueModes) -> str:
    """Return the setting under which different values of a type may be equal in typed columns; "": none."""
    found = item_of(value)
    if found is not None:
        return rounded_by(found[0], modes)
    if value.oid in {_NUMERIC, _MONEY} and modes.decimal == "double":
        shape = numeric_shape(value.modifier)
        short = value.oid == _NUMERIC and shape is not None and shape[0] <= _DOUBLE_DIGITS
        return "" if short else "decimal_handling_mode"
    to_milliseconds = modes.time == "connect" and not 0 <= value.modifier <= 3
    if (value.oid == _TIME and to_milliseconds) or (value.oid == _TIMETZ and modes.time is not None):
        return "time_precision_mode"
    return "interval_handling_mode" if value.oid == _INTERVAL and modes.interval == "numeric" else ""


def _numeric(value: ValueType, modes: ValueModes) -> ColumnType:
    shape = numeric_shape(value.modifier)
    if modes.decimal == "string":
        return _TEXT
    if modes.decimal == "double":
        return columns.number(pa.float64(), forms.DOUBLE)
    json = forms.QUOTED
    if modes.decimal == "precise":
        scaled = shape is not None and shape[1] >= 0
        json = forms.style_of(forms.UNSCALED, shape[1]) if scaled and shape else forms.VARIABLE_SCALE
    if shape is None or not 1 <= shape[0] <= 38 or not 0 <= shape[1] <= shape[0]:
        return columns.text(json)
    return columns.number(pa.decimal128(*shape), json)


def _money(_value: ValueType, modes: ValueModes) -> ColumnType:
    digits = modes.money_fraction_digits
    amount = forms.style_of(forms.AMOUNT, digits)
    if modes.decimal == "string":
        return columns.texts(amount)
    if modes.decimal == "double":
        return columns.parsed(amount, pa.float64(), forms.style_of(forms.AMOUNT_DOUBLE, digits))
    if modes.decimal == "precise":
        # 64 bits have 19 digits, all before the point in a currency without a minor unit.
        exact = pa.decimal128(19 + digits, digits)
        return columns.parsed(amount, exact, forms.style_of(forms.AMOUNT_UNSCALED, digits))
    return _TEXT


def _bytea(_value: ValueType, modes: ValueModes) -> ColumnType:
    texts = {"base64": forms.HEX_BASE64, "base64-url-safe": forms.HEX_BASE64_URL, "hex": forms.HEX}
    if modes.binary in texts:
        return columns.texts(texts[modes.binary])
    return ColumnType(pa.binary(), columns.read_bytea, forms.HEX_BASE64)


def _date(_value: ValueType, modes: ValueModes) -> ColumnType:
    json = forms.ISO_DATE if modes.time == "isostring" else forms.DAYS
    return columns.temporal(literals.DATE, pa.date32(), json)


def _time(value: ValueType, modes: ValueModes) -> ColumnType:
    if modes.time is None:
        return _TEXT
    if modes.time == "isostring":
        return columns.texts(forms.ISO_TIME)
    if modes.time == "connect" or (modes.time == "adaptive" and 0 <= value.modifier <= 3):
        return columns.numbers(forms.TIME_MS, pa.int32())
    return columns.numbers(forms.TIME_NS if modes.time == "nanoseconds" else forms.TIME_US, pa.int64())


def _timetz(_value: ValueType, modes: ValueModes) -> ColumnType:
    return _TEXT if modes.time is None else columns.texts(forms.ISO_TIME_UTC)


def _timestamp(value: ValueType, modes: ValueModes) -> ColumnType:
    to_milliseconds = 0 <= value.modifier <= 3
    json = {
        None: forms.MICROSECONDS,
        "adaptive": forms.STAMP_MS if to_milliseconds else forms.STAMP_US,
        "adaptive_time_microseconds": forms.STAMP_MS if to_milliseconds else forms.STAMP_US,
        "connect": forms.STAMP_MS,
        "isostring": forms.ISO_STAMP,
        "microseconds": forms.STAMP_US,
        "nanoseconds": forms.STAMP_NS,
    }[modes.time]
    return columns.temporal(literals.TIMESTAMP, pa.timestamp("us"), json)


def _interval(_value: ValueType, modes: ValueModes) -> ColumnType:
    if modes.interval == "numeric":
        return columns.numbers(forms.INTERVAL_US, pa.int64())
    return columns.texts(forms.ISO_INTERVAL) if modes.interval == "string" else _TEXT


def _hstore(_value: ValueType, modes: ValueModes) -> ColumnType:
    if modes.hstore == "json":
        return columns.texts(forms.PAIRS, forms.PAIRS_QUOTED)
    return columns.pairs() if modes.hstore == "map" else _TEXT


_TEXT = columns.text(forms.QUOTED)
_FIXED = {
    16: ColumnType(pa.bool_(), columns.read_boolean, forms.BOOLEAN),
    20: columns.number(pa.int64(), forms.INTEGER),
    21: columns.number(pa.int16(), forms.INTEGER),
    23: columns.number(pa.int32(), forms.INTEGER),
    26: columns.number(pa.int64(), forms.INTEGER),  # oid: unsigned, 32 bits
    28: columns.number(pa.int64(), forms.INTEGER),  # xid: unsigned, 32 bits
    29: columns.number(pa.int64(), forms.INTEGER),  # cid: unsigned, 32 bits
    5069: columns.number(pa.int64(), forms.INTEGER),  # xid8: unsigned; more than 63 bits are special
    700: columns.number(pa.float32(), forms.FLOATING),
    701: columns.number(pa.float64(), forms.FLOATING),
    _TIMESTAMPTZ: columns.temporal(literals.TIMESTAMPTZ, pa.timestamp("us", tz="UTC"), forms.ISO_UTC),
}
_CHOSEN: dict[int, Callable[[ValueType, ValueModes], ColumnType]] = {
    _NUMERIC: _numeric,
    _MONEY: _money,
    _BYTEA: _bytea,
    _DATE: _date,
    _TIME: _time,
    _TIMETZ: _timetz,
    _TIMESTAMP: _timestamp,
    _INTERVAL: _interval,
}
_CHOSEN_BY_NAME = {"hstore": _hstore}


def value_of(relation: Relation, column: Column, text: str) -> tuple[pa.Array, bool]:
    """Return what the column has for `text`, as an array of one value, and whether it is exactly that."""
    typed = column_types(relation)[relation.columns.index(column)].read(text_cells(pa.array([text])))
    return typed.values, not len(typed.special_rows)
