"""What of a run of whole frames may pass into the log: compiled scans.

All of them expect whole frames from `wire.split_wire`, or from the log, and look at no length
that was not checked there; a frame that does not fit ends the scan.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import KERNEL
from tailrace.protocol.frames import FROZEN_BYTES, Bytes, Numbers
from tailrace.protocol.memory import i64_at, u32_at


@nb.njit(nb.int64(FROZEN_BYTES, nb.boolean, nb.int64), **KERNEL)
def _before(b, unit_open, limit):  # type: ignore[no-untyped-def]
    n = len(b)
    i = np.int64(0)
    while i + 31 <= n:
        size = u32_at(b, i + 1) + 1
        if size < 31 or size > n - i:
            break
        message = b[i + 30]
        if message == 66 and size >= 39:  # 'B' final lsn
            if i64_at(b, i + 31) >= limit:
                return i
            unit_open = True
        elif message == 67:  # 'C'
            unit_open = False
        elif message == 77 and size >= 40 and not unit_open and i64_at(b, i + 32) > limit:  # 'M' flags lsn
            return i
        i += size
    return n


@nb.njit(nb.int64(nb.uint8[::1], nb.int64[::1]), **KERNEL)
def _without(b, relations):  # type: ignore[no-untyped-def]
    n = len(b)
    i = np.int64(0)
    target = np.int64(0)
    while i < n:
        size = np.int64(n - i)
        keep = True
        if i + 35 <= n:
            size = u32_at(b, i + 1) + 1
            if size < 31 or size > n - i:
                size = np.int64(n - i)
            message = b[i + 30]
            if size >= 35 and (message == 73 or message == 85 or message == 68):  # 'I' 'U' 'D'
                relation = u32_at(b, i + 31)
                for k in range(len(relations)):
                    if relations[k] == relation:
                        keep = False
        if keep:
            if target != i:
                for k in range(size):
                    b[target + k] = b[i + k]
            target += size
        i += size
    return target


@nb.njit(nb.int64(FROZEN_BYTES, nb.int64[::1]), **KERNEL)
def _controls(b, found):  # type: ignore[no-untyped-def]
    n = len(b)
    i = np.int64(0)
    count = np.int64(0)
    while i + 23 <= n:
        size = u32_at(b, i + 1) + 1
        if size < 6 or size > n - i:
            break
        if b[i + 5] == 120 and (b[i + 6] == 66 or b[i + 6] == 69):  # 'x' 'B' 'E'
            if count < len(found):
                found[count] = i
            count += 1
        i += size
    return count


@nb.njit(inline="always")
def _leaves_out(b, i, end):  # type: ignore[no-untyped-def]
    # Whether an Update, whose old key begins at i, has a value in its new row that was not sent.
    for part in range(2):
        if i + 3 > end or (part == 0 and b[i] != 75) or (part == 1 and b[i] != 78):  # 'K' 'N'
            return False
        columns = (np.int64(b[i + 1]) << 8) | b[i + 2]
        i += 3
        for _ in range(columns):
            if i >= end:
                return False
            kind = b[i]
            i += 1
            if kind == 117 and part == 1:  # 'u'
                return True
            if kind == 116:  # 't'
                if i + 4 > end:
                    return False
                i += 4 + u32_at(b, i)
    return False


@nb.njit(nb.void(FROZEN_BYTES, nb.int64[::1], nb.boolean[::1]), **KERNEL)
def _moves(b, relations, found):  # type: ignore[no-untyped-def]
    n = len(b)
    i = np.int64(0)
    while i + 6 <= n:
        size = u32_at(b, i + 1) + 1
        if size < 6 or size > n - i:
            break
        if b[i + 5] == 119 and size > 36 and b[i + 30] == 85:  # 'w' 'U'
            relation = u32_at(b, i + 31)
            for k in range(len(relations)):
                if relations[k] == relation and _leaves_out(b, i + 35, i + size):
                    found[k] = True
        i += size


def before(chunk: Bytes, limit: int, *, unit_open: bool) -> int:
    """Return how many bytes of `chunk` lie before the first transaction whose commit record is at
    or after `limit`; a message outside a transaction, whose LSN is its end, may be at `limit`.

    :param unit_open: the chunk begins inside a transaction.
    """
    return int(_before(chunk, unit_open, limit))


def without(chunk: Bytes, relations: Numbers) -> Bytes:
    """Return `chunk`, which is changed in place, without the rows that changed in `relations`."""
    return chunk[: int(_without(chunk, relations))]


def snapshot_marks(chunk: Bytes) -> Numbers:
    """Return where in `chunk` frames lie that begin or end a unit of a snapshot."""
    found = np.empty(64, np.int64)
    count = int(_controls(chunk, found))
    if count > len(found):
        found = np.empty(count, np.int64)
        _controls(chunk, found)
    return found[:count]


def moved(chunk: Bytes, relations: Numbers) -> list[int]:
    """Return those of `relations` of which a row in `chunk` changed its key and was not sent whole."""
    found = np.zeros(len(relations), np.bool_)
    _moves(chunk, relations, found)
    return [int(relation) for relation in relations[found]]
