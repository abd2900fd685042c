"""The partitions of one task, with their processed and committed offsets; the connector's own offsets."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tailrace.engine.contracts import OffsetStore
from tailrace.engine.offsets.stores import Key, key_of
from tailrace.engine.offsets.tracker import CommitPoint, Tracker
from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Batch, Offset, Partition


@dataclass(slots=True, eq=False)
class TrackedPartition:
    """A partition and the tracker of its records."""

    partition: Partition
    tracker: Tracker = field(default_factory=Tracker)


#: Points of several partitions, to be committed together.
Points = Sequence[tuple[TrackedPartition, CommitPoint]]


class TrackedPartitions:
    """The partitions of which batches or offsets were taken. Callers hold `lock`, except for `take`, `write`.

    :param claim: called with each partition before its first batch is taken or its first offset is written.
    """

    def __init__(self, claim: Callable[[Partition], None]) -> None:
        # Reentrant: a policy, which is asked under it, may look at the engine's view.
        self.lock = threading.RLock()
        self.committed_records = 0
        self.is_closed = False  # nothing more is tracked
        self.has_dropped = False  # a polled batch was dropped: an offset written now may come after it
        self._claim = claim
        self._all: dict[Key, TrackedPartition] = {}
        self._of_batch: dict[int, TrackedPartition] = {}
        self._noted = itertools.count(-1, -1)  # negative numbers, which no batch has

    def take(self, batch: Batch) -> None:
        """Track a batch, as `Tracker.begin` does and with its errors; takes the lock."""
        self._claim_new(batch.partition)
        with self.lock:
            found = self._of(batch.partition)
            found.tracker.begin(batch.number, batch.polled, batch.offsets, batch.end, batch.transaction_ends)
            self._of_batch[batch.number] = found

    def write(self, partition: Partition, offset: Offset) -> None:
        """Track an offset that belongs to no record, as `Tracker.note` does; takes the lock."""
        self._claim_new(partition)
        with self.lock:
            if not self.is_closed and not self.has_dropped:
                self._of(partition).tracker.note(next(self._noted), dict(offset))

    def tracker_of(self, batch: Batch) -> Tracker | None:
        """Return the tracker of a batch; None: the batch was processed and forgotten, or this is closed."""
        found = self._of_batch.get(batch.number)
        return None if found is None or self.is_closed else found.tracker

    def points(self, *, at_transaction_end: bool = False) -> Points:
        """Return the furthest points that can be committed, or the last at which no transaction is open."""
        self._advance()
        found = [
            (kept, kept.tracker.transaction_end if at_transaction_end else kept.tracker.furthest)
            for kept in self._all.values()
        ]
        return [(kept, point) for kept, point in found if point is not None]

    def committed(self, points: Points) -> None:
        """Note that points were committed."""
        self.committed_records += uncommitted(points)
        for kept, point in points:
            kept.tracker.committed(point)

    @property
    def processed(self) -> int:
        """Number of records up to which everything is processed, in all partitions."""
        self._advance()
        return sum(kept.tracker.processed for kept in self._all.values())

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
    """Return the number of records between the committed points and these points."""
    return sum(kept.tracker.uncommitted_records(point) for kept, point in points)


def are_transaction_ends(points: Points) -> bool:
    """Return whether no transaction of the source is open after any of these points."""
    return all(point == kept.tracker.transaction_end for kept, point in points)


class ConnectorOffsets:
    """The connector's writer of offsets to the engine's store (`contracts.OffsetWriter`). Any thread.

    :param timeout_s: longest time for a write.
    """

    def __init__(self, store: OffsetStore, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._writing: Counter[Key] = Counter()
        self._of_tasks: set[Key] = set()
        self._closed = False

    def write(self, partition: Partition, offset: Offset) -> None:
        """Store an offset; it is durable when this returns, if the store is durable.

        :raises TailraceError: `ENGINE_MISUSED` for a partition from which a task has returned records or
            offsets, and once the engine stops; the store's errors.
        """
        key = key_of(partition)
        with self._changed:
            if self._closed:
                raise _refused("the engine stops", "write offsets before the connector is stopped")
            if key in self._of_tasks:
                raise _refused(
                    f"partition {dict(partition)} is a task's",
                    "the engine commits its offset as records are processed; let the task write it, or write "
                    "it before there are tasks",
                )
            self._writing[key] += 1
        try:
            self._store.write([(partition, dict(offset))], self._timeout_s)
        finally:
            with self._changed:
                self._writing -= Counter([key])
                self._changed.notify_all()

    def claim(self, partition: Partition) -> None:
        """Reserve the offset of a partition for a task from now on.

        Waits for the connector's write of that partition, which must not overwrite the task's commits.

        :raises TailraceError: `OFFSETS_UNWRITABLE` if the write hangs.
        """
        key = key_of(partition)
        with self._changed:
            self._of_tasks.add(key)
            if not self._changed.wait_for(lambda: not self._writing[key], self._timeout_s):
                raise TailraceError(
                    Kind.OFFSETS_UNWRITABLE,
                    "begin with a partition: the connector's own write of its offset hangs",
                    "check where offsets are stored; write offsets of tasks before there are tasks",
                    dict(partition),
                )

    def close(self) -> None:
        """Refuse further writes."""
        self._closed = True


def _refused(found: str, hint: str) -> TailraceError:
    return TailraceError(Kind.ENGINE_MISUSED, f"write an offset of the connector: {found}", hint)
