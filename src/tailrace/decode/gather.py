"""Copying of one column's cells into an Arrow string array.

`Cells` is the input of every cast: it says where the texts lie. Eight bytes are copied at a time
wherever both buffers have them, which makes short cells cheap. The functions at the end convert Arrow
arrays to cells, and combine Arrow arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from tailrace.compiled import compiled
from tailrace.decode.kernel import NULL, TEXT
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.frames import FROZEN_BYTES, Bytes, Numbers

Int32s = npt.NDArray[np.int32]

#: Arrow's string arrays count their bytes in 32 bits.
TEXT_BYTES_MAX = 2**31 - 1

#: Message of the error for a text that is not UTF-8.
NOT_UTF8 = "decoded a text: it is not valid UTF-8"

_HIGH_BITS = np.uint64(0x8080808080808080)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """One column's cells: `buffer[start:start + length]` where `kind` is `TEXT`; elsewhere `length`
    is 0.
    """

    buffer: Bytes
    start: Int32s
    length: Int32s
    kind: Bytes

    def __len__(self) -> int:
        return len(self.start)

    @property
    def arrays(self) -> tuple[Bytes, Int32s, Int32s, Bytes]:
        """The arguments that kernels take."""
        return self.buffer, self.start, self.length, self.kind

    @property
    def size(self) -> int:
        """Return the total size of the texts, in bytes."""
        return int(self.length.sum(dtype=np.int64))


@intrinsic
def _copy_bytes(typing_context, target, to, source, at, length):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Copy `source[at:at + length]` to `target[to:to + length]`; bounds are not checked.

    Returns the bitwise OR of the copied bytes and up to seven bytes after them; up to seven bytes
    of `target` after the copy may be overwritten. Nothing outside the arrays is read or written.
    An intrinsic, because a compiled function that is passed arrays counts references to them:
    eight times the cost of copying a short cell (measured).
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        into = context.make_array(signature.args[0])(context, builder, arguments[0])
        out_of = context.make_array(signature.args[2])(context, builder, arguments[2])
        size = arguments[4]
        first_to = builder.gep(into.data, [arguments[1]])
        first_from = builder.gep(out_of.data, [arguments[3]])
        seen = cgutils.alloca_once_value(builder, word(0))  # type: ignore[no-untyped-call]

        def move(place: Any, as_type: Any) -> None:
            value = builder.load(
                builder.bitcast(builder.gep(first_from, [place]), as_type.as_pointer()), align=1
            )
            builder.store(
                value, builder.bitcast(builder.gep(first_to, [place]), as_type.as_pointer()), align=1
            )
            wide = value if as_type == word else builder.zext(value, word)
            builder.store(builder.or_(builder.load(seen), wide), seen)

        padded = builder.add(size, word(7))
        room_from = builder.sub(out_of.nitems, arguments[3])
        room_to = builder.sub(into.nitems, arguments[1])
        by_words = builder.and_(
            builder.icmp_signed("<=", padded, room_from), builder.icmp_signed("<=", padded, room_to)
        )
        with builder.if_else(by_words) as (words, single_bytes):
            with words, cgutils.for_range_slice(builder, word(0), size, word(8)) as (place, _):
                move(place, word)
            with single_bytes, cgutils.for_range(builder, size) as loop:
                move(loop.index, ir.IntType(8))
        return builder.load(seen)

    return nb.uint64(target, nb.int64, source, nb.int64, nb.int64), generate


#: The intrinsic, whose Python signature has one argument more than its calls.
copy_bytes: Any = _copy_bytes


@intrinsic
def _word_at(typing_context, source, at):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Return the eight bytes of `source` from `at` on, little-endian; bounds are not checked."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        out_of = context.make_array(signature.args[0])(context, builder, arguments[0])
        first = builder.gep(out_of.data, [arguments[1]])
        return builder.load(builder.bitcast(first, word.as_pointer()), align=1)

    return nb.uint64(source, nb.int64), generate


#: Likewise.
word_at: Any = _word_at


@compiled(nb.boolean(FROZEN_BYTES, nb.int32[::1], nb.int32[::1], nb.int32[::1], nb.uint8[::1]))
def _copy(b, start, length, offsets, out):  # type: ignore[no-untyped-def]
    # Concatenates the texts. Returns whether they may contain a byte outside ASCII.
    seen = np.uint64(0)
    to = np.int64(0)
    offsets[0] = 0
    for r in range(len(start)):
        size = np.int64(length[r])
        seen |= copy_bytes(out, to, b, np.int64(start[r]), size)
        to += size
        offsets[r + 1] = to
    return (seen & _HIGH_BITS) != 0


def gather(cells: Cells) -> pa.StringArray:
    """Return the cells' texts; null for a cell without a text.

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    array, perhaps_not_ascii = _gathered(cells)
    if perhaps_not_ascii:
        require_utf8(array)
    return array


def gather_bytes(cells: Cells) -> pa.BinaryArray:
    """Return the cells' bytes, unchecked; null for a cell without a text."""
    return _gathered(cells)[0].cast(pa.binary())


def _gathered(cells: Cells) -> tuple[pa.StringArray, bool]:
    size = cells.size
    require_room(size)
    offsets = np.empty(len(cells) + 1, np.int32)
    out = np.empty(size + 8, np.uint8)
    perhaps_not_ascii = _copy(cells.buffer, cells.start, cells.length, offsets, out)
    valid, nulls = there(cells)
    return string_array(offsets, out, valid, nulls), perhaps_not_ascii


def require_room(size: int) -> None:
    """Check that an Arrow string array can hold `size` bytes.

    :raises TailraceError: `DECODE_FAILED`.
    """
    if size > TEXT_BYTES_MAX:
        raise TailraceError(
            Kind.DECODE_FAILED,
            "decoded a column: its texts in one block are longer than 2 GiB",
            "lower the source's largest frame, or exclude the table",
        )


def there(cells: Cells) -> tuple[Bytes | None, int]:
    """Return Arrow's bit map of the cells that have a text (None if all have), and how many have none."""
    texts = cells.kind == TEXT
    nulls = len(texts) - int(np.count_nonzero(texts))
    return (np.packbits(texts, bitorder="little") if nulls else None), nulls


def string_array(offsets: Int32s, text: Bytes, valid: Bytes | None = None, nulls: int = 0) -> pa.StringArray:
    """Return an Arrow string array over these buffers, which are not copied."""
    return pa.StringArray.from_buffers(
        len(offsets) - 1,
        pa.py_buffer(offsets),
        pa.py_buffer(text),
        None if valid is None else pa.py_buffer(valid),
        nulls,
    )


def require_utf8(array: pa.Array) -> None:
    """Check every text of `array`.

    :raises TailraceError: `DECODE_FAILED` if one is not UTF-8.
    """
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        # Arrow's message quotes the text; ours must not.
        raise TailraceError(
            Kind.DECODE_FAILED,
            NOT_UTF8,
            "exclude the column (source.columns_exclude); nothing was dropped from the log",
        ) from None


def array_mask(array: pa.Array) -> npt.NDArray[np.bool_]:
    """Return which values are not null."""
    if array.null_count == 0:
        return np.ones(len(array), np.bool_)
    found: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return found


def bit_map(is_there: npt.NDArray[np.bool_]) -> pa.Buffer | None:
    """Return Arrow's bit map of the values that are not null; None if none is null."""
    return None if is_there.all() else pa.py_buffer(np.packbits(is_there, bitorder="little"))


def text_cells(texts: pa.Array) -> Cells:
    """Return an array of texts or bytes, of any of Arrow's types of these, as cells.

    :raises TailraceError: `DECODE_FAILED` if they are longer than 2 GiB.
    """
    buffer, offsets = text_buffers(texts)
    if offsets[-1] > TEXT_BYTES_MAX:
        raise TailraceError(
            Kind.DECODE_FAILED,
            "converted records: the texts of one column are longer than 2 GiB",
            "take smaller batches",
        )
    is_there = array_mask(texts)
    lengths = np.where(is_there, np.diff(offsets), 0)
    kind = np.where(is_there, TEXT, NULL).astype(np.uint8)
    return Cells(buffer, offsets[:-1].astype(np.int32), lengths.astype(np.int32), kind)


def text_buffers(texts: pa.Array) -> tuple[Bytes, Numbers]:
    """Return the bytes of an array of texts, and the offset of each text (and the end of the last)."""
    arrow = texts.type
    width: type = np.int64
    if pa.types.is_string(arrow) or pa.types.is_binary(arrow):
        width = np.int32
    elif not pa.types.is_large_string(arrow) and not pa.types.is_large_binary(arrow):
        texts = texts.cast(pa.large_binary())
    _, places, data = texts.buffers()
    if not places or not len(texts):
        return np.empty(0, np.uint8), np.zeros(1, np.int64)
    offsets: Numbers = np.frombuffer(places, width)[texts.offset : texts.offset + len(texts) + 1].astype(
        np.int64
    )
    return np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8), offsets


def replaced(array: pa.Array, rows: Numbers, others: pa.Array) -> pa.Array:
    """Return `array` with the values in `rows` (ascending) replaced by `others`."""
    others = others.cast(array.type)
    if pa.types.is_nested(array.type):  # `replace_with_mask` does not support these types
        places = np.arange(len(array))
        places[rows] = len(array) + np.arange(len(rows))
        return pa.concat_arrays([array, others]).take(pa.array(places))
    mask = np.zeros(len(array), np.bool_)
    mask[rows] = True
    return pc.replace_with_mask(array, pa.array(mask), others)


def end_to_end(arrays: Sequence[pa.Array]) -> pa.Array:
    """Return the arrays concatenated; structs get the fields of all.

    :raises pyarrow.ArrowTypeError: if no type can hold the values of all arrays.
    :raises pyarrow.ArrowInvalid: if a value does not fit the common type.
    """
    if len({array.type for array in arrays}) > 1:
        columns = [pa.schema([("values", array.type)]) for array in arrays]
        shared = pa.unify_schemas(columns, promote_options="permissive").field(0).type
        arrays = [array.cast(shared) for array in arrays]
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
