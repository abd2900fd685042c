"""Memory access for kernels: big-endian integers and moves of bytes.

Nothing is checked here: the caller ensures that the bytes exist, and that no index is negative.
These are intrinsics because numba compiles the plain forms to slower code. For `b[i]` it checks
whether `i` counts from the end, which prevents LLVM from combining several bytes into one load.
And a function with array arguments, inlined or not, counts references to them at every call,
which costs more than reading a short number. So kernels pass the addresses of their arrays
(`address_of`) to the functions that they call for each row or cell.
"""

from __future__ import annotations

from typing import Any

import numba as nb
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

_BYTE = ir.IntType(8)


@intrinsic
def _address_of(typing_context, array):  # type: ignore[no-untyped-def]  # noqa: ARG001
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return nb.int64(array), generate


def _reader(bits: int) -> Any:
    @intrinsic
    def read(typing_context, b, i):  # type: ignore[no-untyped-def]  # noqa: ARG001
        is_address = isinstance(b, nb.types.Integer)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            if is_address:
                first = builder.inttoptr(arguments[0], _BYTE.as_pointer())
            else:
                first = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            word = ir.IntType(bits)
            place = builder.bitcast(builder.gep(first, [arguments[1]]), word.as_pointer())
            value = builder.load(place, align=1)
            if bits > 8:
                value = builder.bswap(value)
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return nb.int64(nb.int64 if is_address else b, nb.int64), generate

    return read


def _writer(bits: int) -> Any:
    @intrinsic
    def write(typing_context, address, index, value):  # type: ignore[no-untyped-def]  # noqa: ARG001
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
            word = ir.IntType(bits)
            first = builder.inttoptr(arguments[0], word.as_pointer())
            item = arguments[2] if bits == 64 else builder.trunc(arguments[2], word)
            builder.store(item, builder.gep(first, [arguments[1]]))
            return context.get_dummy_value()

        return nb.void(nb.int64, nb.int64, nb.int64), generate

    return write


@intrinsic
def _move_bytes(typing_context, address, source, end, target):  # type: ignore[no-untyped-def]  # noqa: ARG001
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        first, source, end, target = arguments
        memory = builder.inttoptr(first, _BYTE.as_pointer())
        into, out_of = (builder.gep(memory, [place]) for place in (target, source))
        cgutils.raw_memmove(builder, into, out_of, builder.sub(end, source), 1)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return nb.void(nb.int64, nb.int64, nb.int64, nb.int64), generate


#: The address of an array's first item. It doesn't keep the array alive: the kernel's argument must.
address_of: Any = _address_of

#: The byte at `i` as an unsigned number: `u8_at(b, i)`, where `b` is an array or an address.
u8_at = _reader(8)

#: The two bytes at `i` as an unsigned number.
u16_at = _reader(16)

#: The four bytes at `i` as an unsigned number.
u32_at = _reader(32)

#: The eight bytes at `i` as a signed number.
i64_at = _reader(64)

#: Writes the item at `index` of an array of bytes that begins at `address`.
put_u8 = _writer(8)

#: The same for an array of 32-bit numbers, in the machine's byte order.
put_i32 = _writer(32)

#: Moves the bytes from `source` to `end`, offsets from an address, to `target`; they may overlap.
move_bytes: Any = _move_bytes
