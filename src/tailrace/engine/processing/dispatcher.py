"""The dispatcher: has batches staged, and their records delivered ordered, keyed or unordered.

Its executor determines which, and where: `ordered_executor` calls the handler on the dispatching thread,
`thread_executor` on threads of the task, `spark.processing.executor` in Spark jobs. Unless the order is
total, batches overlap, and failed records return to the executor after a wait.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Executor
from typing import Any, Protocol

import structlog

from tailrace.engine.contracts import Committer
from tailrace.engine.failures import GivenUpError
from tailrace.engine.processing.context import ProcessingConfig, ProcessingContext
from tailrace.engine.processing.in_flight import InFlightLimiter
from tailrace.engine.processing.stage import ReadyBatch, Stage, StageExecutor, StageFuture
from tailrace.engine.threads import belonging
from tailrace.records.batch import Batch
from tailrace.records.group import Group

log = structlog.get_logger(__name__)

#: Longest interval between two looks of the dispatching thread for work, in seconds.
_IDLE_S = 60.0

#: Wait of `close` for the delivering threads, in seconds; they have nothing left to do unless a handler runs.
_END_S = 0.2


class DeliveryExecutor(Protocol):
    """Calls the handler with records of batches, and marks those that are delivered."""

    def add(self, ready: ReadyBatch, size_bytes: int) -> Iterator[None]:
        """Deliver the records of a batch, then return it to the limiter. Runs on the dispatching thread.

        Yields while there is no room for more; calls `Dispatcher.look` when there is, and is resumed then.
        :param size_bytes: the size with which the limiter counts the batch.
        """
        ...

    def close(self) -> None:
        """Begin no more deliveries. Any thread; returns soon."""
        ...


class Dispatcher:
    """Has batches staged, and their records delivered by an executor (`contracts.RecordProcessor`).

    :param new_executors: returns the stage executor (None: batches are not staged) and the delivery executor.
    """

    def __init__(
        self,
        terms: ProcessingConfig,
        new_executors: Callable[
            [Dispatcher, ProcessingContext], tuple[StageExecutor | None, DeliveryExecutor]
        ],
    ) -> None:
        self._terms = terms
        self._new_executors = new_executors
        self._waiting: deque[StageFuture] = deque()
        self._coming: Iterator[None] = iter(())  # adds a batch, some of its records at each step
        self._wake = threading.Event()
        self._ended = False
        self._lock = threading.Lock()
        self._later: list[tuple[float, int, Callable[[], None]]] = []  # a heap by the time of the retry
        self._count = itertools.count()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ the task's thread

    def initialize(
        self,
        executor: Executor,
        transform: Callable[[Group], Iterable[Group]] | None,
        convert: Callable[[Group], Any] | None,
        committer: Committer,
    ) -> None:
        """Initialise the processor; see `contracts.RecordProcessor`."""
        terms = self._terms
        self._committer = committer
        self._limiter = InFlightLimiter(
            terms.queue_batches_max, terms.queue_bytes_max, terms.stopping, terms.counts, committer
        )
        # Ordering keys of records that are not transformed are computed on demand.
        stage = Stage(transform, convert, terms.calls == "key" and transform is not None)
        context = ProcessingContext(terms, executor, stage, committer, self._limiter)
        self._staging = context.retrying("transformation and conversion")
        self._stage_executor, self._executor = self._new_executors(self, context)

    def process(self, batch: Batch) -> None:
        """Begin to process a batch; waits while there is no room. After `close` this has no effect."""
        self._limiter.raise_failure()
        if self._thread is None:
            self._thread = threading.Thread(
                target=belonging(self._run), name=f"{self._terms.name} delivery", daemon=True
            )
            self._thread.start()
        self._limiter.take(batch.size_bytes)
        self._limiter.raise_failure()
        if self._limiter.shut.is_set():
            return
        staging = StageFuture(batch, self._stage_executor)
        staging.when_done(self.look)
        self._waiting.append(staging)
        self.look()

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is delivered and marked; see `contracts.RecordProcessor`."""
        self._limiter.settle()
        is_empty = self._limiter.wait_until_empty(timeout_s)
        self._limiter.raise_failure()
        return is_empty

    def close(self) -> None:
        """Abandon unfinished batches; see `contracts.RecordProcessor`."""
        self._limiter.give_up()
        if self._thread is None:
            return
        self._ended = True
        self._executor.close()
        if self._stage_executor is not None:
            self._stage_executor.close()
        self.look()
        if self._thread is not threading.current_thread():
            self._limiter.wait_until_empty(_END_S)
            self._thread.join(_END_S)

    # ------------------------------------------------------------------ for the executor

    def look(self) -> None:
        """Wake the dispatching thread to look for work. Any thread."""
        self._wake.set()

    def try_later(self, again: Callable[[], None], wait_s: float, **details: object) -> None:
        """Schedule a call of `again` on the dispatching thread after a wait. Any thread.

        :param details: of the failure, for the log.
        """
        self._limiter.tried_again()
        log.warning("failed, retrying", what=f"{self._terms.name}: handler", **details, wait_s=wait_s)
        due_s = self._terms.clock.monotonic() + wait_s
        with self._lock:
            heapq.heappush(self._later, (due_s, next(self._count), again))
        self.look()

    # ------------------------------------------------------------------ the dispatching thread

    def _run(self) -> None:
        """Pass records to the executor, until `close`."""
        while True:
            self._wake.clear()
            if self._ended:
                return
            wait_s = _IDLE_S
            try:
                wait_s = self._try_again()
                self._fill()
            except GivenUpError:
                pass
            except BaseException as error:  # noqa: BLE001 - the task's thread raises it
                # The engine cancels only at its end; otherwise the handler waited for its own future.
                if not (isinstance(error, CancelledError) and self._limiter.shut.is_set()):
                    self._limiter.fail(error)
            if self._limiter.shut.is_set():
                while self._waiting:
                    self._waiting.popleft().cancel()
            self._terms.clock.wait(self._wake, wait_s)

    def _try_again(self) -> float:
        # Returns the seconds until the next retry.
        now_s, due = self._terms.clock.monotonic(), []
        with self._lock:
            while self._later and self._later[0][0] <= now_s:
                due.append(heapq.heappop(self._later)[2])
            wait_s = self._later[0][0] - now_s if self._later else _IDLE_S
        for again in due:
            again()
        return wait_s

    def _fill(self) -> None:
        while not self._limiter.shut.is_set():
            try:
                next(self._coming)
            except StopIteration:
                if not (self._waiting and self._waiting[0].is_done):
                    return
                self._coming = self._added(self._waiting.popleft())
            else:
                return  # until there is room

    def _added(self, staging: StageFuture) -> Iterator[None]:
        ready = self._staging.call(staging.result)
        if not len(ready.given):
            self._limiter.mark(self._committer.mark_processed, ready.batch)
            self._limiter.finish(ready.batch, staging.size_bytes)
            return
        self._limiter.mark(self._committer.mark_dropped, ready.batch)
        yield from self._executor.add(ready, staging.size_bytes)
