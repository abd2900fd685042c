"""The dispatcher: has batches staged, and their records delivered in order, in order for each key, or in any.

Which of these it is, and where, is its executor's: `ordered_executor` calls the handler on the dispatching
thread, `thread_executor` on threads of the task, `spark.processing.executor` in jobs of Spark. Without one
order of all, batches run into one another, and what failed comes back to the executor after its wait.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Generic, Protocol, TypeVar

import structlog

from tailrace.engine.failures import GivenUpError
from tailrace.engine.processing.context import ProcessingConfig, ProcessingContext
from tailrace.engine.processing.stage import ReadyBatch, StageExecutor, StageFuture
from tailrace.records.batch import Batch

log = structlog.get_logger(__name__)

#: The dispatching thread looks for work at least this often.
_IDLE_S = 60.0

Part = TypeVar("Part")
Part_contra = TypeVar("Part_contra", contravariant=True)


class PartExecutor(Protocol[Part_contra]):
    """Calls the handler with records of batches, and marks those that are delivered.

    Its methods are called on the dispatching thread, except `close`.
    """

    def has_room(self) -> bool:
        """Return whether more records may be added; if not, it calls `Dispatcher.look` when there is room."""
        ...

    def add(self, ready: ReadyBatch, size_bytes: int) -> Iterator[None]:
        """Take the records of a batch, some of them at each step; give it back to the limiter at the end.

        :param size_bytes: what the limiter has for it.
        """
        ...

    def go_on(self) -> None:
        """Begin what may begin now that all staged batches are added."""
        ...

    def resume(self, part: Part_contra) -> None:
        """Try a part again that was given to `Dispatcher.try_later`."""
        ...

    def close(self) -> None:
        """Begin nothing more. Any thread; returns soon."""
        ...


class Dispatcher(Generic[Part]):
    """Has batches staged, and their records delivered by an executor.

    :param stage_executor: where batches are staged; None: they are not.
    :param new_executor: returns the executor of this dispatcher.
    """

    def __init__(
        self,
        terms: ProcessingConfig,
        means: ProcessingContext,
        stage_executor: StageExecutor | None,
        new_executor: Callable[[Dispatcher[Part]], PartExecutor[Part]],
    ) -> None:
        self._terms = terms
        self._stage_executor = stage_executor
        self._limiter = means.limiter
        self._committer = means.committer
        self._staging = means.retrying(terms, "transformation and conversion")
        self._waiting: deque[StageFuture] = deque()
        self._coming: Iterator[None] = iter(())  # adds a batch, some of its records at a step
        self._wake = threading.Event()
        self._ended = False
        self._lock = threading.Lock()
        self._later: list[tuple[float, int, Part]] = []  # by the time to try again
        self._count = itertools.count()
        self._executor = new_executor(self)

    def put(self, batch: Batch) -> None:
        """Have a batch staged, and delivered."""
        staging = StageFuture(batch, self._stage_executor)
        staging.when_done(self.look)
        self._waiting.append(staging)
        self.look()

    def wake(self) -> None:
        """Have `run` return."""
        self._ended = True
        self._executor.close()
        if self._stage_executor is not None:
            self._stage_executor.close()
        self.look()

    def look(self) -> None:
        """Have the dispatching thread look for work. Any thread."""
        self._wake.set()

    def try_later(self, part: Part, wait_s: float, **details: object) -> None:
        """Give a part back to the executor after a wait. Any thread.

        :param details: of the failure, for the log.
        """
        self._limiter.tried_again()
        log.warning("failed, tried again", what=f"{self._terms.name}: handler", **details, wait_s=wait_s)
        due_s = self._terms.clock.monotonic() + wait_s
        with self._lock:
            heapq.heappush(self._later, (due_s, next(self._count), part))
        self.look()

    def run(self) -> None:
        """Hand records to the executor, until `wake`."""
        while True:
            self._wake.clear()
            if self._ended:
                return
            wait_s = self._resume()
            try:
                self._fill()
                self._executor.go_on()
            except GivenUpError:
                pass
            except BaseException as error:  # noqa: BLE001 - the task's thread raises it
                # The engine cancels only at its end; a handler may have waited for a future of its own.
                if not (isinstance(error, CancelledError) and self._limiter.shut.is_set()):
                    self._limiter.fail(error)
            if self._limiter.shut.is_set():
                while self._waiting:
                    self._waiting.popleft().cancel()
            self._terms.clock.wait(self._wake, wait_s)

    def _resume(self) -> float:
        # Returns how long to wait for the next part that is tried again.
        now_s, due = self._terms.clock.monotonic(), []
        with self._lock:
            while self._later and self._later[0][0] <= now_s:
                due.append(heapq.heappop(self._later)[2])
            wait_s = self._later[0][0] - now_s if self._later else _IDLE_S
        for part in due:
            self._executor.resume(part)
        return wait_s

    def _fill(self) -> None:
        while not self._limiter.shut.is_set() and self._executor.has_room():
            try:
                next(self._coming)
            except StopIteration:
                if not (self._waiting and self._waiting[0].is_done):
                    return
                self._coming = self._added(self._waiting.popleft())

    def _added(self, staging: StageFuture) -> Iterator[None]:
        ready = self._staging.call(staging.result)
        if not len(ready.given):
            self._limiter.mark(self._committer.mark_processed, ready.batch)
            self._limiter.finish(ready.batch, self._committer, staging.size_bytes)
            return
        self._limiter.mark(self._committer.mark_dropped, ready.batch)
        yield from self._executor.add(ready, staging.size_bytes)
