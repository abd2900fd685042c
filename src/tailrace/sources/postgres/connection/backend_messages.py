"""What stands in a receive buffer: two compiled scans over PostgreSQL's backend messages.

A message is `type:u8 length:i32 body`; the length counts itself. `split_wire` is for
replication: it leaves whole XLogData frames in the buffer, one after another, and cuts the
keepalives out from between them. `unwrap_copy` is for COPY: it leaves the rows' text alone.
Both work in place and move bytes only behind something that was cut out, stop before a
message that is not CopyData, and trust no length.

Source: PostgreSQL manual, "Message Flow" and "Streaming Replication Protocol".
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import numba as nb
import numpy as np
import numpy.typing as npt

from tailrace.compiled import KERNEL
from tailrace.protocol.frames import Bytes, Numbers
from tailrace.protocol.memory import address_of, i64_at, move_bytes, u8_at, u32_at

MESSAGE_HEADER_SIZE = 5  # type and length
KEEPALIVE_SIZE = 23  # header 'k' wal_end:u64 clock_us:i64 reply_wanted:u8
XLOG_SIZE_MIN = 30  # header 'w' start:u64 end:u64 sent_us:i64


class ScanField(enum.IntEnum):
    """What a scan reports, by its place in the result."""

    KEPT_END = 0  # what is kept lies between the scan's start and this
    CONSUMED = 1  # where the first message that was not dealt with begins
    NEEDED = 2  # size of that message, header included; 0: not even its header is there
    STOPPED_BY = 3  # its type, if it is whole and not CopyData; else 0
    KEEPALIVES = 4  # how many were cut out
    WAL_END = 5  # of the last keepalive
    CLOCK_US = 6  # of the last keepalive, since 2000
    REPLY_WANTED = 7  # whether any keepalive asked for a reply
    FAULT = 8  # one of Fault


class ScanFault(enum.IntEnum):
    """Why a scan stopped before a message that can't be."""

    NONE = 0
    LENGTH_IMPOSSIBLE = 1
    LENGTH_OVER_LIMIT = 2
    KIND_UNKNOWN = 3


#: (buffer, start, end, largest message in bytes, result)
Scan = Callable[[Bytes, int, int, int, Numbers], None]

_SIGNATURE = nb.void(nb.uint8[::1], nb.int64, nb.int64, nb.int64, nb.int64[::1])


@nb.njit(inline="always")
def _move(b, source, end, target):  # type: ignore[no-untyped-def]
    # Towards the front of what lies at the address `b`; returns the place behind it.
    if source != target:
        move_bytes(b, source, end, target)
    return target + end - source


@nb.njit(inline="always")
def _fault_of(length, size_max):  # type: ignore[no-untyped-def]
    if length < 4 or length > 0x7FFFFFFF:
        return 1
    if length + 1 > size_max:
        return 2
    return 0


@nb.njit(_SIGNATURE, **KERNEL)
def _split_wire(buffer, start, end, size_max, result):  # type: ignore[no-untyped-def]
    b = address_of(buffer)
    result[:] = 0
    i = start
    run = start  # kept frames since the last cut
    target = start
    while i + 5 <= end:
        size = u32_at(b, i + 1) + 1
        fault = _fault_of(size - 1, size_max)
        if fault != 0:
            result[8] = fault
            break
        result[2] = size
        if i + size > end:
            break
        if u8_at(b, i) != 100:  # 'd'
            result[3] = u8_at(b, i)
            break
        kind = u8_at(b, i + 5) if size > 5 else np.int64(0)
        if kind == 107 and size >= 23:  # 'k'
            target = _move(b, run, i, target)
            result[4] += 1
            result[5] = i64_at(b, i + 6)
            result[6] = i64_at(b, i + 14)
            if u8_at(b, i + 22) != 0:
                result[7] = 1
            run = i + size
        elif kind != 119 or size < 31:  # 'w' with at least a message's type
            result[8] = 3
            break
        result[2] = 0
        i += size
    result[0] = _move(b, run, i, target)
    result[1] = i


@nb.njit(_SIGNATURE, **KERNEL)
def _unwrap_copy(buffer, start, end, size_max, result):  # type: ignore[no-untyped-def]
    b = address_of(buffer)
    result[:] = 0
    i = start
    target = start
    while i + 5 <= end:
        size = u32_at(b, i + 1) + 1
        fault = _fault_of(size - 1, size_max)
        if fault != 0:
            result[8] = fault
            break
        result[2] = size
        if i + size > end:
            break
        if u8_at(b, i) != 100:  # 'd'
            result[3] = u8_at(b, i)
            break
        target = _move(b, i + 5, i + size, target)
        result[2] = 0
        i += size
    result[0] = target
    result[1] = i


@nb.njit(nb.void(nb.uint8[::1], nb.int64[::1]), **KERNEL)
def _lines(b, result):  # type: ignore[no-untyped-def]
    # Without a branch the loop is compiled to wide comparisons: a tenth of the time.
    count = np.int64(0)
    for i in range(len(b)):
        count += np.int64(b[i] == 10)
    last = len(b)
    while last > 0 and b[last - 1] != 10:
        last -= 1
    result[0] = count
    result[1] = last


def split_wire(buffer: Bytes, start: int, end: int, size_max: int, result: Numbers) -> None:
    """Scan `buffer[start:end]` for replication; fill `result`, one number a `ScanField`."""
    _split_wire(buffer, start, end, size_max, result)


def unwrap_copy(buffer: Bytes, start: int, end: int, size_max: int, result: Numbers) -> None:
    """Scan `buffer[start:end]` for COPY's rows; fill `result`, one number a `ScanField`."""
    _unwrap_copy(buffer, start, end, size_max, result)


def lines(text: Bytes) -> tuple[int, int]:
    """Return how many lines end in `text`, and where the last of them ends.

    COPY's text format escapes newlines inside values, so this counts rows.
    """
    result: npt.NDArray[np.int64] = np.empty(2, np.int64)
    _lines(text, result)
    return int(result[0]), int(result[1])
