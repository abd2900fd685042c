"""The runner on Spark: makes record processors whose stages, and handlers without order, run on executors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tailrace.config import SparkConfig
from tailrace.engine.contracts import RecordProcessor
from tailrace.engine.processing.context import Order, ProcessingConfig, ProcessingContext
from tailrace.engine.processing.handlers import Handler, HandlerKind
from tailrace.engine.processing.ordered import OrderedDispatcher
from tailrace.engine.processing.processors import Delivery, Flow
from tailrace.engine.processing.stage import Convert, Stage, Transform
from tailrace.records.batch import Batch
from tailrace.spark.processing.jobs import Jobs, pickled
from tailrace.spark.processing.keyed import SparkKeyedDispatcher
from tailrace.spark.processing.stage_jobs import Preparing, SparkStageExecutor
from tailrace.spark.processing.task_function import TaskFunction
from tailrace.spark.processing.unordered import SparkUnorderedDispatcher
from tailrace.spark.session import is_alive, restarted, session_or_new

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
        self._lock = threading.Lock()
        self._session: SparkSession | None = None
        self._is_own = False

    def check(
        self, handler: Handler, order: Order, transform: Transform | None, convert: Convert | None
    ) -> None:
        """Check that what runs on executors can go there; Spark is not started.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        pickled(Stage(transform, convert, finds_lanes=False), "a transformation or the converter")
        if handler.takes is HandlerKind.RECORD and order != "ordered":
            pickled(handler.call, "the handler")

    def processor_for(self, terms: ProcessingConfig) -> RecordProcessor:
        """Return the processor of one life of a task; each thread of the pool waits for a Spark job."""
        return Flow(terms, self._delivery)

    def session(self) -> SparkSession:
        """Return the session; started if there is none, and again if its JVM has died.

        :raises TailraceError: `ENVIRONMENT_UNFIT`, `SPARK_FAILED`.
        """
        with self._lock:
            if self._session is None:
                self._session, self._is_own = session_or_new(self._config, f"tailrace {self._name}")
            elif not is_alive(self._session):
                self._session = restarted(self._config, f"tailrace {self._name}")
                self._is_own = True
            return self._session

    def close(self) -> None:
        """Stop the session if it is the runner's own."""
        with self._lock:
            if self._session is not None and self._is_own and is_alive(self._session):
                self._session.stop()
            self._session = None

    def _delivery(self, terms: ProcessingConfig, means: ProcessingContext) -> Delivery:
        width = self.session().sparkContext.defaultParallelism
        all_jobs: list[Jobs[Any, Any]] = []

        def jobs(function: Callable[[Any], Any], what: str) -> Jobs[Any, Any]:
            made: Jobs[Any, Any] = Jobs(
                self.session,
                pickled(function, what),
                means.executor,
                terms.threads,
                means.limiter.shut,
                f"{self._name}, {terms.name}: {what}",
            )
            all_jobs.append(made)
            return made

        def stage_executor(stage: Stage) -> SparkStageExecutor:
            return SparkStageExecutor(jobs(Preparing(stage), "transformation and conversion"), width)

        call = terms.handler.call
        stage = Stage(means.transform, means.convert, finds_lanes=terms.calls == "key")
        delivery: Delivery
        if terms.calls == "ordered":
            delivery = OrderedDispatcher(terms, means, None if stage.is_empty else stage_executor(stage))
        elif terms.calls == "unordered":
            delivery = SparkUnorderedDispatcher(
                terms, means, jobs(TaskFunction(stage, call), "handler"), width
            )
        else:
            delivery = SparkKeyedDispatcher(
                terms, means, jobs(TaskFunction(None, call), "handler"), stage_executor(stage), width
            )
        return _WithJobs(delivery, tuple(all_jobs))


@dataclass(frozen=True, slots=True)
class _WithJobs:
    # A delivery whose jobs end with it.
    delivery: Delivery
    jobs: tuple[Jobs[Any, Any], ...]

    def put(self, batch: Batch) -> None:
        self.delivery.put(batch)

    def run(self) -> None:
        self.delivery.run()

    def wake(self) -> None:
        self.delivery.wake()
        for jobs in self.jobs:
            jobs.cancel()
