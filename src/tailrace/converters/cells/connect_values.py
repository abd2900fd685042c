"""Converts columns to Kafka Connect's values, from which JSON and Avro are written.

A column of PostgreSQL's texts is read in the form of its mapping; one that a transformation or another
source made, according to its Arrow type. A value that its type can't represent (`infinity` as a number of
days) is odd: JSON contains its text, and Avro refuses it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numba as nb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.compiled import compiled
from tailrace.converters.cells.json_values import (
    NO_ROWS,
    Rows,
    Values,
    is_listed,
    json_texts,
    lengths_of,
    list_texts,
    map_texts,
    struct_texts,
)
from tailrace.converters.debezium_types import TypeMapping
from tailrace.decode import columns
from tailrace.decode.columns import ColumnType, Typed
from tailrace.decode.gather import (
    Cells,
    array_mask,
    bit_map,
    gather,
    gather_bytes,
    replaced,
    text_cells,
)
from tailrace.decode.json.documents import render
from tailrace.decode.kernel import TEXT
from tailrace.decode.values import forms
from tailrace.decode.values.stamps import microseconds, stamp_texts
from tailrace.decode.values.texts import hex_texts

#: Arrow types of Kafka Connect's types.
_ARROW = {
    "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(), "float": pa.float32(),
    "double": pa.float64(), "boolean": pa.bool_(), "string": pa.string(), "bytes": pa.binary(),
}  # fmt: skip

_NUMBERS = (forms.INTEGER, forms.FLOATING, forms.JAVA, forms.DOUBLE)
_OF_BYTES = {
    forms.UNSCALED: forms.UNSCALED_BYTES,
    forms.AMOUNT_UNSCALED: forms.AMOUNT_BYTES,
    forms.BITS: forms.BITS_BYTES,
}
_ISO = (forms.ISO_DATE, forms.ISO_STAMP, forms.ISO_UTC)
_PRECISE = (forms.UNSCALED, forms.AMOUNT_UNSCALED)
_HIGHEST, _NS_OF_US_MAX = 2**63 - 1, (2**63 - 1) // 1000


def of_cells(cells: Cells, how: TypeMapping) -> Values:
    """Return PostgreSQL's texts as values.

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    typed = _column_type(how).read(cells)
    rows = typed.special_rows
    if not len(rows):
        return Values(typed.values)
    return Values(typed.values, rows, render(_taken(cells, rows), _text_style(how)))


def _taken(cells: Cells, rows: Rows) -> Cells:
    return Cells(cells.buffer, cells.start[rows], cells.length[rows], cells.kind[rows])


def _text_style(how: TypeMapping) -> int:
    """Return the style of PostgreSQL's texts in a column; a text's if it has no PostgreSQL type."""
    return forms.QUOTED if how.style == forms.RAW else how.style


@functools.lru_cache(maxsize=4096)
def _column_type(how: TypeMapping) -> ColumnType:
    # The conversion of cells to values.
    style, form = how.style, forms.form_of(how.style)
    if form == forms.RAW:
        return ColumnType(pa.null(), _all_odd, style)
    if how.schema.type == "array":
        return columns.array_of(_column_type(how.in_parts[0]), chr(style >> 8 & 255))
    if form == forms.VARIABLE_SCALE:
        return columns.variable_scales(style)
    if how.schema.type == "map":
        return columns.pairs()
    arrow = _ARROW[how.schema.type]
    if form in _OF_BYTES:
        return columns.binaries(forms.with_form(style, _OF_BYTES[form]), style)
    if form in _NUMBERS:
        return columns.number(arrow, style)
    if form == forms.AMOUNT_DOUBLE:
        return columns.parsed(forms.with_form(style, forms.AMOUNT), arrow, style)
    if forms.NUMBERS <= form < forms.TEXTS:
        return columns.numbers(form, arrow)
    reads = {
        forms.BOOLEAN: columns.read_boolean,
        forms.BIT: _read_bits,
        forms.BASE64: _read_raw,
        forms.HEX_BASE64: columns.read_bytea,
    }
    if form in reads and arrow != pa.string():
        return ColumnType(arrow, reads[form], style)
    if form == forms.QUOTED:
        return columns.text(style)
    rendered = columns.texts(forms.PAIRS if form == forms.PAIRS_QUOTED else style)

    def read(cells: Cells) -> Typed:
        # A text that does not have the form is kept as it is.
        typed = rendered.read(cells)
        if not len(rows := typed.special_rows):
            return typed
        return Typed(replaced(typed.values, rows, gather(_taken(cells, rows))), NO_ROWS)

    return ColumnType(pa.string(), read, style)


def _all_odd(cells: Cells) -> Typed:
    # For types that can't be read from PostgreSQL's texts.
    return Typed(pa.nulls(len(cells)), np.flatnonzero(cells.kind == TEXT))


def _read_bits(cells: Cells) -> Typed:
    texts = gather(cells)
    odd = pc.invert(pc.is_in(texts.fill_null("0"), pa.array(["0", "1"])))
    return Typed(pc.equal(texts, "1"), np.flatnonzero(odd.to_numpy(zero_copy_only=False)))


def _read_raw(cells: Cells) -> Typed:
    return Typed(gather_bytes(cells), NO_ROWS)


# Arrow's values.


def of_array(array: pa.Array, how: TypeMapping, *, is_rendered: bool = False) -> Values:
    """Return a column's values, according to its Arrow type.

    :param is_rendered: whether texts already have their final form, instead of PostgreSQL's own.
    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    arrow, form = array.type, forms.form_of(how.style)
    if pa.types.is_dictionary(arrow):
        return of_array(array.dictionary_decode(), how, is_rendered=is_rendered)
    if pa.types.is_map(arrow):
        return _map(array, how, is_rendered)
    if is_listed(arrow):
        return _list(array, how, is_rendered)
    if pa.types.is_struct(arrow):
        return _struct(array, how, is_rendered)
    is_binary = pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow)
    if (
        isinstance(arrow, pa.JsonType)
        or pa.types.is_null(arrow)
        or pa.types.is_boolean(arrow)
        or pa.types.is_integer(arrow)
        or pa.types.is_floating(arrow)
        or (is_binary and how.schema.type == "bytes")
    ):
        return Values(array)
    if pa.types.is_date(arrow) or pa.types.is_timestamp(arrow):
        if form in _ISO:
            return Values(stamp_texts(array, max(forms.parameter_of(how.style) - 1, 0)))
        return _stamps(array, form)
    if pa.types.is_decimal128(arrow) and arrow.scale >= 0:
        if form in _PRECISE:
            return Values(_unscaled(array))
        return of_cells(text_cells(_decimal_texts(array)), how)
    if is_binary or pa.types.is_fixed_size_binary(arrow):
        bytes_ = array.cast(pa.binary())
        return Values(bytes_) if how.schema.type == "bytes" else of_cells(text_cells(hex_texts(bytes_)), how)
    texts = array if pa.types.is_large_string(arrow) else array.cast(pa.string())
    return Values(texts) if is_rendered or form == forms.QUOTED else of_cells(text_cells(texts), how)


def _stamps(array: pa.Array, form: int) -> Values:
    # Dates and timestamps in a numeric form. An infinity is the highest or lowest number of its type;
    # `forms.read_number` defines its value in each form.
    if form == forms.DAYS:
        days = array.cast(pa.date32()).cast(pa.int32())
        bounds = pa.array([-(2**31), 2**31 - 1], pa.int32())
        odd = np.flatnonzero(pc.is_in(days, bounds).to_numpy(zero_copy_only=False))
        return _with_odd(days, odd, array)
    us = microseconds(array)
    numbers, odd = us, NO_ROWS
    is_high, is_low = us == _HIGHEST, us == -_HIGHEST - 1
    if form == forms.STAMP_NS:
        is_outermost = is_high | is_low
        odd = np.flatnonzero((np.abs(us) > _NS_OF_US_MAX) & ~is_outermost & array_mask(array))
        numbers = np.where(is_outermost, us, us * 1000)
    elif is_high.any() or is_low.any():
        numbers = np.where(is_high, forms.INFINITY_US, np.where(is_low, forms.MINUS_INFINITY_US, us))
    if form == forms.STAMP_MS:
        numbers = numbers // 1000
    mask = None if array.null_count == 0 else ~array_mask(array)
    return _with_odd(pa.array(numbers, pa.int64(), mask=mask), odd, array)


def _with_odd(numbers: pa.Array, odd: Rows, array: pa.Array) -> Values:
    if not len(odd):
        return Values(numbers)
    texts = stamp_texts(array.take(pa.array(odd)))
    return Values(numbers, odd, render(text_cells(texts), forms.QUOTED))


@compiled(nb.void(nb.uint64[:, ::1], nb.int32[::1], nb.uint8[::1]))
def _write_unscaled(words, ends, out):  # type: ignore[no-untyped-def]
    # Writes 128-bit numbers (low word first) as big-endian two's complement, in as few bytes as possible.
    to = np.int64(0)
    ends[0] = 0
    for r in range(len(words)):
        fill = np.uint64(0) if words[r, 1] >> np.uint64(63) == 0 else np.uint64(255)
        size = 16
        while size > 1:
            k = size - 1
            first = words[r, k >> 3] >> np.uint64(8 * (k & 7)) & np.uint64(255)
            k -= 1
            second = words[r, k >> 3] >> np.uint64(8 * (k & 7)) & np.uint64(255)
            if first != fill or second >> np.uint64(7) != fill >> np.uint64(7):
                break
            size -= 1
        for k in range(size - 1, -1, -1):
            out[to] = np.uint8(words[r, k >> 3] >> np.uint64(8 * (k & 7)) & np.uint64(255))
            to += 1
        ends[r + 1] = to


def _unscaled(array: pa.Array) -> pa.Array:
    count = len(array)
    words = np.frombuffer(array.buffers()[1], np.uint64).reshape(-1, 2)[array.offset : array.offset + count]
    ends, out = np.empty(count + 1, np.int32), np.empty(16 * count, np.uint8)
    _write_unscaled(words.copy(), ends, out)
    buffers = [bit_map(array_mask(array)), pa.py_buffer(ends), pa.py_buffer(out)]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


def _decimal_texts(array: pa.Array) -> pa.Array:
    # Without exponents, which Arrow's own texts have for small numbers.
    scale = array.type.scale
    whole = pa.Array.from_buffers(pa.decimal128(38, 0), len(array), array.buffers(), offset=array.offset)
    texts = whole.cast(pa.string())
    if scale == 0:
        return texts
    sign = pc.if_else(pc.starts_with(texts, "-"), "-", "")
    digits = pc.ascii_lpad(pc.ascii_ltrim(texts, "-"), scale + 1, "0")
    before, after = (pc.utf8_slice_codeunits(digits, *part) for part in ((0, -scale), (-scale, None)))
    return pc.binary_join_element_wise(pc.binary_join_element_wise(sign, before, ""), after, ".")


# Nested values; a value is odd if a part of it is.


def _list(array: pa.Array, how: TypeMapping, is_rendered: bool) -> Values:
    lengths = lengths_of(array)
    items = of_array(array.flatten(), how.in_parts[0], is_rendered=is_rendered)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), items.array, mask=_nulls(array))
    if items.odd is None:
        return Values(lists)
    rows = np.unique(np.searchsorted(offsets, items.odd_rows, side="right") - 1)
    return Values(lists, rows, list_texts(array, json_texts(items)).take(pa.array(rows)))


def _map(array: pa.Array, how: TypeMapping, is_rendered: bool) -> Values:
    own = pa.concat_arrays([array.take(pa.array(np.arange(len(array))))])
    keys = own.keys.cast(pa.string())
    part = how.in_parts[0] if how.in_parts else TypeMapping(forms.QUOTED, how.schema, "null")
    items = of_array(own.items, part, is_rendered=is_rendered)
    maps = pa.MapArray.from_arrays(own.offsets, keys, items.array, mask=_nulls(own))
    if items.odd is None:
        return Values(maps)
    rows = np.unique(np.searchsorted(own.offsets.to_numpy(), items.odd_rows, side="right") - 1)
    texts = map_texts(own, render(text_cells(keys), forms.QUOTED), json_texts(items))
    return Values(maps, rows, texts.take(pa.array(rows)))


def _struct(array: pa.StructArray, how: TypeMapping, is_rendered: bool) -> Values:
    parts = [
        of_array(array.field(place), part, is_rendered=is_rendered) for place, part in enumerate(how.in_parts)
    ]
    return of_parts(array, parts)


def of_parts(array: pa.StructArray, parts: Sequence[Values]) -> Values:
    """Return structs of these values, with the field names of `array`, and null where it is null."""
    if not parts:
        return Values(array)
    names = [field.name for field in array.type]
    structs = pa.StructArray.from_arrays([part.array for part in parts], names, mask=_nulls(array))
    found = [part.odd_rows for part in parts if part.odd is not None]
    if not found:
        return Values(structs)
    rows = np.unique(np.concatenate(found))
    texts = struct_texts(array, [json_texts(part) for part in parts])
    at = next(at for at, part in enumerate(parts) if part.odd is not None and rows[0] in part.odd_rows)
    member = ".".join(filter(None, [names[at], parts[at].member]))
    return Values(structs, rows, texts.take(pa.array(rows)), member)


def _nulls(array: pa.Array) -> pa.Array | None:
    return array.is_null() if array.null_count else None
