"""Delivery of single records on several threads: in any order, or in order for each key.

Records wait in queues. A thread takes a queue and calls the handler with its records one after another,
until the queue is empty or its turn is over. Without order there is one queue, which all threads
take from. With keys there are `KEY_QUEUES`, each for one thread at a time: a record waits in that of its
key's hash. A record that waits in several queues is delivered when it is the first in all of them.

The threads are the task's own: a handler that is slow or hangs holds up no other task, and no batch that
is to be transformed on the pool. Batches run into one another.
"""

from __future__ import annotations

import abc
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import structlog

from tailrace.backoff import Backoff
from tailrace.engine.contracts import StopEngine
from tailrace.engine.processing.context import ProcessingConfig, ProcessingContext
from tailrace.engine.processing.handlers import check_done, where
from tailrace.engine.processing.in_flight import SETTLE_RECORDS, SETTLE_S, InFlight
from tailrace.engine.processing.ordering_keys import KeyTypes, in_order
from tailrace.engine.processing.stage import ReadyBatch, StageExecutor, StageFuture
from tailrace.engine.retry import GivenUpError
from tailrace.engine.threads import Pool, owner
from tailrace.records.batch import Batch

log = structlog.get_logger(__name__)

#: Before more are put into queues, no more records than this are in them or being delivered.
QUEUED_MAX = 4096

#: Queues of keys. A slow record holds up those behind it in its queue, other keys' among them.
KEY_QUEUES = 256

#: The dispatching thread looks up at least so often.
_IDLE_S = 60.0

#: Records that are put into queues together.
_STRETCH = 4096

#: Returns what a handler gets of a record, by the record's number in its batch.
_Get = Callable[[int], tuple[Any, ...]]


class _Part:
    # Records of a batch that wait one behind the other. Whoever delivers them takes their numbers.
    __slots__ = ("backoff", "get", "in_flight", "missing", "numbers", "queues")

    def __init__(
        self,
        in_flight: InFlight,
        get: _Get,
        numbers: Iterable[int],
        backoff: Backoff,
        queues: Sequence[_Queue] = (),
    ) -> None:
        self.in_flight = in_flight
        self.get = get
        self.numbers = iter(numbers)
        self.backoff = backoff
        #: Of a record that waits in several: those, and in how many of them it is not the first.
        self.queues = queues
        self.missing = len(queues)


class _Queue:
    # Threads that deliver take from the left, the dispatching thread adds to the right.
    __slots__ = ("is_busy", "parts")

    def __init__(self) -> None:
        self.parts: deque[_Part] = deque()
        # Of a queue of keys: whether a thread has it, or will be given it.
        self.is_busy = False


class _Dispatcher(abc.ABC):
    # What both have in common: how records come into queues, and the threads that deliver them.

    def __init__(
        self, terms: ProcessingConfig, means: ProcessingContext, stage_executor: StageExecutor | None
    ) -> None:
        self._terms = terms
        self._stage_executor = stage_executor
        self._limiter = means.limiter
        self._committer = means.committer
        self._clock = terms.clock
        self._executor = Pool(terms.threads, f"{terms.name} handlers", owner())
        self._staging = means.retrying(terms, "transformation and conversion")
        self._waiting: deque[StageFuture] = deque()
        self._coming: Iterator[int] = iter(())  # puts a batch into queues, a stretch at a time
        self._queued = 0
        self._is_full = False
        self._wake = threading.Event()
        self._ended = False
        # What follows is under the lock.
        self._lock = threading.Lock()
        self._again: list[tuple[float, int, _Queue, _Part]] = []  # by the time to try again
        self._count = itertools.count()
        self._workers = 0

    def put(self, batch: Batch) -> None:
        """Have a batch staged, and delivered."""
        staging = StageFuture(batch, self._stage_executor)
        staging.when_done(self._wake.set)
        self._waiting.append(staging)
        self._wake.set()

    def wake(self) -> None:
        """Have `run` return."""
        with self._lock:
            self._ended = True
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._wake.set()

    # ------------------------------------------------------------------ the dispatching thread

    def run(self) -> None:
        """Put records into queues, and those back whose time to be tried again has come, until `wake`."""
        while True:
            self._wake.clear()
            if self._ended:
                return
            wait_s = self._put_back()
            try:
                self._fill()
            except GivenUpError:
                pass
            except BaseException as error:  # noqa: BLE001 - the task's thread raises it
                self._limiter.fail(error)
            if self._limiter.shut.is_set():
                while self._waiting:
                    self._waiting.popleft().cancel()
            self._clock.wait(self._wake, wait_s)

    def _fill(self) -> None:
        while not self._limiter.shut.is_set():
            self._is_full = True  # before the look: who makes room meanwhile wakes this thread
            if self._queued - self._limiter.settled >= QUEUED_MAX:
                return
            self._is_full = False
            if next(self._coming, None) is None:
                if not (self._waiting and self._waiting[0].is_done):
                    return
                self._coming = self._put_in(self._waiting.popleft())

    def _put_in(self, staging: StageFuture) -> Iterator[int]:
        ready = self._staging.call(staging.result)
        if not len(ready.given):
            self._limiter.mark(self._committer.mark_processed, ready.batch)
            self._limiter.finish(ready.batch, self._committer, staging.size_bytes)
            return
        self._limiter.mark(self._committer.mark_dropped, ready.batch)
        add = self._adding(ready, self._limiter.begin(ready.batch, self._committer, staging.size_bytes))
        for first, last, get in ready.stretches(_STRETCH):
            self._queued += last - first
            with self._lock:
                add(first, last, get)
            yield last

    def _put_back(self) -> float:
        # Returns how long to wait for the next one.
        now_s = self._clock.monotonic()
        with self._lock:
            while self._again and self._again[0][0] <= now_s:
                _, _, queue, part = heapq.heappop(self._again)
                queue.parts.appendleft(part)
                self._release(queue)
                self._call_workers(1)
            return self._again[0][0] - now_s if self._again else _IDLE_S

    def _call_workers(self, count: int) -> None:
        # Under the lock. One that finds nothing to deliver ends, so those that there are have work.
        for _ in range(min(count, self._terms.threads - self._workers)):
            if self._ended:
                return
            self._workers += 1
            self._executor.submit(self._work)

    # ------------------------------------------------------------------ the threads that deliver

    def _work(self) -> None:
        limiter, began_s = self._limiter, time.monotonic()
        if not limiter.enter():
            return
        try:
            while (queue := self._next()) is not None:
                began_s = self._take_turn(queue, began_s)
        except BaseException as error:  # noqa: BLE001 - the task's thread raises it
            limiter.fail(error)
        finally:
            limiter.leave()
            self._settle(began_s)

    def _next(self) -> _Queue | None:
        with self._lock:
            queue = None if self._limiter.shut.is_set() else self._take()
            if queue is None:
                self._workers -= 1
            return queue

    def _take_turn(self, queue: _Queue, began_s: float) -> float:
        """Call the handler with records of a queue; return when this thread settled last."""
        call, clock_s, is_shut = self._terms.handler.call, time.monotonic, self._limiter.shut.is_set
        while (part := _first(queue)) is not None and not is_shut():
            if part.missing and not self._is_first_in_all(part):
                return began_s  # the last of its queues in which it comes first goes on with it
            get, done, places = part.get, part.in_flight.done, part.in_flight.places
            for number in part.numbers:
                given = get(number)
                try:
                    for one in given:
                        if (returned := call(one)) is not None:
                            check_done(returned)
                except StopEngine as stop:
                    if one is given[-1]:
                        done.append(places[number])
                    self._limiter.fail(stop)
                    return began_s
                except BaseException as error:  # noqa: BLE001 - tried again, or the task's thread raises it
                    left = tuple(itertools.dropwhile(lambda each: each is not one, given))  # noqa: B023
                    self._has_failed(queue, part, number, left, error)
                    return self._settle(began_s)
                done.append(places[number])
                if len(done) >= SETTLE_RECORDS or clock_s() - began_s >= SETTLE_S:
                    began_s = self._settle(began_s)
                    with self._lock:
                        self._release(queue)
                    return began_s
                if is_shut():
                    return began_s
            self._end(part, queue)
        with self._lock:
            self._release(queue)
        return began_s

    def _is_first_in_all(self, part: _Part) -> bool:
        with self._lock:
            part.missing -= 1
            return not part.missing

    def _end(self, part: _Part, queue: _Queue) -> None:
        # All of a part is delivered: its other queues go on.
        with self._lock:
            if queue.parts and queue.parts[0] is part:
                queue.parts.popleft()
            for other in part.queues:
                if other is not queue:
                    other.parts.popleft()
                    self._release(other)
            self._call_workers(len(part.queues))

    def _settle(self, began_s: float) -> float:
        self._limiter.settle(time.monotonic() - began_s)
        if self._is_full and self._queued - self._limiter.settled <= QUEUED_MAX // 2:
            self._is_full = False
            self._wake.set()
        return time.monotonic()

    def _has_failed(
        self, queue: _Queue, part: _Part, number: int, left: tuple[Any, ...], error: BaseException
    ) -> None:
        # A queue of keys is not released before the record is tried again.
        backoff, wait_s = part.backoff.after(error)
        if wait_s is None:
            where(error, part.in_flight.batch, part.in_flight.places[number])
            self._limiter.fail(error)
            self._wake.set()
            return
        self._limiter.tried_again()
        log.warning(
            "failed, tried again",
            what=f"{self._terms.name}: handler",
            error=type(error).__name__,
            retry=backoff.attempts,
            wait_s=wait_s,
        )
        again = _Part(part.in_flight, lambda _: left, (number,), backoff)
        due_s = self._clock.monotonic() + wait_s
        with self._lock:
            heapq.heappush(self._again, (due_s, next(self._count), queue, again))
        self._wake.set()

    # ------------------------------------------------------------------ queues

    @abc.abstractmethod
    def _adding(self, ready: ReadyBatch, in_flight: InFlight) -> Callable[[int, int, _Get], None]:
        """Return what puts a stretch of a batch into queues. It is called under the lock, as the next two."""

    @abc.abstractmethod
    def _take(self) -> _Queue | None:
        """Return a queue with records for a thread that has none."""

    @abc.abstractmethod
    def _release(self, queue: _Queue) -> None:
        """Have a queue taken again if there is something in it."""


class UnorderedDispatcher(_Dispatcher):
    """Delivers records by several threads at once, as they are ready."""

    def __init__(
        self, terms: ProcessingConfig, means: ProcessingContext, stage_executor: StageExecutor | None
    ) -> None:
        super().__init__(terms, means, stage_executor)
        self._queue = _Queue()

    def _adding(self, ready: ReadyBatch, in_flight: InFlight) -> Callable[[int, int, _Get], None]:
        def add(first: int, last: int, get: _Get) -> None:
            self._queue.parts.append(_Part(in_flight, get, range(first, last), self._terms.backoff))
            self._call_workers(last - first)

        return add

    def _take(self) -> _Queue | None:
        return self._queue if self._queue.parts else None

    def _release(self, queue: _Queue) -> None:
        """All threads take from it all the time."""


class KeyedDispatcher(_Dispatcher):
    """Delivers records of a key in order and never at once, those of different keys side by side.

    An update that changed the key waits in the queues of both keys; a TRUNCATE, and the first record of a
    table whose key has another type than before, in all queues.
    """

    def __init__(
        self, terms: ProcessingConfig, means: ProcessingContext, stage_executor: StageExecutor | None
    ) -> None:
        super().__init__(terms, means, stage_executor)
        self._key_types = KeyTypes()
        self._queues = [_Queue() for _ in range(KEY_QUEUES)]
        self._ready: deque[_Queue] = deque()

    def _adding(self, ready: ReadyBatch, in_flight: InFlight) -> Callable[[int, int, _Get], None]:
        for group, lanes in zip(ready.batch.groups, ready.lanes, strict=True):
            self._key_types.hear(group.topic, lanes)
        keys, keys_before, in_all = in_order(ready.lanes, ready.batch.rows)
        own, other = keys % KEY_QUEUES, keys_before % KEY_QUEUES
        in_several = np.flatnonzero(in_all | (own != other))

        def put(numbers: Sequence[int], get: _Get, *queues: _Queue) -> None:
            several = queues if len(queues) > 1 else ()
            part = _Part(in_flight, get, numbers, self._terms.backoff, several)
            for queue in queues:
                queue.parts.append(part)
                if not queue.is_busy:
                    self._release(queue)

        def put_singly(first: int, last: int, get: _Get) -> None:
            order = np.argsort(own[first:last], kind="stable") + first
            ends = [*(np.flatnonzero(np.diff(own[order])) + 1).tolist(), last - first]
            numbers, begin = order.tolist(), 0
            for end in ends if numbers else ():
                put(numbers[begin:end], get, self._queues[own[numbers[begin]]])
                begin = end

        def add(first: int, last: int, get: _Get) -> None:
            before = len(self._ready)
            begin, end = np.searchsorted(in_several, (first, last))
            for number in in_several[begin:end].tolist():
                put_singly(first, number, get)
                both = self._queues[own[number]], self._queues[other[number]]
                put((number,), get, *(self._queues if in_all[number] else both))
                first = number + 1
            put_singly(first, last, get)
            self._call_workers(len(self._ready) - before)

        return add

    def _take(self) -> _Queue | None:
        return self._ready.popleft() if self._ready else None

    def _release(self, queue: _Queue) -> None:
        queue.is_busy = bool(queue.parts)
        if queue.is_busy:
            self._ready.append(queue)


def _first(queue: _Queue) -> _Part | None:
    try:
        return queue.parts[0]
    except IndexError:
        return None
