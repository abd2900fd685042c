"""Tracks which records of a partition are processed, and up to where its offset may be committed. Pure.

An offset is committable when every record before it is processed, in whatever order and on whatever
threads that happened. Batches are begun in the partition's order. Marks in order take one number of memory
per batch; the first mark out of order takes a byte for each place of the batch; a batch that is marked as
a whole takes nothing.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tailrace.errors import Kind, TailraceError

Offset = Mapping[str, Any]

#: Limit of batches that are begun and not processed: beyond it, the handler has stopped marking.
BATCHES_MAX = 10_000

_DONE = 1

#: `transaction_ends` of a batch without records: a transaction is open after it if one was open before.
_NOT_SAID = np.empty(0, np.bool_)


class BatchOffsets(Protocol):
    """The offset of each place of a batch."""

    def __getitem__(self, place: int, /) -> Offset: ...


@dataclass(frozen=True, slots=True)
class CommitPoint:
    """A point up to which everything is processed.

    :param records: number of the partition's records before it, from the first that was begun.
    :param batches: number of whole batches before it.
    """

    offset: Offset
    records: int
    batches: int


@dataclass(slots=True, eq=False)
class _Open:
    # A batch that is not processed as a whole.
    offsets: BatchOffsets
    polled: int
    end: Offset | None
    ends: Sequence[int] | None  # the number of places before each end of a transaction, rising
    records_before: int
    batches_before: int
    done_before: int = 0  # the places before it are processed
    out_of_order: bytearray | None = None  # for each place from `done_before` on, whether it is processed
    verbatim: dict[int, Offset] = field(default_factory=dict)
    is_done: bool = False
    is_within: bool = False  # the batch has no record, and is within a transaction

    def mark(self, place: int) -> None:
        if self.out_of_order is not None:
            self.out_of_order[place] = _DONE
        elif place == self.done_before:
            self.done_before += 1
        elif place > self.done_before:
            self.out_of_order = bytearray(self.polled)
            self.out_of_order[place] = _DONE

    def advance(self) -> None:
        if self.out_of_order is not None:
            found = self.out_of_order.find(0, self.done_before)
            self.done_before = self.polled if found < 0 else found
        if self.polled and self.done_before == self.polled:
            self.is_done = True

    def point(self, count: int) -> CommitPoint | None:
        # After the first `count` places.
        whole = count == self.polled
        offset = self.verbatim.get(count - 1)
        if offset is None:
            offset = self.end if whole else None
        if offset is None and count:
            offset = self.offsets[count - 1]
        if offset is None:
            return None
        return CommitPoint(offset, self.records_before + count, self.batches_before + whole)

    def transaction_end(self) -> int | None:
        # How many of the processed places lie before the last end of a transaction among them.
        if self.is_within:
            return None
        if self.ends is None or not self.polled:
            return self.done_before
        # Called often while records are marked, under the lock of the marking thread: it must neither loop
        # over the places nor release the interpreter's lock, as numpy's functions do.
        ends = bisect.bisect_right(self.ends, self.done_before)
        return self.ends[ends - 1] if ends else None


class Tracker:
    """The tracker of one partition's records. Not thread-safe: the caller locks.

    `furthest` is the last point that can be committed, `transaction_end` the last of those at which no
    transaction is open; None if there is no such point after the committed one.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._order: deque[int] = deque()
        self._records = 0
        self._batches = 0
        self._processed = 0
        self._committed = (0, 0)
        self._furthest: CommitPoint | None = None
        self._transaction_end: CommitPoint | None = None
        self._is_within = False  # whether a transaction is open after the last batch that was begun

    @property
    def processed(self) -> int:
        """Number of records up to which everything is processed."""
        return self._processed

    @property
    def furthest(self) -> CommitPoint | None:
        return self._uncommitted(self._furthest)

    @property
    def transaction_end(self) -> CommitPoint | None:
        return self._uncommitted(self._transaction_end)

    def begin(
        self,
        number: int,
        polled: int,
        offsets: BatchOffsets,
        end: Offset | None = None,
        transaction_ends: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Begin a batch, in the order of the partition, before any of its records is marked.

        :param number: identifies it from now on; the other parameters are as in `records.batch.Batch`.
        :raises TailraceError: `ENGINE_MISUSED` if too many batches are not processed.
        """
        if len(self._order) >= BATCHES_MAX:
            raise TailraceError(
                Kind.ENGINE_MISUSED,
                f"begin a batch: {BATCHES_MAX} batches were delivered and are not marked as processed",
                "make the handler mark each batch, or each of its records, eventually",
            )
        if number in self._open:
            raise ValueError(f"batch {number} was already begun")
        ends = None if transaction_ends is None else (np.flatnonzero(transaction_ends) + 1).tolist()
        self._open[number] = _Open(offsets, polled, end, ends, self._records, self._batches)
        self._order.append(number)
        self._records += polled
        self._batches += 1
        if polled or ends is None:
            self._is_within = ends is not None and ends[-1:] != [polled]
        self._open[number].is_within = not polled and self._is_within

    def note(self, number: int, offset: Offset) -> None:
        """Note an offset after all begun batches, as a batch without records.

        It replaces an earlier one that still waits, if no batch was begun after that.

        :param number: as in `begin`, whose errors it raises.
        """
        newest = self._open[self._order[-1]] if self._order else None
        if newest is None or newest.polled or not newest.is_done:
            self.begin(number, 0, (), offset, _NOT_SAID)
            newest = self._open[number]
            newest.is_done = True
        newest.end = offset
        newest.is_within = self._is_within

    def mark(self, number: int, place: int, offset: Offset | None = None) -> None:
        """Count a place of a batch as processed; marking it again has no effect.

        :param offset: the offset to commit, verbatim, if this place is the last one committed.
        :raises IndexError: the batch has no such place.
        """
        found = self._open.get(number)
        if found is None:
            return
        if not 0 <= place < found.polled:
            raise IndexError(f"place {place} of a batch of {found.polled}")
        if offset is not None:
            found.verbatim[place] = offset
        if not found.is_done:
            found.mark(place)

    def mark_places(self, number: int, places: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Count places of a batch as processed, in any order."""
        found = self._open.get(number)
        if found is None or found.is_done or not len(places):
            return
        if found.out_of_order is None:
            after = found.done_before + len(places)
            if list(places) == list(range(found.done_before, after)):
                found.done_before = after
                return
            found.out_of_order = bytearray(found.polled)
        np.frombuffer(found.out_of_order, np.uint8)[places] = _DONE

    def mark_batch(self, number: int, offset: Offset | None = None) -> None:
        """Count a whole batch as processed.

        :param offset: the offset to commit, verbatim, for the end of the batch.
        """
        found = self._open.get(number)
        if found is None:
            return
        found.is_done = True
        if offset is not None:
            found.verbatim[found.polled - 1] = offset

    def advance(self) -> list[int]:
        """Advance to where everything is processed; called before the points are read.

        Returns the numbers of the batches that are done, and forgets these batches.
        """
        done: list[int] = []
        while self._order:
            batch = self._open[self._order[0]]
            batch.advance()
            if batch.is_done:
                batch.done_before = batch.polled
            self._note(batch)
            if not batch.is_done:
                break
            done.append(self._order.popleft())
            del self._open[done[-1]]
        return done

    def committed(self, point: CommitPoint) -> None:
        """Note that a point was committed."""
        self._committed = max(self._committed, (point.records, point.batches))

    def uncommitted_records(self, point: CommitPoint) -> int:
        """Return the number of records between the committed point and `point`."""
        return point.records - self._committed[0]

    def _note(self, batch: _Open) -> None:
        self._processed = batch.records_before + batch.done_before
        if batch.done_before == 0 and not batch.is_done:
            return
        self._furthest = batch.point(batch.done_before) or self._furthest
        count = batch.transaction_end()
        if count is not None and (count or batch.is_done):
            self._transaction_end = batch.point(count) or self._transaction_end

    def _uncommitted(self, point: CommitPoint | None) -> CommitPoint | None:
        if point is None or (point.records, point.batches) <= self._committed:
            return None
        return point
