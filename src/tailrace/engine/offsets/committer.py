"""The committer of one task: tracks marked records, asks the policy when to commit, writes the offsets.

The policy is asked at the end of each batch and, while records are marked, after every `LOOK_RECORDS`
of them and every `LOOK_S`: a batch may take minutes.

Writes happen on the committer's own thread, one at a time. The thread that finishes a batch waits at most
`timeout_s` for the write; after that both the engine and the write continue: no other write begins until
it has ended, and if it succeeds after all, it counts. Within a batch no thread waits for a write.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import structlog

from tailrace import failpoints
from tailrace.engine.contracts import Clock, CommitPolicy, OffsetReader, OffsetStore
from tailrace.engine.offsets.commits import Commits
from tailrace.engine.offsets.partitions import Points, are_transaction_ends, uncommitted
from tailrace.engine.threads import belonging
from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Batch, Offset, Partition

log = structlog.get_logger(__name__)

#: Interval at which the policy is asked while processed records are not committed, in seconds.
LOOK_S = 0.2
#: Records, marked one by one, after which the policy is asked as well.
LOOK_RECORDS = 256
#: Wait before a failed commit is retried within a batch, in seconds.
AGAIN_S = 1.0
#: Time since the last commit that is longer than any policy's interval, in seconds.
_FOREVER_S = 1e9


@dataclass(slots=True, eq=False)
class _Write:
    # Points to commit, of several partitions, and the outcome.
    points: Points
    done: threading.Event = field(default_factory=threading.Event)
    succeeded: bool = False
    is_late: bool = False  # a thread waited `timeout_s` for it: no thread waits again


class OffsetCommitter(Commits):
    """Tracks which records of a task are processed, and commits its offsets.

    Any thread. Only the engine calls `take`, `tick` and `finish`.

    :param committed: called on the writing thread; never after `finish` has returned.
    :param timeout_s: longest time for which a commit blocks the thread that finishes a batch.
    """

    def __init__(
        self,
        store: OffsetStore,
        policy: CommitPolicy,
        clock: Clock,
        *,
        committed: Callable[[Partition, Offset], None],
        timeout_s: float = 5.0,
        name: str = "task",
        claim: Callable[[Partition], None] = lambda _: None,
    ) -> None:
        super().__init__(policy, clock, committed=committed, name=name, claim=claim)
        self._store = store
        self._timeout_s = timeout_s
        self._notifying = threading.Lock()  # held while the task is notified of a commit
        self._write: _Write | None = None
        self._writes: queue.SimpleQueue[_Write | Literal["look", "end"]] | None = None
        self._marked = 0  # records since the policy was last asked
        self._is_looking = False
        self._thread: threading.Thread | None = None
        # Bound to the engine of this thread: the thread that marks first may be the user's.
        self._work_as_engine = belonging(self._work)
        self._failures = 0
        self._failed_s = 0.0

    @property
    def is_writing(self) -> bool:
        """Whether a write is under way; one that hangs outlives `finish`."""
        return self._write is not None

    def begin(self) -> OffsetReader:
        """Return the reader of the committed offsets."""
        return self._store

    def mark_processed(self, batch: Batch, place: int | None = None, offset: Offset | None = None) -> None:
        """Count a record of `batch`, or all of it, as processed; after `finish` this has no effect."""
        with self._lock:
            # Batches are forgotten once they are processed; marking one again has no effect.
            tracker = self._partitions.tracker_of(batch)
            if tracker is None:
                return
            if place is None:
                tracker.mark_batch(batch.number, offset)
                self._has_marked(0)
            else:
                tracker.mark(batch.number, place, offset)
                self._has_marked(1)

    def mark_places(self, batch: Batch, places: Sequence[int]) -> None:
        """Count records of `batch` as processed, by their places; after `finish` this has no effect."""
        with self._lock:
            tracker = self._partitions.tracker_of(batch)
            if tracker is not None:
                tracker.mark_places(batch.number, places)
                self._has_marked(len(places))

    def _has_marked(self, records: int) -> None:
        # Under the lock.
        self._marked += records
        if self._marked >= LOOK_RECORDS:
            self._look()
        elif not self._is_looking:
            self._is_looking = True
            self._queue().put("look")

    def mark_dropped(self, batch: Batch) -> None:
        """Count the records as processed that were polled with `batch` and dropped by transformations."""
        if len(batch) == batch.polled:
            return
        is_dropped = np.ones(batch.polled, np.bool_)
        is_dropped[batch.places] = False
        places = np.flatnonzero(is_dropped)
        with self._lock:
            tracker = self._partitions.tracker_of(batch)
            if tracker is not None:
                tracker.mark_places(batch.number, places)

    def mark_batch_finished(self, batch: Batch) -> None:
        """Commit if the policy wants it: the caller marks nothing more in `batch`."""
        self._commit_if_due()

    def tick(self) -> None:
        """Commit if the policy wants it: after a batch, and while no records arrive.

        :raises TailraceError: `OFFSETS_PREEMPTED` if the store raised it: another engine has taken over.
        """
        self._raise_failure()
        self._commit_if_due()

    def _commit_if_due(self) -> None:
        with self._lock:
            earlier = self._write
        if earlier is not None and not earlier.is_late:
            self._await(earlier, self._timeout_s)
        with self._lock:
            write = None if self._partitions.is_closed else self._due()
            self._begin_write(write)
        if write is not None:
            self._await(write, self._timeout_s)

    def _look(self) -> None:
        # Under the lock: begins a commit if the policy wants it, without waiting.
        self._marked = 0
        if self._partitions.is_closed or self._failed is not None:
            return
        if not self._failures or self._clock.monotonic() - self._failed_s >= AGAIN_S:
            self._begin_write(self._due())

    def finish(self, timeout_s: float) -> bool:
        """Commit all committable offsets and stop tracking; return whether they are all stored.

        Takes at most `timeout_s`, whatever the store and the task do.
        """
        deadline_s = time.monotonic() + timeout_s
        complete = self._commit_all(deadline_s)
        is_held = self._notifying.acquire(timeout=max(0.0, deadline_s - time.monotonic()))
        with self._lock:
            self._partitions.is_closed = True
            if self._writes is not None:
                self._writes.put("end")
        if is_held:
            self._notifying.release()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return complete

    def _commit_all(self, deadline_s: float) -> bool:
        with self._lock:
            earlier = self._write
        if earlier is not None and not earlier.done.wait(max(0.0, deadline_s - time.monotonic())):
            return False
        with self._lock:
            points = self._last_points()
            write = _Write(points) if points and not self._partitions.is_closed else None
            self._begin_write(write)
        if write is None:
            return not points
        return self._await(write, max(0.0, deadline_s - time.monotonic()))

    def _last_points(self) -> Points:
        # Under the lock. The furthest points; or the last ends of transactions, if the policy never commits
        # within one: a handler that buffers an open transaction needs all of its records again.
        points = self._partitions.points()
        if are_transaction_ends(points):
            return points
        try:
            takes_all = self._policy.is_due(sys.maxsize, False, _FOREVER_S)
        except BaseException as error:  # noqa: BLE001 - raised by the user's policy; the end continues
            log.warning("a commit policy failed", task=self._name, error=type(error).__name__)
            takes_all = False
        return points if takes_all else self._partitions.points(at_transaction_end=True)

    def _due(self) -> _Write | None:
        # Under the lock. The furthest points if the policy commits those, else the ends of transactions.
        if self._write is not None:
            return None
        since_s = self._clock.monotonic() - self._last_s
        for at_end in (False, True):
            points = self._partitions.points(at_transaction_end=at_end)
            is_end = at_end or are_transaction_ends(points)
            if points and self._policy.is_due(uncommitted(points), is_end, since_s):
                return _Write(points)
            if is_end:
                return None
        return None

    def _begin_write(self, write: _Write | None) -> None:
        if write is None:
            return
        self._write = write
        self._queue().put(write)

    def _queue(self) -> queue.SimpleQueue[_Write | Literal["look", "end"]]:
        # Under the lock. The queue of the committer's thread, which starts with the first entry.
        if self._writes is None:
            self._writes = queue.SimpleQueue()
            name = f"commits of {self._name}"
            self._thread = threading.Thread(target=self._work_as_engine, name=name, daemon=True)
            self._thread.start()
        return self._writes

    def _await(self, write: _Write, timeout_s: float) -> bool:
        if not write.done.wait(timeout_s):
            write.is_late = True
            log.warning(
                "offsets are not stored in time: the engine continues, and so does the write",
                task=self._name,
                timeout_s=timeout_s,
            )
        return write.succeeded

    def _work(self) -> None:
        # On the committer's thread: writes, and asks the policy while anything processed is uncommitted.
        writes = self._writes
        assert writes is not None
        while True:
            try:
                wanted = writes.get(timeout=LOOK_S if self._is_looking else None)
            except queue.Empty:
                self._look_once()
                continue
            if wanted == "end":
                return
            if isinstance(wanted, _Write):
                self._store_points(wanted)

    def _look_once(self) -> None:
        with self._lock:
            try:
                self._look()
            except BaseException as error:  # noqa: BLE001 - the user's policy; the task's thread raises it
                self._failed = error
            is_left = bool(self._partitions.points())
            self._is_looking = is_left and not self._partitions.is_closed and self._failed is None

    def _store_points(self, write: _Write) -> None:
        try:
            failpoints.hit("engine.before_commit")
            self._store.write([(kept.partition, p.offset) for kept, p in write.points], self._timeout_s)
        except BaseException as error:  # noqa: BLE001 - the engine continues whatever a store raises
            self._has_failed(write, error)
        else:
            self._has_succeeded(write)

    def _has_failed(self, write: _Write, error: BaseException) -> None:
        with self._lock:
            self._failures += 1
            self._failed_s = self._clock.monotonic()
            self._failure = error
            self._write = None
            is_preempted = isinstance(error, TailraceError) and error.kind is Kind.OFFSETS_PREEMPTED
            if is_preempted:
                self._failed = error
        if is_preempted:
            log.error("another engine has taken over the offsets: this one stops", task=self._name)
            write.done.set()
            return
        message = error.message if isinstance(error, TailraceError) else type(error).__name__
        log.warning(
            "offsets were not stored: retrying after a later batch",
            task=self._name,
            kind=str(error.kind if isinstance(error, TailraceError) else Kind.OFFSETS_UNWRITABLE),
            message=message,
            failures=self._failures,
        )
        write.done.set()

    def _has_succeeded(self, write: _Write) -> None:
        failpoints.hit("engine.after_commit")
        with self._notifying:
            with self._lock:
                self._partitions.committed(write.points)
                self._last_s = self._clock.monotonic()
                failures, self._failures, self._failure = self._failures, 0, None
                self._write = None
            write.succeeded = True
            self._notify(write.points)
        if failures:
            log.info("offsets are stored again", task=self._name, failures=failures)
        write.done.set()
