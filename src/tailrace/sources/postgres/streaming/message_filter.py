"""Logical messages that the source leaves out by their prefix: taken out of the stream before the log.

A compiled scan compares each message's prefix with those that were met before. Python is asked
about a prefix once, as long as there are no more of them than are remembered.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import KERNEL
from tailrace.config.source.postgres import PostgresSource
from tailrace.protocol.frames import FROZEN_BYTES, Bytes
from tailrace.protocol.memory import u32_at

#: So many prefixes are remembered, and prefixes of together so many bytes; then they are forgotten.
PREFIXES_MAX = 64
PREFIX_BYTES_MAX = 16 * 1024

_PREFIX_AT = 40  # in the frame of a message: header, 'M', flags, lsn

_AT, _TARGET, _UNKNOWN_END = range(3)


@nb.njit(
    nb.boolean(nb.uint8[::1], FROZEN_BYTES, nb.int64[::1], nb.boolean[::1], nb.int64, nb.int64[::1]),
    **KERNEL,
)
def _without_messages(b, known, ends, captured, count, state):  # type: ignore[no-untyped-def]
    # Moves what stays to the front. False: the prefix of the message at state[0] is not known, and
    # ends before state[2].
    n = len(b)
    i = state[0]
    target = state[1]
    done = True
    while i < n:
        size = np.int64(n - i)
        keep = True
        if i + 31 <= n:
            size = u32_at(b, i + 1) + 1
            if size < 31 or size > n - i:
                size = np.int64(n - i)
            if size >= 41 and b[i + 30] == 77:  # 'M'
                end = i + 40
                while end < i + size and b[end] != 0:
                    end += 1
                length = end - i - 40
                found = np.int64(-1)
                first = np.int64(0)
                for k in range(count):
                    if found < 0 and ends[k] - first == length:
                        same = True
                        for j in range(length):
                            if known[first + j] != b[i + 40 + j]:
                                same = False
                                break
                        if same:
                            found = np.int64(k)
                    first = ends[k]
                if found < 0:
                    state[2] = end
                    done = False
                    break
                keep = captured[found]
        if keep:
            if target != i:
                for k in range(size):
                    b[target + k] = b[i + k]
            target += size
        i += size
    state[0] = i
    state[1] = target
    return done


class MessageFilter:
    """Drops the logical messages that `source` leaves out. One thread."""

    def __init__(self, source: PostgresSource) -> None:
        self._source = source
        self._known = np.empty(PREFIX_BYTES_MAX, np.uint8)
        self._ends = np.zeros(PREFIXES_MAX, np.int64)
        self._captured = np.zeros(PREFIXES_MAX, np.bool_)
        self._count = 0

    def apply(self, chunk: Bytes) -> Bytes:
        """Return what is to be captured of a run of whole XLogData frames; `chunk` is changed in place."""
        if not self._source.leaves_messages_out:
            return chunk
        state = np.zeros(3, np.int64)
        while not _without_messages(chunk, self._known, self._ends, self._captured, self._count, state):
            self._decide(chunk[state[_AT] + _PREFIX_AT : state[_UNKNOWN_END]])
        return chunk[: int(state[_TARGET])]

    def _decide(self, prefix: Bytes) -> None:
        begin = int(self._ends[self._count - 1]) if self._count else 0
        if self._count == PREFIXES_MAX or begin + len(prefix) > PREFIX_BYTES_MAX:
            self._count, begin = 0, 0
        if len(prefix) > PREFIX_BYTES_MAX:
            self._known = np.empty(len(prefix), np.uint8)  # that of one message, which is there already
        self._known[begin : begin + len(prefix)] = prefix
        self._ends[self._count] = begin + len(prefix)
        text = prefix.tobytes().decode(errors="surrogateescape")
        self._captured[self._count] = self._source.captures_message(text)
        self._count += 1
