"""`tailrace run`: runs a source worker for each source of a file, until the end.

`Run` is the entry point. An engine with a handler (`connector.py`) has the same source workers, those of a
task in a `SourceGroup`, and reads their logs in addition.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import structlog

from tailrace.backoff import Backoff
from tailrace.compiled import load_all
from tailrace.config import EngineConfig
from tailrace.engine.failures import backoff_of, restarts_of
from tailrace.engine.lifecycle import State
from tailrace.engine.logs import to_logging
from tailrace.engine.metrics import EngineMetrics, MetricsEndpoint
from tailrace.engine.supervision import Phase
from tailrace.engine.views import EngineView, TaskView
from tailrace.errors import Kind, Policy, TailraceError
from tailrace.fair_semaphore import FairSemaphore
from tailrace.pipeline.background import Background
from tailrace.pipeline.log.root import take_root
from tailrace.pipeline.source_worker import SourceWorker
from tailrace.pipeline.spark_host import SparkHost
from tailrace.pipeline.status.publisher import StatusPublisher
from tailrace.pipeline.status.source_metrics import SourceMetrics
from tailrace.pipeline.status.views import PipelineView, SourceView
from tailrace.waits import wait_until

log = structlog.get_logger(__name__)

TURN_S = 0.05
#: Interval at which metrics are updated, and consumers' positions are committed to the log, in seconds.
KEEP_INTERVAL_S = 1.0
#: States of a capture whose server was reached.
AT_WORK = frozenset({"snapshot", "streaming", "waiting_for_disk"})
#: Time for sinks to finish their batch at the end, in seconds; then it is abandoned, which is safe: it is
#: written again at the next start.
DRAIN_DEADLINE_S = 8.0
GIVE_UP_DEADLINE_S = 4.0
CAPTURE_STOP_DEADLINE_S = 10.0
#: Limit of the batches of one sink at a time, of all sources: while one is committed, another is decoded.
BATCHES_AT_ONCE = 2

Item = TypeVar("Item")


def _load_kernels() -> None:
    began = time.monotonic()
    message = "compiling kernels, once after an installation; the first rows wait for it, a minute or two"
    if load_all(lambda: log.info(message)):
        log.info("kernels compiled", seconds=round(time.monotonic() - began))


class PipelineResources:
    """The resources that a running pipeline's sources share: Spark, status, sinks' turns, logs' directory.

    :param on_spark: whether sources are captured on executors.
    :param observe: as of `StatusPublisher`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_spark: bool,
        observe: Callable[[PipelineView], None] = lambda _: None,
    ) -> None:
        self._config = config
        self.remote_tasks = len(config.pipelines) if on_spark else 0
        self.spark = SparkHost(config)
        self.status = StatusPublisher(config, observe)
        # One queue for each sink: while a sink hangs, sources wait for it, but not the other sinks.
        self.writing = [FairSemaphore(BATCHES_AT_ONCE) for _ in config.sinks]
        self._root_lock: int | None = None
        self._started = False

    def start(self) -> None:
        """Lock the directory of the logs, and begin to publish the status.

        :raises TailraceError: `LOG_LOCKED`, `LOG_FOREIGN`, `SINK_FOREIGN`; `ENVIRONMENT_UNFIT` if Spark is
            needed and there is no Java.
        """
        if self._needs_spark:
            from tailrace.spark.java import require_java

            require_java()
        self._root_lock = take_root(self._config)
        self._started = True
        # Loaded while the source connects; otherwise the first change would wait for them.
        Background("kernels", _load_kernels).start()
        self.status.start()

    def start_spark(self) -> None:
        """Begin to start Spark, if it is needed from the start; returns at once."""
        if self._needs_spark:
            self.spark.start()

    def stop(self) -> None:
        """Stop Spark, if it ran, publish the last status, and unlock the directory."""
        self.spark.stop()
        if self._started:
            self.status.stop()
        if self._root_lock is not None:
            os.close(self._root_lock)
            self._root_lock = None

    @property
    def _needs_spark(self) -> bool:
        return self.remote_tasks > 0 or self._config.needs_spark_at_start


class SourceGroup:
    """Source workers that start together, are driven by one thread, and end together.

    :param make: makes the worker at a place; called again to restart its capture.
    :param keep: called every `KEEP_INTERVAL_S` on that thread, and once at the end.
    """

    def __init__(
        self, spark: SparkHost, count: int, make: Callable[[int], SourceWorker], keep: Callable[[], None]
    ) -> None:
        self._spark = spark
        self._make = make
        self._keep = keep
        self.workers = tuple(make(place) for place in range(count))
        self._recovering: list[SourceWorker] = []
        self._running = False
        self._stop_wanted = threading.Event()
        self._looking_after = Background("look-after", self._look_after)

    def check(self) -> None:
        """Check everything that can be checked without a server.

        :raises TailraceError: `LOG_LOCKED` if another process writes a log; `SECRET_MISSING`.
        """
        for worker in self.workers:
            worker.refuse_if_written()
            worker.require_salts()

    def start(self) -> None:
        """Start every worker; returns at once."""
        self._running = True
        for worker in self.workers:
            worker.start()
        self._looking_after.start()

    @property
    def is_over(self) -> bool:
        """Whether all workers are over."""
        return all(worker.is_over for worker in self.workers)

    @property
    def failed(self) -> list[SourceWorker]:
        """The workers that have failed."""
        return [worker for worker in self.workers if worker.error is not None]

    @property
    def broken(self) -> TailraceError | None:
        """The error of the thread that drives the workers, which belongs to no source."""
        return self._looking_after.error

    @property
    def is_recovering(self) -> bool:
        """Whether captures were restarted, and none of them has reached its server yet."""
        if any(worker.view().task.state in AT_WORK for worker in self._recovering):
            self._recovering = []
        return bool(self._recovering)

    def note_sink_failures(self) -> None:
        """Make workers that are over adopt the error that stopped a sink as their own failure."""
        for worker in self.workers:
            worker.note_sink_failure()

    def capture_again(self) -> None:
        """Replace each worker that failed and has ended by a new one, and start it."""
        again: list[SourceWorker] = []
        workers = list(self.workers)
        for place, worker in enumerate(self.workers):
            if worker.error is not None and worker.capture_ended(0) and worker.sinks_ended():
                workers[place] = self._make(place)
                again.append(workers[place])
        self.workers = tuple(workers)
        self._recovering = again
        for worker in again:
            worker.start()

    def stop(self) -> None:
        """End captures and sinks in order, within their deadlines."""
        self._stop_wanted.set()
        if self._running:
            self._stop_workers()
            self._looking_after.join(2 * TURN_S)
            self.note_sink_failures()
        self._keep()

    def _stop_workers(self) -> None:
        workers = self.workers
        for worker in workers:
            worker.stop()
        if not wait_until(lambda: all(worker.sinks_ended() for worker in workers), DRAIN_DEADLINE_S, TURN_S):
            log.warning("a sink did not finish its batch in time: it is written again at the next start")
            self._spark.cancel_jobs(tag for worker in workers for tag in worker.job_tags)
            # Only jobs can be cancelled: a thread that waits for a cluster ends with the process.
            wait_until(lambda: all(worker.spark_ended() for worker in workers), GIVE_UP_DEADLINE_S, TURN_S)
        deadline = time.monotonic() + CAPTURE_STOP_DEADLINE_S
        for worker in workers:
            if not worker.capture_ended(max(0.0, deadline - time.monotonic())):
                log.warning(
                    "capture did not stop in time: the source sends again what is not durable",
                    source=worker.name,
                )

    def _look_after(self) -> None:
        keep_s = 0.0
        while not self._stop_wanted.wait(TURN_S):
            for worker in self.workers:
                worker.turn()
            if time.monotonic() >= keep_s:
                keep_s = time.monotonic() + KEEP_INTERVAL_S
                self._keep()


class Run:
    """One run of a pipeline, from one source or from several.

    :param until_caught_up: end when everything that the sources had committed at the start is in the log and
        in every sink.
    :param observe: called periodically with the pipeline's view, on its own thread, and once at the end; it
        must return at once and not raise.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        until_caught_up: bool = False,
        observe: Callable[[PipelineView], None] = lambda _: None,
    ) -> None:
        to_logging()
        self._config = config
        self._until_caught_up = until_caught_up
        options = config.engine.without_handler()
        self._resources = PipelineResources(config, on_spark=options.tasks_on == "spark", observe=observe)
        # The places of each task's sources, by the task's number.
        self._tasks = spread(range(len(config.pipelines)), config.tasks_max)
        self._beginning = [FairSemaphore(1) for _ in self._tasks]
        self._sources = SourceGroup(
            self._resources.spark, len(config.pipelines), self._worker, self._count_sinks
        )
        self._metrics = EngineMetrics(config.name, self._view_for_metrics, polls=False)
        of_tasks = [self._metrics.of(str(task)) for task in range(len(self._tasks))]
        self._source_metrics = [SourceMetrics(metrics) for metrics in of_tasks]
        self._endpoint = MetricsEndpoint(config.name)
        self._retries, self._restarts = backoff_of(options), restarts_of(options)
        self._on_failure = options.on_task_failure
        self._state = State.CREATING
        self._stop_wanted = threading.Event()
        self._ending = threading.Event()

    def run(self) -> None:
        """Run until `stop`, until caught up, or until all sources have failed. Once, on one thread.

        A source fails alone, and so does a sink while its source has another one; when no source can
        continue, the run ends.

        :raises TailraceError: at once, `LOG_LOCKED` if a log has a writer, `SECRET_MISSING` or
            `CONFIG_INVALID` if a mask has no salt; at the end, the first error that ended a capture or
            stopped a sink. If all sinks of a source have stopped, the source ends; otherwise the pipeline
            continues with the others, and the error is raised when it is stopped. With several sources, the
            context has the `source`, and under `failed_too` those that failed after it.
        """
        try:
            self._start()
            self._wait()
        finally:
            self._ending.set()
            self._state = State.STOPPING
            with contextlib.ExitStack() as afterwards:
                afterwards.callback(self._endpoint.close)
                afterwards.callback(self._resources.stop)
                self._sources.stop()
            self._state = State.STOPPED
        if failed := self._sources.failed:
            raise self._resources.status.failure or failure_of(failed)

    def stop(self) -> None:
        """Request the end: sinks finish their batch, capture makes its changes durable and acknowledges them.

        Any thread, any number of times, also from a signal handler; returns at once.
        """
        self._stop_wanted.set()

    def view(self) -> PipelineView:
        """Return the present view of the pipeline. Any thread."""
        return self._resources.status.view()

    def _start(self) -> None:
        self._config.require_no_delivery()
        if self._config.is_atomic_for_nothing:
            log.warning("atomic_source_offset_commit is ignored: no offsets are kept in Kafka")
        self._endpoint.open(self._config.engine, self._metrics)
        self._sources.check()
        self._resources.start()
        for number, places in enumerate(self._tasks):
            self._resources.status.show(number, functools.partial(self._views, places), self._ending)
        self._resources.start_spark()
        self._sources.start()
        self._state = State.POLLING_TASKS

    def _wait(self) -> None:
        """Wait for the end; restart failed captures, as often as the file says."""
        sources = self._sources
        while not self._stop_wanted.wait(TURN_S):
            if sources.broken is not None:
                self._resources.status.fail(sources.broken)
                raise sources.broken
            if not sources.is_recovering:
                self._retries, self._restarts = self._retries.after_success(), self._restarts.after_success()
            if over := sources.is_over:
                sources.note_sink_failures()
            failed = sources.failed
            if failed and (over or len(failed) == len(sources.workers) or self._on_failure != "isolate"):
                error = failure_of(failed)
                retries, restarts, wait_s = self._next_attempt(error)
                is_over = all(worker.is_over for worker in failed)
                if wait_s is None:
                    # Only raised until caught up: the log has all other changes, and sinks write them first.
                    if is_over or error.kind is not Kind.SHARDS_LOST:
                        return
                elif is_over:
                    self._retries, self._restarts = retries, restarts
                    log.warning("capture failed, restarting", error=str(error), wait_s=wait_s)
                    self._stop_wanted.wait(wait_s)
                    sources.capture_again()
            elif over:
                return

    def _next_attempt(self, error: TailraceError) -> tuple[Backoff, Backoff, float | None]:
        """Return the state of retries and restarts after a failure, and the wait; None: the run ends."""
        retries, wait_s = self._retries.after(error)
        if wait_s is not None or self._on_failure != "restart":
            return retries, self._restarts, wait_s
        return retries, *self._restarts.after_failure()

    def _worker(self, place: int) -> SourceWorker:
        task = next(number for number, places in enumerate(self._tasks) if place in places)
        return SourceWorker(
            self._config.pipelines[place],
            task,
            self._resources.spark,
            beginning=self._beginning[task],
            writing=self._resources.writing,
            until_caught_up=self._until_caught_up,
            remote_tasks=self._resources.remote_tasks,
        )

    def _views(self, places: Iterable[int]) -> list[SourceView]:
        workers = self._sources.workers
        return [workers[place].view() for place in places]

    def _count_sinks(self) -> None:
        for metrics, places in zip(self._source_metrics, self._tasks, strict=True):
            metrics.note(self._views(places))

    def _view_for_metrics(self) -> EngineView:
        tasks = []
        for number, places in enumerate(self._tasks):
            errors = tuple(view.task.error for view in self._views(places) if view.task.error is not None)
            failed = all(self._sources.workers[place].error is not None for place in places)
            at_work = Phase.POLLING if self._state is State.POLLING_TASKS else Phase.STOPPED
            tasks.append(TaskView(number, Phase.FAILED if failed else at_work, errors=errors))
        return EngineView(self._config.name, self._state, tuple(tasks), None, "")


def spread(items: Sequence[Item], groups_max: int) -> list[tuple[Item, ...]]:
    """Distribute `items`, one after another, to at most `groups_max` groups.

    Sizes differ by at most one, and no group is empty. While there are `groups_max` groups, an item that is
    added at the end moves no other item.
    """
    count = min(groups_max, len(items))
    return [tuple(items[number::count]) for number in range(count)]


def failure_of(failed: Sequence[SourceWorker]) -> TailraceError:
    """Return the first failure, naming the other failed sources; failures that are not retried come first."""
    errors = [(_of_sinks(worker.error), worker.name) for worker in failed if worker.error is not None]
    errors.sort(key=lambda found: found[0].policy is Policy.RETRY)
    first = errors[0][0]
    if len(errors) == 1:
        return first
    others = ", ".join(name for _, name in errors[1:])
    found = first.changed({"failed_too": others})
    found.__cause__ = first
    return found


def _of_sinks(error: TailraceError) -> TailraceError:
    """Return `error`; an error of sinks, which have already been retried, is returned as a final one."""
    if error.policy is not Policy.RETRY or "sinks" not in error.context:
        return error
    found = error.changed(kind=Kind.TASK_FAILED, message=f"{error.kind}: {error.message}")
    found.__cause__ = error
    return found
