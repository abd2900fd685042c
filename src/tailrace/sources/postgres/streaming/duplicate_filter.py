"""After every (re)connection: what the log already has is dropped, by whole transactions.

The server is asked to start at the log's position, and may yet send transactions before it: a
slot's own position is saved only now and then, and goes back when the server crashes. Rows
have no position of their own that could be compared. So a transaction is dropped whole if its
commit record starts before the position, and the first one that does not ends the filter for
good. `<`, never `<=`: a commit record may start exactly where the one before it ended.

A logical message outside a transaction carries the end of its record, so there `<=` is right:
one that ends at the position is in the log, and none that follows can end there too. Relation
and Type messages are kept always: the server sends them once a connection, perhaps inside a
transaction that is dropped, and later transactions rely on them.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tailrace.compiled import KERNEL
from tailrace.errors import Kind, TailraceError
from tailrace.model import format_lsn
from tailrace.protocol.frames import Bytes
from tailrace.protocol.memory import i64_at, u32_at

#: A server that sends more than this of what it was told is done does not follow the protocol.
TRANSACTIONS_DROPPED_MAX = 10_000_000

_INSIDE, _DONE, _DROPPED = range(3)


@nb.njit(
    nb.int64(nb.uint8[::1], nb.int64, nb.int64[::1]),
    **KERNEL,
)
def _drop(b, position, state):  # type: ignore[no-untyped-def]
    # Frames come whole and at least 31 bytes long from wire.split_wire. Returns what is left.
    n = len(b)
    i = np.int64(0)
    target = np.int64(0)
    while i < n:
        size = np.int64(n - i)
        keep = True
        if state[1] == 0 and i + 31 <= n:
            size = u32_at(b, i + 1) + 1
            if size < 31 or size > n - i:
                size = n - i
            message = b[i + 30]
            if message == 82 or message == 89:  # 'R' 'Y'
                keep = True
            elif state[0] == 1:
                keep = False
                if message == 67:  # 'C'
                    state[0] = 0
                    state[2] += 1
            elif message == 66 and size >= 39:  # 'B' final lsn
                if i64_at(b, i + 31) < position:
                    keep = False
                    state[0] = 1
                else:
                    state[1] = 1
            elif message == 77 and size >= 40:  # 'M' flags lsn
                if i64_at(b, i + 32) <= position:
                    keep = False
                    state[2] += 1
                else:
                    state[1] = 1
        if keep:
            if target != i:
                for k in range(size):
                    b[target + k] = b[i + k]
            target += size
        i += size
    return target


class ResumptionFilter:
    """Drops what lies before `position`, until the first that does not. One a connection."""

    def __init__(self, position: int) -> None:
        self._position = position
        self._state = np.zeros(3, np.int64)

    @property
    def done(self) -> bool:
        """Whether everything from now on is new."""
        return bool(self._state[_DONE])

    @property
    def dropped(self) -> int:
        """Transactions and messages dropped so far."""
        return int(self._state[_DROPPED])

    def apply(self, chunk: Bytes) -> Bytes:
        """Return what is new of a run of whole XLogData frames; `chunk` is changed in place.

        :raises TailraceError: `PROTOCOL_VIOLATION` if the dropping does not end.
        """
        if self.done:
            return chunk
        left = _drop(chunk, self._position, self._state)
        if self.dropped > TRANSACTIONS_DROPPED_MAX:
            raise TailraceError(
                Kind.PROTOCOL_VIOLATION,
                f"resume at {format_lsn(self._position)}: the server sent more than "
                f"{TRANSACTIONS_DROPPED_MAX} transactions that end before it",
            )
        return chunk[: int(left)]
