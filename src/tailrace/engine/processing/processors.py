"""The engine's record processors: one stage, and one of two ways of delivery.

Three choices make the six flows: a handler of batches or of records, a converter or none, in order
or not; order for each key is a seventh. Which thread calls a handler: of batches, and of records in
order, one thread of the task's own (never two at once for one task); of records without order or in
order for each key, several threads of the task's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, Protocol

from tailrace.engine.contracts import Committer, RecordProcessor
from tailrace.engine.processing.context import ProcessingConfig, ProcessingContext
from tailrace.engine.processing.dispatchers import KeyedDispatcher, UnorderedDispatcher
from tailrace.engine.processing.ordered import OrderedDispatcher
from tailrace.engine.processing.stage import PoolStageExecutor, Stage
from tailrace.engine.threads import belonging
from tailrace.records.batch import Batch
from tailrace.records.group import Group

#: How long `close` waits for the threads that deliver, which have nothing left to do unless a handler runs.
_END_S = 0.2


def processor_for(terms: ProcessingConfig) -> RecordProcessor:
    """Return the processor of one life of a task."""
    return Flow(terms, _on_threads)


class Delivery(Protocol):
    """What has batches staged and delivered. `run` has a thread of its own."""

    def put(self, batch: Batch) -> None:
        """Take a batch; on the task's thread. Returns at once."""
        ...

    def run(self) -> None:
        """Work until `wake`."""
        ...

    def wake(self) -> None:
        """Have `run` return: nothing more may be delivered. Any thread; returns soon."""
        ...


def _on_threads(terms: ProcessingConfig, means: ProcessingContext) -> Delivery:
    stage = Stage(means.transform, means.convert, terms.calls == "key")
    stage_executor = None if stage.is_empty else PoolStageExecutor(stage, means.executor, terms.threads)
    if terms.calls == "ordered":
        return OrderedDispatcher(terms, means, stage_executor)
    return (KeyedDispatcher if terms.calls == "key" else UnorderedDispatcher)(terms, means, stage_executor)


class Flow:
    """Stages batches while others are delivered (`contracts.RecordProcessor`)."""

    def __init__(
        self, terms: ProcessingConfig, new_delivery: Callable[[ProcessingConfig, ProcessingContext], Delivery]
    ) -> None:
        self._terms = terms
        self._new_delivery = new_delivery
        self._limiter = terms.new_limiter()
        self._thread: threading.Thread | None = None

    @property
    def batches_under_way(self) -> int:
        """Batches that were taken and are not done."""
        return self._limiter.batches

    def initialize(
        self,
        executor: Executor,
        transform: Callable[[Group], Iterable[Group]] | None,
        convert: Callable[[Group], Any] | None,
        committer: Committer,
    ) -> None:
        """Take what is needed; see `contracts.RecordProcessor`."""
        means = ProcessingContext(executor, transform, convert, committer, self._limiter)
        self._delivery = self._new_delivery(self._terms, means)

    def process(self, batch: Batch) -> None:
        """Put a batch under way; waits while there is no room. After `close` nothing is taken."""
        self._limiter.raise_failure()
        if self._thread is None:
            self._thread = threading.Thread(
                target=belonging(self._delivery.run), name=f"{self._terms.name} delivery", daemon=True
            )
            self._thread.start()
        self._limiter.take(batch.size_bytes)
        self._limiter.raise_failure()
        if self._limiter.shut.is_set():
            return
        self._delivery.put(batch)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is delivered and marked; see `contracts.RecordProcessor`."""
        self._limiter.settle()
        is_empty = self._limiter.wait_until_empty(timeout_s)
        self._limiter.raise_failure()
        return is_empty

    def close(self) -> None:
        """Give up what is not done; see `contracts.RecordProcessor`."""
        self._limiter.give_up()
        if self._thread is not None:
            self._delivery.wake()
            if self._thread is not threading.current_thread():
                self._limiter.wait_until_empty(_END_S)
                self._thread.join(_END_S)
