"""One source of a pipeline: its capture, its log, and a sink worker for each sink that is fed from the log;
and the consumer of the engine's handler, if there is one.

A source worker moves no data itself. Capture and sink workers have their own threads; the engine supervises
its source workers in turn, on one thread.

A source worker that can't continue fails alone: its capture ends in order, its sinks write what is in the
log, and `error` has the reason. The engine decides what that means for the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from numbers import Integral

import structlog

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.lock import refuse_if_written, wait_until_unwritten
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.policy import RetentionRules
from tailrace.changelog.retention.prune import apply
from tailrace.config import LogConfig, PipelineConfig, SinkConfig
from tailrace.decode.column_policy import TablePolicy
from tailrace.errors import NEEDS_SNAPSHOT, REPORT, Kind, Policy, Stopped, TailraceError
from tailrace.fair_semaphore import FairSemaphore
from tailrace.pipeline.background import Background, as_failure
from tailrace.pipeline.log.consumer import LogConsumer
from tailrace.pipeline.remote.capture import RemoteCapture
from tailrace.pipeline.sink_worker import SinkWorker
from tailrace.pipeline.spark_host import SparkHost
from tailrace.pipeline.status.views import (
    CaptureView,
    PipelineState,
    SinkState,
    SinkView,
    SourceView,
    tables_left,
)
from tailrace.realtime.handover import Handover
from tailrace.realtime.path import RealtimePath
from tailrace.sinks.build import build, require_target_within_log
from tailrace.sources.contract import Capture, Snapshots
from tailrace.sources.registry import source_type

log = structlog.get_logger(__name__)

#: Interval at which a log's retention rules are applied, in seconds.
RETENTION_INTERVAL_S = 10.0
#: Longest wait for the end of a task on an executor whose driver was killed, in seconds.
ORPHAN_S = 20.0

#: Wait after a failed query for the source's position, in seconds.
_ASK_AGAIN_S = 1.0


class SourceWorker:
    """Brings the changes of one source into its log and from there into its sinks.

    :param engine_task: the number of the engine's task that the source belongs to.
    :param spark: for the sinks, and for capture on executors.
    :param beginning: limits how many of that task's sources begin at once.
    :param writing: for each sink, limits how many sources write a batch at once.
    :param until_caught_up: end when everything that the source had committed at the start is in
        the log and in every sink.
    :param reading: reads the log for the engine's handler; None: there is none.
    :param on_durable: called when transactions have become durable in the log, on the thread that made them
        durable; returns at once. Not called if capture runs on executors.
    :param remote_tasks: how many captures run on executors, including this one; 0: they run here.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        engine_task: int,
        spark: SparkHost,
        *,
        beginning: FairSemaphore,
        writing: Sequence[FairSemaphore],
        until_caught_up: bool,
        reading: LogConsumer | None = None,
        on_durable: Callable[[], None] | None = None,
        remote_tasks: int = 0,
    ) -> None:
        self.name = pipeline.source_name
        self.pipeline = pipeline
        self._engine_task = engine_task
        self._spark = spark
        self._until_caught_up = until_caught_up
        self._reading = reading
        self._is_remote = remote_tasks > 0
        self._source = source_type(pipeline.source.type)
        self._on_durable = on_durable
        self._feeds = [
            self._feed(sink, semaphore) for sink, semaphore in zip(pipeline.sinks, writing, strict=True)
        ]
        listener = self._handover()
        self._capture_task: Capture = (
            RemoteCapture(pipeline, spark, remote_tasks)
            if remote_tasks
            else self._source.capture(
                pipeline.source,
                pipeline.log.path,
                pipeline.log,
                name=pipeline.name,
                semaphore=beginning,
                listener=listener,
            )
        )
        self._capture = self._background("capture", self._run_capture, Kind.SOURCE_UNREACHABLE)
        self._feeding = [self._background(f"sink-{feed.view.name}", feed.run) for feed in self._feeds]
        self._retaining = RetentionTimer(pipeline.log, TASK, self._source.snapshots(pipeline.log.path))
        self._target = self._background("ask-source", self._ask_for_target, Kind.SOURCE_UNREACHABLE)
        self._target_position: int | None = None
        self._stop_wanted = threading.Event()
        self._finishing = False
        self._over = False
        self._error: TailraceError | None = None

    @property
    def error(self) -> TailraceError | None:
        """Why the source can't continue, with commands for recovery and, among several, its name."""
        return self._error

    def refuse_if_written(self) -> None:
        """Raise if another process writes the log: at once, unless that process may be about to end.

        :raises TailraceError: `LOG_LOCKED`.
        """
        if self._is_remote:
            # The previous driver may have been killed: its task notices that, and ends in order.
            wait_until_unwritten(self.pipeline.log.path, TASK, ORPHAN_S, self._stop_wanted)
        refuse_if_written(self.pipeline.log.path, TASK)

    def require_salts(self) -> None:
        """Raise if a mask has no salt, before anything is created on the server.

        :raises TailraceError: as `TablePolicy.of`.
        """
        TablePolicy.of(self.pipeline.source.disclosure)

    def start(self) -> None:
        """Start every thread; returns at once."""
        self._capture.start()
        for feeding in self._feeding:
            feeding.start()
        if self._until_caught_up:
            self._target.start()

    def turn(self) -> bool:
        """Supervise the threads; return whether all have ended, with nothing left to do.

        A failure is kept in `error` and ends the capture. A failed sink is not a failure of the source
        while another sink works.
        """
        over = self._capture.ended and all(feeding.ended for feeding in self._feeding)
        if self._error is None:
            try:
                self._look_after()
            except Exception as error:  # noqa: BLE001 - it ends this source
                self._give_up(_of_source(error))
        if self._capture.ended and not self._finishing:
            self._finishing = True
            self._finish()
        self._over = over
        return over

    @property
    def is_over(self) -> bool:
        """Whether all threads had ended at the last `turn`."""
        return self._over

    def stop(self) -> None:
        """Ask for the end: sinks finish their batch, capture makes durable and acknowledges."""
        self._stop_wanted.set()
        # Sinks first, then capture: they stop in parallel.
        for feed in self._feeds:
            feed.stop()
        self._stop_capture()

    @property
    def job_tags(self) -> Iterable[str]:
        """The tags of Spark's jobs for the sinks."""
        return [feed.job_tag for feed in self._feeds]

    def sinks_ended(self) -> bool:
        """Return whether every sink worker has ended."""
        return all(feeding.ended for feeding in self._feeding)

    def spark_ended(self) -> bool:
        """Return whether every worker whose sink Spark writes has ended."""
        both = zip(self._feeds, self._feeding, strict=True)
        return all(feeding.ended for feed, feeding in both if feed.on_spark)

    def capture_ended(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for the capture to end; return whether it has."""
        return self._capture.join(timeout_s)

    def note_sink_failure(self) -> None:
        """Set `error`, when all threads have stopped, to a failure that the engine must report.

        That is the error that ended the capture, or else the one that stopped a sink, even if other sinks
        continued.
        """
        if self._error is not None:
            return
        try:
            if self._capture.error is not None:
                raise self._capture.error
            if failed := self._failed_sinks():
                raise _sinks_failure(failed)
        except TailraceError as error:
            self._error = self._explained(error)

    def view(self) -> SourceView:
        """Return the current state of the source and its sinks. Any thread."""
        sinks = tuple(feed.view for feed in self._feeds)
        task = task_view(self._capture_task)
        if (error := self._error) is not None:
            state = PipelineState.NEEDS_SNAPSHOT if error.kind in NEEDS_SNAPSHOT else PipelineState.FAILED
            task = replace(task, state=str(state), error=error)
        return SourceView(self.name, self._engine_task, task, sinks)

    def _run_capture(self) -> None:
        """Capture, unless a sink has changes that the log lacks: once the log has others in their place, the
        sink would continue after these.
        """
        for sink in self.pipeline.folders:
            try:
                directory = LogDirectory.open(self.pipeline.log.path)
                require_target_within_log(sink, self.pipeline.name, directory, TASK)
            except TailraceError as error:
                if error.kind is Kind.SINK_AHEAD_OF_LOG:
                    raise
                log.debug("capture begins without a look at a sink", sink=sink.name, reason=error.message)
        self._capture_task.run()

    def _look_after(self) -> None:
        if self._capture.error is not None:
            raise self._capture.error
        ahead = [view for view in self._failed_sinks() if _is_ahead(view)]
        if ahead:
            raise _sinks_failure(ahead)
        # A handler continues after all sinks have failed. Sinks that a stop ended may not even have a log.
        failed = self._failed_sinks() if self._reading is None and self.sinks_ended() else []
        if failed and not self._is_snapshot_open():
            raise _sinks_failure(failed)
        if self._until_caught_up and not self._capture.ended:
            self._look_for_the_end()
        if all(feed.is_registered for feed in self._feeds) and self._reading_is_registered():
            self._retaining.turn()

    def _is_snapshot_open(self) -> bool:
        """Return whether a requested snapshot is not complete: a sink that stopped may need it."""
        snapshots = self._source.snapshots(self.pipeline.log.path)
        return snapshots is not None and snapshots.is_request_open

    def _reading_is_registered(self) -> bool:
        return self._reading is None or self._reading.is_registered

    def _give_up(self, error: TailraceError) -> None:
        self._error = self._explained(error)
        if self.name:
            log.error(
                "source failed; the others continue",
                source=self.name,
                kind=str(self._error.kind),
                error=self._error.message,
                hint=self._error.hint,
            )
        self._stop_capture()

    def _stop_capture(self) -> None:
        """Stop the capture; a failure of a user's type of source must not keep others from being stopped."""
        try:
            self._capture_task.stop()
        except Exception as error:  # noqa: BLE001 - it is this source's
            self._error = self._error or self._explained(_of_source(error))

    def _explained(self, error: TailraceError) -> TailraceError:
        found = self._source.with_recovery(error, self.pipeline)
        if self.name:
            found = found.changed({"source": self.name}).of_source(self.name)
        found.__cause__ = found.__cause__ or error.__cause__
        return found

    def _finish(self) -> None:
        # Capture has ended, so the log's end is final: sinks write up to it.
        end = self._log_end()
        for feed in self._feeds:
            if end is None:
                feed.stop()
            else:
                feed.finish_at(end)

    def _log_end(self) -> int | None:
        """Return the log offset of the log's end; None if the log can't be read."""
        if (offset := self._capture_task.progress().durable.offset) > 0:
            return offset
        try:
            with LogReader.open(LogDirectory.open(self.pipeline.log.path), TASK) as reader:
                return reader.end().offset
        except TailraceError:
            return None

    def _failed_sinks(self) -> list[SinkView]:
        return [view for feed in self._feeds if (view := feed.view).state is SinkState.FAILED]

    def _look_for_the_end(self) -> None:
        if self._target.ended and self._target.error is not None:
            raise self._target.error
        if self._target_position is None:
            return
        if self._capture_task.caught_up(self._target_position):
            # What is committed later is left to the next run, so the log's end is final now.
            self._capture_task.stop()

    def _ask_for_target(self) -> None:
        while not self._stop_wanted.is_set():
            try:
                self._target_position = self._ask_for_end()
            except Stopped:
                return
            except TailraceError as error:
                if error.policy is Policy.STOP:
                    raise
                self._stop_wanted.wait(_ASK_AGAIN_S)
            else:
                return

    def _ask_for_end(self) -> int:
        end: object = self._source.end(self.pipeline.source, self._stop_wanted)
        if not isinstance(end, Integral):
            raise TailraceError(
                Kind.TASK_FAILED,
                f"ask the source {self.pipeline.source.type!r} for its end: it returned "
                f"{type(end).__name__}, not a position",
                "see the package of this type of source",
            )
        return int(end)

    def _handover(self) -> Handover | None:
        """Return the handover of capture's blocks to handler and sinks; None if capture runs elsewhere."""
        paths = [feed.realtime for feed in self._feeds if feed.realtime is not None]
        if self._reading is not None:
            paths.append(self._reading.realtime)
        buffers = [path.buffer for path in paths]
        handover = None if self._is_remote else Handover(buffers, self._durable, self.pipeline.source)
        for path in paths:
            path.attach(handover)
        return handover

    def _durable(self) -> None:
        if self._on_durable is not None:
            self._on_durable()
        for feed in self._feeds:
            feed.look()

    def _feed(self, config: SinkConfig, semaphore: FairSemaphore) -> SinkWorker:
        pipeline = self.pipeline
        return SinkWorker(
            config,
            pipeline.name,
            pipeline.log.path,
            lambda: build(config, pipeline.source, pipeline.log.path),
            self._spark,
            semaphore=semaphore,
            source=self.name,
            rules=pipeline.source.awaited_policy,
            realtime=RealtimePath(config.name, pipeline.realtime, pipeline.log.segment_bytes),
        )

    def _background(
        self, work: str, function: Callable[[], None], refused: Kind = Kind.SINK_WRITE_FAILED
    ) -> Background:
        if not self.name:
            return Background(work, function, refused)

        def run() -> None:
            structlog.contextvars.bind_contextvars(source=self.name)
            function()

        return Background(f"{work}-{self.name}", run, refused)


def task_view(task: Capture) -> CaptureView:
    """Return the current state of `task`."""
    progress = task.progress()
    tables = progress.snapshot.values()
    # Until capture holds the log's lock, the log there may be another engine's.
    unopened = progress.durable.offset == 0 and progress.phase in {"connecting", "stopped"}
    # Between two connections; what the last one reported of the source's end is old.
    broken = progress.phase == "streaming" and progress.error is not None
    return CaptureView(
        task=TASK,
        state="connecting" if broken else str(progress.phase),
        rows=progress.rows,
        bytes=progress.bytes,
        log_end=None if unopened else progress.durable.offset,
        position=progress.durable.position,
        position_time_us=progress.durable.position_time_us,
        source_end=0 if broken else progress.source_end,
        acknowledged=progress.acknowledged,
        snapshot_rows=sum(table.rows for table in tables),
        snapshot_rows_estimated=sum(table.rows_estimated for table in tables),
        reconnects=progress.reconnects,
        error=progress.error,
        slot=progress.health,
        concerns=progress.warnings,
        snapshot=tables_left(progress.snapshot, time.monotonic()),
    )


def _of_source(error: Exception) -> TailraceError:
    failure = as_failure(error, Kind.SOURCE_UNREACHABLE)
    if failure is not error:
        failure.__cause__ = error  # --debug shows it
    return failure


def _is_ahead(failed: SinkView) -> bool:
    return failed.error is not None and failed.error.kind is Kind.SINK_AHEAD_OF_LOG


def _sinks_failure(failed: list[SinkView]) -> TailraceError:
    first = failed[0].error or TailraceError(Kind.INTERNAL, "a sink stopped without an error", REPORT)
    others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    names = ", ".join(view.name for view in failed)
    message = f"feed sink {failed[0].name!r}{others}: {first.message}"
    found = first.changed({"sinks": names}, message=message)
    found.__cause__ = first
    return found


class RetentionTimer:
    """Applies a log's retention rules every few seconds, on the caller's thread.

    Only for the process that writes the log, and only when its readers are registered.

    :param snapshots: of the log: what an open snapshot needs is kept.
    """

    def __init__(self, config: LogConfig, task: str, snapshots: Snapshots | None) -> None:
        retention = config.retention
        self._path = config.path
        self._task = task
        self._snapshots = snapshots
        self._rules = RetentionRules(
            size_bytes=retention.size_bytes,
            age_s=retention.age_s,
            on_slow_reader=retention.on_slow_reader,
        )
        self._wanted = retention.size_bytes is not None or retention.age_s is not None
        self._next_s = 0.0
        self._held_by: tuple[str, ...] = ()

    def turn(self) -> None:
        """Apply the rules if the interval has passed. A failure is logged, and tried again later: segments
        that are removed late do no harm.
        """
        if not self._wanted or time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + RETENTION_INTERVAL_S
        try:
            directory = LogDirectory.open(self._path)
            keep_from = None if self._snapshots is None else self._snapshots.needed_from
            pruned = apply(directory, self._task, self._rules, keep_from=keep_from)
        except (TailraceError, OSError) as error:
            if not isinstance(error, TailraceError) or error.kind is not Kind.LOG_MISSING:
                log.warning("retention failed", error=str(error))
            return
        if pruned.segments:
            log.info("retention", segments=len(pruned.segments), size_bytes=pruned.size_bytes)
        if pruned.dropped_readers:
            log.warning("retention dropped slow readers", readers=pruned.dropped_readers)
        if pruned.held_by and pruned.held_by != self._held_by:
            log.warning(
                "consumers hold more of the log than retention allows",
                readers=pruned.held_by,
                hint="`tailrace log forget PATH --reader NAME` removes one that will not return",
            )
        self._held_by = pruned.held_by
