"""The connector and the tasks of an engine that reads a pipeline's sources for a handler.

A task has a source worker for each of its sources (`run.SourceGroup`): captured changes are made durable in
the source's log, then acknowledged, and only durable changes are polled from there. So a slow or failed
handler delays neither the server nor the sinks of the same pipeline, and after a crash changes are read again
from the log, not from the server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog
from pydantic import ValidationError

from tailrace.config import EngineConfig
from tailrace.config.problems import from_pydantic
from tailrace.config.sections import SINK_TYPES
from tailrace.engine.contracts import ConnectorContext, OffsetStore, Settings, TaskContext
from tailrace.errors import Kind, TailraceError
from tailrace.fair_semaphore import FairSemaphore
from tailrace.pipeline import realtime
from tailrace.pipeline.log.consumer import LogConsumer, partition_of
from tailrace.pipeline.offsets.log_store import LogOffsetStore
from tailrace.pipeline.run import PipelineResources, SourceGroup, failure_of, spread
from tailrace.pipeline.source_worker import SourceWorker
from tailrace.pipeline.status.source_metrics import SourceMetrics
from tailrace.pipeline.status.views import SourceView
from tailrace.ranges.changes import PENDING_S
from tailrace.records.batch import Batch, Offset, Partition

log = structlog.get_logger(__name__)

#: Key that the settings may have in addition to those of a pipeline file.
UNTIL_CAUGHT_UP = "until_caught_up"

#: Interval between checks of a log whose capture does not announce changes (a snapshot's chunks, a capture
#: that begins, one on an executor), in seconds.
LOOK_S = 0.05
#: The same if capture announces what is durable, after a while without changes.
QUIET_LOOK_S = 0.2


class PipelineConnector:
    """Plans tasks over the sources of a pipeline. Its settings are the keys of a pipeline file.

    With `until_caught_up: true` each task finishes when everything that its sources had committed at its
    start was polled and is in the sinks.
    """

    def __init__(self) -> None:
        self._settings: Settings = {}
        self._config: EngineConfig | None = None
        self._resources: PipelineResources | None = None

    @property
    def places(self) -> Collection[str]:
        """Where sources can be captured except in this process (`contracts.RunsElsewhere`)."""
        return ("spark",)

    def offset_store(self, name: str, settings: Settings) -> OffsetStore:
        """Return the store that keeps offsets in the logs.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        return LogOffsetStore(name, config_of(name, settings).pipelines)

    def switch_realtime(self, *, on: bool) -> None:
        """Request that handler and sinks are fed from memory, or not; see `pipeline.realtime.switch`."""
        assert self._config is not None
        realtime.switch(self._config, on=on)

    def realtime_status(self) -> Sequence[Mapping[str, Any]]:
        """Return the state of real time of each consumer."""
        assert self._config is not None
        return realtime.status(self._config)

    def start(self, context: ConnectorContext) -> None:
        """Check the settings and lock the directory `log.path`.

        :raises TailraceError: `CONFIG_INVALID`; as `PipelineResources.start`.
        """
        self._settings = {"name": context.name, **context.settings}
        self._config = config_of(context.name, context.settings)
        self._resources = PipelineResources(self._config, on_spark=context.tasks_on == "spark")
        self._resources.start()

    def task_settings(self, tasks_max: int) -> Sequence[Settings]:
        """Divide the sources among at most `tasks_max` tasks, as evenly as possible."""
        assert self._config is not None
        if not self._config.has_several:
            return [self._settings]
        groups = spread(self._settings["sources"], tasks_max)
        return [{**self._settings, "sources": list(sources)} for sources in groups]

    def create_task(self) -> PipelineTask:
        assert self._resources is not None
        return PipelineTask(self._resources)

    def stop(self) -> None:
        """Stop Spark if it runs, and unlock the directory `log.path`."""
        if self._resources is not None:
            self._resources.stop()


class PipelineTask:
    """Captures some sources into their logs, feeds their sinks, and returns the logs' changes in batches."""

    def __init__(self, resources: PipelineResources) -> None:
        self._resources = resources
        self._until_caught_up = False
        self._context: TaskContext | None = None
        self._config: EngineConfig | None = None
        self._sources: SourceGroup | None = None
        # By the source's index. Empty if the engine has no handler: sinks read the log by themselves.
        self._readings: dict[int, LogConsumer] = {}
        self._offsets: dict[int, Offset | None] = {}
        self._next_source = 0
        # By the source's index: when to read again, and the error of the missing catalogue facts.
        self._pending: dict[int, tuple[float, TailraceError]] = {}
        self._look_s = LOOK_S
        self._finished = False
        self._raised = False
        self._dropped: TailraceError | None = None
        self._news = threading.Event()  # set when something may be new in a log
        self._beginning = FairSemaphore(1)
        self._metrics: SourceMetrics | None = None

    def start(self, context: TaskContext) -> None:
        """Start capturing, after the checks that need no server.

        :raises TailraceError: `LOG_LOCKED` if another process writes a log; `SECRET_MISSING`;
            `OFFSETS_FOREIGN`, `OFFSETS_UNREADABLE`; `LOG_RANGE_GONE`.
        """
        self._context = context
        self._config = config_of(context.name, context.settings)
        self._until_caught_up = bool(context.settings.get(UNTIL_CAUGHT_UP, False))
        pipelines = self._config.pipelines
        self._offsets = dict(context.offsets.read([partition_of(pipeline) for pipeline in pipelines]))
        self._metrics = SourceMetrics(context.metrics)
        self._sources = SourceGroup(self._resources.spark, len(pipelines), self._worker, self._keep)
        self._sources.check()
        for reading in self._readings.values():
            reading.open()
        self._resources.status.show(context.number, self._views, context.stopping)
        self._resources.start_spark()
        self._sources.start()

    def poll(self, timeout_s: float) -> Batch | None:
        """Return the next batch of one of the logs; None if there is none, or the engine has no handler.

        If a source fails, the others continue; its error is raised when all have failed or ended.
        :raises TailraceError: the error of a capture, or of all sinks; `LOG_CORRUPT`, `LOG_RANGE_GONE`,
            `DECODE_FAILED`. After a transient error, the next call captures again.
        """
        assert self._context is not None
        assert self._sources is not None
        until = time.monotonic() + timeout_s
        look_s = self._look_s
        if self._raised:
            # After a transient error: captures begin again, and each log is read on from its position.
            self._raised = False
            self._pending.clear()
            self._sources.capture_again()
        while True:
            self._news.clear()
            over = self._sources.is_over
            if (batch := self._next(self._sources.workers)) is not None:
                self._look_s = LOOK_S
                return batch
            self._look_for_failures(self._sources, over=over)
            if over and not self._finished and not self._pending:
                self._finished = True
                self._context.finish()
            left_s = until - time.monotonic()
            if left_s <= 0 or self._context.stopping.is_set():
                remote = self._resources.remote_tasks > 0
                self._look_s = LOOK_S if remote else min(2 * look_s, QUIET_LOOK_S)
                return None
            self._news.wait(min(left_s, look_s))

    @property
    def is_recovering(self) -> bool:
        """Whether captures were restarted, and none of them has received changes of its server yet."""
        return self._sources is not None and self._sources.is_recovering

    @property
    def errors(self) -> Sequence[TailraceError]:
        """The errors of sources that are retried, or have failed while others continue."""
        found = []
        for place, worker in enumerate(self._sources.workers if self._sources is not None else ()):
            view = worker.view()
            pending = self._pending.get(place)
            if (error := view.task.error or (pending and pending[1])) is not None:
                found.append(error.changed({"source": view.name} if view.name else {}))
        return found

    def commit(self, partition: Partition, offset: Offset) -> None:
        """Note `offset`; it is committed to the log later, so that retention may remove what precedes it."""
        for reading in self._readings.values():
            if reading.partition == partition:
                reading.note(offset)

    def stop(self) -> None:
        """Stop the captures and the sinks in order, within their deadlines.

        :raises TailraceError: the error of a source or sink that failed while others continued.
        """
        failed: list[SourceWorker] = []
        if self._sources is not None:
            self._sources.stop()
            failed = self._sources.failed
        for reading in self._readings.values():
            reading.close()
        if failed and not self._raised:
            raise failure_of(failed)

    def _worker(self, place: int) -> SourceWorker:
        assert self._context is not None
        assert self._config is not None
        pipeline, reading = self._config.pipelines[place], self._readings.get(place)
        if self._context.wanted:
            begin = self._offsets.get(place) if reading is None else reading.offset
            rows_max = self._context.batch_records_max
            reading = LogConsumer(self._context.name, pipeline, begin, rows_max=rows_max)
            self._readings[place] = reading
        return SourceWorker(
            pipeline,
            self._context.number,
            self._resources.spark,
            beginning=self._beginning,
            writing=self._resources.writing,
            until_caught_up=self._until_caught_up,
            reading=reading,
            on_durable=self._news.set if self._context.wanted else None,
            remote_tasks=self._resources.remote_tasks,
        )

    def _next(self, workers: Sequence[SourceWorker]) -> Batch | None:
        """Return the next batch, of each source in turn; skip sources that wait for catalogue facts.

        :raises TailraceError: as `LogConsumer.next`; `TASK_FAILED` if such a source's capture has ended.
        """
        for number in range(len(self._readings)):
            place = (self._next_source + number) % len(self._readings)
            until_s, _ = self._pending.get(place, (0.0, None))
            if time.monotonic() < until_s and not workers[place].is_over:
                continue
            try:
                batch = self._readings[place].next()
            except TailraceError as error:
                if error.kind is not Kind.SCHEMA_PENDING:
                    raise
                if workers[place].is_over:  # the facts are not queried any more
                    raise error.changed(kind=Kind.TASK_FAILED) from error
                self._pending[place] = time.monotonic() + PENDING_S, error
                continue
            self._pending.pop(place, None)
            if batch is not None:
                self._next_source = place + 1
                return batch
        return None

    def _look_for_failures(self, sources: SourceGroup, *, over: bool) -> None:
        """Raise the error with which the task can't continue, if any; `over`: all sources have ended."""
        failure = sources.broken or self._dropped
        if failure is not None:
            self._resources.status.fail(failure)
            raise failure
        if over:
            sources.note_sink_failures()
        failed = sources.failed
        if failed and (over or len(failed) == len(sources.workers)):
            self._raised = True
            raise failure_of(failed)

    def _views(self) -> list[SourceView]:
        """Return the current state of the sources, with the handler among their sinks. Any thread."""
        assert self._sources is not None
        views = []
        for place, worker in enumerate(self._sources.workers):
            view, reading = worker.view(), self._readings.get(place)
            views.append(view if reading is None else replace(view, sinks=(*view.sinks, reading.view)))
        return views

    def _keep(self) -> None:
        for reading in list(self._readings.values()):
            try:
                reading.keep()
            except TailraceError as error:
                if error.kind is Kind.LOG_RANGE_GONE:
                    self._dropped = error
                else:
                    log.warning("the engine's offset could not be committed to the log", error=str(error))
        if self._metrics is not None and self._sources is not None:
            self._metrics.note(self._views())


def config_of(name: str, settings: Settings) -> EngineConfig:
    """Return the configuration of the engine `name` from settings with the keys of a pipeline file.

    :raises TailraceError: `CONFIG_INVALID`; its message lists every problem, one per line.
    """
    document = {"name": name, **settings}
    document.pop(UNTIL_CAUGHT_UP, None)
    try:
        return EngineConfig.model_validate(document)
    except ValidationError as error:
        problems = from_pydantic(error, EngineConfig, SINK_TYPES)
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"read the settings of the connector postgresql:{lines}",
            "they are the keys of a pipeline file; every one is described in docs/configuration.md",
        ) from None
