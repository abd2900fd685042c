"""The runner on Spark: makes record processors whose stages, and unordered handlers, run on executors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tailrace.config import SparkConfig
from tailrace.engine.contracts import RecordProcessor
from tailrace.engine.processing.context import Order, ProcessingConfig, ProcessingContext
from tailrace.engine.processing.dispatcher import DeliveryExecutor, Dispatcher
from tailrace.engine.processing.handlers import Handler, HandlerKind
from tailrace.engine.processing.processors import delivery_here
from tailrace.engine.processing.stage import Convert, Stage, StagedGroup, StageExecutor, Transform
from tailrace.records.group import Group
from tailrace.spark.processing.executor import SparkExecutor, TaskFunction
from tailrace.spark.processing.jobs import Jobs, pickled
from tailrace.spark.session import EngineSession

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkRunner:
    """Runs record processing on Spark (`engine.processing.processors.Runner`). Any thread.

    A session that already runs is used and left running; a session that the runner started is stopped by it.

    :param name: of the engine.
    :param spark: settings with which a session is started.
    """

    def __init__(self, name: str, spark: SparkConfig | None) -> None:
        self._name = name
        self._config = spark
        self._spark = EngineSession()

    def check(
        self, handler: Handler, order: Order, transform: Transform | None, convert: Convert | None
    ) -> None:
        """Check that the functions for executors can be pickled; Spark is not started.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        pickled(Stage(transform, convert, finds_keys=False), "a transformation or the converter")
        if handler.takes is HandlerKind.RECORD and order == "unordered":
            pickled(handler.call, "the handler")

    def processor_for(self, terms: ProcessingConfig) -> RecordProcessor:
        """Return the processor of one attempt of a task; each thread of the pool waits for a Spark job."""
        return Dispatcher(terms, self._on_spark)

    def session(self) -> SparkSession:
        """Return the session; start it if there is none, or if its JVM has died.

        :raises TailraceError: `ENVIRONMENT_UNFIT`, `SPARK_FAILED`.
        """
        return self._spark.get(self._config, self._name)

    def close(self) -> None:
        """Stop the session if the runner started it."""
        self._spark.stop()

    def _on_spark(
        self, dispatcher: Dispatcher, context: ProcessingContext
    ) -> tuple[StageExecutor | None, DeliveryExecutor]:
        terms, stage = context.terms, context.stage
        width = self.session().sparkContext.defaultParallelism

        def jobs(function: Callable[[Any], Any], what: str) -> Jobs[Any, Any]:
            return Jobs(
                self.session,
                pickled(function, what),
                context.pool,
                terms.threads,
                context.limiter.shut,
                f"{self._name}, {terms.name}: {what}",
            )

        if terms.calls == "unordered":
            # A record is staged by the Spark task that delivers it.
            call = TaskFunction(stage, terms.handler.call)
            return None, SparkExecutor(dispatcher, context, jobs(call, "handler"), width)
        stage_executor = None
        if not stage.is_empty:
            stage_executor = SparkStageExecutor(
                jobs(Preparing(stage), "transformation and conversion"), width
            )
        return stage_executor, delivery_here(dispatcher, context)


#: Placeholder for a group that is not sent back.
_PLACEHOLDER = Group("", np.empty(0, np.int64), _columns=pa.RecordBatch.from_pydict({}))


@dataclass(frozen=True, slots=True)
class Preparing:
    """The stage as Spark executors call it. Groups that it did not change are not sent back."""

    stage: Stage

    def __call__(self, part: list[Group]) -> list[tuple[int, StagedGroup]]:
        """Return the staged groups, each with the number of the unchanged group in `part`, or -1."""
        numbers = {id(group): number for number, group in enumerate(part)}
        found = []
        for staged in self.stage(part):
            number = numbers.get(id(staged.group), -1)
            found.append((number, staged if number < 0 else replace(staged, group=_PLACEHOLDER)))
        return found


@dataclass(frozen=True, slots=True)
class SparkStageExecutor:
    """Stages parts on Spark executors (`engine.processing.stage.StageExecutor`).

    :param width: number of tasks that run there at a time.
    """

    jobs: Jobs[list[Group], list[tuple[int, StagedGroup]]]
    width: int

    def close(self) -> None:
        """Cancel running Spark jobs, and begin no others."""
        self.jobs.cancel()

    def stage(self, part: list[Group]) -> Future[list[StagedGroup]]:
        """Stage a part in a Spark job."""
        outcome: Future[list[StagedGroup]] = Future()
        self.jobs.submit(part).add_done_callback(functools.partial(_settle, outcome, part))
        return outcome


def _settle(
    outcome: Future[list[StagedGroup]], part: Sequence[Group], found: Future[list[tuple[int, StagedGroup]]]
) -> None:
    if found.cancelled():
        outcome.cancel()
    if not outcome.set_running_or_notify_cancel():
        return
    if (error := found.exception()) is not None:
        outcome.set_exception(error)
        return
    outcome.set_result(
        [staged if number < 0 else replace(staged, group=part[number]) for number, staged in found.result()]
    )
