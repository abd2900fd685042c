"""The engine's record processors, and the runners that make them: in this process, or elsewhere.

Three choices make the six flows: a handler of batches or of records, a converter or none, ordered or
unordered; keyed is the seventh. A handler of batches, or of ordered records, is called by one thread that
belongs to the task (never two at once for one task); a handler of unordered or keyed records by several
threads that belong to the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Protocol

from tailrace import extensions
from tailrace.config import SparkConfig
from tailrace.engine.contracts import Committer, RecordProcessor
from tailrace.engine.processing.context import Order, ProcessingConfig, ProcessingContext
from tailrace.engine.processing.dispatcher import DeliveryExecutor, Dispatcher
from tailrace.engine.processing.handlers import Handler
from tailrace.engine.processing.ordered_executor import OrderedExecutor
from tailrace.engine.processing.stage import Convert, PoolStageExecutor, StageExecutor, Transform
from tailrace.engine.processing.thread_executor import ThreadExecutor
from tailrace.records.batch import Batch
from tailrace.records.group import Group


def processor_for(terms: ProcessingConfig) -> RecordProcessor:
    """Return the processor of one attempt of a task."""
    return Dispatcher(terms, _on_threads)


def _on_threads(
    dispatcher: Dispatcher, context: ProcessingContext
) -> tuple[StageExecutor | None, DeliveryExecutor]:
    stage, threads = context.stage, context.terms.threads
    stage_executor = None if stage.is_empty else PoolStageExecutor(stage, context.pool, threads)
    return stage_executor, delivery_here(dispatcher, context)


def delivery_here(dispatcher: Dispatcher, context: ProcessingContext) -> DeliveryExecutor:
    """Return the executor that calls the handler in this process."""
    if context.terms.calls == "ordered":
        return OrderedExecutor(context)
    return ThreadExecutor(dispatcher, context)


class NullProcessor:
    """Counts polled records as processed; for engines without a handler, whose sinks read the log."""

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
        """Return True: nothing is ever in flight."""
        return True

    def close(self) -> None:
        """Do nothing: nothing is in flight."""


class Runner(Protocol):
    """Makes the record processors of an engine, which may work in other processes.

    Found by the entry point `tailrace.runners`, and made with the engine's name and the settings of Spark.
    """

    def check(
        self, handler: Handler, order: Order, transform: Transform | None, convert: Convert | None
    ) -> None:
        """Check, before anything is started, that the runner supports all of this.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        ...

    def processor_for(self, terms: ProcessingConfig) -> RecordProcessor:
        """Return the processor of one attempt of a task."""
        ...

    def close(self) -> None:
        """Release all resources; called once, after the last processor was closed."""
        ...


class InProcess:
    """The runner on threads of this process."""

    def check(
        self, handler: Handler, order: Order, transform: Transform | None, convert: Convert | None
    ) -> None:
        """Do nothing: this process supports everything."""

    processor_for = staticmethod(processor_for)

    def close(self) -> None:
        """Do nothing: there are no resources."""


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
