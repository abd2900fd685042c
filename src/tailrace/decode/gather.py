"""Cells of one column, copied together into an Arrow string array.

`Cells` is what every cast starts from: where the texts lie, not yet touched. Copying goes by
eight bytes wherever both buffers have them, which is what makes short cells cheap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from llvmlite import ir
from numba.extending import intrinsic

from tailrace.decode.kernel import TEXT
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.frames import FROZEN_BYTES, Bytes

Int32s = npt.NDArray[np.int32]

#: Arrow's string arrays count their bytes in 32 bits.
TEXT_BYTES_MAX = 2**31 - 1

_HIGH_BITS = np.uint64(0x8080808080808080)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """One column's cells: `buffer[start:start + length]` where `kind` is `TEXT`."""

    buffer: Bytes
    start: Int32s
    length: Int32s
    kind: Bytes

    def __len__(self) -> int:
        return len(self.start)

    def text(self, row: int) -> bytes:
        """Return one cell's text; for rare rows and for tests."""
        at = int(self.start[row])
        return self.buffer[at : at + int(self.length[row])].tobytes()


@intrinsic
def copy8(typing_context, target, to, source, at):  # type: ignore[no-untyped-def]
    """Copy `source[at:at + 8]` to `target[to:to + 8]`, unchecked, and return it as a number."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64).as_pointer()
        places = []
        for array, place in ((0, 1), (2, 3)):
            made = context.make_array(signature.args[array])(context, builder, arguments[array])
            byte = builder.gep(made.data, [arguments[place]])
            places.append(builder.bitcast(byte, word))
        value = builder.load(places[1], align=1)
        builder.store(value, places[0], align=1)
        return value

    return nb.uint64(target, nb.int64, source, nb.int64), generate


@nb.njit(inline="always")
def copy_bytes(target, to, source, at, length):  # type: ignore[no-untyped-def]
    """Copy `length` bytes and return their bits, or-ed together with those of up to seven
    bytes that follow; the seven bytes of `target` after them may be overwritten.
    """
    seen = np.uint64(0)
    if at + length + 7 <= len(source) and to + length + 7 <= len(target):
        for k in range(0, length, 8):
            seen |= copy8(target, to + k, source, at + k)
    else:
        for k in range(length):
            target[to + k] = source[at + k]
            seen |= np.uint64(source[at + k])
    return seen


@nb.njit(
    nb.int64(nb.int32[::1], nb.uint8[::1], nb.int32[::1], nb.uint8[::1]), nogil=True, cache=True
)
def _measure(length, kind, offsets, valid):  # type: ignore[no-untyped-def]
    # Offsets of the texts laid end to end, and the bit map of those that are there (zeroed
    # before). Returns how many are not, or -1 if the texts are too long for Arrow.
    total = np.int64(0)
    nulls = 0
    offsets[0] = 0
    for r in range(len(length)):
        if kind[r] == TEXT:
            total += length[r]
            valid[r >> 3] |= np.uint8(1 << (r & 7))
        else:
            nulls += 1
        if total > TEXT_BYTES_MAX:
            return -1
        offsets[r + 1] = total
    return nulls


@nb.njit(
    nb.boolean(FROZEN_BYTES, nb.int32[::1], nb.int32[::1], nb.uint8[::1]), nogil=True, cache=True
)
def _copy(b, start, offsets, out):  # type: ignore[no-untyped-def]
    # Returns whether a byte outside ASCII may be among what was copied.
    seen = np.uint64(0)
    for r in range(len(start)):
        seen |= copy_bytes(out, np.int64(offsets[r]), b, np.int64(start[r]), np.int64(offsets[r + 1] - offsets[r]))
    return (seen & _HIGH_BITS) != 0


def gather(cells: Cells) -> pa.StringArray:
    """Return the cells' texts; null where there is none.

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    count = len(cells)
    offsets = np.empty(count + 1, np.int32)
    valid = np.zeros((count + 7) >> 3, np.uint8)
    nulls = _measure(cells.length, cells.kind, offsets, valid)
    if nulls < 0:
        raise TailraceError(
            Kind.DECODE_FAILED,
            "decoded a column: its texts in one block are longer than 2 GiB",
            "lower the source's largest frame, or exclude the table",
        )
    out = np.empty(int(offsets[-1]) + 8, np.uint8)
    perhaps_not_ascii = _copy(cells.buffer, cells.start, offsets, out)
    array = string_array(offsets, out, valid if nulls else None, nulls)
    if perhaps_not_ascii:
        require_utf8(array)
    return array


def string_array(
    offsets: Int32s, text: Bytes, valid: Bytes | None = None, nulls: int = 0
) -> pa.StringArray:
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
            "decoded a text: it is not valid UTF-8",
            "a database with the encoding SQL_ASCII can hold such bytes: repair the values "
            "(convert_from), or exclude the table; nothing was dropped from the log",
        ) from None
