"""The partitions of one task: what was taken of each, what of it is processed, and what is committed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tailrace.engine.offsets.stores import Key, key_of
from tailrace.engine.offsets.tracker import CommitPoint, Tracker
from tailrace.records.batch import Batch, Offset, Partition


@dataclass(slots=True, eq=False)
class TrackedPartition:
    """A partition and what is known of it."""

    partition: Partition
    tracker: Tracker = field(default_factory=Tracker)


#: Points of several partitions, to be committed together.
Points = Sequence[tuple[TrackedPartition, CommitPoint]]


class TrackedPartitions:
    """Each partition that something was taken of. Callers hold `lock`, but for `take` and `write`.

    :param claim: is called with each partition before its first batch is taken, or its first offset.
    """

    def __init__(self, claim: Callable[[Partition], None]) -> None:
        self.lock = threading.Lock()
        self.committed_records = 0
        self.is_closed = False  # nothing is taken note of any more
        self._claim = claim
        self._all: dict[Key, TrackedPartition] = {}
        self._of_batch: dict[int, TrackedPartition] = {}
        self._noted = itertools.count(-1, -1)  # numbers that no batch has

    def take(self, batch: Batch) -> None:
        """Take note of a batch, as `Tracker.begin`, which it raises the errors of; locks."""
        self._claim_new(batch.partition)
        with self.lock:
            found = self._of(batch.partition)
            found.tracker.begin(batch.number, batch.polled, batch.offsets, batch.end, batch.transaction_ends)
            self._of_batch[batch.number] = found

    def write(self, partition: Partition, offset: Offset) -> None:
        """Take note of an offset that no record brings, as `Tracker.note`; locks."""
        self._claim_new(partition)
        with self.lock:
            if not self.is_closed:
                self._of(partition).tracker.note(next(self._noted), dict(offset))

    def tracker_of(self, batch: Batch) -> Tracker | None:
        """Return what tracks a batch; None: it was processed, and is forgotten."""
        found = self._of_batch.get(batch.number)
        return None if found is None else found.tracker

    def points(self, *, at_transaction_end: bool = False) -> Points:
        """Return the furthest points that can be committed, or the last at which no transaction is open."""
        self._advance()
        found = [
            (kept, kept.tracker.transaction_end if at_transaction_end else kept.tracker.furthest)
            for kept in self._all.values()
        ]
        return [(kept, point) for kept, point in found if point is not None]

    def committed(self, points: Points) -> None:
        """Take note that points were committed."""
        self.committed_records += uncommitted(points)
        for kept, point in points:
            kept.tracker.committed(point)

    @property
    def processed(self) -> int:
        """Records before which everything is processed, of all partitions."""
        self._advance()
        return sum(kept.tracker.processed for kept in self._all.values())

    @property
    def open_batches(self) -> int:
        """Batches that were begun and wait to be processed."""
        return sum(kept.tracker.open_batches for kept in self._all.values())

    def _claim_new(self, partition: Partition) -> None:
        if key_of(partition) not in self._all:
            self._claim(partition)

    def _of(self, partition: Partition) -> TrackedPartition:
        return self._all.setdefault(key_of(partition), TrackedPartition(partition))

    def _advance(self) -> None:
        for kept in self._all.values():
            for number in kept.tracker.advance():
                self._of_batch.pop(number, None)


def uncommitted(points: Points) -> int:
    """Return how many records lie between what was committed and these points."""
    return sum(kept.tracker.uncommitted_records(point) for kept, point in points)


def are_transaction_ends(points: Points) -> bool:
    """Tell whether no transaction of the source is open after any of these points."""
    return all(point == kept.tracker.transaction_end for kept, point in points)
