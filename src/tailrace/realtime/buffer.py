"""The buffer of real time: blocks that were appended to the log, until the consumer has taken them.

Three threads use it: one appends blocks, one reports what is durable, the consumer's takes durable blocks.
The first two never wait: a block that exceeds the capacity empties the buffer, which then accepts no blocks
until `fill` is called again. Blocks that the consumer has taken count until it calls `take` again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from tailrace.changelog.format import HeldBlock


class BlockBuffer:
    """The blocks of one log for one consumer, in log order, with at most `capacity_bytes` of frames.

    Blocks without changes are left out, unless they continue a transaction in the buffer, which is returned
    once its end is in the buffer. Several buffers share the memory of a block.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._blocks: deque[HeldBlock] = deque()
        self._size = self._working = self._durable = self._rows = 0
        self._goes_on_at = -1  # log offset at which the next block must start; -1: any
        self._lost = ""
        self.fills = False

    @property
    def size_bytes(self) -> int:
        """Size of the frames in the buffer, including those that the consumer has taken, in bytes."""
        return self._size + self._working

    @property
    def count(self) -> int:
        """Number of blocks that wait for the consumer, durable or not."""
        return len(self._blocks)

    @property
    def rows(self) -> int:
        """Number of changes that wait for the consumer, durable or not."""
        return self._rows

    @property
    def first_time_us(self) -> int:
        """Commit time (since 1970) at the end of the first block that waits; 0: there is none."""
        with self._lock:
            return self._blocks[0].header.position_time_us if self._blocks else 0

    @property
    def lost(self) -> str:
        """The reason for which the buffer was emptied since the last `fill`; empty: it was not."""
        return self._lost

    def fill(self) -> None:
        """Accept the blocks that are appended from now on."""
        self._empty(fills=True, lost="")

    def drop(self) -> None:
        """Remove all blocks and accept no more; the consumer no longer uses any that it has taken."""
        self._empty(fills=False, lost=self._lost)

    def append(self, block: HeldBlock) -> None:
        """Add a block that was just appended to the log, if it has anything for a consumer."""
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
        """Remove blocks after this offset, at which the log ends or to which it was cut back."""
        with self._lock:
            while self._blocks and self._blocks[-1].header.end > log_offset:
                gone = self._blocks.pop().header
                self._size, self._rows = self._size - gone.raw_size, self._rows - gone.rows
            self._goes_on_at = min(self._goes_on_at, log_offset)

    def durable(self, log_offset: int) -> None:
        """Allow `take` to return the blocks before this offset, which are durable."""
        self._durable = max(self._durable, log_offset)

    def take(self, bytes_max: int) -> Sequence[HeldBlock]:
        """Return the next durable blocks, in order; none if there are none.

        The consumer no longer uses the blocks of the previous call. The blocks have whole transactions, up to
        `bytes_max` or, if the first transaction is larger, only that one.
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
