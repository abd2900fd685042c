"""PostgreSQL as a source of the engine: its connector and its tasks.

A task has a lane for each of its sources: captured changes are made durable in the source's log,
then acknowledged, and only what is durable is polled from there. So a handler that is slow or dead
holds up neither the server nor the sinks of the same pipeline, and what it is given again after a
crash is read from the log, not asked of the server.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import structlog
from pydantic import ValidationError

from tailrace.config import EngineConfig, PipelineConfig
from tailrace.config.problems import from_pydantic
from tailrace.config.sections import SINK_TYPES
from tailrace.engine.contracts import ConnectorContext, OffsetStore, Settings, TaskContext
from tailrace.errors import Kind, Policy, TailraceError
from tailrace.fair_semaphore import FairSemaphore
from tailrace.pipeline.background import Background
from tailrace.pipeline.log.consumer import LogConsumer, partition_of
from tailrace.pipeline.log.root import take_root
from tailrace.pipeline.offsets.log_store import LogOffsetStore
from tailrace.pipeline.sink_worker import PENDING_S
from tailrace.pipeline.source_worker import SourceWorker
from tailrace.pipeline.spark_host import SparkHost
from tailrace.pipeline.status.publisher import StatusPublisher
from tailrace.pipeline.status.sink_metrics import SinkMetrics
from tailrace.pipeline.status.views import PipelineView, SourceView
from tailrace.pipeline.task_plan import spread
from tailrace.records.batch import Batch, Offset, Partition

log = structlog.get_logger(__name__)

#: What the settings may have beside the keys of a pipeline file.
UNTIL_CAUGHT_UP = "until_caught_up"

TURN_S = 0.05
#: How often the log hears what it may let go of.
KEEP_INTERVAL_S = 1.0
#: Between looks at a log whose capture says nothing: a snapshot's chunks, a capture that begins, one on an
#: executor.
LOOK_S = 0.05
#: The same where capture tells of what is durable, once nothing has come for a while.
QUIET_LOOK_S = 0.2
#: States of a source that its server was reached for.
AT_WORK = frozenset({"snapshot", "streaming", "waiting_for_disk"})
#: How long sinks may take to finish their batch when the task stops; then it is given up,
#: which is safe: it is written again at the next start.
DRAIN_DEADLINE_S = 8.0
GIVE_UP_DEADLINE_S = 4.0
CAPTURE_STOP_DEADLINE_S = 10.0
#: Batches of one sink at a time, over all sources: while one is committed, another is decoded.
BATCHES_AT_ONCE = 2


class PostgresConnector:
    """Plans tasks over the sources of a pipeline. Its settings are the keys of a pipeline file.

    With `until_caught_up: true` beside them each task finishes when everything that its sources had
    committed at its start was polled, and is in the sinks.

    :param observe: as `StatusPublisher` has it.
    """

    def __init__(self, observe: Callable[[PipelineView], None] = lambda _: None) -> None:
        self._observe = observe
        self._settings: Settings = {}
        self._config: EngineConfig | None = None
        self._spark: SparkHost | None = None
        self._showing: StatusPublisher | None = None
        self._root_lock: int | None = None
        # One queue a sink: a sink that hangs keeps the sources waiting for itself, not the other sinks.
        self._writing: Sequence[FairSemaphore] = ()
        self._remote_tasks = 0

    @property
    def places(self) -> Collection[str]:
        """Where sources can be captured beside here (`contracts.RunsElsewhere`)."""
        return ("spark",)

    def offset_store(self, name: str, settings: Settings) -> OffsetStore:
        """Return the store that keeps offsets with the logs.

        :raises TailraceError: `CONFIG_INVALID`.
        """
        return LogOffsetStore(name, config_of(name, settings).pipelines)

    def start(self, context: ConnectorContext) -> None:
        """Check the settings, and take hold of the directory that several logs lie in.

        :raises TailraceError: `CONFIG_INVALID`, `LOG_LOCKED`, `LOG_FOREIGN`, `SINK_FOREIGN`;
            `ENVIRONMENT_UNFIT` if something is to run on Spark and there is no Java.
        """
        config = config_of(context.name, context.settings)
        self._settings, self._config = {"name": context.name, **context.settings}, config
        if context.tasks_on == "spark":
            self._remote_tasks = len(config.pipelines)
        if self._remote_tasks or config.needs_spark_at_start:
            from tailrace.spark.java import require_java

            require_java()
        self._writing = [FairSemaphore(BATCHES_AT_ONCE) for _ in config.sinks]
        self._spark = SparkHost(config)
        if config.has_several:
            self._root_lock = take_root(config)
        self._showing = StatusPublisher(config, self._observe)
        self._showing.start()

    def task_settings(self, tasks_max: int) -> Sequence[Settings]:
        """Deal the sources out, as evenly as can be."""
        assert self._config is not None
        if not self._config.has_several:
            return [self._settings]
        groups = spread(self._settings["sources"], tasks_max)
        return [{**self._settings, "sources": list(sources)} for sources in groups]

    def create_task(self) -> PostgresTask:
        assert self._spark is not None
        assert self._showing is not None
        return PostgresTask(self._spark, self._showing, self._writing, self._remote_tasks)

    def view(self) -> PipelineView | None:
        """Return the pipeline as it is now; None before the start. Any thread."""
        return None if self._showing is None else self._showing.view()

    @property
    def failure(self) -> TailraceError | None:
        """Why sources, or their tasks, can't go on; None if they can."""
        return None if self._showing is None else self._showing.failure

    def stop(self) -> None:
        """Stop Spark, where it ran, and let go of the logs' directory."""
        if self._spark is not None:
            self._spark.stop()
        if self._showing is not None:
            self._showing.stop()
        if self._root_lock is not None:
            os.close(self._root_lock)
            self._root_lock = None


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    # `reading` is None where nobody wants the records: sinks read the log by themselves.
    worker: SourceWorker
    reading: LogConsumer | None


class PostgresTask:
    """Captures some sources into their logs, feeds their sinks, and gives what is in the logs.

    :param spark: for the sinks.
    :param showing: shows how it is.
    :param writing: for each sink, the turns of all sources to write a batch.
    :param remote_tasks: as `SourceWorker` has it.
    """

    def __init__(
        self,
        spark: SparkHost,
        showing: StatusPublisher,
        writing: Sequence[FairSemaphore],
        remote_tasks: int = 0,
    ) -> None:
        self._remote_tasks = remote_tasks
        self._spark = spark
        self._showing = showing
        self._writing = writing
        self._until_caught_up = False
        self._context: TaskContext | None = None
        self._sources: tuple[_Source, ...] = ()
        self._running = False
        self._next_source = 0
        # By place: when to read on, and why not before: capture has yet to learn of a table.
        self._pending: dict[int, tuple[float, TailraceError]] = {}
        self._look_s = LOOK_S
        self._finished = False
        self._raised = False
        self._recovering: list[SourceWorker] = []
        self._dropped: TailraceError | None = None
        self._news = threading.Event()  # set when something may be new in a log
        self._stop_wanted = threading.Event()
        self._looking_after = Background("look-after", self._look_after)
        self._beginning = FairSemaphore(1)
        self._keep_s = 0.0
        self._metrics: SinkMetrics | None = None

    def start(self, context: TaskContext) -> None:
        """Start capturing. What can be refused without a server is refused here.

        :raises TailraceError: `LOG_LOCKED` if another process writes a log; `SECRET_MISSING`;
            `OFFSETS_FOREIGN`, `OFFSETS_UNREADABLE`; `LOG_RANGE_GONE`.
        """
        self._context = context
        config = config_of(context.name, context.settings)
        self._until_caught_up = bool(context.settings.get(UNTIL_CAUGHT_UP, False))
        offsets = context.offsets.read([partition_of(pipeline) for pipeline in config.pipelines])
        self._sources = tuple(
            self._source(pipeline, offsets.get(number)) for number, pipeline in enumerate(config.pipelines)
        )
        for source in self._sources:
            source.worker.refuse_if_written()
            source.worker.require_salts()
            if source.reading is not None:
                source.reading.open()
        self._running = True
        self._metrics = SinkMetrics(context.metrics)
        self._showing.show(context.number, self._views, context.stopping)
        if self._remote_tasks or config.needs_spark_at_start:
            self._spark.start()
        for source in self._sources:
            source.worker.start()
        self._looking_after.start()

    def poll(self, timeout_s: float) -> Batch | None:
        """Return what comes next in one of the logs, a stretch at most; nothing if nobody wants it.

        A source that fails leaves the others at work: it is raised when no other is left.
        :raises TailraceError: what ended a capture, or all sinks; `LOG_CORRUPT`, `LOG_RANGE_GONE`,
            `DECODE_FAILED`. After an error that may pass, the next call captures again.
        """
        assert self._context is not None
        until = time.monotonic() + timeout_s
        look_s = self._look_s
        self._capture_again()
        while True:
            self._news.clear()
            over = all(source.worker.is_over for source in self._sources)
            if (batch := self._next()) is not None:
                self._look_s = LOOK_S
                return batch
            self._look_for_failures(over)
            if over and not self._finished and not self._pending:
                self._finished = True
                self._context.finish()
            left_s = until - time.monotonic()
            if left_s <= 0 or self._context.stopping.is_set():
                self._look_s = LOOK_S if self._remote_tasks else min(2 * look_s, QUIET_LOOK_S)
                return None
            self._news.wait(min(left_s, look_s))

    @property
    def is_recovering(self) -> bool:
        """Whether captures were begun again, and none of them has got to its server's changes yet."""
        if any(worker.view().task.state in AT_WORK for worker in self._recovering):
            self._recovering = []
        return bool(self._recovering)

    @property
    def errors(self) -> Sequence[TailraceError]:
        """Why sources can't be read now: they are tried again, or have failed while others go on."""
        found = []
        for place, source in enumerate(self._sources):
            view = source.worker.view()
            pending = self._pending.get(place)
            if (error := view.task.error or (pending and pending[1])) is not None:
                where = {"source": view.name} if view.name else {}
                found.append(TailraceError(error.kind, error.message, error.hint, {**where, **error.context}))
        return found

    def commit(self, partition: Partition, offset: Offset) -> None:
        """Take note, so that retention soon knows that what lies before is not needed here."""
        for source in self._sources:
            if source.reading is not None and source.reading.partition == partition:
                source.reading.note(offset)

    def stop(self) -> None:
        """End the captures and the sinks in good order, within their deadlines.

        :raises TailraceError: why a source, or a sink, could not go on, while others did.
        """
        self._stop_wanted.set()
        if self._running:
            self._stop_workers([source.worker for source in self._sources])
            self._looking_after.join(TURN_S + LOOK_S)
            for source in self._sources:
                source.worker.close_the_books()
        self._keep()
        for source in self._sources:
            if source.reading is not None:
                source.reading.close()
        failed = [source.worker for source in self._sources if source.worker.error is not None]
        if failed and not self._raised:
            raise _failure_of(failed)

    def _stop_workers(self, workers: Sequence[SourceWorker]) -> None:
        for worker in workers:
            worker.stop()
        if not _wait_until(lambda: all(worker.sinks_ended() for worker in workers), DRAIN_DEADLINE_S):
            log.warning("a sink did not finish its batch in time; it is given up and written again next time")
            self._spark.cancel_jobs(tag for worker in workers for tag in worker.job_tags)
            # Nothing but a job can be cancelled: who waits for a cluster in this process ends with it.
            _wait_until(lambda: all(worker.spark_ended() for worker in workers), GIVE_UP_DEADLINE_S)
        deadline = time.monotonic() + CAPTURE_STOP_DEADLINE_S
        for worker in workers:
            if not worker.capture_ended(max(0.0, deadline - time.monotonic())):
                log.warning(
                    "capture did not stop in time; what is durable stays, the rest is sent again",
                    source=worker.name,
                )

    def _source(self, pipeline: PipelineConfig, begin: Offset | None) -> _Source:
        assert self._context is not None
        wanted = self._context.wanted
        rows_max = self._context.batch_records_max
        reading = LogConsumer(self._context.name, pipeline, begin, rows_max=rows_max) if wanted else None
        worker = SourceWorker(
            pipeline,
            self._context.number,
            self._spark,
            beginning=self._beginning,
            writing=self._writing,
            until_caught_up=self._until_caught_up,
            reading=reading,
            on_durable=self._news.set if wanted else None,
            remote_tasks=self._remote_tasks,
        )
        return _Source(worker, reading)

    # Polling

    def _next(self) -> Batch | None:
        """Return the next batch, of each source in turn; one that waits for facts of a table is passed over.

        :raises TailraceError: as `LogConsumer.next`; `TASK_FAILED` if such a source's capture has ended.
        """
        for number in range(len(self._sources)):
            place = (self._next_source + number) % len(self._sources)
            source = self._sources[place]
            until_s, _ = self._pending.get(place, (0.0, None))
            if source.reading is None or (time.monotonic() < until_s and not source.worker.is_over):
                continue
            try:
                batch = source.reading.next()
            except TailraceError as error:
                if error.kind is not Kind.SCHEMA_PENDING:
                    raise
                if source.worker.is_over:  # nobody asks for the facts any more
                    raise TailraceError(Kind.TASK_FAILED, error.message, error.hint, error.context) from error
                self._pending[place] = time.monotonic() + PENDING_S, error
                continue
            self._pending.pop(place, None)
            if batch is not None:
                self._next_source = place + 1
                return batch
        return None

    def _look_for_failures(self, over: bool) -> None:
        """Raise why the task can't go on, if it can't; `over`: nothing is left to do for any source."""
        failure = self._looking_after.error or self._dropped
        if failure is not None:
            self._showing.fail(failure)
            raise failure
        if over:
            for source in self._sources:
                source.worker.close_the_books()
        failed = [source.worker for source in self._sources if source.worker.error is not None]
        if failed and (over or len(failed) == len(self._sources)):
            self._raised = True
            raise _failure_of(failed)

    def _capture_again(self) -> None:
        """After an error that may pass: begin captures anew, each reading where it is."""
        if not self._raised:
            return
        self._raised = False
        self._pending.clear()
        again: list[SourceWorker] = []
        sources: list[_Source] = []
        for source in self._sources:
            worker = source.worker
            if worker.error is not None and worker.capture_ended(0) and worker.sinks_ended():
                at = None if source.reading is None else source.reading.offset
                source = self._source(worker.pipeline, at)  # noqa: PLW2901
                again.append(source.worker)
            sources.append(source)
        self._sources = tuple(sources)
        self._recovering = again
        for worker in again:
            worker.start()

    def _views(self) -> list[SourceView]:
        """Return the sources as they are now, the handler among their sinks. Any thread."""
        views = []
        for source in self._sources:
            view = source.worker.view()
            if source.reading is not None:
                view = replace(view, sinks=(*view.sinks, source.reading.view))
            views.append(view)
        return views

    # Looking after the lanes, on a thread of its own

    def _look_after(self) -> None:
        while not self._stop_wanted.wait(TURN_S):
            for source in self._sources:
                source.worker.turn()
            if time.monotonic() >= self._keep_s:
                self._keep_s = time.monotonic() + KEEP_INTERVAL_S
                self._keep()

    def _keep(self) -> None:
        if self._metrics is not None:
            self._metrics.note(source.worker.view() for source in self._sources)
        for source in self._sources:
            try:
                if source.reading is not None:
                    source.reading.keep()
            except TailraceError as error:
                if error.kind is Kind.LOG_RANGE_GONE:
                    self._dropped = error
                else:
                    log.warning("could not tell the log what it may let go of", error=str(error))


def _wait_until(is_so: Callable[[], bool], deadline_s: float) -> bool:
    until = time.monotonic() + deadline_s
    while not is_so():
        if time.monotonic() >= until:
            return False
        time.sleep(TURN_S)
    return True


def config_of(name: str, settings: Settings) -> EngineConfig:
    """Return what the settings of the engine `name` describe: the keys of a pipeline file.

    :raises TailraceError: `CONFIG_INVALID`; its message lists every problem, a line each.
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


def _failure_of(failed: Sequence[SourceWorker]) -> TailraceError:
    """Return the first failure, naming the other sources that failed; one that stays comes first."""
    errors = [(_of_sinks(worker.error), worker.name) for worker in failed if worker.error is not None]
    errors.sort(key=lambda found: found[0].policy is Policy.RETRY)
    first = errors[0][0]
    if len(errors) == 1:
        return first
    others = ", ".join(name for _, name in errors[1:])
    return TailraceError(first.kind, first.message, first.hint, {**first.context, "failed_too": others})


def _of_sinks(error: TailraceError) -> TailraceError:
    """Return `error`; as one that is final where it is that of sinks, which have had their attempts."""
    if error.policy is not Policy.RETRY or "sinks" not in error.context:
        return error
    return TailraceError(Kind.TASK_FAILED, f"{error.kind}: {error.message}", error.hint, error.context)
