"""The limit of a task's batches in flight, and the gate before each call of a handler."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tailrace.engine.contracts import Committer, StopEngine
from tailrace.records.batch import Batch

#: Interval at which a task that waits for room checks whether the engine wants it to end, in seconds.
_LOOK_S = 0.05

#: Delivered records are marked together: after this many, or after this time, in seconds.
SETTLE_RECORDS = 128
SETTLE_S = 0.002


@dataclass(slots=True)
class TaskCounts:
    """Counts of a task, over all its attempts.

    The task's thread counts up to `poll_s`, the limiter of the present attempt from `delivered` on.

    :param polled: records; `batches` is the number of their batches.
    :param processed: records in attempts that have ended, as is `committed`.
    :param polls_retried: number of starts and polls that failed and were retried.
    :param delivered: records of completely delivered batches.
    :param dropped: records of these batches that transformations dropped.
    :param retries: number of transformations, conversions and handler calls that failed and were retried.
    :param handling_s: seconds for which threads of this process called handlers, including waits before
        retries.
    :param calls: handlers that run now. Those of an attempt that has ended may still run: the next attempt
        begins when they have returned.
    :param batches_under_way: batches in flight now.
    :param bytes_under_way: size of these batches.
    """

    polled: int = 0
    batches: int = 0
    processed: int = 0
    committed: int = 0
    polls_retried: int = 0
    poll_s: float = 0.0
    delivered: int = 0
    dropped: int = 0
    retries: int = 0
    handling_s: float = 0.0
    calls: int = 0
    batches_under_way: int = 0
    bytes_under_way: int = 0


class InFlight:
    """A batch whose records are delivered one by one.

    :param size_bytes: the size that the limiter counts.
    """

    __slots__ = ("batch", "delivered", "done", "dropped", "left", "places", "size_bytes")

    def __init__(self, batch: Batch, size_bytes: int) -> None:
        self.batch = batch
        self.size_bytes = size_bytes
        #: The place of each record, in order.
        self.places: list[int] = (
            list(range(batch.polled)) if len(batch) == batch.polled else batch.places.tolist()
        )
        #: In ordered delivery: number of delivered records. One thread writes it, without a lock.
        self.delivered = 0
        #: Otherwise: places of records delivered and not yet marked. Any thread appends, without a lock.
        self.done: deque[int] = deque()
        #: Number of records that are not marked.
        self.left = len(batch)
        #: Number of records that transformations dropped after delivery began. Under the limiter's lock.
        self.dropped = 0

    def take_done(self) -> list[int]:
        """Return the places of records delivered since the last call. One thread at a time."""
        first, delivered = len(self.places) - self.left, self.delivered
        if first < delivered:
            found = self.places[first:delivered]
        else:
            found = [self.done.popleft() for _ in range(len(self.done))]
        self.left -= len(found)
        return found


class InFlightLimiter:
    """Limits the batches and bytes in flight; the gate for handler calls and for marking their records.

    The gate is shut once something failed, a handler asked to stop the engine, or the batches in flight were
    abandoned; in the last case nothing more is marked either. Any thread.

    :param stopping: set when the task is to end: waits for room end then.
    :param counts: of the task; updated until the batches in flight are abandoned.
    :param committer: marks delivered records.
    """

    def __init__(
        self,
        batches_max: int,
        bytes_max: int,
        stopping: threading.Event,
        counts: TaskCounts,
        committer: Committer,
    ) -> None:
        self._batches_max = batches_max
        self._bytes_max = bytes_max
        self._stopping = stopping
        self._counts = counts
        self._committer = committer
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._batches = 0
        self._bytes = 0
        self._ending = 0  # of these batches: all is marked, and a commit may be running
        self._ending_bytes = 0
        self._given_up = False
        self._failure: BaseException | None = None
        self._in_flight: list[InFlight] = []
        self._finished: list[InFlight] = []
        #: Number of records of `InFlight` batches that were marked so far.
        self.settled = 0
        #: Set once no handler may be called any more; `is_shut` is the same, for loops over records.
        self.shut = threading.Event()
        self.is_shut = False

    def take(self, size_bytes: int) -> None:
        """Wait until there is room for a batch, and count it. One batch always has room."""
        while not self._taken(size_bytes):
            # The thread that delivers may be in a call that hangs.
            self.settle()

    def _taken(self, size_bytes: int) -> bool:
        with self._lock:
            if self._is_full(size_bytes):
                self._changed.wait(_LOOK_S)
            if self._is_full(size_bytes):
                return False
            self._batches += 1
            self._bytes += size_bytes
            self._note_under_way()
            return True

    def _is_full(self, size_bytes: int) -> bool:
        batches, size = self._batches - self._ending, self._bytes - self._ending_bytes
        is_over = batches >= self._batches_max or size + size_bytes > self._bytes_max
        return batches > 0 and is_over and not self.shut.is_set() and not self._stopping.is_set()

    def begin(self, batch: Batch, size_bytes: int) -> InFlight:
        """Begin to deliver the records of a taken batch one by one; the batch has at least one."""
        found = InFlight(batch, size_bytes)
        with self._lock:
            self._in_flight.append(found)
        return found

    def settle(self, handled_s: float = 0.0) -> None:
        """Mark delivered records, and finish the batches whose records are all marked.

        :param handled_s: seconds for which the calling thread called handlers since its last `settle`.
        """
        with self._lock:
            self._counts.handling_s += handled_s
            self._mark_done()
            finished, self._finished = self._finished, []
        for one in finished:
            self.finish(one.batch, one.size_bytes, one.dropped)

    def finish(self, batch: Batch, size_bytes: int, dropped: int = 0) -> None:
        """Release a batch in which this task marks nothing more, and commit if the policy wants it.

        Its room is free before the commit: the next batch is read while the commit waits for the store.
        :param dropped: number of its records that were not delivered.
        """
        with self._lock:
            self._ending += 1
            self._ending_bytes += size_bytes
            self._changed.notify_all()
        self._committer.mark_batch_finished(batch)
        delivered = len(batch) - dropped
        with self._lock:
            self._ending -= 1
            self._ending_bytes -= size_bytes
            self._batches -= 1
            self._bytes -= size_bytes
            self._note_under_way()
            if not self._given_up:
                self._counts.delivered += delivered
                self._counts.dropped += max(0, batch.polled - delivered)
            self._changed.notify_all()

    def _mark_done(self) -> None:
        # Under the lock. Records delivered meanwhile are marked the next time.
        if self._given_up:
            return
        for one in tuple(self._in_flight):
            if places := one.take_done():
                self._committer.mark_places(one.batch, places)
                self.settled += len(places)
            if not one.left:
                self._in_flight.remove(one)
                self._finished.append(one)

    def tried_again(self) -> None:
        """Count a failure that is retried."""
        with self._lock:
            self._counts.retries += 1

    def enter(self) -> bool:
        """Return whether a handler may be called now; if so, `leave` must follow.

        A thread that calls the handler several times in between checks `shut` before each call.
        """
        with self._lock:
            if self.shut.is_set():
                return False
            self._counts.calls += 1
            return True

    def leave(self, mark: Callable[..., None] | None = None, *args: Any) -> None:
        """Note the end of a call, and mark its records, unless they were abandoned meanwhile."""
        with self._lock:
            self._counts.calls -= 1
            if mark is not None and not self._given_up:
                mark(*args)
            self._mark_done()
            if self.shut.is_set():
                self._changed.notify_all()

    def mark(self, mark: Callable[..., None], *args: Any) -> None:
        """Mark records that need no handler call, unless they were abandoned."""
        with self._lock:
            if not self._given_up:
                mark(*args)

    def fail(self, error: BaseException) -> None:
        """Shut the gate: something failed, or a handler asks to stop the engine (`StopEngine`)."""
        with self._lock:
            # The first is kept, but an error replaces a `StopEngine`.
            if self._failure is None or isinstance(self._failure, StopEngine):
                self._failure = error
            self.is_shut = True
            self.shut.set()
            self._changed.notify_all()

    def raise_failure(self) -> None:
        """Raise the error passed to `fail`, if any."""
        if self._failure is not None:
            raise self._failure

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight, or after a failure until no handler runs; return the former."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            while self._counts.calls if self.shut.is_set() else self._batches:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            return self._batches == 0

    def give_up(self) -> None:
        """Abandon the batches in flight: mark records delivered so far, then deliver and mark no more."""
        with self._lock:
            self._mark_done()
            if not self._given_up:
                self._counts.batches_under_way = self._counts.bytes_under_way = 0
            self._given_up = True
            self.is_shut = True
            self.shut.set()
            self._changed.notify_all()

    def _note_under_way(self) -> None:
        # Under the lock. Abandoned batches are not counted here; the next attempt has another limiter.
        if not self._given_up:
            self._counts.batches_under_way, self._counts.bytes_under_way = self._batches, self._bytes
