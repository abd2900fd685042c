"""Splits a receive buffer into PostgreSQL's backend messages, by one compiled scan.

A message is `type:u8 length:i32 body`; the length includes itself. For replication, `split_wire` leaves
complete XLogData frames in the buffer, without gaps, and removes the keepalives between them. For COPY it
leaves only the rows' text. It works in place and moves only the bytes after something it removed, stops
before a message that is not CopyData, and checks every length.

Source: PostgreSQL manual, "Message Flow" and "Streaming Replication Protocol".
"""

from __future__ import annotations

import enum

import numba as nb
import numpy as np
import numpy.typing as npt

from tailrace.compiled import compiled
from tailrace.protocol.frames import COPY_DATA, KIND_AT, XLOG, XLOG_PAYLOAD_AT, Bytes, Numbers
from tailrace.protocol.memory import address_of, i64_at, move_bytes, u8_at, u32_at

MESSAGE_HEADER_SIZE = 5  # type and length
LENGTH_MAX = 0x7FFFFFFF

#: Layout of a keepalive: header 'k' wal_end:u64 clock_us:i64 reply_wanted:u8.
KEEPALIVE = ord("k")
KEEPALIVE_END_AT, KEEPALIVE_CLOCK_AT, REPLY_WANTED_AT, KEEPALIVE_SIZE = 6, 14, 22, 23

# Indexes of a scan's result:
# the end of the kept bytes, which begin at the scan's start;
# the offset of the first message that was not processed, its size with its header (0: the header is
# incomplete), and its type, if it is complete and not CopyData, else 0;
# the number of keepalives that were removed, the last one's position and time (µs since 2000), whether any
# requested a reply; and a `ScanFault`.
KEPT_END, CONSUMED, NEEDED, STOPPED_BY, KEEPALIVES, WAL_END, CLOCK_US, REPLY_WANTED, FAULT = range(9)
SCAN_FIELDS = 9

_NEWLINE = ord("\n")


class ScanFault(enum.IntEnum):
    """Why a scan stopped before an invalid message."""

    NONE = 0
    LENGTH_IMPOSSIBLE = 1
    LENGTH_OVER_LIMIT = 2
    KIND_UNKNOWN = 3


_IMPOSSIBLE = int(ScanFault.LENGTH_IMPOSSIBLE)
_OVER_LIMIT = int(ScanFault.LENGTH_OVER_LIMIT)
_UNKNOWN = int(ScanFault.KIND_UNKNOWN)


@nb.njit(inline="always")
def _move(b, source, end, target):  # type: ignore[no-untyped-def]
    # Move bytes towards the front of the buffer at address `b`; return the offset after them.
    if source != target:
        move_bytes(b, source, end, target)
    return target + end - source


@nb.njit(inline="always")
def _fault_of(length, size_max):  # type: ignore[no-untyped-def]
    if length < MESSAGE_HEADER_SIZE - 1 or length > LENGTH_MAX:
        return _IMPOSSIBLE
    if length + 1 > size_max:
        return _OVER_LIMIT
    return 0


@compiled(nb.void(nb.uint8[::1], nb.int64, nb.int64, nb.int64, nb.boolean, nb.int64[::1]))
def _split_wire(buffer, start, end, size_max, copies, result):  # type: ignore[no-untyped-def]
    b = address_of(buffer)
    result[:] = 0
    i = start
    run = start  # kept frames since the last cut
    target = start
    while i + MESSAGE_HEADER_SIZE <= end:
        size = u32_at(b, i + 1) + 1
        fault = _fault_of(size - 1, size_max)
        if fault != 0:
            result[FAULT] = fault
            break
        result[NEEDED] = size
        if i + size > end:
            break
        if u8_at(b, i) != COPY_DATA:
            result[STOPPED_BY] = u8_at(b, i)
            break
        kind = u8_at(b, i + KIND_AT) if size > KIND_AT else np.int64(0)
        if copies:
            target = _move(b, i + MESSAGE_HEADER_SIZE, i + size, target)
            run = i + size
        elif kind == KEEPALIVE and size >= KEEPALIVE_SIZE:
            target = _move(b, run, i, target)
            result[KEEPALIVES] += 1
            result[WAL_END] = i64_at(b, i + KEEPALIVE_END_AT)
            result[CLOCK_US] = i64_at(b, i + KEEPALIVE_CLOCK_AT)
            if u8_at(b, i + REPLY_WANTED_AT) != 0:
                result[REPLY_WANTED] = 1
            run = i + size
        elif kind != XLOG or size <= XLOG_PAYLOAD_AT:
            result[FAULT] = _UNKNOWN
            break
        result[NEEDED] = 0
        i += size
    result[KEPT_END] = _move(b, run, i, target)
    result[CONSUMED] = i


@compiled(nb.void(nb.uint8[::1], nb.int64[::1]))
def _lines(b, result):  # type: ignore[no-untyped-def]
    # Without a branch the loop is vectorised, which takes a tenth of the time.
    count = np.int64(0)
    for i in range(len(b)):
        count += np.int64(b[i] == _NEWLINE)
    last = len(b)
    while last > 0 and b[last - 1] != _NEWLINE:
        last -= 1
    result[0] = count
    result[1] = last


def split_wire(buffer: Bytes, start: int, end: int, size_max: int, *, copies: bool, result: Numbers) -> None:
    """Scan `buffer[start:end]` and fill `result`, of `SCAN_FIELDS` numbers.

    :param size_max: the maximum size of a message in bytes.
    :param copies: the messages are rows of COPY, not replication.
    """
    _split_wire(buffer, start, end, size_max, copies, result)


def lines(text: Bytes) -> tuple[int, int]:
    """Return the number of lines that end in `text`, and the end of the last one.

    COPY's text format escapes newlines inside values, so this counts rows.
    """
    result: npt.NDArray[np.int64] = np.empty(2, np.int64)
    _lines(text, result)
    return int(result[0]), int(result[1])
