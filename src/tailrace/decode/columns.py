"""Readers that convert a column's cells to an Arrow array, one for each family of types.

Each reader takes the cells of a column, and returns the array and the rows that the array does not
hold exactly. No value makes a reader fail; a text that is not UTF-8 is the only error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode.gather import Cells, gather, require_room, require_utf8, string_array, there
from tailrace.decode.kernel import TEXT
from tailrace.decode.values import digits, forms, hstore, literals
from tailrace.protocol.frames import Bytes

_STRING = pa.string()


@dataclass(frozen=True, slots=True, eq=False)
class Typed:
    """A column in its Arrow type, and the rows (ascending) whose text it does not hold exactly."""

    values: pa.Array
    special_rows: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ColumnType:
    """How a column is represented: its Arrow type, the cast from its cells, and its style in JSON."""

    arrow: pa.DataType
    read: Callable[[Cells], Typed]
    json: int


def text(json: int) -> ColumnType:
    """Return the type of PostgreSQL's unchanged text."""
    return ColumnType(pa.string(), _read_text, json)


def number(arrow: pa.DataType, json: int) -> ColumnType:
    """Return a type of numbers: read by a kernel if it can read the whole column, else by Arrow."""

    def read(cells: Cells) -> Typed:
        values = _numbers(cells, arrow)
        if values is None:
            return _cast(gather(cells), arrow)
        valid, nulls = there(cells)
        buffers = [None if valid is None else pa.py_buffer(valid), pa.py_buffer(values)]
        return Typed(pa.Array.from_buffers(arrow, len(cells), buffers, nulls), _NO_ROWS)

    return ColumnType(arrow, read, json)


def _numbers(cells: Cells, arrow: pa.DataType) -> npt.NDArray[Any] | None:
    # Returns the values of Arrow's array; None if no kernel reads the type or all of the cells.
    values: npt.NDArray[Any]
    if pa.types.is_signed_integer(arrow):
        values = np.empty(len(cells), arrow.to_pandas_dtype())
        whole = digits.read_integers(*cells.arrays, np.iinfo(values.dtype).max, values)
    elif pa.types.is_decimal128(arrow) and arrow.scale < digits.DIGITS_MAX:
        values = np.empty((len(cells), 2), np.int64)
        bound = 10 ** min(arrow.precision, digits.DIGITS_MAX - 1)
        whole = digits.read_decimals(*cells.arrays, arrow.scale, 10**arrow.scale, bound, values)
    else:
        return None
    return values if whole else None


def temporal(flavour: int, arrow: pa.DataType, json: int) -> ColumnType:
    """Return a type of dates (`literals.DATE`) or timestamps."""

    def read(cells: Cells) -> Typed:
        values, outcome = np.empty(len(cells), np.int64), np.empty(len(cells), np.uint8)
        specials = literals.read_temporals(*cells.arrays, flavour, values, outcome)
        held = values.astype(np.int32) if flavour == literals.DATE else values
        buffers = [_valid(cells, specials, outcome), pa.py_buffer(held)]
        return Typed(pa.Array.from_buffers(arrow, len(cells), buffers), _special(specials, outcome))

    return ColumnType(arrow, read, json)


def numbers(form: int, arrow: pa.DataType) -> ColumnType:
    """Return a type of integers in one of the `forms`, in JSON too."""

    def read(cells: Cells) -> Typed:
        values, outcome = np.empty(len(cells), np.int64), np.empty(len(cells), np.uint8)
        valid = _bits(len(cells))
        specials = forms.read_numbers(*cells.arrays, form, values, valid, outcome)
        buffers = [pa.py_buffer(valid), pa.py_buffer(values.astype(arrow.to_pandas_dtype()))]
        return Typed(pa.Array.from_buffers(arrow, len(cells), buffers), _special(specials, outcome))

    return ColumnType(arrow, read, form)


def texts(style: int, json: int | None = None) -> ColumnType:
    """Return a type of texts in one of the `forms`, in JSON too unless `json` names another."""

    def read(cells: Cells) -> Typed:
        return _rendered(cells, style)

    return ColumnType(pa.string(), read, style if json is None else json)


def binaries(style: int, json: int) -> ColumnType:
    """Return a type of bytes in one of the `forms`."""

    def read(cells: Cells) -> Typed:
        return _rendered(cells, style, pa.binary())

    return ColumnType(pa.binary(), read, json)


def variable_scales(json: int) -> ColumnType:
    """Return a type of numbers of any scale: the scale, and the bytes of the unscaled number."""
    fields = [pa.field("scale", pa.int32()), pa.field("value", pa.binary())]

    def read(cells: Cells) -> Typed:
        count = len(cells)
        scales = np.empty(count, np.int32)
        values = _rendered(cells, 0, pa.binary(), scales)
        digits = pa.Array.from_buffers(pa.int32(), count, [None, pa.py_buffer(scales)])
        parts = [digits, values.values]
        nulls = values.values.is_null()
        return Typed(pa.StructArray.from_arrays(parts, fields=fields, mask=nulls), values.special_rows)

    return ColumnType(pa.struct(fields), read, json)


def parsed(style: int, arrow: pa.DataType, json: int) -> ColumnType:
    """Return a type whose values Arrow reads from texts in one of the `forms`."""

    def read(cells: Cells) -> Typed:
        rendered = _rendered(cells, style)
        typed = _cast(rendered.values, arrow)
        return Typed(typed.values, np.union1d(rendered.special_rows, typed.special_rows))

    return ColumnType(arrow, read, json)


def array_of(item: ColumnType, delimiter: str) -> ColumnType:
    """Return a type of one-dimensional arrays; all other arrays are special."""
    arrow = pa.list_(item.arrow)
    separator = ord(delimiter)

    def read(cells: Cells) -> Typed:
        count = len(cells)
        offsets, valid, outcome = np.empty(count + 1, np.int32), _bits(count), np.empty(count, np.uint8)
        specials, items, size = literals.measure_arrays(*cells.arrays, separator, offsets, valid, outcome)
        out = np.empty(size + 8, np.uint8)
        found = Cells(out, np.empty(items, np.int32), np.empty(items, np.int32), np.empty(items, np.uint8))
        literals.read_arrays(
            cells.buffer, cells.start, cells.length, separator, offsets, out,
            found.start, found.length, found.kind,
        )  # fmt: skip
        typed = item.read(found)
        values = pa.Array.from_buffers(
            arrow, count, [pa.py_buffer(valid), pa.py_buffer(offsets)], children=[typed.values]
        )
        rows_of_items = np.searchsorted(offsets, typed.special_rows, side="right") - 1
        return Typed(values, np.union1d(_special(specials, outcome), rows_of_items.astype(np.int64)))

    return ColumnType(arrow, read, forms.array_style(item.json, delimiter))


def pairs() -> ColumnType:
    """Return the type of hstores as maps from text to text."""
    arrow = pa.map_(pa.string(), pa.string())

    def read(cells: Cells) -> Typed:
        count = len(cells)
        offsets, valid, outcome = np.empty(count + 1, np.int32), _bits(count), np.empty(count, np.uint8)
        specials = hstore.measure_maps(*cells.arrays, offsets, valid, outcome)
        found, size = int(offsets[-1]), cells.size + 8
        ends = [np.zeros(found + 1, np.int32) for _ in range(2)]
        keys, values, there = np.empty(size, np.uint8), np.empty(size, np.uint8), _bits(found)
        hstore.read_maps(
            cells.buffer, cells.start, cells.length, offsets, ends[0], keys, ends[1], values, there
        )
        entries = [string_array(ends[0], keys), string_array(ends[1], values, there, -1)]
        for entry in entries:
            require_utf8(entry)
        entry = pa.StructArray.from_arrays(
            entries, fields=[pa.field("key", pa.string(), nullable=False), pa.field("value", pa.string())]
        )
        maps = pa.Array.from_buffers(
            arrow, count, [pa.py_buffer(valid), pa.py_buffer(offsets)], children=[entry]
        )
        return Typed(maps, _special(specials, outcome))

    return ColumnType(arrow, read, forms.PAIRS)


def read_boolean(cells: Cells) -> Typed:
    """Read booleans."""
    values, outcome = np.empty(len(cells), np.uint8), np.empty(len(cells), np.uint8)
    specials = literals.read_booleans(*cells.arrays, values, outcome)
    buffers = [_valid(cells, specials, outcome), pa.py_buffer(np.packbits(values, bitorder="little"))]
    return Typed(pa.Array.from_buffers(pa.bool_(), len(cells), buffers), _special(specials, outcome))


def read_bytea(cells: Cells) -> Typed:
    """Read bytea into bytes."""
    count = len(cells)
    offsets, valid, outcome = np.empty(count + 1, np.int32), _bits(count), np.empty(count, np.uint8)
    out = np.empty(cells.size // 2 + 1, np.uint8)
    specials = literals.read_byteas(*cells.arrays, offsets, out, valid, outcome)
    buffers = [pa.py_buffer(valid), pa.py_buffer(offsets), pa.py_buffer(out)]
    return Typed(pa.Array.from_buffers(pa.binary(), count, buffers), _special(specials, outcome))


def _read_text(cells: Cells) -> Typed:
    return Typed(gather(cells), _NO_ROWS)


def _rendered(
    cells: Cells,
    style: int,
    arrow: pa.DataType = _STRING,
    scales: npt.NDArray[np.int32] | None = None,
) -> Typed:
    # With `scales`: numbers of any scale, whose scales are written there.
    count = len(cells)
    offsets, valid, outcome = np.empty(count + 1, np.int64), _bits(count), np.empty(count, np.uint8)
    growth = forms.PAIRS_GROWTH if style == forms.PAIRS else 1
    size = cells.size * growth + count * forms.TEXT_GROWTH_FIXED
    out = np.empty(size + 8, np.uint8)
    if scales is not None:
        specials = forms.read_variable_scales(*cells.arrays, scales, offsets, out, valid, outcome)
    else:
        specials = forms.read_texts(*cells.arrays, style, offsets, out, valid, outcome)
    require_room(int(offsets[-1]))
    array = string_array(offsets.astype(np.int32), out, valid, -1)
    if arrow == _STRING:
        require_utf8(array)
    else:
        array = array.cast(arrow)
    return Typed(array, _special(specials, outcome))


def _cast(text: pa.StringArray, arrow: pa.DataType) -> Typed:
    try:
        return Typed(pc.cast(text, arrow), _NO_ROWS)
    except pa.ArrowInvalid:
        values = pa.chunked_array(_cast_halves(text, arrow), arrow).combine_chunks()
        return Typed(values, _rows_where(pc.and_(pc.is_valid(text), pc.is_null(values))))


def _cast_halves(text: pa.Array, arrow: pa.DataType) -> Iterator[pa.Array]:
    # Halves the column until each value that Arrow refuses is alone; those become null. NaN and the
    # infinities, nearly all such values that PostgreSQL writes, are removed first.
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


def _bits(count: int) -> Bytes:
    return np.zeros((count + 7) >> 3, np.uint8)


def _valid(cells: Cells, specials: int, outcome: Bytes) -> pa.Buffer | None:
    """Return Arrow's bit map of the cells that have a value."""
    if not specials:
        valid, _ = there(cells)
    else:
        valid = np.packbits((cells.kind == TEXT) & (outcome != literals.SPECIAL_NULL), bitorder="little")
    return None if valid is None else pa.py_buffer(valid)


def _special(specials: int, outcome: Bytes) -> npt.NDArray[np.int64]:
    return np.flatnonzero(outcome) if specials else _NO_ROWS


def _rows_where(mask: pa.BooleanArray) -> npt.NDArray[np.int64]:
    return np.flatnonzero(mask.to_numpy(zero_copy_only=False))


_NO_ROWS = np.empty(0, np.int64)
_NOT_FINITE = pa.array(["NaN", "Infinity", "-Infinity"])
