"""Encodes columns in Avro's binary form: one compiled pass over the rows writes values from Arrow's buffers.

A record has no frame in Avro, so the members of a record that is never null are columns of the enclosing
record. Records that may be null, and the items of lists and maps, are encoded first and then copied.

Source: Avro 1.12 specification, "Binary Encoding". Wire format of Confluent's serializers: a zero, then the
schema's id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numba as nb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.compiled import compiled
from tailrace.converters.cells.json_values import Mask, Rows, is_listed, lengths_of
from tailrace.converters.connect_schemas import Document
from tailrace.decode.gather import array_mask, bit_map, copy_bytes, text_buffers
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.frames import FROZEN_BYTES, Bytes

#: A magic byte and four of the schema's id.
HEADER_BYTES = 5

# Kinds of columns of the kernel. `BLOCKS` are lists and maps: the number of items, their bytes, and a zero.
CONSTANT, LONG, FLOAT, DOUBLE, BOOLEAN, BYTES, RAW, BLOCKS = range(8)
_KINDS = {
    "int8": LONG, "int16": LONG, "int32": LONG, "int64": LONG, "float": FLOAT, "double": DOUBLE,
    "boolean": BOOLEAN, "string": BYTES, "bytes": BYTES,
}  # fmt: skip

# The position of null in the two branches of a column's union, if it is one.
NO_UNION, NULL_FIRST, NULL_LAST = range(3)

# Fields of the kernel's description of a column; the last three are rows in the kernel's arrays.
_KIND, _UNION, _THERE, _NUMBER, _SPAN = range(5)

#: Largest number of bytes of a number, and of the parts around bytes: length, union, last zero.
_NUMBER_BYTES_MAX, _FRAME_BYTES_MAX = 11, 12

_STRING: Document = {"type": "string", "optional": False}


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Records, as one column for each member.

    :param there: which records are not null; None: all.
    """

    values: Mapping[str, Value]
    count: int
    there: Mask | None = None

    def __len__(self) -> int:
        return self.count


#: Values to encode: an array (NumPy's: of integers); one number or text (or None) for all rows; records.
Value: TypeAlias = "pa.Array | Rows | int | str | Members | None"


@nb.njit(inline="always")
def _write_long(value, out, to):  # type: ignore[no-untyped-def]
    # An integer: zigzag, then seven bits in each byte.
    rest = (np.uint64(value) << np.uint64(1)) ^ np.uint64(value >> 63)
    while rest >= np.uint64(128):
        out[to] = np.uint8(rest & np.uint64(127)) | np.uint8(128)
        rest >>= np.uint64(7)
        to += 1
    out[to] = np.uint8(rest)
    return to + 1


@compiled(
    nb.int64(
        nb.int64, nb.types.Array(nb.boolean, 1, "C", readonly=True), FROZEN_BYTES, nb.int64[:, ::1],
        nb.boolean[:, ::1], nb.int64[:, ::1], nb.int64[:, ::1], nb.int64[:, ::1], FROZEN_BYTES,
        nb.uint8[::1], nb.int64[::1],
    )
)  # fmt: skip
def write_records(count, rows, header, columns, there, numbers, start, length, b, out, ends):  # type: ignore[no-untyped-def]
    """Write `count` records, each preceded by `header`, and nothing for those not in `rows`.

    `columns` describes each column: its kind, its union, and its rows in `there`, in `numbers` and in the
    spans `start` and `length` of `b`; a constant is its span's first entry. `out` has room for all records,
    `ends` receives the place after each. Returns the number of bytes written.
    """
    to = np.int64(0)
    for r in range(count):
        if not rows[r]:
            ends[r] = to
            continue
        copy_bytes(out, to, header, np.int64(0), np.int64(len(header)))
        to += len(header)
        for c in range(len(columns)):
            kind, union, span = columns[c, _KIND], columns[c, _UNION], columns[c, _SPAN]
            if kind == CONSTANT:
                copy_bytes(out, to, b, start[span, 0], length[span, 0])
                to += length[span, 0]
                continue
            if union != NO_UNION:
                is_there = there[columns[c, _THERE], r]
                out[to] = 2 if is_there == (union == NULL_FIRST) else 0
                to += 1
                if not is_there:
                    continue
            if kind == BYTES:
                to = _write_long(length[span, r], out, to)
            elif kind != RAW:
                number = numbers[columns[c, _NUMBER], r]
                if kind == LONG or kind == BLOCKS:
                    to = _write_long(number, out, to)
                elif kind == BOOLEAN:
                    out[to] = np.uint8(number)
                    to += 1
                else:
                    for k in range(4 if kind == FLOAT else 8):
                        out[to + k] = np.uint8(number >> (8 * k) & 255)
                    to += 4 if kind == FLOAT else 8
            if kind == BYTES or kind == RAW or kind == BLOCKS:
                copy_bytes(out, to, b, start[span, r], length[span, r])
                to += length[span, r]
            if kind == BLOCKS and numbers[columns[c, _NUMBER], r] > 0:
                out[to] = 0
                to += 1
        ends[r] = to
    return to


def encoded(value: pa.Array | Members, schema: Document, schema_id: int) -> pa.LargeBinaryArray:
    """Return values in Avro's binary form, each preceded by its schema's id; null stays null.

    :param value: an array or records.
    :param schema: as `connect_schemas.Schema.document` returns it, of a value that is not null itself.
    :raises TailraceError: `CONVERSION_FAILED` if a value does not match the schema; with its `row` and the
        path of the member.
    """
    found = _there(value)
    there = np.ones(len(value), np.bool_) if found is None else found
    header = bytes([0]) + schema_id.to_bytes(4, "big")
    data, ends = _written(value, {**schema, "optional": False}, "", there, np.frombuffer(header, np.uint8))
    offsets = np.concatenate((np.zeros(1, np.int64), ends))
    buffers = [bit_map(there), pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(there), buffers)


def _there(value: pa.Array | Rows | Members) -> Mask | None:
    # Which values are not null; None: all.
    if isinstance(value, Members):
        return value.there
    return array_mask(value) if isinstance(value, pa.Array) and value.null_count else None


def _written(
    value: Value, schema: Document, path: str, rows: Mask, header: Bytes | None = None
) -> tuple[Bytes, Rows]:
    # The values' bytes, and where each ends; only of the rows in `rows`.
    table = _Table(rows)
    table.add(value, schema, path)
    return table.written(header)


class _Table:
    """The columns that the kernel writes.

    :param rows: which rows are written; the values of others are ignored.
    """

    def __init__(self, rows: Mask) -> None:
        self._rows = rows
        self._columns: list[tuple[int, int, int, int, int]] = []
        self._there: list[Mask] = [np.ones(len(rows), np.bool_)]
        self._numbers: list[Rows] = []
        self._starts: list[Rows] = []
        self._lengths: list[Rows] = []
        self._buffers: list[Bytes] = []
        self._size = self._room = 0
        self._constant = b""

    def add(self, value: Value, schema: Document, path: str) -> None:
        """Add the columns of a value and, if it may be null, of its union."""
        union = NO_UNION
        if schema["optional"]:
            union = NULL_FIRST if schema.get("default") is None else NULL_LAST
        if schema["type"] == "struct" and isinstance(value, pa.StructArray):
            fields = {field.name: value.field(place) for place, field in enumerate(value.type)}
            value = Members(fields, len(value), array_mask(value) if value.null_count else None)
        if isinstance(value, pa.NullArray):
            value = None
        if value is None or isinstance(value, int | str):
            self._add_constant(value, union, path)
            return
        there = _there(value)
        if union == NO_UNION and there is not None:
            if not (there | ~self._rows).all():
                raise misfit(path, int(np.argmin(there | ~self._rows)), is_null=True)
            there = None
        if isinstance(value, Members) and there is None:
            self._constant += (b"", b"\2", b"\0")[union]
            for field in schema["fields"]:
                name = field["field"]
                self.add(value.values[name], field, f"{path}.{name}" if path else name)
        else:
            self._add_column(value, schema, union, path, there)

    def _add_constant(self, value: int | str | None, union: int, path: str) -> None:
        if value is None and union == NO_UNION and self._rows.any():
            raise misfit(path, int(np.argmax(self._rows)), is_null=True)
        branch = (b"", b"\0", b"\2") if value is None else (b"", b"\2", b"\0")
        self._constant += branch[union]
        if isinstance(value, str):
            self._constant += _long(len(value.encode())) + value.encode()
        elif value is not None:
            self._constant += _long(value)

    def _add_column(
        self, value: pa.Array | Members, schema: Document, union: int, path: str, there: Mask | None
    ) -> None:
        self._end_constant()
        number = span = 0
        if isinstance(value, pa.ExtensionArray):
            value = value.storage
        if isinstance(value, Members):
            kind = RAW
            rows = self._rows if there is None else there & self._rows
            span = self._add_fragments(*_written(value, {**schema, "optional": False}, path, rows))
        elif schema["type"] in ("array", "map"):
            kind = BLOCKS
            counts, data, ends = _items(value, schema, path)
            places = np.concatenate((np.zeros(1, np.int64), ends))[_offsets(counts)]
            number = self._add_numbers(counts)
            span = self._add_fragments(data, places[1:])
        else:
            kind = _KINDS[schema["type"]]
            if kind == BYTES:
                data, offsets = text_buffers(value)
                span = self._add_span(data, offsets[:-1], np.diff(offsets), int(offsets[-1] - offsets[0]))
            else:
                number = self._add_numbers(_numbers(value, kind, path))
        at = 0
        if there is not None:
            self._there.append(there)
            at = len(self._there) - 1
        self._columns.append((kind, union, at, number, span))

    def _add_numbers(self, numbers: Rows) -> int:
        self._numbers.append(numbers)
        self._room += _NUMBER_BYTES_MAX * len(numbers)
        return len(self._numbers) - 1

    def _add_fragments(self, data: Bytes, ends: Rows) -> int:
        starts = np.concatenate((np.zeros(min(len(ends), 1), np.int64), ends[:-1]))
        return self._add_span(data, starts, ends - starts, len(data))

    def _add_span(self, data: Bytes, starts: Rows, lengths: Rows, size: int) -> int:
        self._starts.append(starts + self._size)
        self._lengths.append(lengths)
        self._buffers.append(data)
        self._size += len(data)
        self._room += size + _FRAME_BYTES_MAX * len(lengths)
        return len(self._starts) - 1

    def _end_constant(self) -> None:
        constant, self._constant = self._constant, b""
        if constant:
            count = len(self._rows)
            data = np.frombuffer(constant, np.uint8)
            span = self._add_span(
                data, np.zeros(count, np.int64), np.full(count, len(data)), len(data) * count
            )
            self._columns.append((CONSTANT, NO_UNION, 0, 0, span))

    def written(self, header: Bytes | None = None) -> tuple[Bytes, Rows]:
        """Return the rows' bytes, and the end of each row in them."""
        self._end_constant()
        count = len(self._rows)
        header = np.empty(0, np.uint8) if header is None else header
        out, ends = np.empty(self._room + len(header) * count, np.uint8), np.empty(count, np.int64)
        buffer = np.concatenate(self._buffers) if self._buffers else np.empty(0, np.uint8)
        used = write_records(
            count, self._rows, header, np.array(self._columns, np.int64).reshape(-1, 5),
            _stacked(self._there, count, np.bool_), _stacked(self._numbers, count, np.int64),
            _stacked(self._starts, count, np.int64), _stacked(self._lengths, count, np.int64), buffer,
            out, ends,
        )  # fmt: skip
        return out[:used], ends


def _stacked(arrays: Sequence[npt.NDArray[Any]], count: int, dtype: type) -> npt.NDArray[Any]:
    return np.stack(arrays) if arrays else np.empty((0, count), dtype)


def _long(value: int) -> bytes:
    out = np.empty(_NUMBER_BYTES_MAX, np.uint8)
    return out[: _write_long(value, out, 0)].tobytes()


def _offsets(counts: Rows) -> Rows:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))


def _items(array: pa.Array, schema: Document, path: str) -> tuple[Rows, Bytes, Rows]:
    # The number of items of each list or map, the bytes of all items, and where each item ends.
    counts = lengths_of(array)
    try:
        if is_listed(array.type):
            items = array.flatten()
            return counts, *_written(items, schema["items"], path, np.ones(len(items), np.bool_))
        entry = [{**_STRING, "field": "key"}, {**schema["values"], "field": "value"}]
        entries = Members({"key": array.keys, "value": array.items}, len(array.keys))
        document = {"type": "struct", "fields": entry, "optional": False}
        return counts, *_written(entries, document, path, np.ones(len(entries), np.bool_))
    except TailraceError as error:
        row = int(np.searchsorted(_offsets(counts), error.context["row"], side="right")) - 1
        raise misfit(path, row) from None


def _numbers(array: pa.Array | Rows, kind: int, path: str) -> Rows:
    # Integers, or the bits of floating-point numbers.
    if isinstance(array, np.ndarray):
        return array
    if kind in (FLOAT, DOUBLE):
        arrow, bits = (pa.float32(), np.int32) if kind == FLOAT else (pa.float64(), np.int64)
        values = _filled(array.cast(arrow))
        values = np.where(np.isnan(values), np.nan, values).astype(values.dtype)
        return values.view(bits).astype(np.int64)
    if pa.types.is_uint64(array.type):
        large = pc.greater(array, pa.scalar(2**63 - 1, pa.uint64())).fill_null(False)
        if pc.any(large).as_py():
            raise misfit(path, large.index(True).as_py())
    return _filled(array).astype(np.int64)


def _filled(array: pa.Array) -> npt.NDArray[Any]:
    # The values, with 0 (or False) in place of null.
    found = array.fill_null(array.type.to_pandas_dtype()(0)) if array.null_count else array
    values: npt.NDArray[Any] = found.to_numpy(zero_copy_only=False)
    return values


def misfit(path: str, row: int, *, is_null: bool = False) -> TailraceError:
    """Return the error of a value that is not of its schema's type."""
    of_transformation = (
        "if a transformation makes it NULL, as `mask` with `method: null` does, choose another method or "
        "drop the field: key columns and NOT NULL columns need a value. "
    )
    return TailraceError(
        Kind.CONVERSION_FAILED,
        f"write a record in Avro: its {path or 'value'} is not of the schema's type",
        (of_transformation if is_null else "")
        + "NaN in a numeric, infinite dates, arrays with several dimensions or other bounds, and similar "
        "values have no form there: cast the column to text by a transformation (type: cast), choose texts "
        "for the type in the source (decimal_handling_mode: string, time_precision_mode: isostring), or "
        "exclude the column",
        {"member": path, "row": row},
    )
