"""The engine: capture, Spark and sinks beside each other, with the log between them.

`Engine.run` is the whole story. Nothing here moves data: each source has a `Lane`, whose capture
appends to its log on threads of its own and whose feeds read it on others. The engine starts the
lanes together, looks after them, turn by turn, on the thread that called it, and stops them
together. A lane that fails leaves the others at work; the engine fails for it at its end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import structlog

from tailrace.capture.turns import Turns
from tailrace.config import EngineConfig
from tailrace.errors import NEEDS_SNAPSHOT, TailraceError
from tailrace.pipeline.background import as_failure
from tailrace.pipeline.lane import Lane
from tailrace.pipeline.lifecycle import Event, Lifecycle, toward
from tailrace.pipeline.log_root import take_root
from tailrace.pipeline.planning import plan_tasks
from tailrace.pipeline.spark_host import SparkHost
from tailrace.pipeline.status import StatusFile
from tailrace.pipeline.views import EngineView

log = structlog.get_logger(__name__)

TURN_S = 0.05
#: How long sinks may take to finish their batch when the engine stops; then it is given up,
#: which is safe: it is written again at the next start.
DRAIN_DEADLINE_S = 8.0
GIVE_UP_DEADLINE_S = 4.0
CAPTURE_STOP_DEADLINE_S = 10.0
#: Batches of one sink at a time, over all sources: while one is committed, another is decoded.
BATCHES_AT_ONCE = 2


class Engine:
    """Runs one pipeline, once, from one source or from several.

    :param until_caught_up: end by itself when everything that the sources had committed at the
        start is in the log and in every sink.
    :param observe: called with the engine's view at each turn, on the engine's thread; it
        must return at once and not raise.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        until_caught_up: bool = False,
        observe: Callable[[EngineView], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._observe = observe
        self._life = Lifecycle()
        self._error: TailraceError | None = None  # of the engine itself, not of a source
        self._failed: list[Lane] = []  # in the order in which they failed
        self._stop_wanted = threading.Event()
        self._spark = SparkHost(config)
        self._lanes = _lanes(config, self._spark, until_caught_up=until_caught_up)
        self._status = StatusFile(config.log.path)
        self._root_lock: int | None = None

    def run(self) -> None:
        """Run until `stop`, until caught up, or until it can't go on. Once, on one thread.

        A source fails alone, and so does a sink while its source has another one; when no source
        can go on, nor can the engine.

        :raises TailraceError: at once, `LOG_LOCKED` if a log has a writer, `SECRET_MISSING` or
            `CONFIG_INVALID` if a mask has no salt; at the end, the first
            of what ended a capture, and of what stopped the sinks of a source, if all of them
            have stopped, or if any has under `until_caught_up`. With several sources, the context
            has the `source`, and under `failed_too` those that failed after it.
        """
        for lane in self._lanes:
            lane.refuse_if_written()
            lane.require_salts()
        if self._config.has_several:
            self._root_lock = take_root(self._config)
        try:
            self._run()
        finally:
            if self._root_lock is not None:
                os.close(self._root_lock)
        if (error := self._failure()) is not None:
            raise error

    def stop(self) -> None:
        """Ask for the end: sinks finish their batch, capture makes durable and acknowledges.

        Any thread, any number of times; returns at once.
        """
        self._stop_wanted.set()

    def view(self) -> EngineView:
        """Return the engine as it is now. Any thread."""
        lanes = tuple(lane.view() for lane in self._lanes)
        return EngineView(self._config.name, self._life.state, lanes, self._failure())

    def _run(self) -> None:
        if any(sink.on_spark for sink in self._config.sinks):
            from tailrace.spark.java import require_java

            require_java()
            self._spark.start()
        try:
            for lane in self._lanes:
                lane.start()
            while self._life.is_running:
                self._turn()
                self._stop_wanted.wait(TURN_S)
        except Exception as error:  # noqa: BLE001 - nothing may leave threads and Spark behind
            self._error = as_failure(error)
            self._step(Event.FAILURE)
        self._shut_down()
        view = self.view()
        if self._holds_log(view):
            self._status.last(view)
        self._observe(view)

    def _turn(self) -> None:
        event = toward(self._life.state, (source.task.state for source in self.view().sources))
        if event is not None:
            self._step(event)
        if self._stop_wanted.is_set():
            self._step(Event.STOP_CALLED)
        else:
            # Every lane has its turn, also when one before it is at its end.
            ended = [lane.turn() for lane in self._lanes]
            self._look_for_failures()
            if len(self._failed) == len(self._lanes):
                self._end_as_failed()
            elif all(ended):
                self._step(Event.ALL_DONE)
        self._show()

    def _show(self) -> None:
        view = self.view()
        if self._holds_log(view):
            self._status.turn(view)
        self._observe(view)

    def _holds_log(self, view: EngineView) -> bool:
        # What lies at the log's place may be another engine's.
        return self._root_lock is not None or view.sources[0].task.log_end is not None

    def _shut_down(self) -> None:
        for lane in self._lanes:
            lane.stop()
        self._wait_for_sinks(DRAIN_DEADLINE_S)
        if not all(lane.sinks_ended() for lane in self._lanes):
            log.warning("a sink did not finish its batch in time; it is given up and written again next time")
            self._spark.cancel_jobs()
            self._wait_for_sinks(GIVE_UP_DEADLINE_S)
        deadline = time.monotonic() + CAPTURE_STOP_DEADLINE_S
        for lane in self._lanes:
            if not lane.capture_ended(max(0.0, deadline - time.monotonic())):
                log.warning(
                    "capture did not stop in time; what is durable stays, the rest is sent again",
                    source=lane.name,
                )
            lane.close_the_books()
        self._look_for_failures()
        self._end_as_failed()
        self._spark.stop()
        self._step(Event.EVERYTHING_STOPPED)

    def _wait_for_sinks(self, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while not all(lane.sinks_ended() for lane in self._lanes) and time.monotonic() < deadline:
            time.sleep(TURN_S)
            self._show()

    def _look_for_failures(self) -> None:
        self._failed += [lane for lane in self._lanes if lane.error is not None and lane not in self._failed]

    def _end_as_failed(self) -> None:
        """Have the engine's end be that of the sources which failed; nothing if none has."""
        for lane in self._failed:
            lost = lane.error is not None and lane.error.kind in NEEDS_SNAPSHOT
            self._step(Event.CHANGES_LOST if lost else Event.FAILURE)

    def _failure(self) -> TailraceError | None:
        """Return why the engine fails, or will in the end: the first failure, naming the others."""
        if self._error is not None or not self._failed:
            return self._error
        first = self._failed[0].error
        assert first is not None
        if len(self._failed) == 1:
            return first
        others = ", ".join(lane.name for lane in self._failed[1:])
        return TailraceError(first.kind, first.message, first.hint, {**first.context, "failed_too": others})

    def _step(self, event: Event) -> None:
        before = self._life.state
        self._life = self._life.step(event)
        if self._life.state is not before:
            log.info("engine", state=str(self._life.state), because=str(event))


def _lanes(config: EngineConfig, spark: SparkHost, *, until_caught_up: bool) -> tuple[Lane, ...]:
    tasks = plan_tasks(config)
    task_of = {pipeline.source_name: task.number for task in tasks for pipeline in task.pipelines}
    beginning = [Turns(1) for _ in tasks]
    # One queue a sink: a sink that hangs keeps the sources waiting for itself, not the other sinks.
    writing = [Turns(BATCHES_AT_ONCE) for _ in config.sinks]
    return tuple(
        Lane(
            pipeline,
            (number := task_of[pipeline.source_name]),
            spark,
            beginning=beginning[number],
            writing=writing,
            until_caught_up=until_caught_up,
        )
        for pipeline in config.pipelines
    )
