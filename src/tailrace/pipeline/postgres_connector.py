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

from tailrace.capture.turns import Turns
from tailrace.config import EngineConfig, PipelineConfig
from tailrace.config.problems import from_pydantic
from tailrace.config.sections import SINK_TYPES
from tailrace.engine.contracts import ConnectorContext, OffsetStore, Settings, TaskContext
from tailrace.errors import Kind, Policy, TailraceError
from tailrace.pipeline.background import Background
from tailrace.pipeline.lane import Lane
from tailrace.pipeline.log_offsets import LogOffsetStore
from tailrace.pipeline.log_root import take_root
from tailrace.pipeline.planning import spread
from tailrace.pipeline.reading import LogReading, partition_of
from tailrace.pipeline.remote.requirements import require_own_reading
from tailrace.pipeline.showing import Showing
from tailrace.pipeline.spark_host import SparkHost
from tailrace.pipeline.views import EngineView, SourceView
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

    :param observe: as `Showing` has it.
    """

    def __init__(self, observe: Callable[[EngineView], None] = lambda _: None) -> None:
        self._observe = observe
        self._settings: Settings = {}
        self._config: EngineConfig | None = None
        self._spark: SparkHost | None = None
        self._showing: Showing | None = None
        self._root_lock: int | None = None
        # One queue a sink: a sink that hangs keeps the sources waiting for itself, not the other sinks.
        self._writing: Sequence[Turns] = ()
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
            require_own_reading(config)
        if self._remote_tasks or config.needs_spark:
            from tailrace.spark.java import require_java

            require_java()
        self._writing = [Turns(BATCHES_AT_ONCE) for _ in config.sinks]
        self._spark = SparkHost(config)
        if config.has_several:
            self._root_lock = take_root(config)
        self._showing = Showing(config, self._observe)
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

    def view(self) -> EngineView | None:
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
    lane: Lane
    reading: LogReading | None


class PostgresTask:
    """Captures some sources into their logs, feeds their sinks, and gives what is in the logs.

    :param spark: for the sinks.
    :param showing: shows how it is.
    :param writing: for each sink, the turns of all sources to write a batch.
    :param remote_tasks: as `Lane` has it.
    """

    def __init__(
        self, spark: SparkHost, showing: Showing, writing: Sequence[Turns], remote_tasks: int = 0
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
        self._look_s = LOOK_S
        self._finished = False
        self._raised = False
        self._recovering: list[Lane] = []
        self._dropped: TailraceError | None = None
        self._news = threading.Event()  # set when something may be new in a log
        self._stop_wanted = threading.Event()
        self._looking_after = Background("look-after", self._look_after)
        self._beginning = Turns(1)
        self._keep_s = 0.0

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
            source.lane.refuse_if_written()
            source.lane.require_salts()
            if source.reading is not None:
                source.reading.open()
        self._running = True
        self._showing.show(context.number, self._views, context.stopping)
        if self._remote_tasks or config.needs_spark:
            self._spark.start()
        for source in self._sources:
            source.lane.start()
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
            over = all(source.lane.is_over for source in self._sources)
            if (batch := self._next()) is not None:
                self._look_s = LOOK_S
                return batch
            self._look_for_failures(over)
            if over and not self._finished:
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
        if any(lane.view().task.state in AT_WORK for lane in self._recovering):
            self._recovering = []
        return bool(self._recovering)

    def commit(self, partition: Partition, offset: Offset) -> None:
        """Take note, so that retention soon knows that what lies before is not needed here."""
        for source in self._sources:
            if source.reading is not None and source.reading.partition == partition:
                source.reading.note(offset)

    def stop(self) -> None:
        """End the captures and the sinks in good order, within their deadlines.

        :raises TailraceError: why a source could not go on, while others did.
        """
        self._stop_wanted.set()
        if self._running:
            self._stop_lanes([source.lane for source in self._sources])
            self._looking_after.join(TURN_S + LOOK_S)
        self._keep()
        for source in self._sources:
            if source.reading is not None:
                source.reading.close()
        failed = [source.lane for source in self._sources if source.lane.error is not None]
        if failed and not self._raised:
            raise _failure_of(failed)

    def _stop_lanes(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            lane.stop()
        if not _wait_for_sinks(lanes, DRAIN_DEADLINE_S):
            log.warning("a sink did not finish its batch in time; it is given up and written again next time")
            self._spark.cancel_jobs(tag for lane in lanes for tag in lane.job_tags)
            _wait_for_sinks(lanes, GIVE_UP_DEADLINE_S)
        deadline = time.monotonic() + CAPTURE_STOP_DEADLINE_S
        for lane in lanes:
            if not lane.capture_ended(max(0.0, deadline - time.monotonic())):
                log.warning(
                    "capture did not stop in time; what is durable stays, the rest is sent again",
                    source=lane.name,
                )

    def _source(self, pipeline: PipelineConfig, begin: Offset | None) -> _Source:
        assert self._context is not None
        wanted = self._context.wanted
        reading = LogReading(self._context.name, pipeline, begin) if wanted else None
        lane = Lane(
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
        return _Source(lane, reading)

    # Polling

    def _next(self) -> Batch | None:
        """Return the next batch, of each source in turn."""
        for number in range(len(self._sources)):
            place = (self._next_source + number) % len(self._sources)
            reading = self._sources[place].reading
            if reading is not None and (batch := reading.next()) is not None:
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
                source.lane.close_the_books()
        failed = [source.lane for source in self._sources if source.lane.error is not None]
        if failed and (over or len(failed) == len(self._sources)):
            self._raised = True
            raise _failure_of(failed)

    def _capture_again(self) -> None:
        """After an error that may pass: begin captures anew, each reading where it is."""
        if not self._raised:
            return
        self._raised = False
        again: list[Lane] = []
        sources: list[_Source] = []
        for source in self._sources:
            lane = source.lane
            if lane.error is not None and lane.capture_ended(0) and lane.sinks_ended():
                at = None if source.reading is None else source.reading.offset
                source = self._source(lane.pipeline, at)  # noqa: PLW2901
                again.append(source.lane)
            sources.append(source)
        self._sources = tuple(sources)
        self._recovering = again
        for lane in again:
            lane.start()

    def _views(self) -> list[SourceView]:
        """Return the sources as they are now, the handler among their sinks. Any thread."""
        views = []
        for source in self._sources:
            view = source.lane.view()
            if source.reading is not None:
                view = replace(view, sinks=(*view.sinks, source.reading.view))
            views.append(view)
        return views

    # Looking after the lanes, on a thread of its own

    def _look_after(self) -> None:
        while not self._stop_wanted.wait(TURN_S):
            for source in self._sources:
                source.lane.turn()
            if time.monotonic() >= self._keep_s:
                self._keep_s = time.monotonic() + KEEP_INTERVAL_S
                self._keep()

    def _keep(self) -> None:
        for source in self._sources:
            try:
                if source.reading is not None:
                    source.reading.keep()
            except TailraceError as error:
                if error.kind is Kind.LOG_RANGE_GONE:
                    self._dropped = error
                else:
                    log.warning("could not tell the log what it may let go of", error=str(error))


def _wait_for_sinks(lanes: Sequence[Lane], deadline_s: float) -> bool:
    until = time.monotonic() + deadline_s
    while not all(lane.sinks_ended() for lane in lanes):
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


def _failure_of(failed: Sequence[Lane]) -> TailraceError:
    """Return the first failure, naming the other sources that failed; one that stays comes first."""
    errors = [(_of_sinks(lane.error), lane.name) for lane in failed if lane.error is not None]
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
