"""The engine: capture, Spark and sinks beside each other, with the log between them.

`Engine.run` is the whole story. Nothing here moves data: capture appends to the log on threads
of its own, each sink's `Feed` reads the log on another, and the engine looks after them, turn
by turn, on the thread that called it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

from tailrace.capture.session import Stopped
from tailrace.capture.task import CaptureTask
from tailrace.config import PipelineConfig, SinkConfig
from tailrace.errors import NEEDS_SNAPSHOT, Kind, Policy, TailraceError
from tailrace.pipeline.background import Background, as_failure
from tailrace.pipeline.feed import TASK, Feed
from tailrace.pipeline.lifecycle import Event, Lifecycle, State
from tailrace.pipeline.lock_probe import refuse_if_written
from tailrace.pipeline.retaining import Retaining
from tailrace.pipeline.source import wal_end
from tailrace.pipeline.spark_host import SparkHost
from tailrace.pipeline.status import StatusFile
from tailrace.pipeline.views import EngineView, SinkState, SinkView, TaskView
from tailrace.pipeline.way_out import with_way_out
from tailrace.sinks.build import build

log = structlog.get_logger(__name__)

TURN_S = 0.05
#: How long sinks may take to finish their batch when the engine stops; then it is given up,
#: which is safe: it is written again at the next start.
DRAIN_DEADLINE_S = 8.0
GIVE_UP_DEADLINE_S = 4.0
CAPTURE_STOP_DEADLINE_S = 10.0
#: How long a failed connection keeps the question for the source's position waiting.
_ASK_AGAIN_S = 1.0


class Engine:
    """Runs one pipeline, once.

    :param until_caught_up: end by itself when everything that the source had committed at the
        start is in the log and in every sink.
    :param observe: called with the engine's view at each turn, on the engine's thread; it
        must return at once and not raise.
    """

    def __init__(
        self,
        config: PipelineConfig,
        *,
        until_caught_up: bool = False,
        observe: Callable[[EngineView], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._until_caught_up = until_caught_up
        self._observe = observe
        self._life = Lifecycle()
        self._error: TailraceError | None = None
        self._stop_wanted = threading.Event()
        self._capture_task = CaptureTask(config.source, config.log.path, config.log, name=config.name)
        self._capture = Background("capture", self._capture_task.run)
        self._spark = SparkHost(config)
        self._feeds = [self._make_feed(sink) for sink in config.sinks]
        self._feeding = [Background(f"sink-{feed.view.name}", feed.run) for feed in self._feeds]
        self._retaining = Retaining(config.log, TASK)
        self._status = StatusFile(config.log.path)
        self._target = Background("ask-source", self._ask_for_target)
        self._target_lsn: int | None = None

    def run(self) -> None:
        """Run until `stop`, until caught up, or until it can't go on. Once, on one thread.

        Sinks fail alone: the engine goes on without them while one is left.

        :raises TailraceError: `LOG_LOCKED` at once if the log has a writer; what ended the
            capture; what stopped the sinks, if all of them have stopped, or if any has under
            `until_caught_up`.
        """
        refuse_if_written(self._config.log.path, TASK)
        if self._feeds:
            from tailrace.spark.java import require_java

            require_java()
            self._spark.start()
        self._capture.start()
        for feeding in self._feeding:
            feeding.start()
        if self._until_caught_up:
            self._target.start()
        try:
            while self._life.is_running:
                self._turn()
                self._stop_wanted.wait(TURN_S)
        except Exception as error:  # noqa: BLE001 - nothing may leave threads and Spark behind
            self._fail(as_failure(error))
        self._shut_down()
        self._status.last(self.view())
        self._observe(self.view())
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Ask for the end: sinks finish their batch, capture makes durable and acknowledges.

        Any thread, any number of times; returns at once.
        """
        self._stop_wanted.set()

    def view(self) -> EngineView:
        """Return the engine as it is now. Any thread."""
        return EngineView(
            self._config.name,
            self._life.state,
            task_view(self._capture_task),
            tuple(feed.view for feed in self._feeds),
            self._error,
        )

    def _turn(self) -> None:
        self._follow_capture()
        if self._stop_wanted.is_set() and self._life.is_running:
            self._step(Event.STOP_CALLED)
        elif self._capture.error is not None:
            self._fail(self._capture.error)
        elif self._feeds and all(feeding.ended for feeding in self._feeding):
            self._after_sinks()
        elif self._capture.ended:
            # It has nothing more to do: the sinks take what is in the log, which grows no more.
            self._finish_at(self._capture_task.progress().durable.offset)
        elif self._until_caught_up:
            self._look_for_the_end()
        if all(feed.is_registered for feed in self._feeds):
            self._retaining.turn()
        self._show()

    def _show(self) -> None:
        view = self.view()
        self._status.turn(view)
        self._observe(view)

    def _follow_capture(self) -> None:
        phase = self._capture_task.progress().phase
        if phase == "snapshot" and self._life.state is State.STARTING:
            self._step(Event.SNAPSHOT_BEGAN)
        elif phase == "streaming" and self._life.state in (State.STARTING, State.SNAPSHOT):
            self._step(Event.STREAM_BEGAN)
        elif phase == "connecting" and self._life.state in (State.SNAPSHOT, State.STREAMING):
            self._step(Event.CONNECTION_LOST)

    def _after_sinks(self) -> None:
        failed = [feed.view for feed in self._feeds if feed.view.state is SinkState.FAILED]
        if failed:
            self._fail(_sinks_failure(failed))
        elif self._life.is_running:
            self._step(Event.ALL_DONE)

    def _look_for_the_end(self) -> None:
        if self._target.ended and self._target.error is not None:
            self._fail(self._target.error)
        elif self._target_lsn is not None and self._capture_task.caught_up(self._target_lsn):
            # What is committed later is left to the next run, so the log's end is final now.
            self._capture_task.stop()

    def _finish_at(self, offset: int) -> None:
        for feed in self._feeds:
            feed.finish_at(offset)
        if not self._feeds:
            self._step(Event.ALL_DONE)

    def _ask_for_target(self) -> None:
        while not self._stop_wanted.is_set():
            try:
                self._target_lsn = wal_end(self._config.source, self._stop_wanted)
            except Stopped:
                return
            except TailraceError as error:
                if error.policy is Policy.STOP:
                    raise
                self._stop_wanted.wait(_ASK_AGAIN_S)
            else:
                return

    def _shut_down(self) -> None:
        # Sinks first are told, then capture, then both are waited for: they stop side by side.
        for feed in self._feeds:
            feed.stop()
        stopping = Background("stop-capture", self._capture_task.stop)
        stopping.start()
        deadline = time.monotonic() + DRAIN_DEADLINE_S
        for feeding in self._feeding:
            while not feeding.join(TURN_S) and time.monotonic() < deadline:
                self._show()
        if not all(feeding.ended for feeding in self._feeding):
            log.warning("a sink did not finish its batch in time; it is given up and written again next time")
            self._spark.cancel_jobs()
            deadline = time.monotonic() + GIVE_UP_DEADLINE_S
            for feeding in self._feeding:
                feeding.join(max(0.0, deadline - time.monotonic()))
        if not self._capture.join(CAPTURE_STOP_DEADLINE_S):
            log.warning("capture did not stop in time; what is durable stays, the rest is sent again")
        if self._capture.error is not None and self._error is None:
            self._fail(self._capture.error)
        if self._until_caught_up and self._error is None:
            failed = [feed.view for feed in self._feeds if feed.view.state is SinkState.FAILED]
            if failed:
                self._fail(_sinks_failure(failed))
        self._spark.stop()
        self._step(Event.EVERYTHING_STOPPED)

    def _fail(self, error: TailraceError) -> None:
        self._error = self._error or with_way_out(error, self._config)
        self._step(Event.CHANGES_LOST if error.kind in NEEDS_SNAPSHOT else Event.FAILURE)

    def _step(self, event: Event) -> None:
        before = self._life.state
        self._life = self._life.step(event)
        if self._life.state is not before:
            log.info("engine", state=str(self._life.state), because=str(event))

    def _make_feed(self, config: SinkConfig) -> Feed:
        source = self._config.source
        rules, modes = source.disclosure, source.value_modes
        return Feed(
            config, self._config.name, self._config.log.path, lambda: build(config, rules, modes), self._spark
        )


def task_view(task: CaptureTask) -> TaskView:
    """Return what `task` shows of itself now."""
    progress = task.progress()
    tables = progress.snapshot.values()
    # Until capture holds the log's lock, the log there may be another engine's.
    unopened = progress.durable.offset == 0 and progress.phase in {"connecting", "stopped"}
    return TaskView(
        task=TASK,
        state=str(progress.phase),
        rows=progress.rows,
        bytes=progress.bytes,
        log_end=None if unopened else progress.durable.offset,
        position=progress.durable.position,
        position_time_us=progress.durable.position_time_us,
        source_end=progress.server_end_lsn,
        acknowledged=progress.acknowledged_lsn,
        snapshot_rows=sum(table.rows for table in tables),
        snapshot_rows_estimated=sum(table.rows_estimated for table in tables),
        reconnects=progress.reconnects,
        error=progress.error,
        slot=progress.slot,
        concerns=progress.concerns,
    )


def _sinks_failure(failed: list[SinkView]) -> TailraceError:
    first = failed[0].error or TailraceError(Kind.INTERNAL, "a sink stopped without an error")
    others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    names = ", ".join(view.name for view in failed)
    return TailraceError(
        first.kind,
        f"feed sink {failed[0].name!r}{others}: {first.message}",
        first.hint,
        {"sinks": names, **first.context},
    )
