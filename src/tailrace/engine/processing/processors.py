"""The engine's record processors, and the runners that make them: in this process, or somewhere else.

Three choices make the six flows: a handler of batches or of records, a converter or none, in order
or not; order for each key is a seventh. Which thread calls a handler: of batches, and of records in
order, one thread that belongs to the task (never two at once for one task); of records without order or in
order for each key, several threads that belong to the task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, Protocol

from tailrace import extensions
from tailrace.config import SparkConfig
from tailrace.engine.contracts import Committer, RecordProcessor
from tailrace.engine.processing.context import Order, ProcessingConfig, ProcessingContext
from tailrace.engine.processing.dispatcher import Dispatcher, PartExecutor
from tailrace.engine.processing.handlers import Handler
from tailrace.engine.processing.ordered_executor import OrderedExecutor
from tailrace.engine.processing.stage import Convert, PoolStageExecutor, Stage, Transform
from tailrace.engine.processing.thread_executor import ThreadExecutor
from tailrace.engine.threads import belonging
from tailrace.records.batch import Batch
from tailrace.records.group import Group

#: How long `close` waits for the threads that deliver, which have nothing left to do unless a handler runs.
_END_S = 0.2


def processor_for(terms: ProcessingConfig) -> RecordProcessor:
    """Return the processor of one attempt of a task."""
    return Flow(terms, _on_threads)


def _on_threads(terms: ProcessingConfig, means: ProcessingContext) -> Dispatcher[Any]:
    # Keys of records that are not transformed are found when they are asked for.
    stage = Stage(means.transform, means.convert, terms.calls == "key" and means.transform is not None)
    stage_executor = None if stage.is_empty else PoolStageExecutor(stage, means.executor, terms.threads)

    def executor(dispatcher: Dispatcher[Any]) -> PartExecutor[Any]:
        if terms.calls == "ordered":
            return OrderedExecutor(terms, means)
        return ThreadExecutor(dispatcher, terms, means)

    return Dispatcher(terms, means, stage_executor, executor)


class Flow:
    """Stages batches while others are delivered (`contracts.RecordProcessor`)."""

    def __init__(
        self,
        terms: ProcessingConfig,
        new_dispatcher: Callable[[ProcessingConfig, ProcessingContext], Dispatcher[Any]],
    ) -> None:
        self._terms = terms
        self._new_dispatcher = new_dispatcher
        self._limiter = terms.new_limiter()
        self._thread: threading.Thread | None = None

    def initialize(
        self,
        executor: Executor,
        transform: Callable[[Group], Iterable[Group]] | None,
        convert: Callable[[Group], Any] | None,
        committer: Committer,
    ) -> None:
        """Take what is needed; see `contracts.RecordProcessor`."""
        means = ProcessingContext(executor, transform, convert, committer, self._limiter)
        self._dispatcher = self._new_dispatcher(self._terms, means)

    def process(self, batch: Batch) -> None:
        """Put a batch under way; waits while there is no room. After `close` nothing is taken."""
        self._limiter.raise_failure()
        if self._thread is None:
            self._thread = threading.Thread(
                target=belonging(self._dispatcher.run), name=f"{self._terms.name} delivery", daemon=True
            )
            self._thread.start()
        self._limiter.take(batch.size_bytes)
        self._limiter.raise_failure()
        if self._limiter.shut.is_set():
            return
        self._dispatcher.put(batch)

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
            self._dispatcher.wake()
            if self._thread is not threading.current_thread():
                self._limiter.wait_until_empty(_END_S)
                self._thread.join(_END_S)


class NullProcessor:
    """Counts what is polled as processed, where nobody wants the records: sinks are fed from the log."""

    def initialize(
        self,
        executor: Executor,
        transform: Callable[[Group], Iterable[Group]] | None,
        convert: Callable[[Group], object] | None,
        committer: Committer,
    ) -> None:
        """Take the committer."""
        self._committer = committer

    def process(self, batch: Batch) -> None:
        """Mark the batch."""
        self._committer.mark_processed(batch)
        self._committer.mark_batch_finished(batch)

    def drain(self, timeout_s: float) -> bool:
        """Nothing is ever under way."""
        return True

    def close(self) -> None:
        """Nothing is to be given up."""


class Runner(Protocol):
    """Makes the record processors of an engine, whose work is done somewhere else.

    Found by the entry point `tailrace.runners`, and made with the engine's name and the settings of Spark.
    """

    def check(
        self, handler: Handler, order: Order, transform: Transform | None, convert: Convert | None
    ) -> None:
        """Check, before anything is started, that all of this can be done there.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        ...

    def processor_for(self, terms: ProcessingConfig) -> RecordProcessor:
        """Return the processor of one attempt of a task."""
        ...

    def close(self) -> None:
        """Let go of what is held; called once, after the last processor was closed."""
        ...


class InProcess:
    """The runner on threads of this process."""

    def check(
        self, handler: Handler, order: Order, transform: Transform | None, convert: Convert | None
    ) -> None:
        """There is nothing that can't be done here."""

    processor_for = staticmethod(processor_for)

    def close(self) -> None:
        """Nothing is held."""


def runner_of(runs_on: str, name: str, spark: SparkConfig | None) -> Runner:
    """Return the runner that `record_processing.runs_on` names.

    :raises TailraceError: `CONFIG_INVALID`, `ENVIRONMENT_UNFIT`.
    """
    if runs_on == "threads":
        return InProcess()
    make: Callable[[str, SparkConfig | None], Runner] = extensions.factory(
        extensions.RUNNERS, runs_on, ("check", "processor_for", "close")
    )
    return make(name, spark)
