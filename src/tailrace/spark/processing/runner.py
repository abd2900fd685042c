"""The runner on Spark: makes record processors whose stages, and handlers without order, run on executors."""

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
from tailrace.engine.processing.dispatcher import Dispatcher, PartExecutor
from tailrace.engine.processing.handlers import Handler, HandlerKind
from tailrace.engine.processing.ordered_executor import OrderedExecutor
from tailrace.engine.processing.stage import Convert, Stage, StagedGroup, StageExecutor, Transform
from tailrace.engine.processing.thread_executor import ThreadExecutor
from tailrace.records.group import Group
from tailrace.spark.processing.executor import SparkExecutor, TaskFunction
from tailrace.spark.processing.jobs import Jobs, pickled
from tailrace.spark.session import EngineSession

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkRunner:
    """Runs record processing on Spark (`engine.processing.runners.Runner`). Any thread.

    A session that runs already is used and left running; one that the runner started is its to stop.

    :param name: of the engine.
    :param spark: what a session is started with.
    """

    def __init__(self, name: str, spark: SparkConfig | None) -> None:
        self._name = name
        self._config = spark
        self._spark = EngineSession()

    def check(
        self, handler: Handler, order: Order, transform: Transform | None, convert: Convert | None
    ) -> None:
        """Check that what runs on executors can go there; Spark is not started.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        pickled(Stage(transform, convert, finds_keys=False), "a transformation or the converter")
        if handler.takes is HandlerKind.RECORD and order == "unordered":
            pickled(handler.call, "the handler")

    def processor_for(self, terms: ProcessingConfig) -> RecordProcessor:
        """Return the processor of one attempt of a task; each thread of the pool waits for a Spark job."""
        return Dispatcher(terms, self._on_spark)

    def session(self) -> SparkSession:
        """Return the session; started if there is none, and again if its JVM has died.

        :raises TailraceError: `ENVIRONMENT_UNFIT`, `SPARK_FAILED`.
        """
        return self._spark.get(self._config, self._name)

    def close(self) -> None:
        """Stop the session if it is the runner's own."""
        self._spark.stop()

    def _on_spark(
        self, dispatcher: Dispatcher, context: ProcessingContext
    ) -> tuple[StageExecutor | None, PartExecutor]:
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
            # A record is staged by the task that hands it over.
            call = TaskFunction(stage, terms.handler.call)
            return None, SparkExecutor(dispatcher, context, jobs(call, "handler"), width)
        stage_executor = None
        if not stage.is_empty:
            stage_executor = SparkStageExecutor(
                jobs(Preparing(stage), "transformation and conversion"), width
            )
        if terms.calls == "ordered":
            return stage_executor, OrderedExecutor(context)
        return stage_executor, ThreadExecutor(dispatcher, context)


#: In the place of a group that is not sent back.
_NOTHING = Group("", np.empty(0, np.int64), _columns=pa.RecordBatch.from_pydict({}))


@dataclass(frozen=True, slots=True)
class Preparing:
    """The stage, as executors call it. A group that it left as it was is not sent back."""

    stage: Stage

    def __call__(self, part: list[Group]) -> list[tuple[int, StagedGroup]]:
        """Return what becomes of groups; with the number of the one that it is, or -1."""
        numbers = {id(group): number for number, group in enumerate(part)}
        found = []
        for staged in self.stage(part):
            number = numbers.get(id(staged.group), -1)
            found.append((number, staged if number < 0 else replace(staged, group=_NOTHING)))
        return found


class SparkStageExecutor:
    """Has parts staged on executors (`engine.processing.stage.StageExecutor`).

    :param width: tasks that run at a time there.
    """

    def __init__(self, jobs: Jobs[list[Group], list[tuple[int, StagedGroup]]], width: int) -> None:
        self._jobs = jobs
        self._width = width

    @property
    def width(self) -> int:
        """Into how many parts a batch is cut, about."""
        return self._width

    def close(self) -> None:
        """Give up Spark jobs that run, and begin no other."""
        self._jobs.cancel()

    def stage(self, part: list[Group]) -> Future[list[StagedGroup]]:
        """Have a part staged by a Spark job."""
        outcome: Future[list[StagedGroup]] = Future()
        self._jobs.submit(part).add_done_callback(functools.partial(_settle, outcome, part))
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
