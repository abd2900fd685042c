"""The executor on threads: records wait in queues, and a thread calls the handler with those of one queue.

A thread takes a queue and delivers its records one after another, until the queue is empty or its turn is
over. Without order there is one queue, which all threads take from. With keys there are
`KEY_QUEUES_A_THREAD` for each thread, each taken by one thread at a time: a record waits in that of its key's
hash. A record that waits in several queues is delivered when it is the first in all of them.

The threads belong to the task: a handler that is slow or hangs holds up no other task, and no batch that is
to be transformed on the pool.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tailrace.backoff import Backoff
from tailrace.engine.contracts import StopEngine
from tailrace.engine.processing.context import ProcessingConfig, ProcessingContext
from tailrace.engine.processing.dispatcher import Dispatcher
from tailrace.engine.processing.handlers import check_done, where
from tailrace.engine.processing.in_flight import SETTLE_RECORDS, SETTLE_S, InFlight
from tailrace.engine.processing.ordering_keys import KeyTypes, in_order
from tailrace.engine.processing.stage import GetRecord, ReadyBatch
from tailrace.engine.threads import Pool, owner

#: Before more are put into queues, no more records than this are in them or being delivered.
QUEUED_MAX = 4096

#: Queues of keys for each thread. A slow record holds up those behind it in its queue, other keys' among
#: them. With many more, what a thread takes at once would be too little to be worth the taking.
KEY_QUEUES_A_THREAD = 16

#: Records that are put into queues together.
_RUN_RECORDS = 4096


class QueuedRecords:
    """Records of a batch that wait one behind the other. The thread that delivers them takes their numbers.

    :param get: returns what the handler gets of a record, by its number in the batch.
    :param queues: of a record that waits in several queues: all of them. Else only the one it goes back to
        when it is tried again.
    """

    __slots__ = ("backoff", "get", "in_flight", "missing", "numbers", "queues")

    def __init__(
        self,
        in_flight: InFlight,
        get: GetRecord,
        numbers: Iterable[int],
        backoff: Backoff,
        queues: Sequence[_Queue] = (),
    ) -> None:
        self.in_flight = in_flight
        self.get = get
        self.numbers = iter(numbers)
        self.backoff = backoff
        self.queues = queues
        #: In how many of several queues it is not the first.
        self.missing = len(queues) if len(queues) > 1 else 0


@dataclass(slots=True, eq=False)
class _Queue:
    # Threads that deliver take from the left, the dispatching thread adds to the right.
    parts: deque[QueuedRecords] = field(default_factory=deque)
    # Of a queue of keys: whether a thread has it, or will be given it.
    is_busy: bool = False


#: Puts the records of a batch from a first to before a last into queues, with what returns what a handler
#: gets of each; returns how many threads they may keep busy.
_Add = Callable[[int, int, GetRecord], int]


class _Queues(Protocol):
    # All queues of an executor. What `adding` returns, `take` and `release` are called under the lock.
    def adding(self, ready: ReadyBatch, in_flight: InFlight, backoff: Backoff) -> _Add:
        """Return what puts records of a batch into queues."""

    def take(self) -> _Queue | None:
        """Return a queue with records for a thread that has none."""

    def release(self, queue: _Queue) -> None:
        """Have a queue taken again if there is something in it."""


class _FreeQueue:
    # One queue for all threads.
    def __init__(self) -> None:
        self._queue = _Queue()

    def adding(self, ready: ReadyBatch, in_flight: InFlight, backoff: Backoff) -> _Add:
        def add(first: int, last: int, get: GetRecord) -> int:
            self._queue.parts.append(QueuedRecords(in_flight, get, range(first, last), backoff))
            return last - first

        return add

    def take(self) -> _Queue | None:
        return self._queue if self._queue.parts else None

    def release(self, queue: _Queue) -> None:
        """All threads take from it all the time."""


class _KeyQueues:
    # Records of a key are delivered in order and never at once, those of different keys side by side. An
    # update that changed the key waits in the queues of both keys; a TRUNCATE, and the first record of a
    # table whose key has another type than before, in all queues.
    def __init__(self, threads: int) -> None:
        self._key_types = KeyTypes()
        self._queues = [_Queue() for _ in range(KEY_QUEUES_A_THREAD * threads)]
        self._ready: deque[_Queue] = deque()

    def adding(self, ready: ReadyBatch, in_flight: InFlight, backoff: Backoff) -> _Add:
        for group, keys in zip(ready.batch.groups, ready.ordering_keys, strict=True):
            self._key_types.note(group.topic, keys)
        now, before, in_all = in_order(ready.ordering_keys, ready.batch.rows)
        queues = len(self._queues)
        own, other = now % queues, before % queues
        in_several = np.flatnonzero(in_all | (own != other))

        def put(numbers: Sequence[int], get: GetRecord, *queues: _Queue) -> None:
            part = QueuedRecords(in_flight, get, numbers, backoff, queues)
            for queue in queues:
                queue.parts.append(part)
                if not queue.is_busy:
                    self.release(queue)

        def put_singly(first: int, last: int, get: GetRecord) -> None:
            order = np.argsort(own[first:last], kind="stable") + first
            ends = [*(np.flatnonzero(np.diff(own[order])) + 1).tolist(), last - first]
            numbers, begin = order.tolist(), 0
            for end in ends if numbers else ():
                put(numbers[begin:end], get, self._queues[own[numbers[begin]]])
                begin = end

        def add(first: int, last: int, get: GetRecord) -> int:
            before = len(self._ready)
            begin, end = np.searchsorted(in_several, (first, last))
            for number in in_several[begin:end].tolist():
                put_singly(first, number, get)
                both = self._queues[own[number]], self._queues[other[number]]
                put((number,), get, *(self._queues if in_all[number] else both))
                first = number + 1
            put_singly(first, last, get)
            return len(self._ready) - before

        return add

    def take(self) -> _Queue | None:
        return self._ready.popleft() if self._ready else None

    def release(self, queue: _Queue) -> None:
        queue.is_busy = bool(queue.parts)
        if queue.is_busy:
            self._ready.append(queue)


class ThreadExecutor:
    """Delivers records by several threads at once, in order for each key or in any (`PartExecutor`).

    :param dispatcher: whose executor it is.
    """

    def __init__(
        self, dispatcher: Dispatcher[QueuedRecords], terms: ProcessingConfig, means: ProcessingContext
    ) -> None:
        self._dispatcher = dispatcher
        self._terms = terms
        self._limiter = means.limiter
        self._committer = means.committer
        self._pool = Pool(terms.threads, f"{terms.name} handlers", owner())
        self._queued = 0
        self._is_full = False
        # What follows is under the lock.
        self._lock = threading.Lock()
        self._queues: _Queues = _KeyQueues(terms.threads) if terms.calls == "key" else _FreeQueue()
        self._workers = 0
        self._ended = False

    # ------------------------------------------------------------------ the dispatching thread

    def has_room(self) -> bool:
        """As `PartExecutor.has_room`."""
        self._is_full = True  # before the look: a thread that makes room meanwhile wakes the dispatcher
        if self._queued - self._limiter.settled >= QUEUED_MAX:
            return False
        self._is_full = False
        return True

    def add(self, ready: ReadyBatch, size_bytes: int) -> Iterator[None]:
        """As `PartExecutor.add`."""
        in_flight = self._limiter.begin(ready.batch, self._committer, size_bytes)
        add = self._queues.adding(ready, in_flight, self._terms.backoff)
        for first, last, get in ready.runs(_RUN_RECORDS):
            self._queued += last - first
            with self._lock:
                self._call_workers(add(first, last, get))
            yield

    def go_on(self) -> None:
        """As `PartExecutor.go_on`: threads begin when records are added."""

    def resume(self, part: QueuedRecords) -> None:
        """As `PartExecutor.resume`."""
        [queue] = part.queues
        with self._lock:
            queue.parts.appendleft(part)
            self._queues.release(queue)
            self._call_workers(1)

    def close(self) -> None:
        """As `PartExecutor.close`."""
        with self._lock:
            self._ended = True
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _call_workers(self, count: int) -> None:
        # Under the lock. A thread that finds nothing to deliver ends, so those that there are have work.
        for _ in range(min(count, self._terms.threads - self._workers)):
            if self._ended:
                return
            self._workers += 1
            self._pool.submit(self._work)

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
            queue = None if self._limiter.is_shut else self._queues.take()
            if queue is None:
                self._workers -= 1
            return queue

    def _take_turn(self, queue: _Queue, began_s: float) -> float:
        """Call the handler with records of a queue; return when this thread settled last."""
        call, clock_s, limiter = self._terms.handler.call, time.monotonic, self._limiter
        while (part := _first(queue)) is not None:
            if part.missing and not self._is_first_in_all(part):
                return began_s  # the last of its queues in which it comes first goes on with it
            get, done, places = part.get, part.in_flight.done, part.in_flight.places
            for number in part.numbers:
                if limiter.is_shut:
                    return began_s
                given = get(number)
                try:
                    for one in given:
                        if (returned := call(one)) is not None:
                            check_done(returned)
                except StopEngine as stop:
                    if one is given[-1]:
                        done.append(places[number])
                    limiter.fail(stop)
                    return began_s
                except BaseException as error:  # noqa: BLE001 - tried again, or the task's thread raises it
                    left = tuple(itertools.dropwhile(lambda each: each is not one, given))  # noqa: B023
                    self._has_failed(queue, part, number, left, error)
                    return self._settle(began_s)
                done.append(places[number])
                if len(done) >= SETTLE_RECORDS or clock_s() - began_s >= SETTLE_S:
                    began_s = self._settle(began_s)
                    with self._lock:
                        self._queues.release(queue)
                    return began_s
            self._end(part, queue)
        with self._lock:
            self._queues.release(queue)
        return began_s

    def _is_first_in_all(self, part: QueuedRecords) -> bool:
        with self._lock:
            part.missing -= 1
            return not part.missing

    def _end(self, part: QueuedRecords, queue: _Queue) -> None:
        # All of a part is delivered: its other queues go on.
        with self._lock:
            if queue.parts and queue.parts[0] is part:
                queue.parts.popleft()
            if len(part.queues) < 2:
                return
            for other in part.queues:
                if other is not queue:
                    other.parts.popleft()
                    self._queues.release(other)
            self._call_workers(len(part.queues))

    def _settle(self, began_s: float) -> float:
        self._limiter.settle(time.monotonic() - began_s)
        if self._is_full and self._queued - self._limiter.settled <= QUEUED_MAX // 2:
            self._is_full = False
            self._dispatcher.look()
        return time.monotonic()

    def _has_failed(
        self, queue: _Queue, part: QueuedRecords, number: int, left: tuple[Any, ...], error: BaseException
    ) -> None:
        # A queue of keys is not released before the record is tried again.
        backoff, wait_s = part.backoff.after(error)
        if wait_s is None:
            where(error, part.in_flight.batch, part.in_flight.places[number])
            self._limiter.fail(error)
            self._dispatcher.look()
            return
        again = QueuedRecords(part.in_flight, lambda _: left, (number,), backoff, (queue,))
        self._dispatcher.try_later(again, wait_s, error=type(error).__name__, retry=backoff.attempts)


def _first(queue: _Queue) -> QueuedRecords | None:
    try:
        return queue.parts[0]
    except IndexError:
        return None
