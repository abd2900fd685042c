"""Blocks in memory: what was appended to the log, from when it is durable until a consumer has taken it.

Three threads use it. The appending one puts blocks in, the syncing one says what is durable, the consumer's
takes. The first two never wait: a block that finds no room empties the buffer, which then takes nothing until
it is filled again. What the consumer works on counts until it comes back for more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from tailrace.changelog.format import HeldBlock


class BlockBuffer:
    """Holds blocks of one log in its order, at most `capacity_bytes` of frames, for one consumer.

    Blocks without changes are left out, unless a transaction that is held goes on in them: it is given out
    when its end is there. Those of several buffers are the same memory.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._blocks: deque[HeldBlock] = deque()
        self._size = self._working = self._durable = self._rows = 0
        self._goes_on_at = -1  # where the next block must begin; -1: anywhere
        self._lost = ""
        self.fills = False

    @property
    def size_bytes(self) -> int:
        """Bytes of frames that are held, those that the consumer works on among them."""
        return self._size + self._working

    @property
    def count(self) -> int:
        """How many blocks wait for the consumer, durable or not."""
        return len(self._blocks)

    @property
    def rows(self) -> int:
        """How many changes wait for the consumer, durable or not."""
        return self._rows

    @property
    def first_time_us(self) -> int:
        """Commit time (since 1970) at the end of the first block that waits; 0: none does."""
        with self._lock:
            return self._blocks[0].header.position_time_us if self._blocks else 0

    @property
    def lost(self) -> str:
        """Why it has let go of everything since it was filled last; empty: it has not."""
        return self._lost

    def fill(self) -> None:
        """Take what is appended from now on."""
        self._empty(fills=True, lost="")

    def drop(self) -> None:
        """Let go of everything, and take nothing more; the consumer works on nothing of it."""
        self._empty(fills=False, lost=self._lost)

    def append(self, block: HeldBlock) -> None:
        """Take a block that was just appended, if anything in it is for a consumer."""
        header = block.header
        with self._lock:
            if not self.fills:
                return
            if self._goes_on_at not in (-1, header.log_offset):
                self._lose("capture began again elsewhere in the log")
                return
            self._goes_on_at = header.end
            is_within_held = bool(self._blocks) and self._blocks[-1].header.open_at_end is not None
            if not (header.rows or header.has_schema or is_within_held):
                return
            if self.size_bytes + header.raw_size > self.capacity_bytes:
                self._lose("buffer full")
                return
            self._blocks.append(block)
            self._size += header.raw_size
            self._rows += header.rows

    def cut(self, log_offset: int) -> None:
        """Forget what the log had from here on: it was cut back to this offset, or is that long."""
        with self._lock:
            while self._blocks and self._blocks[-1].header.end > log_offset:
                gone = self._blocks.pop().header
                self._size, self._rows = self._size - gone.raw_size, self._rows - gone.rows
            self._goes_on_at = min(self._goes_on_at, log_offset)

    def durable(self, log_offset: int) -> None:
        """Give out what lies before this offset: it is durable."""
        self._durable = max(self._durable, log_offset)

    def take(self, bytes_max: int) -> Sequence[HeldBlock]:
        """Return blocks that have become durable, in order; none if none have.

        Those that were returned before are done with. What comes is whole transactions, of `bytes_max` or, if
        the first one has more, that one.
        """
        with self._lock:
            self._working = 0
            taken: list[HeldBlock] = []
            whole = size = 0
            for block in self._blocks:
                size += block.header.raw_size
                if block.header.end > self._durable or (whole and size > bytes_max):
                    break
                taken.append(block)
                if block.header.open_at_end is None:
                    whole, self._working = len(taken), size
            del taken[whole:]
            for _ in taken:
                self._blocks.popleft()
            self._size -= self._working
            self._rows -= sum(block.header.rows for block in taken)
            return taken

    def _lose(self, why: str) -> None:
        self._blocks.clear()
        self._size, self._rows, self._goes_on_at = 0, 0, -1
        self.fills, self._lost = False, why

    def _empty(self, *, fills: bool, lost: str) -> None:
        with self._lock:
            self._working = 0
            self._lose(lost)
            self.fills = fills
