"""Records and offsets of one task in one transaction of Kafka: the handler and the committer are one.

What is in the open transaction is marked, and what is marked is in it or was committed: both change under one
lock, at once. So a commit at the end of a batch, while nothing comes, or at the task's end, commits
the offsets that the records lead to.

An error ends the transaction, and with it this object: nothing more is sent or marked. The task's thread
raises it at its next turn, and the task's next attempt goes on from the offsets that the topic has.
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
from tailrace.kafka.producer.account import too_long
from tailrace.kafka.producer.task_producer import TaskProducer
from tailrace.records.batch import Batch, Offset, Partition
from tailrace.records.events import Events

log = structlog.get_logger(__name__)

#: A transaction ends once its values have so many bytes, or this part of its time has passed.
_BYTES_MAX = 16 << 20
_TIME_SHARE = 4
#: Records of a batch that are sent before it is looked whether that is so.
_RECORDS = 4096


class TransactionCommits(Commits):
    """Sends what a task polled, and commits it with its offsets.

    Any thread. `begin`, `take`, `tick` and `finish` are the engine's.

    :param policy: says where transactions end.
    :param splits: whether a transaction of the source may be split, which one that is large or takes long is.
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
        # The first is held, perhaps for long, while something is sent or committed; the other within it.
        self._writing = threading.Lock()
        self._is_over = False  # the producer is closed

    def begin(self) -> OffsetReader:
        """Fence the attempt before, and return what reads the offsets that were committed.

        :raises TailraceError: as `TaskProducer.open`.
        """
        with self._held():
            self._producer.open()
        return self._producer

    def send(self, events: Events) -> None:
        """Send a batch, and mark it: the task's handler, on its delivering thread."""
        batch = events.batch
        with self._held():
            if self._failure is not None or self._partitions.is_closed:
                return  # it comes again
            try:
                for first, last in self._cuts(batch):
                    for topic, found in events.by_topic(first, last):
                        self._producer.send(topic, found)
                    self._mark(batch, first, last)
                    if last < batch.polled:  # at the end of the batch: `mark_batch_finished`
                        self._commit_if_due(is_within=True)
            except BaseException as error:  # noqa: BLE001 - the task's thread raises it
                self._fail(error)

    def mark_processed(self, batch: Batch, place: int | None = None, offset: Offset | None = None) -> None:
        """Count a batch as processed of which nothing is left to send."""
        self._mark(batch, 0, batch.polled)

    def mark_places(self, batch: Batch, places: Sequence[int]) -> None:
        """Nothing: what is sent is marked where it is sent."""

    def mark_dropped(self, batch: Batch) -> None:
        """Nothing, likewise."""

    def mark_batch_finished(self, batch: Batch) -> None:
        """Commit if the policy wants it."""
        with self._held():
            self._try_to_commit()

    def tick(self) -> None:
        """Commit if the policy wants it, and nothing is being sent.

        :raises BaseException: what ended the transaction.
        """
        with self._held(0.0) as is_held:
            if is_held:
                self._try_to_commit()
        self._raise_failure()

    def finish(self, timeout_s: float) -> bool:
        """Commit what can be committed, and close the producer; return whether all of that is committed.

        What is being sent is given up: the thread that sends it closes the producer.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._held(timeout_s) as is_held:
            if is_held and not self._partitions.is_closed:
                self._try_to_commit(max(0.1, deadline_s - time.monotonic()), at_end=True)
            self._partitions.is_closed = True
        return is_held and self._failure is None

    @contextlib.contextmanager
    def _held(self, timeout_s: float = -1) -> Iterator[bool]:
        """Hold the producer, and yield whether it is held in time; who holds it last closes it."""
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

    def _cuts(self, batch: Batch) -> Iterator[tuple[int, int]]:
        """Yield from which to before which place a batch is sent at once: a transaction may end there."""
        ends = batch.transaction_ends
        if self._splits:
            bounds = [*range(0, batch.polled, _RECORDS), batch.polled]
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
        """Commit what was sent if the policy wants it, the transaction is large, or the task ends.

        :param is_within: a batch is sent in part.
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
            error = too_long(error, "let it be split: transaction_boundary: poll")
        self._failure = self._failed = error
        log.warning(
            "a transaction was not committed: its records come again, behind the last commit in the topic",
            task=self._name,
            kind=str(error.kind) if isinstance(error, TailraceError) else type(error).__name__,
        )
