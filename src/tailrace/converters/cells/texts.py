"""Arrow arrays back to PostgreSQL's texts, and those to JSON: what makes typed columns and the wire's
cells come out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numba as nb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.compiled import ALLOCATING, KERNEL
from tailrace.converters.connect_schemas import written
from tailrace.converters.debezium_types import TypeMapping, like
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.frames import Bytes
from tailrace.sources.postgres.decode.gather import Cells
from tailrace.sources.postgres.decode.json.documents import render
from tailrace.sources.postgres.decode.kernel import NULL, TEXT
from tailrace.sources.postgres.decode.values import forms
from tailrace.sources.postgres.decode.values.stamps import stamp_texts

_TEXT_BYTES_MAX = 2**31 - 1
_DECIMAL_DIGITS_MAX = 45  # five times nine, for 128 bits; more only by the scale

_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


@nb.njit(
    nb.void(nb.uint64[:, ::1], nb.int64, nb.int32[::1], nb.uint8[::1]), **ALLOCATING
)  # fmt: skip
def _write_decimals(words, scale, ends, out):  # type: ignore[no-untyped-def]
    # Numbers of 128 bits, the low word first, as plain decimals with `scale` digits after the point.
    limbs = np.zeros(4, np.int64)
    digits = np.zeros(max(_DECIMAL_DIGITS_MAX, scale) + 1, np.uint8)
    to = np.int64(0)
    ends[0] = 0
    for r in range(len(words)):
        low = words[r, 0]
        high = words[r, 1]
        negative = (high >> np.uint64(63)) != 0
        if negative:
            low = ~low + np.uint64(1)
            high = ~high + (np.uint64(1) if low == 0 else np.uint64(0))
        limbs[0] = np.int64(low & np.uint64(0xFFFFFFFF))
        limbs[1] = np.int64(low >> np.uint64(32))
        limbs[2] = np.int64(high & np.uint64(0xFFFFFFFF))
        limbs[3] = np.int64(high >> np.uint64(32))
        count = 0
        while limbs[0] | limbs[1] | limbs[2] | limbs[3]:
            rest = np.int64(0)
            for k in range(3, -1, -1):
                value = (rest << 32) | limbs[k]
                limbs[k] = value // 1_000_000_000
                rest = value % 1_000_000_000
            for _ in range(9):
                digits[count] = np.uint8(48 + rest % 10)
                rest //= 10
                count += 1
        while count > 0 and digits[count - 1] == 48:
            count -= 1
        while count < scale + 1:
            digits[count] = 48
            count += 1
        if negative:
            out[to] = 45
            to += 1
        for k in range(count - 1, -1, -1):
            out[to] = digits[k]
            to += 1
            if k == scale and scale > 0:
                out[to] = 46
                to += 1
        ends[r + 1] = to


@nb.njit(
    nb.void(nb.types.Array(nb.uint8, 1, "C", readonly=True), nb.int64[::1], nb.int32[::1], nb.uint8[::1]),
    **KERNEL,
)  # fmt: skip
def _write_hex(b, offsets, ends, out):  # type: ignore[no-untyped-def]
    to = 0
    ends[0] = 0
    for r in range(len(offsets) - 1):
        out[to] = 92
        out[to + 1] = 120
        to += 2
        for p in range(offsets[r], offsets[r + 1]):
            out[to] = _HEX[b[p] >> 4]
            out[to + 1] = _HEX[b[p] & 15]
            to += 2
        ends[r + 1] = to


def json_texts(array: pa.Array, how: TypeMapping, *, is_rendered: bool = False) -> pa.LargeStringArray:
    """Return each value as JSON; null stays null.

    :param is_rendered: strings and whole numbers are in their form already, and not PostgreSQL's text.
    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8, or the texts are longer than 2 GiB.
    """
    arrow = array.type
    if isinstance(arrow, pa.JsonType):
        return array.storage.cast(pa.large_string())  # it is JSON already: the payload of an outbox
    if pa.types.is_dictionary(arrow):
        return json_texts(array.dictionary_decode(), how, is_rendered=is_rendered)
    for is_such, in_parts in _IN_PARTS:
        if is_such(arrow):
            return in_parts(array, how, is_rendered)
    if pa.types.is_null(arrow):
        return pa.nulls(len(array), pa.large_string())
    if pa.types.is_boolean(arrow) or pa.types.is_integer(arrow):
        return array.cast(pa.large_string())
    style = how.style
    if pa.types.is_floating(arrow):
        style = forms.style_of(forms.JAVA, forms.REAL if pa.types.is_float32(arrow) else 0)
    elif like(arrow) is None and is_rendered:
        style = forms.QUOTED
    return render(cells(array), style)


def cells(array: pa.Array) -> Cells:
    """Return the values as PostgreSQL writes them, null where there is none.

    :raises TailraceError: `DECODE_FAILED` if the texts are longer than 2 GiB.
    """
    return text_cells(_postgres_texts(array))


def text_cells(texts: pa.Array) -> Cells:
    """Return texts (any of Arrow's types of texts or bytes) as cells.

    :raises TailraceError: `DECODE_FAILED` if they are longer than 2 GiB.
    """
    buffer, offsets = text_buffers(texts)
    if len(offsets) > 0 and offsets[-1] > _TEXT_BYTES_MAX:
        raise TailraceError(
            Kind.DECODE_FAILED,
            "converted records: the texts of one column are longer than 2 GiB",
            "take smaller batches",
        )
    there = array_mask(texts)
    kind = np.where(there, TEXT, NULL).astype(np.uint8)
    lengths = np.where(there, np.diff(offsets), 0)
    return Cells(buffer, offsets[:-1].astype(np.int32), lengths.astype(np.int32), kind)


def array_mask(array: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which values are there."""
    if array.null_count == 0:
        return np.ones(len(array), np.bool_)
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = array.is_valid().to_numpy(zero_copy_only=False)
    return found


def text_buffers(texts: pa.Array) -> tuple[Bytes, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return the bytes of an array of texts, and where each begins (with the end of the last)."""
    wide = texts.cast(pa.large_binary()) if not pa.types.is_large_string(texts.type) else texts
    _, places, data = wide.buffers()
    offsets = np.frombuffer(places, np.int64)[wide.offset : wide.offset + len(wide) + 1] if places else _ZERO
    if len(offsets) == 0:
        offsets = _ZERO
    return np.frombuffer(data, np.uint8) if data is not None else _NO_BYTES, offsets


def _postgres_texts(array: pa.Array) -> pa.Array:
    arrow = array.type
    if pa.types.is_floating(arrow):
        texts = array.cast(pa.string())
        for theirs, ours in (("nan", "NaN"), ("inf", "Infinity"), ("-inf", "-Infinity")):
            texts = pc.if_else(pc.equal(texts, theirs), ours, texts)
        return texts
    if pa.types.is_date(arrow) or pa.types.is_timestamp(arrow):
        return stamp_texts(array)
    if pa.types.is_decimal128(arrow) and arrow.scale >= 0:
        return _decimals(array)
    if pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow) or pa.types.is_fixed_size_binary(arrow):
        return _hexes(array)
    if pa.types.is_boolean(arrow):
        return pc.if_else(array, "t", "f")
    return array if pa.types.is_large_string(arrow) else array.cast(pa.string())


def _decimals(array: pa.Array) -> pa.Array:
    raw = array.buffers()[1]
    words = np.frombuffer(raw, np.uint64)[2 * array.offset : 2 * (array.offset + len(array))]
    # Its digits, one before the point at least, the point and the sign.
    out = np.empty(len(array) * (max(_DECIMAL_DIGITS_MAX, array.type.scale) + 3), np.uint8)
    ends = np.empty(len(array) + 1, np.int32)
    _require_room(out)
    _write_decimals(words.reshape(-1, 2).copy(), array.type.scale, ends, out)
    return _texts(ends, out, array)


def _hexes(array: pa.Array) -> pa.Array:
    buffer, offsets = text_buffers(array.cast(pa.binary()))
    out = np.empty(2 * int(offsets[-1] - offsets[0]) + 2 * len(array), np.uint8)
    ends = np.empty(len(array) + 1, np.int32)
    _require_room(out)
    _write_hex(buffer, np.ascontiguousarray(offsets), ends, out)
    return _texts(ends, out, array)


def _texts(ends: np.ndarray[tuple[int], np.dtype[np.int32]], out: Bytes, like_array: pa.Array) -> pa.Array:
    valid = None
    if like_array.null_count:
        valid = pa.py_buffer(np.packbits(array_mask(like_array), bitorder="little"))
    return pa.StringArray.from_buffers(len(like_array), pa.py_buffer(ends), pa.py_buffer(out), valid)


def _require_room(out: Bytes) -> None:
    if len(out) > _TEXT_BYTES_MAX:
        raise TailraceError(
            Kind.DECODE_FAILED,
            "converted records: one column's values may be longer than 2 GiB",
            "take smaller batches",
        )


# Values that are made of parts.


def _list(array: pa.Array, how: TypeMapping, is_rendered: bool) -> pa.Array:
    items = json_texts(array.flatten(), how.in_parts[0], is_rendered=is_rendered).fill_null("null")
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    return _bracketed("[", _joined(lengths, items), "]", array)


def _map(array: pa.Array, how: TypeMapping, is_rendered: bool) -> pa.Array:
    own = pa.concat_arrays([array.take(pa.array(np.arange(len(array))))])
    keys = render(cells(own.keys.cast(pa.string())), forms.QUOTED)
    values = json_texts(own.items, _part(how, 0), is_rendered=is_rendered).fill_null("null")
    entries = pc.binary_join_element_wise(keys, values, _scalar(":"))
    lengths = np.diff(own.offsets.to_numpy())
    return _bracketed("{", _joined(lengths, entries), "}", array)


def _struct(array: pa.Array, how: TypeMapping, is_rendered: bool) -> pa.Array:
    texts = [
        json_texts(array.field(place), _part(how, place), is_rendered=is_rendered)
        for place in range(len(array.type))
    ]
    return struct_texts(array, texts)


def struct_texts(array: pa.StructArray, texts: Sequence[pa.Array]) -> pa.LargeStringArray:
    """Return structs as JSON objects of these texts, one array for each field; null stays null."""
    parts: list[pa.Array | pa.Scalar] = []
    for place, (field, of_field) in enumerate(zip(array.type, texts, strict=True)):
        comma = "," if place else ""
        parts += [_scalar(f"{comma}{written(field.name)}:"), of_field.fill_null("null")]
    if not parts:
        return _bracketed("{", pa.repeat(_scalar(""), len(array)), "}", array)
    return _bracketed("{", pc.binary_join_element_wise(*parts, _scalar("")), "}", array)


def _part(how: TypeMapping, place: int) -> TypeMapping:
    return how.in_parts[place] if how.in_parts else TypeMapping(forms.QUOTED, how.schema, "null")


def _joined(lengths: np.ndarray[tuple[int], np.dtype[np.int64]], items: pa.Array) -> pa.Array:
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), items.cast(pa.string()))
    return pc.binary_join(lists, ",").cast(pa.large_string())


def _bracketed(opening: str, texts: pa.Array, closing: str, like_array: pa.Array) -> pa.Array:
    whole = pc.binary_join_element_wise(_scalar(opening), texts, _scalar(closing), _scalar(""))
    if like_array.null_count == 0:
        return whole
    return pc.if_else(like_array.is_valid(), whole, pa.scalar(None, pa.large_string()))


def _scalar(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())


def is_listed(arrow: pa.DataType) -> bool:
    """Tell whether values of a type are lists."""
    return bool(
        pa.types.is_list(arrow) or pa.types.is_large_list(arrow) or pa.types.is_fixed_size_list(arrow)
    )


_IN_PARTS: tuple[
    tuple[Callable[[pa.DataType], bool], Callable[[pa.Array, TypeMapping, bool], pa.Array]], ...
] = (
    (pa.types.is_map, _map),
    (is_listed, _list),
    (pa.types.is_struct, _struct),
)

_ZERO = np.zeros(1, np.int64)
_NO_BYTES = np.empty(0, np.uint8)
