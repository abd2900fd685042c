r"""Texts that are not UTF-8, as a database in SQL_ASCII can hold them: given as bytea writes their bytes.

`\x636166e9` takes the place of such a text wherever it goes, so no two of them become one, and the
values beside it stay as they are. A database in another encoding sends UTF-8 alone.
"""

from __future__ import annotations

from dataclasses import replace

import numba as nb
import numpy as np

from tailrace.compiled import KERNEL
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.frames import FROZEN_BYTES
from tailrace.protocol.memory import i64_at
from tailrace.sources.postgres.decode.kernel import TEXT
from tailrace.sources.postgres.decode.tuples import Spans, Tuples

#: Places in a buffer are counted in 32 bits.
_BUFFER_BYTES_MAX = 2**31 - 1

_HIGH_BITS = np.int64(-0x7F7F7F7F7F7F7F80)

_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)
_SPANS = (nb.int32[:, ::1], nb.int32[:, ::1], nb.uint8[:, ::1])


@nb.njit(nb.boolean(FROZEN_BYTES, nb.int64, nb.int64), **KERNEL)
def _is_utf8(b, p, length):  # type: ignore[no-untyped-def]
    # Unicode 15, table 3-7: well-formed byte sequences.
    end = p + length
    while p < end:
        first = b[p]
        if first < 0x80:
            while end - p >= 8 and i64_at(b, p) & _HIGH_BITS == 0:
                p += 8
            while p < end and b[p] < 0x80:
                p += 1
            continue
        more = (
            1 if 0xC2 <= first <= 0xDF else 2 if 0xE0 <= first <= 0xEF else 3 if 0xF0 <= first <= 0xF4 else 0
        )
        if more == 0 or end - p <= more:
            return False
        second = b[p + 1]
        lowest = 0xA0 if first == 0xE0 else 0x90 if first == 0xF0 else 0x80
        highest = 0x9F if first == 0xED else 0x8F if first == 0xF4 else 0xBF
        if second < lowest or second > highest:
            return False
        for k in range(p + 2, p + 1 + more):
            if b[k] & 0xC0 != 0x80:
                return False
        p += 1 + more
    return True


@nb.njit(nb.int64(FROZEN_BYTES, *_SPANS), **KERNEL)
def _measure(b, start, length, kind):  # type: ignore[no-untyped-def]
    # Bytes that the hexadecimal forms of all texts take that are not UTF-8.
    size = np.int64(0)
    for c in range(start.shape[0]):
        for r in range(start.shape[1]):
            if kind[c, r] == TEXT and not _is_utf8(b, np.int64(start[c, r]), np.int64(length[c, r])):
                size += 2 + 2 * np.int64(length[c, r])
    return size


@nb.njit(nb.int64(FROZEN_BYTES, *_SPANS, nb.int64, nb.uint8[::1], nb.int64), **KERNEL)
def _write(b, start, length, kind, first, out, to):  # type: ignore[no-untyped-def]
    # Lets the cells of such texts be what is written to `out`, which will lie at `first` behind the buffer.
    for c in range(start.shape[0]):
        for r in range(start.shape[1]):
            p = np.int64(start[c, r])
            size = np.int64(length[c, r])
            if kind[c, r] != TEXT or _is_utf8(b, p, size):
                continue
            start[c, r] = first + to
            length[c, r] = 2 + 2 * size
            out[to] = 92
            out[to + 1] = 120
            to += 2
            for k in range(p, p + size):
                out[to] = _HEX[b[k] >> 4]
                out[to + 1] = _HEX[b[k] & 15]
                to += 2
    return to


def in_utf8(tuples: Tuples) -> Tuples:
    """Return the changes with texts that are UTF-8 throughout; `tuples` itself if they are.

    :raises TailraceError: `DECODE_FAILED` if the block grows beyond 2 GiB.
    """
    if tuples.relation is None:
        return tuples  # the content of a message is bytes
    sides = (tuples.current, tuples.old)
    more = sum(_measure(tuples.buffer, side.start, side.length, side.kind) for side in sides)
    if more == 0:
        return tuples
    first = len(tuples.buffer)
    if first + more > _BUFFER_BYTES_MAX:
        raise TailraceError(
            Kind.DECODE_FAILED,
            "decoded texts that are not UTF-8: a block and their hexadecimal form are longer than 2 GiB",
            "exclude the column, or repair its values",
            {"table": tuples.relation.qualified_name},
        )
    out, to = np.empty(more, np.uint8), 0
    current, old = (Spans(side.start.copy(), side.length.copy(), side.kind.copy()) for side in sides)
    for side in (current, old):
        to = _write(tuples.buffer, side.start, side.length, side.kind, first, out, to)
    return replace(tuples, buffer=np.concatenate((tuples.buffer, out)), current=current, old=old)
