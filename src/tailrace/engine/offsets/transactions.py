"""Commits records and offsets of one task in one Kafka transaction: handler and committer are one object.

Records in the open transaction are marked, and marked records are in it or were committed: both change
together, under one lock. So a commit at the end of a batch, while no records arrive, or at the task's end
commits exactly the offsets of the records that were sent.

An error ends the transaction, and with it this object: nothing more is sent or marked. The task's thread
raises it at its next turn, and the task's next attempt continues from the offsets in the topic.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import structlog

from tailrace import failpoints
from tailrace.engine.contracts import Clock, CommitPolicy, OffsetReader
from tailrace.engine.offsets.commits import Commits
from tailrace.engine.offsets.partitions import Points, are_transaction_ends, uncommitted
from tailrace.errors import TailraceError
from tailrace.kafka.client.failures import LIMIT_S
from tailrace.kafka.events.dead_letters import sizes
from tailrace.kafka.producer.account import too_long
from tailrace.kafka.producer.task_producer import TaskProducer
from tailrace.records.batch import Batch, Offset, Partition
from tailrace.records.events import Events, bytes_of

log = structlog.get_logger(__name__)

#: Limits of a transaction, which ends at either: bytes of its values, and its time limit divided by this.
_BYTES_MAX = 16 << 20
_TIME_SHARE = 4
#: Most records of a batch that are sent between two checks of these limits; fewer if they are large.
_RECORDS = 4096


class TransactionCommits(Commits):
    """Sends a task's records, and commits them with their offsets.

    Any thread. Only the engine calls `begin`, `take`, `tick` and `finish`.

    :param policy: decides where transactions end.
    :param splits: whether a large or long transaction of the source is split into several.
    """

    def __init__(
        self,
        producer: TaskProducer,
        policy: CommitPolicy,
        clock: Clock,
        *,
        splits: bool,
        committed: Callable[[Partition, Offset], None],
        name: str,
        claim: Callable[[Partition], None],
    ) -> None:
        super().__init__(policy, clock, committed=committed, name=name, claim=claim)
        self._producer = producer
        self._splits = splits
        # Held, perhaps for long, while records are sent or committed; `_lock` is taken within it.
        self._writing = threading.Lock()
        self._is_over = False  # the producer is closed

    def begin(self) -> OffsetReader:
        """Fence the previous attempt, and return the reader of the committed offsets.

        :raises TailraceError: as `TaskProducer.open`.
        """
        with self._held():
            self._producer.open()
        return self._producer

    def send(self, events: Events) -> None:
        """Send a batch and mark it. This is the task's handler, on its delivering thread."""
        batch = events.batch
        with self._held():
            if self._failure is not None or self._partitions.is_closed:
                return  # the batch is delivered again
            try:
                for first, last in self._cuts(events):
                    for topic, found in events.by_topic(first, last):
                        self._producer.send(topic, found)
                    self._mark(batch, first, last)
                    if last < batch.polled:  # at the end of the batch: `mark_batch_finished`
                        self._commit_if_due(is_within=True)
            except BaseException as error:  # noqa: BLE001 - the task's thread raises it
                self._fail(error)

    def mark_processed(self, batch: Batch, place: int | None = None, offset: Offset | None = None) -> None:
        """Count a batch as processed that has no records left to send."""
        self._mark(batch, 0, batch.polled)

    def mark_places(self, batch: Batch, places: Sequence[int]) -> None:
        """Do nothing: `send` marks the records it sends."""

    def mark_dropped(self, batch: Batch) -> None:
        """Do nothing, likewise."""

    def mark_batch_finished(self, batch: Batch) -> None:
        """Commit if the policy wants it."""
        with self._held():
            self._try_to_commit()

    def tick(self) -> None:
        """Commit if the policy wants it, and nothing is being sent.

        :raises BaseException: the error that ended the transaction.
        """
        with self._held(0.0) as is_held:
            if is_held:
                self._try_to_commit()
        self._raise_failure()

    def finish(self, timeout_s: float) -> bool:
        """Commit what can be committed, and close the producer; return whether all of that is committed.

        A batch that is being sent is abandoned: the thread that sends it closes the producer.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._held(timeout_s) as is_held:
            if is_held and not self._partitions.is_closed:
                self._try_to_commit(max(0.1, deadline_s - time.monotonic()), at_end=True)
            self._partitions.is_closed = True
        return is_held and self._failure is None

    @contextlib.contextmanager
    def _held(self, timeout_s: float = -1) -> Iterator[bool]:
        """Lock the producer, and yield whether that succeeded in time; the last holder closes it."""
        is_held = self._writing.acquire(timeout=timeout_s)
        try:
            yield is_held
        finally:
            if is_held:
                if self._partitions.is_closed and not self._is_over:
                    self._is_over = True
                    self._producer.close()
                self._writing.release()

    def _mark(self, batch: Batch, first: int, last: int) -> None:
        with self._lock:
            tracker = self._partitions.tracker_of(batch)
            if tracker is None or self._failure is not None:
                return
            if last == batch.polled:
                tracker.mark_batch(batch.number)
            else:
                tracker.mark_places(batch.number, range(first, last))

    def _cuts(self, events: Events) -> Iterator[tuple[int, int]]:
        """Yield the ranges of places that are sent together: a transaction may end after each."""
        batch, ends = events.batch, events.batch.transaction_ends
        if self._splits:
            bounds = fitting_places(events)
        elif ends is None or ends[-1] or not ends.any():
            bounds = [0, batch.polled]
        else:
            bounds = [0, int(np.flatnonzero(ends)[-1]) + 1, batch.polled]
        return itertools.pairwise(bounds)

    def _try_to_commit(self, timeout_s: float | None = None, *, at_end: bool = False) -> None:
        if self._failure is None and not self._partitions.is_closed:
            try:
                self._commit_if_due(timeout_s, at_end=at_end)
            except BaseException as error:  # noqa: BLE001 - the task's thread raises it
                self._fail(error)

    def _commit_if_due(
        self, timeout_s: float | None = None, *, is_within: bool = False, at_end: bool = False
    ) -> None:
        """Commit the sent records if the policy wants it, the transaction is large, or the task ends.

        :param is_within: the batch is only partly sent.
        """
        with self._lock:
            points = self._partitions.points()
            records, is_end = uncommitted(points), are_transaction_ends(points)
        if not points:
            return
        may_end = is_end or self._splits
        since_s = self._clock.monotonic() - self._last_s
        is_asked = not (is_within and self._splits)
        is_due = is_asked and self._policy.is_due(records, is_end, since_s)
        if is_due or (may_end and (at_end or self._is_full)):
            self._commit(points, timeout_s)

    @property
    def _is_full(self) -> bool:
        progress = self._producer.progress
        return progress.bytes >= _BYTES_MAX or progress.seconds >= self._producer.limit_s / _TIME_SHARE

    def _commit(self, points: Points, timeout_s: float | None) -> None:
        failpoints.hit("engine.before_commit")
        self._producer.commit([(kept.partition, point.offset) for kept, point in points], timeout_s)
        failpoints.hit("engine.after_commit")
        with self._lock:
            self._partitions.committed(points)
        self._last_s = self._clock.monotonic()
        self._notify(points)

    def _fail(self, error: BaseException) -> None:
        if not self._splits and isinstance(error, TailraceError) and LIMIT_S in error.context:
            error = too_long(error, "allow it to be split: transaction_boundary: poll")
        self._failure = self._failed = error
        log.warning(
            "a transaction was not committed: records after the topic's last commit are delivered again",
            task=self._name,
            kind=str(error.kind) if isinstance(error, TailraceError) else type(error).__name__,
        )


def fitting_places(events: Events) -> list[int]:
    """Return places that divide a batch into parts of at most `_RECORDS` places and half of `_BYTES_MAX`, or
    of a single larger one.
    """
    polled, large = events.batch.polled, _BYTES_MAX // 2
    if sum(map(bytes_of, events.converted)) <= large:
        return [*range(0, polled, _RECORDS), polled]
    before = np.zeros(polled + 1, np.int64)  # bytes before each place
    for places, converted in events.parts():
        np.add.at(before, places + 1, sizes(converted))
    np.cumsum(before, out=before)
    bounds = [0]
    while (first := bounds[-1]) < polled:
        upto = int(np.searchsorted(before, before[first] + large, side="right")) - 1
        bounds.append(min(max(upto, first + 1), first + _RECORDS, polled))
    return bounds
