"""The table from PostgreSQL's types to Arrow's, and the cast of a column from its texts.

A type that the table does not name stays PostgreSQL's own text, which loses nothing. A value
that its Arrow type can't hold exactly becomes null, or an infinity the outermost value; its row
is then listed in `Typed.special_rows`, and the row's `_special` carries PostgreSQL's text.

Type oids are those of PostgreSQL's pg_type.dat; they never change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode import literals
from tailrace.decode.gather import Cells, gather
from tailrace.errors import Kind, TailraceError
from tailrace.model import Column, Relation
from tailrace.protocol.frames import Bytes

_NUMERIC = 1700

#: Array types whose items are separated by commas, and the type of their items.
_ITEM_TYPES = {
    1000: 16,  # bool
    1001: 17,  # bytea
    1002: 18,  # "char"
    1003: 19,  # name
    1005: 21,  # int2
    1007: 23,  # int4
    1009: 25,  # text
    1014: 1042,  # char(n)
    1015: 1043,  # varchar
    1016: 20,  # int8
    1021: 700,  # float4
    1022: 701,  # float8
    1028: 26,  # oid
    1040: 829,  # macaddr
    1041: 869,  # inet
    1115: 1114,  # timestamp
    1182: 1082,  # date
    1183: 1083,  # time
    1185: 1184,  # timestamptz
    1187: 1186,  # interval
    1231: _NUMERIC,
    1270: 1266,  # timetz
    199: 114,  # json
    2951: 2950,  # uuid
    3807: 3802,  # jsonb
    651: 650,  # cidr
}

_MAP = pa.map_(pa.string(), pa.string())

#: What every row carries after its table's own columns.
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
_RESERVED = frozenset(field.name for field in METADATA)


@dataclass(frozen=True, slots=True, eq=False)
class Typed:
    """A column in its Arrow type, and the rows (rising) whose text it does not hold exactly."""

    values: pa.Array
    special_rows: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The Arrow type of a column, and the cast from its cells."""

    arrow: pa.DataType
    read: Callable[[Cells], Typed]


def row_schema(relation: Relation) -> pa.Schema:
    """Return the schema of a table's typed rows: its own columns, then `METADATA`.

    :raises TailraceError: `DECODE_FAILED` if a column has the name of a metadata column.
    """
    fields = []
    for column in relation.columns:
        if column.name in _RESERVED:
            raise TailraceError(
                Kind.DECODE_FAILED,
                f"described typed rows: the table's own column {column.name!r} has a reserved name",
                "rename the column, or exclude the table; the envelope and JSON forms can hold it",
                {"table": relation.qualified_name},
            )
        fields.append(pa.field(column.name, column_type(column).arrow))
    return pa.schema([*fields, *METADATA])


def column_type(column: Column) -> ColumnType:
    """Return how `column` is typed; PostgreSQL's text if nothing better is known."""
    return _type_of(column.type_oid, column.type_modifier)


def item_type(oid: int) -> int | None:
    """Return the type of the items of array type `oid`; None if it is no array that is known."""
    return _ITEM_TYPES.get(oid)


@functools.lru_cache(maxsize=4096)
def _type_of(oid: int, modifier: int) -> ColumnType:
    if oid == _NUMERIC:
        return _numeric(modifier)
    if oid in _ITEM_TYPES:
        return _array_of(_type_of(_ITEM_TYPES[oid], modifier))
    return _SCALARS.get(oid, _TEXT)


def numeric_shape(modifier: int) -> tuple[int, int] | None:
    """Return (precision, scale) of a numeric's modifier, or None if it has none.

    The scale is signed, 11 bits (PostgreSQL 15).
    """
    if modifier < 4:
        return None
    return ((modifier - 4) >> 16) & 0xFFFF, (((modifier - 4) & 0x7FF) ^ 1024) - 1024


def _numeric(modifier: int) -> ColumnType:
    shape = numeric_shape(modifier)
    if shape is None or not 1 <= shape[0] <= 38 or not 0 <= shape[1] <= shape[0]:
        return _TEXT
    return _number(pa.decimal128(*shape))


def _number(arrow: pa.DataType) -> ColumnType:
    def read(cells: Cells) -> Typed:
        text = gather(cells)
        try:
            return Typed(pc.cast(text, arrow), _NO_ROWS)
        except pa.ArrowInvalid:
            values = pa.chunked_array(_cast_halves(text, arrow), arrow).combine_chunks()
            return Typed(values, _rows_where(pc.and_(pc.is_valid(text), pc.is_null(values))))

    return ColumnType(arrow, read)


def _cast_halves(text: pa.Array, arrow: pa.DataType) -> Iterator[pa.Array]:
    # Cuts the column until the values that have no such number stand alone; those become null.
    # PostgreSQL writes only these three that Arrow refuses, so they are taken out at once.
    odd = pc.is_in(text, value_set=_NOT_FINITE)
    text = pc.if_else(odd, pa.scalar(None, pa.string()), text)
    parts = [text]
    while parts:
        part = parts.pop()
        try:
            yield pc.cast(part, arrow)
        except pa.ArrowInvalid:
            if len(part) == 1:
                yield pa.nulls(1, arrow)
            else:
                middle = len(part) // 2
                parts += [part.slice(middle), part.slice(0, middle)]


def _read_text(cells: Cells) -> Typed:
    return Typed(gather(cells), _NO_ROWS)


def _read_boolean(cells: Cells) -> Typed:
    values, valid, outcome = _bits(len(cells)), _bits(len(cells)), np.empty(len(cells), np.uint8)
    specials = literals.read_booleans(
        cells.buffer, cells.start, cells.length, cells.kind, values, valid, outcome
    )
    buffers = [pa.py_buffer(valid), pa.py_buffer(values)]
    return Typed(pa.Array.from_buffers(pa.bool_(), len(cells), buffers), _special(specials, outcome))


def _temporal(flavour: int, arrow: pa.DataType) -> ColumnType:
    def read(cells: Cells) -> Typed:
        values, outcome = np.empty(len(cells), np.int64), np.empty(len(cells), np.uint8)
        valid = _bits(len(cells))
        specials = literals.read_temporals(
            cells.buffer, cells.start, cells.length, cells.kind, flavour, values, valid, outcome
        )
        held = values.astype(np.int32) if flavour == literals.DATE else values
        buffers = [pa.py_buffer(valid), pa.py_buffer(held)]
        return Typed(pa.Array.from_buffers(arrow, len(cells), buffers), _special(specials, outcome))

    return ColumnType(arrow, read)


def _read_bytea(cells: Cells) -> Typed:
    count = len(cells)
    offsets, valid, outcome = np.empty(count + 1, np.int32), _bits(count), np.empty(count, np.uint8)
    out = np.empty(int(cells.length.sum(dtype=np.int64)) // 2 + 1, np.uint8)
    specials = literals.read_byteas(
        cells.buffer, cells.start, cells.length, cells.kind, offsets, out, valid, outcome
    )
    buffers = [pa.py_buffer(valid), pa.py_buffer(offsets), pa.py_buffer(out)]
    return Typed(pa.Array.from_buffers(pa.binary(), count, buffers), _special(specials, outcome))


def _array_of(item: ColumnType) -> ColumnType:
    arrow = pa.list_(item.arrow)

    def read(cells: Cells) -> Typed:
        count = len(cells)
        offsets, valid, outcome = np.empty(count + 1, np.int32), _bits(count), np.empty(count, np.uint8)
        specials, items, size = literals.measure_arrays(
            cells.buffer, cells.start, cells.length, cells.kind, offsets, valid, outcome
        )
        out = np.empty(size + 8, np.uint8)
        found = Cells(out, np.empty(items, np.int32), np.empty(items, np.int32), np.empty(items, np.uint8))
        literals.read_arrays(
            cells.buffer, cells.start, cells.length, offsets, out, found.start, found.length, found.kind
        )
        typed = item.read(found)
        values = pa.Array.from_buffers(
            arrow, count, [pa.py_buffer(valid), pa.py_buffer(offsets)], children=[typed.values]
        )
        rows_of_items = np.searchsorted(offsets, typed.special_rows, side="right") - 1
        return Typed(values, np.union1d(_special(specials, outcome), rows_of_items.astype(np.int64)))

    return ColumnType(arrow, read)


def _bits(count: int) -> Bytes:
    return np.zeros((count + 7) >> 3, np.uint8)


def _special(specials: int, outcome: Bytes) -> npt.NDArray[np.int64]:
    return np.flatnonzero(outcome) if specials else _NO_ROWS


def _rows_where(mask: pa.BooleanArray) -> npt.NDArray[np.int64]:
    return np.flatnonzero(mask.to_numpy(zero_copy_only=False))


_NO_ROWS = np.empty(0, np.int64)
_NOT_FINITE = pa.array(["NaN", "Infinity", "-Infinity"])
_TEXT = ColumnType(pa.string(), _read_text)
_SCALARS = {
    16: ColumnType(pa.bool_(), _read_boolean),
    17: ColumnType(pa.binary(), _read_bytea),
    20: _number(pa.int64()),
    21: _number(pa.int16()),
    23: _number(pa.int32()),
    26: _number(pa.int64()),  # oid: unsigned, 32 bits
    28: _number(pa.int64()),  # xid: unsigned, 32 bits
    700: _number(pa.float32()),
    701: _number(pa.float64()),
    1082: _temporal(literals.DATE, pa.date32()),
    1114: _temporal(literals.TIMESTAMP, pa.timestamp("us")),
    1184: _temporal(literals.TIMESTAMPTZ, pa.timestamp("us", tz="UTC")),
}
