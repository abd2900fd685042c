"""Debezium's representation of values: the style in JSON and the schema of each type.

Styles are those of decoding under Debezium's handling modes, except for floating-point numbers (written
as Java writes them) and bits. If the source sets no mode, Debezium's default applies.

Source: Debezium 3.6, PostgresValueConverter (`schemaBuilder`), JdbcValueConverters (`schemaBuilder`, values
in place of NULL in a column that is NOT NULL), UnchangedToastedPlaceholder.
"""

from __future__ import annotations

import base64
import functools
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from tailrace.converters.connect_schemas import Schema, array, mapping, struct, written
from tailrace.decode.postgres_types import item_of
from tailrace.decode.types import numeric_shape, value_type
from tailrace.decode.values import forms
from tailrace.decode.values.forms import form_of, of_items, parameter_of
from tailrace.model import ValueModes, ValueType

_BYTEA, _BIT, _VARBIT, _REAL, _TIMESTAMPTZ = 17, 1560, 1562, 700, 1184
#: Digits of a fraction of a second, for types without precision.
_STAMP_DIGITS = 6
_BITS_MAX = 2_147_483_647

#: Keys in a field's metadata: name and version of its values' schema.
_NAME, _VERSION = b"connect.name", b"connect.version"

#: Types of array items whose placeholder is its characters' codes. For booleans it is the codes' bits.
_NUMBER_TYPES = {"int16": int, "int32": int, "int64": int, "float": float, "double": float}

#: Forms that a kernel can't write as Java does: numbers that must first become doubles.
_ROUNDED = (forms.DOUBLE, forms.AMOUNT_DOUBLE)


@dataclass(frozen=True, slots=True)
class TypeMapping:
    """The representation of a type's values.

    :param style: in JSON.
    :param zero: the JSON in place of a value that was not sent, in a column that is NOT NULL.
    :param in_parts: mappings of the items of a list, the values of a map or the fields of a struct.
    """

    style: int
    schema: Schema
    zero: str
    in_parts: tuple[TypeMapping, ...] = ()

    @property
    def is_rounded(self) -> bool:
        """Whether a text must become a double before it is written."""
        return form_of(self.style) in _ROUNDED

    @property
    def is_floating(self) -> bool:
        """Whether the texts are those of floating-point numbers."""
        return form_of(self.style) == forms.JAVA

    def unavailable(self, placeholder: str) -> str:
        """Return the JSON in place of an unchanged value, which was not sent."""
        encoded = base64.b64encode(placeholder.encode()).decode()
        if self.schema.type == "bytes":
            return written(encoded)
        if self.schema.type == "map":
            return written({placeholder: placeholder})
        if self.schema.type == "struct":
            return written({"scale": 0, "value": encoded})
        if self.schema.type == "array":
            item, letters = self.in_parts[0], placeholder.encode()
            if item.schema.type in _NUMBER_TYPES:
                return written([_NUMBER_TYPES[item.schema.type](letter) for letter in letters])
            if item.schema.type == "boolean":
                return written(np.unpackbits(np.frombuffer(letters, np.uint8)).astype(bool).tolist())
            return f"[{item.unavailable(placeholder)}]"
        return written(placeholder)


def debezium_modes(modes: ValueModes) -> ValueModes:
    """Return the modes, with Debezium's defaults for those not set."""
    return replace(
        modes,
        decimal=modes.decimal or "precise",
        time=modes.time or "adaptive",
        interval=modes.interval or "numeric",
        binary=modes.binary or "bytes",
        hstore=modes.hstore or "json",
    )


@functools.lru_cache(maxsize=4096)
def type_mapping(value: ValueType, modes: ValueModes) -> TypeMapping:
    """Return the mapping of a PostgreSQL type; all of `modes` must be set."""
    style = value_type(value, modes).json
    found = item_of(value)
    if found is not None:
        item = type_mapping(found[0], modes) if item_of(found[0]) is None else _TEXT
        schema = array(item.schema.document(optional=True))
        return TypeMapping(of_items(style, item.style), schema, "[]", (item,))
    if value.oid in {_BIT, _VARBIT}:
        return _bits(value)
    if form_of(style) == forms.FLOATING:
        style = forms.style_of(forms.JAVA, forms.REAL if value.oid == _REAL else 0)
    return _scalar(value, style, modes)


def _bits(value: ValueType) -> TypeMapping:
    length = value.modifier if value.modifier > 0 else 1 if value.oid == _BIT else _BITS_MAX
    if length == 1:
        return TypeMapping(forms.BIT, Schema("boolean"), "false")
    schema = Schema("bytes", "io.debezium.data.Bits", 1, parameters=(("length", str(length)),))
    return TypeMapping(forms.BITS, schema, '""')


def _scalar(value: ValueType, style: int, modes: ValueModes) -> TypeMapping:
    if value.oid == _TIMESTAMPTZ:
        digits = value.modifier if 0 <= value.modifier < _STAMP_DIGITS else _STAMP_DIGITS
        style = forms.utc_style(digits)
    if value.oid in _PLAIN:
        schema, zero = _PLAIN[value.oid]
        return TypeMapping(style, schema, zero)
    if value.oid == _BYTEA:
        return TypeMapping(style, Schema("bytes" if modes.binary == "bytes" else "string"), '""')
    form = form_of(style)
    if form in _BY_FORM:
        schema, zero = _BY_FORM[form]
        return TypeMapping(style, schema, zero)
    if form in {forms.UNSCALED, forms.AMOUNT_UNSCALED}:
        return TypeMapping(style, _decimal(value, style), '"AA=="')
    if form in _TIMES:
        of_time = _connect if modes.time == "connect" else _time
        return TypeMapping(style, of_time(*_TIMES[form]), "0")
    if form == forms.PAIRS:
        return TypeMapping(
            style, mapping(Schema("string").document(), Schema("string").document(optional=True)), "{}"
        )
    return TypeMapping(style, _NAMED.get(value.name, Schema("string")), '""')


def _decimal(value: ValueType, style: int) -> Schema:
    scale = parameter_of(style)
    parameters: tuple[tuple[str, str], ...] = (("scale", str(scale)),)
    shape = numeric_shape(value.modifier) if form_of(style) == forms.UNSCALED else None
    if shape is not None:
        parameters += (("connect.decimal.precision", str(shape[0])),)
    return Schema("bytes", "org.apache.kafka.connect.data.Decimal", 1, parameters=parameters)


_VARIABLE = replace(
    struct(
        [Schema("int32").document(field="scale"), Schema("bytes").document(field="value")],
        "io.debezium.data.VariableScaleDecimal",
        1,
    ),
    doc="Variable scaled decimal",
)


def _time(kind: str, name: str) -> Schema:
    return Schema(kind, f"io.debezium.time.{name}", 1)


def _connect(kind: str, name: str) -> Schema:
    return Schema(kind, f"org.apache.kafka.connect.data.{name}", 1)


_INT64 = (Schema("int64"), "0")
_PLAIN: dict[int, tuple[Schema, str]] = {
    16: (Schema("boolean"), "false"),
    20: _INT64,
    21: (Schema("int16"), "0"),
    23: (Schema("int32"), "0"),
    26: _INT64,
    28: _INT64,
    29: _INT64,
    5069: _INT64,
    700: (Schema("float"), "0.0"),
    701: (Schema("double"), "0.0"),
    114: (Schema("string", "io.debezium.data.Json", 1), '""'),
    3802: (Schema("string", "io.debezium.data.Json", 1), '""'),
    2950: (Schema("string", "io.debezium.data.Uuid", 1), '""'),
    142: (Schema("string", "io.debezium.data.Xml", 1), '""'),
    3614: (Schema("string", "io.debezium.data.Tsvector", 1), '""'),
    _TIMESTAMPTZ: (_time("string", "ZonedTimestamp"), '"1970-01-01T00:00:00Z"'),
    1266: (_time("string", "ZonedTime"), '"00:00:00Z"'),
}
_BY_FORM: dict[int, tuple[Schema, str]] = {
    forms.DOUBLE: (Schema("double"), "0.0"),
    forms.AMOUNT_DOUBLE: (Schema("double"), "0.0"),
    forms.VARIABLE_SCALE: (_VARIABLE, '{"scale":0,"value":"AA=="}'),
    forms.STAMP_US: (_time("int64", "MicroTimestamp"), "0"),
    forms.STAMP_NS: (_time("int64", "NanoTimestamp"), "0"),
    forms.TIME_US: (_time("int64", "MicroTime"), "0"),
    forms.TIME_NS: (_time("int64", "NanoTime"), "0"),
    forms.INTERVAL_US: (_time("int64", "MicroDuration"), "0"),
    forms.ISO_INTERVAL: (_time("string", "Interval"), '"P0Y0M0DT0H0M0S"'),
    forms.PAIRS_QUOTED: (Schema("string", "io.debezium.data.Json", 1), '"{}"'),
    forms.ISO_DATE: (_time("string", "IsoDate"), '"1970-01-01Z"'),
    forms.ISO_TIME: (_time("string", "IsoTime"), '"00:00:00Z"'),
    forms.ISO_STAMP: (_time("string", "IsoTimestamp"), '"1970-01-01T00:00:00Z"'),
}
#: Types that Kafka Connect has as well, under the same names.
_TIMES = {
    forms.DAYS: ("int32", "Date"),
    forms.TIME_MS: ("int32", "Time"),
    forms.STAMP_MS: ("int64", "Timestamp"),
}
_NAMED = {"ltree": Schema("string", "io.debezium.data.Ltree", 1)}
_TEXT = TypeMapping(forms.QUOTED, Schema("string"), '""')


# Arrow types, of columns that transformations or other sources made.


def like(arrow: pa.DataType) -> ValueType | None:
    """Return the PostgreSQL type of the same values; None for nested and other types."""
    for is_such, oid in _ARROW:
        if is_such(arrow):
            return ValueType(oid, _modifier(arrow))
    return None


def named_field(name: str, arrow: pa.DataType, schema: str) -> pa.Field:
    """Return a field without nulls whose values' schema has this name, and version 1."""
    named = {_NAME: schema.encode(), _VERSION: b"1"}
    return pa.field(name, arrow, nullable=False, metadata=named)


def field_mapping(field: pa.Field, modes: ValueModes) -> TypeMapping:
    """Return the mapping of a field's values, with the schema name of the field's metadata, if any."""
    found, named = arrow_mapping(field.type, modes), schema_name_of(field)
    if named is None:
        return found
    return replace(found, schema=replace(found.schema, name=named[0], version=named[1]))


def schema_name_of(field: pa.Field) -> tuple[str, int | None] | None:
    """Return the name and the version of a field's schema from its metadata; None if it has none."""
    named = field.metadata or {}
    if _NAME not in named:
        return None
    return named[_NAME].decode(), int(named[_VERSION]) if _VERSION in named else None


def _modifier(arrow: pa.DataType) -> int:
    if pa.types.is_decimal(arrow):
        return int((arrow.precision << 16 | arrow.scale & 0x7FF) + 4)
    if pa.types.is_timestamp(arrow) or pa.types.is_time(arrow):
        return 3 if arrow.unit in {"s", "ms"} else -1
    return -1


def arrow_mapping(arrow: pa.DataType, modes: ValueModes) -> TypeMapping:
    """Return the mapping of an Arrow type; all of `modes` must be set."""
    if pa.types.is_dictionary(arrow):
        return arrow_mapping(arrow.value_type, modes)
    if pa.types.is_map(arrow):
        item = arrow_mapping(arrow.item_type, modes)
        keys = Schema("string").document()
        return TypeMapping(forms.RAW, mapping(keys, item.schema.document(optional=True)), "{}", (item,))
    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow) or pa.types.is_fixed_size_list(arrow):
        item = field_mapping(arrow.value_field, modes)
        items = item.schema.document(optional=arrow.value_field.nullable)
        return TypeMapping(forms.RAW, array(items), "[]", (item,))
    if pa.types.is_struct(arrow):
        parts = tuple(field_mapping(field, modes) for field in arrow)
        fields = [
            part.schema.document(optional=field.nullable, field=field.name)
            for part, field in zip(parts, arrow, strict=True)
        ]
        return TypeMapping(forms.RAW, struct(fields), "{}", parts)
    value = like(arrow)
    return _TEXT if value is None else type_mapping(value, modes)


_ARROW = (
    (pa.types.is_boolean, 16),
    (pa.types.is_int8, 21),
    (pa.types.is_uint8, 21),
    (pa.types.is_int16, 21),
    (pa.types.is_uint16, 23),
    (pa.types.is_int32, 23),
    (pa.types.is_integer, 20),
    (pa.types.is_float16, 700),
    (pa.types.is_float32, 700),
    (pa.types.is_float64, 701),
    (pa.types.is_decimal, 1700),
    (pa.types.is_date, 1082),
    (pa.types.is_time, 1083),
    (lambda arrow: pa.types.is_timestamp(arrow) and arrow.tz is None, 1114),
    (pa.types.is_timestamp, 1184),
    (pa.types.is_binary, 17),
    (pa.types.is_large_binary, 17),
    (pa.types.is_fixed_size_binary, 17),
)
