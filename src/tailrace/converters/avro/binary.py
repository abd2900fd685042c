"""JSON documents to Avro's binary form, by a program that their schema was compiled to.

What stands between a server's bytes and Debezium's values is known to one writer, that of JSON
(`decode.jsontext`); its documents have each member of their schema, in the schema's order. So a
document is read from left to right, each name is compared with the one that is due, and no member
is looked for. Both steps are compiled.

Numbers with a point that a double can't be made of by one exact operation are left out, read by
Arrow, which rounds correctly, and put in their places: they have eight bytes, whatever they are.

Source: Avro 1.11 specification, "Binary Encoding"; W. Clinger, "How to Read Floating Point Numbers
Accurately" (the exact case). Wire format of Confluent's serializers: a zero, then the schema's id.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.compiled import ALLOCATING
from tailrace.converters.avro.kernels import (
    count_items,
    decimal,
    escaped_length,
    put_bits,
    string_end,
    unescape,
    write_bytes,
    write_long,
)
from tailrace.converters.avro.program import (
    ARRAY,
    BOOLEAN,
    BYTES,
    CLOSE,
    DOUBLE,
    END,
    FLOAT,
    INT,
    LONG,
    MAP,
    NAME,
    NEXT_ENTRY,
    NEXT_ITEM,
    NULLABLE,
    NULLABLE_LAST,
    OPEN,
    STRING,
    Program,
)
from tailrace.converters.cells.texts import array_mask, text_buffers
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.frames import FROZEN_BYTES, Bytes, Numbers
from tailrace.sources.postgres.decode.gather import copy_bytes

#: Numbers that are read apart, at a call; a document that has more gets a call of its own.
_APART = 4096
#: A magic byte and four of the schema's id.
HEADER_BYTES = 5
#: A document grows at most so: `0,` becomes nine bytes.
GROWTH, GROWTH_FIXED = 5, 32

# Of the kernel's answer.
_NEXT, _USED, _APARTS, _ERROR, _AT = range(5)
_NO_ERROR, _NO_ROOM, _MISFIT = range(3)

_POWERS = np.array([10.0**k for k in range(23)])
_POWERS_32 = np.array([10.0**k for k in range(11)], np.float32)


@nb.njit(
    nb.void(
        FROZEN_BYTES, nb.types.Array(nb.int64, 1, "C", readonly=True), nb.boolean[::1], nb.int64,
        nb.int64[:, ::1], FROZEN_BYTES, nb.int64, nb.uint8[::1], nb.int64[::1], nb.int64[:, ::1],
        nb.int64[::1],
    ),
    **ALLOCATING,
)  # fmt: skip
def encode(b, offsets, there, first, steps, names, schema_id, out, ends, apart, result):  # type: ignore[no-untyped-def]
    """Write documents from `first` on, as far as `out` and `apart` have room.

    `ends` gets the place after each. `apart` gets numbers that are to be read otherwise: their place
    in `out`, where their text is, its length, and how many bytes they have. `result` gets the document
    to go on with, the bytes and the numbers apart so far, and what was wrong, with the step it was at.
    """
    to = np.int64(0)
    aparts = np.int64(0)
    result[_ERROR] = _NO_ERROR
    bits32 = np.zeros(1, np.float32)
    bits64 = np.zeros(1, np.float64)
    for d in range(first, len(there)):
        begun, aparts_begun = to, aparts
        p, end = offsets[d], offsets[d + 1]
        error = _NO_ERROR
        step = at = 0
        if not there[d]:
            ends[d] = to
            continue
        if GROWTH * (end - p) + GROWTH_FIXED > len(out) - to:
            error = _NO_ROOM
        else:
            out[to] = 0
            for k in range(4):
                out[to + 1 + k] = np.uint8(schema_id >> (24 - 8 * k) & 255)
            to += HEADER_BYTES
        while error == _NO_ERROR:
            what, at = steps[step, 0], step
            if what == END:
                if p != end:
                    error = _MISFIT
                break
            if p >= end:
                error = _MISFIT
                break
            letter = b[p]
            if what == NAME:
                size = steps[step, 1]
                if size >= end - p:
                    error = _MISFIT
                else:
                    for k in range(size):
                        if b[p + k] != names[steps[step, 2] + k]:
                            error = _MISFIT
                p += size
            elif what == NULLABLE or what == NULLABLE_LAST:
                is_null = letter == 110
                out[to] = 2 if is_null == (what == NULLABLE_LAST) else 0
                to += 1
                if is_null:
                    p += 4
                    step = steps[step, 1]
                    continue
            elif what == STRING or what == BYTES:
                stop = string_end(b, p + 1, end)
                if letter != 34 or stop >= end:
                    error = _MISFIT
                elif what == BYTES:
                    to = write_bytes(b, p + 1, stop, out, to)
                    if to < 0:
                        error = _MISFIT
                else:
                    length = stop - p - 1
                    has_escapes = False
                    for k in range(p + 1, stop):
                        has_escapes |= b[k] == 92
                    if has_escapes:
                        length = escaped_length(b, p + 1, stop)
                        if length < 0:
                            error = _MISFIT
                        else:
                            to = write_long(length, out, to)
                            to = unescape(b, p + 1, stop, out, to)
                    else:
                        to = write_long(length, out, to)
                        copy_bytes(out, to, b, p + 1, length)
                        to += length
                p = stop + 1
            elif what == INT or what == LONG:
                negative = letter == 45
                if negative:
                    p += 1
                begin = p
                value = np.int64(0)
                while p < end and 48 <= b[p] <= 57:
                    digit = np.int64(b[p] - 48)
                    # Summed up below zero, where there is room for one more.
                    if value < -922337203685477580 or (value == -922337203685477580 and digit > 8):
                        error = _MISFIT
                        break
                    value = value * 10 - digit
                    p += 1
                if p == begin or (not negative and value == np.int64(-(2**63))):
                    error = _MISFIT
                if not negative:
                    value = -value
                if what == INT and not -(2**31) <= value < 2**31:
                    error = _MISFIT
                to = write_long(value, out, to)
            elif what == OPEN or what == CLOSE:
                if letter != (123 if what == OPEN else 125):
                    error = _MISFIT
                p += 1
            elif what == BOOLEAN:
                if letter != 116 and letter != 102:
                    error = _MISFIT
                out[to] = letter == 116
                to += 1
                p += 4 if letter == 116 else 5
            elif what == FLOAT or what == DOUBLE:
                width = 4 if what == FLOAT else 8
                negative = letter == 45
                if letter == 34:
                    # "NaN", "Infinity", "-Infinity": the first letters tell.
                    sign = p + 1 < end and b[p + 1] == 45
                    kind = b[p + 2] if sign and p + 2 < end else b[p + 1] if p + 1 < end else 0
                    stop = string_end(b, p + 1, end)
                    if stop >= end or not (
                        (kind == 78 and stop - p == 4) or (kind == 73 and stop - p == (10 if sign else 9))
                    ):
                        error = _MISFIT
                    value64 = np.nan if kind == 78 else -np.inf if sign else np.inf
                    p = stop + 1
                else:
                    digits, exponent, stop = decimal(b, p, end)
                    if digits == -2:
                        error = _MISFIT
                    exact = 0 <= digits < (1 << 24 if what == FLOAT else 1 << 53)
                    reach = 10 if what == FLOAT else 22
                    exact &= -reach <= exponent <= reach
                    value64 = np.float64(digits)
                    if what == FLOAT and exact:
                        small = np.float32(digits)
                        if exponent < 0:
                            small = np.float32(small / _POWERS_32[-exponent])
                        else:
                            small = np.float32(small * _POWERS_32[exponent])
                        value64 = np.float64(small)
                    elif exact:
                        if exponent < 0:
                            value64 /= _POWERS[-exponent]
                        else:
                            value64 *= _POWERS[exponent]
                    elif aparts < len(apart):
                        apart[aparts, 0] = to
                        apart[aparts, 1] = p
                        apart[aparts, 2] = stop - p
                        apart[aparts, 3] = width
                        aparts += 1
                    else:
                        error = _NO_ROOM
                    if negative:
                        value64 = -value64
                    p = stop
                if what == FLOAT:
                    bits32[0] = np.float32(value64)
                    to = put_bits(np.uint64(bits32.view(np.uint32)[0]), 4, out, to)
                else:
                    bits64[0] = value64
                    to = put_bits(bits64.view(np.uint64)[0], 8, out, to)
            elif what == ARRAY or what == MAP:
                opening = 91 if what == ARRAY else 123
                if letter != opening or p + 1 >= end:
                    error = _MISFIT
                elif b[p + 1] == opening + 2:
                    out[to] = 0
                    to += 1
                    p += 2
                    step = steps[step, 1]
                    continue
                else:
                    to = write_long(count_items(b, p, end), out, to)
                    p += 1
            elif letter == 44:  # NEXT_ITEM, NEXT_ENTRY: there is another one
                p += 1
            elif letter == (93 if what == NEXT_ITEM else 125):
                out[to] = 0
                to += 1
                p += 1
                step += 1
                continue
            else:
                error = _MISFIT
            if error == _NO_ERROR and (
                what == MAP or (what == NEXT_ENTRY and letter == 44)
            ):  # an entry begins with its name
                stop = string_end(b, p + 1, end)
                if p >= end or b[p] != 34 or stop + 1 >= end or b[stop + 1] != 58:
                    error = _MISFIT
                else:
                    length = escaped_length(b, p + 1, stop)
                    if length < 0:
                        error = _MISFIT
                    else:
                        to = write_long(length, out, to)
                        to = unescape(b, p + 1, stop, out, to)
                        p = stop + 2
            step = steps[step, 1] if what == NEXT_ITEM or what == NEXT_ENTRY else step + 1
        if error != _NO_ERROR:
            result[_NEXT] = d
            result[_USED] = begun
            result[_APARTS] = aparts_begun
            result[_ERROR] = error
            result[_AT] = at
            return
        ends[d] = to
    result[_NEXT] = len(there)
    result[_USED] = to
    result[_APARTS] = aparts


def encoded(texts: pa.Array, program: Program, schema_id: int) -> pa.LargeBinaryArray:
    """Return JSON documents in Avro's binary form behind their schema's id; null stays null.

    :raises TailraceError: `CONVERSION_FAILED` if a document has what its schema does not; with its
        `row` and the path of the member.
    """
    data, offsets = text_buffers(texts)
    there = array_mask(texts)
    ends = np.empty(len(texts), np.int64)
    result = np.zeros(5, np.int64)
    chunks: list[Bytes] = []
    first, done = 0, 0
    lengths = np.diff(offsets)
    room = int(lengths.sum()) + GROWTH * int(lengths.max(initial=0)) + GROWTH_FIXED * (len(texts) + 1)
    aparts = _APART
    while first < len(texts):
        out, apart = np.empty(room, np.uint8), np.empty((aparts, 4), np.int64)
        encode(data, offsets, there, first, program.steps, program.names, schema_id, out, ends, apart, result)
        after, used = int(result[_NEXT]), int(result[_USED])
        _put_apart(out, data, apart[: result[_APARTS]])
        ends[first:after] += done
        chunks.append(out[:used])
        done += used
        if result[_ERROR] == _MISFIT:
            raise _misfit(program.paths[result[_AT]], after)
        if result[_ERROR] == _NO_ROOM:
            # Whatever was short: enough for the next document by itself.
            size = int(offsets[after + 1] - offsets[after])
            room = max(room // 2, GROWTH * size + GROWTH_FIXED)
            aparts = max(aparts, size) if after == first else aparts
        first = after
    whole = chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, np.uint8), *chunks])
    places = np.concatenate((np.zeros(1, np.int64), ends))
    valid = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(texts), [valid, pa.py_buffer(places), pa.py_buffer(whole)]
    )


def _put_apart(out: Bytes, data: Bytes, apart: Numbers) -> None:
    for width, arrow in ((4, pa.float32()), (8, pa.float64())):
        chosen = apart[apart[:, 3] == width]
        if not len(chosen):
            continue
        numbers = _texts_at(data, chosen[:, 1], chosen[:, 2]).cast(arrow)
        bits = np.frombuffer(numbers.to_numpy().tobytes(), np.uint8).reshape(-1, width)
        out[chosen[:, :1] + np.arange(width)] = bits


def _texts_at(data: Bytes, starts: Numbers, lengths: Numbers) -> pa.LargeStringArray:
    places = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
    within = np.arange(places[-1]) - np.repeat(places[:-1], lengths)
    letters = data[np.repeat(starts, lengths) + within]
    return pa.LargeStringArray.from_buffers(len(starts), pa.py_buffer(places), pa.py_buffer(letters))


def _misfit(path: str, row: int) -> TailraceError:
    return TailraceError(
        Kind.CONVERSION_FAILED,
        f"write a record in Avro: its {path or 'value'} is not of the schema's type",
        "NaN in a numeric, infinite dates and the like have no number: choose texts for the type in the "
        "source (decimal_handling_mode: string, time_precision_mode: isostring), or exclude the column",
        {"member": path, "row": row},
    )


def headed(texts: pa.Array, schema_id: int) -> pa.LargeBinaryArray:
    """Return documents as they are, each behind its schema's id; null stays null."""
    header = pa.scalar(bytes([0]) + schema_id.to_bytes(4, "big"), pa.large_binary())
    nothing = pa.scalar(b"", pa.large_binary())
    return pc.binary_join_element_wise(header, texts.cast(pa.large_binary()), nothing)
