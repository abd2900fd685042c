"""The limit of what a task has in flight, and the gate before each call of a handler."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tailrace.engine.contracts import Committer, StopEngine
from tailrace.records.batch import Batch

#: How often a task that waits for room checks whether the engine wants it to end.
_LOOK_S = 0.05

#: Records that were delivered are marked together: so many, or after so long.
SETTLE_RECORDS = 128
SETTLE_S = 0.002


@dataclass(slots=True)
class TaskCounts:
    """What a task has done, over all its attempts.

    Its thread counts the first of them, the limiter of its present attempt the rest, from `delivered` on.

    :param polled: records, in so many `batches`.
    :param processed: records, as `committed`, in attempts that have ended.
    :param polls_retried: times that a start or a poll failed and was tried again.
    :param delivered: records of batches that were handed over whole.
    :param dropped: records of them that transformations dropped.
    :param retries: times that a transformation, a converter or a handler failed and was tried again.
    :param handling_s: seconds for which threads of this process called handlers, waits before retries among
        them.
    :param calls: handlers that run now. Those of an attempt that has ended may still run: the next one begins
        when they have returned.
    :param batches_under_way: now.
    :param bytes_under_way: of them.
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

    :param size_bytes: what the limiter counts for it.
    """

    __slots__ = ("batch", "delivered", "done", "dropped", "left", "places", "size_bytes")

    def __init__(self, batch: Batch, size_bytes: int) -> None:
        self.batch = batch
        self.size_bytes = size_bytes
        #: The place of each record, in order.
        self.places: list[int] = (
            list(range(batch.polled)) if len(batch) == batch.polled else batch.places.tolist()
        )
        #: Where records are delivered in order: how many are. One thread writes it, without a lock.
        self.delivered = 0
        #: Where they are not: places of those that are, and not marked. Any thread appends, without a lock.
        self.done: deque[int] = deque()
        #: Records that are not marked.
        self.left = len(batch)
        #: How many of the records transformations dropped after delivery began. Under the limiter's lock.
        self.dropped = 0

    def take_done(self) -> list[int]:
        """Return the places of delivered records that it did not return before. One thread at a time."""
        first, delivered = len(self.places) - self.left, self.delivered
        if first < delivered:
            found = self.places[first:delivered]
        else:
            found = [self.done.popleft() for _ in range(len(self.done))]
        self.left -= len(found)
        return found


class InFlightLimiter:
    """Counts batches and bytes under way. Handlers are called, and what they did is marked, through it.

    The gate is shut once something failed, a handler wanted the end, or what is under way was given
    up; in the last case nothing is marked any more either. Any thread.

    :param stopping: set when the task is to end: waits for room end then.
    :param counts: of the task: what becomes of batches, until they are given up.
    :param committer: marks what was delivered.
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
        self._ending = 0  # of these batches: all is marked, and perhaps a commit is under way
        self._ending_bytes = 0
        self._given_up = False
        self._failure: BaseException | None = None
        self._in_flight: list[InFlight] = []
        self._finished: list[InFlight] = []
        #: Records of batches in flight that were marked.
        self.settled = 0
        #: Set once no handler is called any more, and the same for who looks at each record.
        self.shut = threading.Event()
        self.is_shut = False

    def take(self, size_bytes: int) -> None:
        """Wait until there is room for a batch, and take it. One batch always has room."""
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
        """Have the records of a batch that was taken delivered one by one; the batch has at least one."""
        found = InFlight(batch, size_bytes)
        with self._lock:
            self._in_flight.append(found)
        return found

    def settle(self, handled_s: float = 0.0) -> None:
        """Mark the records that are done, and give back the batches of which all are.

        :param handled_s: for how long the calling thread called handlers since it settled before.
        """
        with self._lock:
            self._counts.handling_s += handled_s
            self._mark_done()
            finished, self._finished = self._finished, []
        for one in finished:
            self.finish(one.batch, one.size_bytes, one.dropped)

    def finish(self, batch: Batch, size_bytes: int, dropped: int = 0) -> None:
        """Give back a batch of which everything is marked that this task will mark, and commit if it is due.

        There is room for another batch before that: it is read while the commit waits for its answer.
        :param dropped: how many of its records were not handed over.
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
        # Under the lock. What is noted as done later is marked the next time.
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
        """Count a failure after which something is tried again."""
        with self._lock:
            self._counts.retries += 1

    def enter(self) -> bool:
        """Return whether a handler may be called now; `leave` must follow then.

        A thread that calls it several times in between checks `shut` before each call.
        """
        with self._lock:
            if self.shut.is_set():
                return False
            self._counts.calls += 1
            return True

    def leave(self, mark: Callable[..., None] | None = None, *args: Any) -> None:
        """Note the end of a call, and mark what it did, unless that was given up meanwhile."""
        with self._lock:
            self._counts.calls -= 1
            if mark is not None and not self._given_up:
                mark(*args)
            self._mark_done()
            if self.shut.is_set():
                self._changed.notify_all()

    def mark(self, mark: Callable[..., None], *args: Any) -> None:
        """Mark what no handler had to be called for, unless that was given up."""
        with self._lock:
            if not self._given_up:
                mark(*args)

    def fail(self, error: BaseException) -> None:
        """Deliver nothing more: something went wrong, or a handler wants the end (`StopEngine`)."""
        with self._lock:
            # The first counts; but an error for more than a wish.
            if self._failure is None or isinstance(self._failure, StopEngine):
                self._failure = error
            self.is_shut = True
            self.shut.set()
            self._changed.notify_all()

    def raise_failure(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._failure is not None:
            raise self._failure

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until nothing is under way, or after a failure until no handler runs; return the first."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            while self._counts.calls if self.shut.is_set() else self._batches:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            return self._batches == 0

    def give_up(self) -> None:
        """Have nothing more delivered or marked; what is done by now is marked."""
        with self._lock:
            self._mark_done()
            if not self._given_up:
                self._counts.batches_under_way = self._counts.bytes_under_way = 0
            self._given_up = True
            self.is_shut = True
            self.shut.set()
            self._changed.notify_all()

    def _note_under_way(self) -> None:
        # Under the lock. What was given up is no longer counted here; the next attempt has another limiter.
        if not self._given_up:
            self._counts.batches_under_way, self._counts.bytes_under_way = self._batches, self._bytes
