"""The thread executor: records wait in queues, and each thread calls the handler with those of one queue.

A thread takes a queue and delivers its records one after another, until the queue is empty or the thread's
turn is over (`queues`).

Threads that call a handler that never waits only compete for Python's lock. So while records are delivered
quickly (`DeliveryRate`), one thread delivers, and another stands by: once the first makes no progress, the
other takes a queue, too, and calls more threads.

The threads belong to the task: a handler that is slow or hangs delays neither other tasks nor batches that
wait to be transformed on the pool.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

from tailrace.engine.contracts import StopEngine
from tailrace.engine.processing.context import ProcessingContext
from tailrace.engine.processing.dispatcher import Dispatcher
from tailrace.engine.processing.handlers import check_done, where
from tailrace.engine.processing.in_flight import SETTLE_RECORDS, SETTLE_S
from tailrace.engine.processing.queues import (
    PERIOD_S,
    DeliveryRate,
    Queue,
    QueuedRecords,
    Queues,
)
from tailrace.engine.processing.stage import ReadyBatch
from tailrace.engine.threads import Pool, owner

#: Limit of records in queues or being delivered, above which no more are added.
QUEUED_MAX = 4096

#: Number of records that are added to queues together.
_RUN_RECORDS = 4096


class ThreadExecutor:
    """Delivers records on several threads at once, keyed or unordered (`DeliveryExecutor`).

    :param dispatcher: the owner of this executor.
    """

    def __init__(self, dispatcher: Dispatcher, context: ProcessingContext) -> None:
        terms = context.terms
        self._dispatcher = dispatcher
        self._terms = terms
        self._limiter = context.limiter
        self._pool = Pool(terms.threads, f"{terms.name} handlers", owner())
        self._queued = 0
        self._is_full = False
        # The attributes from here on are guarded by the lock.
        self._lock = threading.Lock()
        self._workers = 0
        self._standing_by = 0  # of the workers
        self._rate = DeliveryRate()
        self._queues = Queues(terms.threads if terms.calls == "key" else 0, self._rate)
        self._turn_by: int | None = None  # the thread that last ended a turn
        self._turn_s = 0.0  # the time of that
        self._ended = False

    # ------------------------------------------------------------------ the dispatching thread

    def add(self, ready: ReadyBatch, size_bytes: int) -> Iterator[None]:
        in_flight = self._limiter.begin(ready.batch, size_bytes)
        dealing = self._queues.dealing(ready)
        with self._lock:
            is_quick = self._rate.is_quick
        if dealing is not None and not is_quick:
            _ = dealing.keys  # computed without holding the lock
        for first, last, get in ready.runs(_RUN_RECORDS):
            self._queued += last - first
            numbers, backoff = range(first, last), self._terms.backoff
            with self._lock:
                self._queues.add(QueuedRecords(in_flight, get, numbers, backoff, dealing=dealing))
                self._call_worker()
            while not self._has_room():
                yield

    def _has_room(self) -> bool:
        self._is_full = True  # before the check: a thread that makes room meanwhile wakes the dispatcher
        if self._queued - self._limiter.settled >= QUEUED_MAX:
            return False
        self._is_full = False
        return True

    def _resume(self, part: QueuedRecords) -> None:
        [queue] = part.queues
        with self._lock:
            queue.parts.appendleft(part)
            self._queues.release(queue)
            self._call_worker()

    def close(self) -> None:
        with self._lock:
            self._ended = True
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _call_worker(self) -> None:
        # Under the lock. A thread that takes a queue calls another thread, as long as there are queues.
        stands_by = self._rate.is_quick and self._workers > self._standing_by
        has_enough = self._standing_by > 0 if stands_by else not self._queues.has_any()
        if not self._ended and not has_enough and self._workers < self._terms.threads:
            self._workers += 1
            self._standing_by += stands_by
            self._pool.submit(self._work, stands_by)

    # ------------------------------------------------------------------ the threads that deliver

    def _work(self, stands_by: bool) -> None:
        limiter, began_s = self._limiter, time.monotonic()
        if not limiter.enter():
            return
        try:
            while (queue := self._next(stands_by)) is not None:
                if self._take_turn(queue, began_s):
                    began_s = self._settle(began_s)
                stands_by = self._steps_back()
        except BaseException as error:  # noqa: BLE001 - the task's thread raises it
            limiter.fail(error)
        finally:
            limiter.leave()
            self._settle(began_s)

    def _next(self, stands_by: bool) -> Queue | None:
        """Return the queue that this thread takes, once it no longer stands by; None: the thread ends."""
        while stands_by and self._others_get_on():
            pass
        with self._lock:
            self._standing_by -= stands_by
            is_needed = not (stands_by and self._standing_by) and self._queues.has_any()
            if self._limiter.is_shut or not is_needed:
                self._workers -= 1
                return None
            queue = self._queues.take()
            self._call_worker()
            return queue

    def _others_get_on(self) -> bool:
        """Wait for `PERIOD_S`; return whether this thread continues to stand by."""
        before, began_s = self._limiter.settled, time.monotonic()
        self._limiter.shut.wait(PERIOD_S)
        with self._lock:
            settled = self._limiter.settled
            if self._standing_by > 1 or settled == self._queued or self._limiter.is_shut:
                return False
            if not self._rate.goes_on(settled - before, began_s, time.monotonic()):
                self._queues.deal_out()
            return self._rate.is_quick

    def _steps_back(self) -> bool:
        """Return whether this thread, after a turn, stands by because another one makes progress."""
        me, now_s = threading.get_ident(), time.monotonic()
        with self._lock:
            if not self._rate.measure(self._limiter.settled, now_s):
                self._queues.deal_out()
            another_gets_on = self._turn_by not in (None, me) and now_s - self._turn_s < PERIOD_S
            is_alone = self._workers - self._standing_by == 1
            self._turn_by, self._turn_s = me, now_s
            stands_by = self._rate.is_quick and another_gets_on and not is_alone
            self._standing_by += stands_by
            return stands_by

    def _take_turn(self, queue: Queue, began_s: float) -> bool:
        """Call the handler with records of a queue; return whether it is time to mark them.

        :param began_s: time at which this thread last marked records.
        """
        call, clock_s, limiter = self._terms.handler.call, time.monotonic, self._limiter
        part: QueuedRecords | None = None
        while (part := self._next_part(queue, part)) is not None:
            get, done, places = part.get, part.in_flight.done, part.in_flight.places
            for number in part.numbers:
                if limiter.is_shut:
                    return False
                given = get(number)
                try:
                    for one in given:
                        if (returned := call(one)) is not None:
                            check_done(returned)
                except StopEngine as stop:
                    if one is given[-1]:
                        done.append(places[number])
                    limiter.fail(stop)
                    return False
                except BaseException as error:  # noqa: BLE001 - retried, or the task's thread raises it
                    left = tuple(itertools.dropwhile(lambda each: each is not one, given))  # noqa: B023
                    self._has_failed(queue, part, number, left, error)
                    return True
                done.append(places[number])
                if len(done) >= SETTLE_RECORDS or clock_s() - began_s >= SETTLE_S:
                    with self._lock:
                        self._queues.release(queue)
                    return True
        return False

    def _next_part(self, queue: Queue, ended: QueuedRecords | None) -> QueuedRecords | None:
        with self._lock:
            found = self._queues.next_in(queue, ended)
            if ended is not None:
                self._call_worker()
            return found

    def _settle(self, began_s: float) -> float:
        self._limiter.settle(time.monotonic() - began_s)
        if self._is_full and self._queued - self._limiter.settled <= QUEUED_MAX // 2:
            self._is_full = False
            self._dispatcher.look()
        return time.monotonic()

    def _has_failed(
        self, queue: Queue, part: QueuedRecords, number: int, left: tuple[Any, ...], error: BaseException
    ) -> None:
        with self._lock:
            self._rate.pause(time.monotonic())
            queue = self._queues.held_for_retry(queue)
            self._call_worker()
        backoff, wait_s = part.backoff.after(error)
        if wait_s is None:
            where(error, part.in_flight.batch, part.in_flight.places[number])
            self._limiter.fail(error)
            self._dispatcher.look()
            return
        again = QueuedRecords(part.in_flight, lambda _: left, (number,), backoff, (queue,))
        self._dispatcher.try_later(
            functools.partial(self._resume, again),
            wait_s,
            error=type(error).__name__,
            retry=backoff.attempts,
        )
