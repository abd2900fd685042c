"""The engine: runs the tasks of a connector, each on its thread, and delivers their records.

`Engine._live` is the main path, on the engine's own thread: it starts everything, waits for the end, and
stops everything, in a fixed order. All other threads request the end (`_step`) and may wait for it. All
failures are reported there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Self

import structlog

from tailrace.config import EngineConfig, EngineOptions
from tailrace.engine.arguments import Arguments
from tailrace.engine.assembly import assemble
from tailrace.engine.contracts import (
    BatchHandler,
    Callbacks,
    Clock,
    CommitPolicy,
    ConnectorContext,
    OffsetStore,
    RecordHandler,
    RecordProcessor,
    Settings,
    SourceConnector,
    SourceTask,
    SwitchesRealtime,
)
from tailrace.engine.failures import as_engine_failure, timed_out
from tailrace.engine.lifecycle import EngineEvent, EngineLifecycle, State
from tailrace.engine.logs import to_logging
from tailrace.engine.metrics import EngineMetrics, MetricsEndpoint
from tailrace.engine.offsets.commits import TaskCommits
from tailrace.engine.offsets.partitions import ConnectorOffsets
from tailrace.engine.processing.in_flight import TaskCounts
from tailrace.engine.supervision import Phase, Supervision
from tailrace.engine.tasks import LifecycleEvents, TaskEnvironment, TaskThread
from tailrace.engine.threads import BoundedCall, CallbackDispatcher, Pool, adopt, owner, wait_for
from tailrace.engine.views import EngineView, TaskView
from tailrace.errors import Kind, TailraceError
from tailrace.secrets import masked
from tailrace.waits import join_all, wait_until

log = structlog.get_logger(__name__)

#: Wait at the engine's end for callbacks, and for threads that have nothing left to do, in seconds.
GRACE_S = 1.0
#: Longest time to stop a hanging task from another thread, in seconds.
FORCE_S = 5.0


class Engine:
    """Runs the tasks of one source connector, and delivers their records. An object runs once.

    Its parts come from a configuration or from Python objects; see `docs/engine.md`.

    :param config: a pipeline file's path, its content as a mapping, or an `EngineConfig`.
    :param connector: a name among the entry points `tailrace.connectors`, a class, or an object, in
        place of the configuration's source; with its `settings`.
    :param name: under which offsets are stored. Default: the configuration's, or `engine`.
    :param tasks_max: most tasks. Default: the configuration's, or 1.
    :param on_batch: called with each `Batch`, or with `Events` if there is a converter, one after another
        for each task. When it returns, the batch counts as processed.
    :param on_record: called with single records or events, by `record_processing.order`.
    :param processor: makes a `RecordProcessor` for each attempt of a task, instead of a handler. One of
        the three must be given, or none with a configuration: its sinks are fed from the log.
    :param converter: a `Converter`, or its name or section in the file.
    :param transformations: applied after those of the options: each a `Transformation`, a
        `RecordTransformation` or a mapping as in the file, which may name one of `predicates`.
    :param offsets: the offset store, instead of `offset_storage`.
    :param commit_policy: makes a policy for each attempt of a task, instead of `offset_commit.policy`.
    :param callbacks: called at events of the engine.
    :param options: `EngineOptions`, or the section `engine` as a mapping; each overrides the configuration's.
    :raises TailraceError: `CONFIG_INVALID`, `ENVIRONMENT_UNFIT`: nothing has been started then.
    """

    def __init__(
        self,
        config: EngineConfig | Mapping[str, Any] | str | PathLike[str] | None = None,
        *,
        connector: SourceConnector | Callable[[], SourceConnector] | str | None = None,
        settings: Settings | None = None,
        name: str | None = None,
        tasks_max: int | None = None,
        on_batch: BatchHandler | None = None,
        on_record: RecordHandler | None = None,
        processor: Callable[[], RecordProcessor] | None = None,
        converter: Any = None,
        transformations: Sequence[Any] = (),
        predicates: Mapping[str, Any] | None = None,
        offsets: OffsetStore | None = None,
        commit_policy: Callable[[], CommitPolicy] | None = None,
        callbacks: Callbacks | None = None,
        clock: Clock | None = None,
        options: EngineOptions | Mapping[str, Any] | None = None,
    ) -> None:
        to_logging()
        self._parts = parts = assemble(
            Arguments(
                config=config, connector=connector, settings=settings, name=name, tasks_max=tasks_max,
                on_batch=on_batch, on_record=on_record, processor=processor, converter=converter,
                transformations=transformations, predicates=predicates, offsets=offsets,
                commit_policy=commit_policy, callbacks=callbacks, clock=clock, options=options,
            )
        )  # fmt: skip
        self._limit_s = parts.options.task_management_timeout_ms / 1000
        self._shutdown_s = parts.options.record_processing.shutdown_timeout_ms / 1000
        self._lock = threading.Lock()
        self._lifecycle = EngineLifecycle()
        self._error: TailraceError | None = None
        self._latches = LifecycleEvents()
        self._tasks: tuple[TaskThread, ...] = ()
        self._supervision: Supervision | None = None
        self._store: OffsetStore | None = None
        self._connector_offsets: ConnectorOffsets | None = None
        self._metrics = EngineMetrics(parts.name, self.view)
        self._endpoint = MetricsEndpoint(parts.name)
        self._connector_called = False
        self._creating = threading.Lock()
        self._pools: dict[str, Pool] = {}  # of each task's present attempt
        self._callbacks = CallbackDispatcher(callbacks or Callbacks(), f"{parts.name} callbacks", self)
        self._thread: threading.Thread | None = None
        self._process: int | None = None  # where it was started
        self._entered = False
        self._up = threading.Event()  # all tasks poll, or the engine has ended
        self._stopped = threading.Event()

    # ------------------------------------------------------------------ public methods

    def run(self) -> None:
        """Run until the end; blocks. Ctrl-C closes the engine and is raised again.

        Within `with`, which has started the engine, wait for its end.

        :raises TailraceError: the engine's failure; `ENGINE_MISUSED` if it was started before.
        """
        if not self._entered:
            self._launch()
        self._refuse_to_wait()
        try:
            self._wait_stopped(None)
        except BaseException:
            self.close()
            raise
        self._raise_failure()

    def start(self) -> None:
        """Start, and return when all tasks poll, or the engine has ended; its threads do the work.

        Ctrl-C during the start closes the engine and is raised again.

        :raises TailraceError: why it did not start; `ENGINE_MISUSED` if it was started before.
        """
        self._launch()
        try:
            wait_for(self._up, None)
        except BaseException:
            self.close()
            raise
        if self._lifecycle.failed:
            self._wait_stopped(None)
            self._raise_failure()

    def close(self, timeout_s: float | None = None) -> None:
        """End the engine in order, and return when it has ended. Any thread, also while others close.

        While tasks start, waits until every start has ended, and stops them all. Called from a callback, a
        handler, or a task, for which the end has to wait, it returns at once.

        On a stopped engine it has no effect; the failure is raised by `run`, `start` and `wait`. It has none
        either in a process that was forked while the engine runs: the engine's threads are not there.

        :param timeout_s: longest wait, after which the engine continues to end. None: as its limits allow.
        :raises TailraceError: `TASK_TIMED_OUT`.
        """
        if self._is_copy:
            return
        with self._lock:
            unborn = self._lifecycle.state is State.CREATING
            if self._lifecycle.state is not State.STOPPED:
                self._take(EngineEvent.CLOSE_CALLED)
            if unborn:
                self._take(EngineEvent.EVERYTHING_STOPPED)
        if unborn:
            self._end()
        if owner() is self:
            return
        if not self._wait_stopped(timeout_s):
            assert timeout_s is not None
            raise timed_out(
                "close the engine, which continues to stop", [], timeout_s, "the `timeout_s` of close()"
            )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, at most `timeout_s`; return whether the engine has ended.

        :raises TailraceError: the engine's failure; `ENGINE_MISUSED` on a thread of the engine, which would
            wait for itself, and in a process that was forked while the engine runs.
        """
        self._refuse_to_wait()
        if not self._wait_stopped(timeout_s):
            return False
        self._raise_failure()
        return True

    def __enter__(self) -> Self:
        """Start; see `start`."""
        self.start()
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, and raise the engine's failure unless another error is raised."""
        self._entered = False
        self.close()
        if error is None:
            self._raise_failure()

    @property
    def state(self) -> State:
        """The engine's state. Any thread, at any time, as `error`, `view` and `status`."""
        return self._lifecycle.state

    @property
    def error(self) -> TailraceError | None:
        """The engine's failure; while it continues, the error for which a source can't be read now."""
        if self._error is not None or self._lifecycle.state is State.STOPPED:
            return self._error
        supervision = self._supervision
        isolated = [] if supervision is None else supervision.failures()
        return next((error for task in self._tasks for error in (*isolated, *task.errors)), None)

    @property
    def metrics(self) -> EngineMetrics:
        """The metrics, in the text format of Prometheus (`text()`) or as a registry; also after the end."""
        return self._metrics

    def view(self) -> EngineView:
        """Return the present state of the engine and its tasks."""
        supervision = self._supervision
        tasks = [] if supervision is None else self._tasks
        views = tuple(self._view_of(task, supervision) for task in tasks if supervision is not None)
        return EngineView(self._parts.name, self._lifecycle.state, views, self.error, self._lifecycle.story)

    def status(self) -> dict[str, Any]:
        """Return the view as one JSON object."""
        return self.view().as_json()

    def switch_realtime(self, *, on: bool) -> None:
        """Request that handler and sinks are fed from memory, or no longer; as `tailrace realtime on|off`.

        Returns at once, without a guarantee: `realtime_status` shows the result.

        :raises TailraceError: `ENGINE_MISUSED` if the engine does not run, or its connector does not support
            it; `LOG_MISSING` before there is a log; `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        self._realtime_connector("switch real time").switch_realtime(on=on)

    def realtime_status(self) -> Sequence[Mapping[str, Any]]:
        """Return whether memory or the log feeds handler and sinks, and why; as `tailrace realtime status`.

        :raises TailraceError: as `switch_realtime`.
        """
        return self._realtime_connector("show real time").realtime_status()

    # ------------------------------------------------------------------ the run

    def _launch(self) -> None:
        with self._lock:
            self._take(EngineEvent.RUN_CALLED)
        self._process = os.getpid()
        try:
            # Not a daemon: it keeps the process alive while the engine works, and its end is bounded.
            self._thread = threading.Thread(target=self._live, name=f"{self._parts.name} engine")
            self._thread.start()
        except BaseException:
            # Ctrl-C at this moment: the caller can't close the engine, so a thread that has begun must end.
            self._report_event(EngineEvent.CLOSE_CALLED, None)
            thread = self._thread
            if thread is not None and wait_until(lambda: thread.ident is not None, GRACE_S, 0.01):
                self._wait_stopped(None)
            raise

    def _live(self) -> None:
        adopt(self)
        for part in (self._work, self._stop_all):
            try:
                part()
            except BaseException as error:  # noqa: BLE001 - all failures end here
                self._step(EngineEvent.FAILURE, as_engine_failure(error, "run the engine"))
        self._step(EngineEvent.EVERYTHING_STOPPED)
        self._end()

    def _work(self) -> None:
        if self._start_all():
            self._up.set()
            self._latches.ending.wait()

    def _start_all(self) -> bool:
        """Go through the states until tasks poll; return whether they do."""
        parts = self._parts
        self._endpoint.open(parts.options, self._metrics)
        self._store = parts.new_store()
        self._within_limit("start the offset store", self._store.start)
        self._connector_offsets = ConnectorOffsets(self._store, parts.commit_timeout_s)
        context = ConnectorContext(
            parts.name,
            parts.settings,
            self._store,
            parts.clock,
            self._report,
            parts.options.tasks_on,
            offset_writer=self._connector_offsets,
            commit_policy=parts.new_policy(),
            metrics=self._metrics.of(""),
            transformations=parts.stages.transform,
        )
        self._connector_called = True
        self._within_limit("start the connector", lambda: parts.connector.start(context))
        self._callbacks.notify("connector_started")
        if not self._step(EngineEvent.CONNECTOR_STARTED):
            return False
        self._within_limit("create tasks", self._create_tasks)
        if not self._step(EngineEvent.TASKS_CREATED):
            return False
        self._start_tasks()
        if not self._step(EngineEvent.STARTS_ENDED):
            return False
        self._callbacks.notify("polling_started")
        self._latches.may_poll.set()
        return True

    def _create_tasks(self) -> None:
        parts = self._parts
        settings = list(parts.connector.task_settings(parts.tasks_max))
        if not 0 < len(settings) <= parts.tasks_max:
            raise TailraceError(
                Kind.TASK_FAILED,
                f"create tasks: the connector planned {len(settings)}, allowed are 1 to {parts.tasks_max}",
                "correct the connector, or its settings, which may leave it without work",
            )
        assert self._store is not None
        supervision = self._supervision = Supervision(parts.options, len(settings), self._report_event)
        environment = TaskEnvironment(
            engine=self,
            name=parts.name,
            options=parts.options,
            clock=parts.clock,
            latches=self._latches,
            supervision=supervision,
            wanted=parts.wanted,
            transform=parts.stages.transform,
            metrics=lambda number: self._metrics.of(str(number)),
            new_task=self._new_task,
            new_commits=self._new_commits,
            new_processor=self._new_processor,
            notify=self._callbacks.notify,
        )
        tasks = []
        for number, own in enumerate(settings):
            log.debug("task configuration", engine=parts.name, task=number, settings=masked(own))
            tasks.append(TaskThread(number, own, self._new_task(), environment))
        self._tasks = tuple(tasks)

    def _start_tasks(self) -> None:
        """Start all tasks in parallel, and wait until every start has ended, also if one fails."""
        for task in self._tasks:
            task.thread.start()
        deadline_s = time.monotonic() + self._limit_s
        late = [
            task.number
            for task in self._tasks
            if not task.start_ended.wait(max(0.0, deadline_s - time.monotonic()))
        ]
        if late:
            self._step(EngineEvent.FAILURE, timed_out("start tasks", late, self._limit_s))

    def _stop_all(self) -> None:
        """Stop everything that was started: processing, tasks, the offset store, the connector."""
        polled = self._latches.may_poll.is_set()
        self._latches.may_poll.set()
        deadline_s = time.monotonic() + self._shutdown_s + self._limit_s
        started = [task for task in self._tasks if task.thread.ident is not None]
        # Half of the time is for polls that do not return, the rest for stopping their tasks anyway.
        for task in started:
            task.polling_ended.wait(max(0.0, deadline_s - self._limit_s / 2 - time.monotonic()))
        if polled:
            self._callbacks.notify("polling_stopped")
        self._latches.may_stop.set()
        for task in started:
            if task.polling_ended.is_set():
                task.thread.join(max(0.0, deadline_s - time.monotonic()))
        self._force([task for task in started if task.thread.is_alive()])
        for pool in tuple(self._pools.values()):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._connector_offsets is not None:
            self._connector_offsets.close()
        if self._store is not None:
            self._attempt("stop the offset store", self._store.stop)
        if self._connector_called:
            self._attempt("stop the connector", self._parts.connector.stop)
            self._callbacks.notify("connector_stopped")
        isolated = [] if self._supervision is None else self._supervision.failures()
        if isolated and self._error is None:
            self._step(EngineEvent.FAILURE, isolated[0])

    def _force(self, late: Sequence[TaskThread]) -> None:
        """Stop tasks whose threads hang in user code, as far as possible."""
        if not late:
            return
        calls = [BoundedCall(f"stop task {task.number}", self, task.force_stop) for task in late]
        deadline_s = time.monotonic() + min(FORCE_S, self._limit_s)
        for call in calls:
            try:
                call.wait(deadline_s - time.monotonic())
            except BaseException as error:  # noqa: BLE001 - all failures are handled in one place
                self._step(EngineEvent.FAILURE, as_engine_failure(error, "stop a task that hangs"))
        join_all([task.thread for task in late], GRACE_S)
        numbers = [task.number for task in late if task.thread.is_alive()]
        if numbers:
            self._step(EngineEvent.FAILURE, timed_out("stop tasks", numbers, self._limit_s))

    def _end(self) -> None:
        """Close the remaining parts, and report the end."""
        for close in (*self._parts.stages.closers, self._parts.runner.close, self._endpoint.close):
            try:
                self._within_limit("close", close)
            except BaseException as failure:  # noqa: BLE001 - the end continues
                log.warning(
                    "closing a part of the engine failed", error=str(as_engine_failure(failure, "close"))
                )
        error = self._error
        log.info(
            "engine stopped" if error is None else "engine has failed",
            engine=self._parts.name,
            error=None if error is None else str(error),
        )
        message = f"engine {self._parts.name!r} completed normally" if error is None else str(error)
        self._callbacks.notify("completed", error is None, message, error)
        if not self._callbacks.finish(GRACE_S):
            log.warning("a callback hangs: the engine ends without waiting for it", engine=self._parts.name)
        join_all([thread for pool in tuple(self._pools.values()) for thread in pool.threads], GRACE_S)
        self._stopped.set()
        self._up.set()

    # ------------------------------------------------------------------ parts of it

    def _take(self, event: EngineEvent, error: TailraceError | None = None) -> None:
        """Change the lifecycle: the only place that does. Under the lock."""
        before = self._lifecycle
        try:
            self._lifecycle = before.step(event)
        except TailraceError as misused:
            raise misused from self._error
        if event is EngineEvent.FAILURE:
            if self._error is None:
                self._error = error
            elif error is not None and error is not self._error:
                self._error.add_note(f"also failed: {error.message}")
        if self._lifecycle.state is not before.state:
            log.info("engine", engine=self._parts.name, state=str(self._lifecycle.state), because=str(event))
        if self._lifecycle.ending is not None:
            self._latches.end(self._shutdown_s)

    def _step(self, event: EngineEvent, error: TailraceError | None = None) -> bool:
        """Apply `event` to the lifecycle; return whether the engine continues."""
        with self._lock:
            self._take(event, error)
            return self._lifecycle.goes_on

    def _report_event(self, event: EngineEvent, error: TailraceError | None) -> None:
        with self._lock:
            # An abandoned thread may still report something after the end.
            if self._lifecycle.state is not State.STOPPED:
                self._take(event, error)

    def _report(self, error: BaseException) -> None:
        self._report_event(EngineEvent.FAILURE, as_engine_failure(error, "run the connector"))

    def _within_limit(self, doing: str, function: Callable[[], None]) -> None:
        """Call a function of user code, and wait for it no longer than the limit."""
        try:
            ended = BoundedCall(f"{self._parts.name}: {doing}", self, function).wait(self._limit_s)
        except TailraceError:
            raise  # not from itself: programs that follow causes would never end
        except Exception as error:
            raise as_engine_failure(error, doing) from error
        if not ended:
            raise timed_out(doing, [], self._limit_s)

    def _attempt(self, doing: str, function: Callable[[], None]) -> None:
        """As `_within_limit`, but an error is only noted, and the end continues."""
        try:
            self._within_limit(doing, function)
        except BaseException as error:  # noqa: BLE001 - all failures are handled in one place
            self._step(EngineEvent.FAILURE, as_engine_failure(error, doing))

    def _new_task(self) -> SourceTask:
        with self._creating:
            return self._parts.connector.create_task()

    def _new_commits(self, task: SourceTask, number: int) -> TaskCommits:
        assert self._store is not None
        assert self._connector_offsets is not None
        return self._parts.new_commits(self._store, task.commit, self._connector_offsets.claim, number)

    def _new_processor(self, commits: TaskCommits, name: str, counts: TaskCounts) -> RecordProcessor:
        parts = self._parts
        processor = parts.new_processor(self._latches.ending, name, counts, commits)
        # A hanging transformation blocks threads only of its task, and none of the task's next attempt.
        if (earlier := self._pools.get(name)) is not None:
            earlier.shutdown(wait=False, cancel_futures=True)
        pool = Pool(parts.options.record_processing.thread_count, f"{parts.name} {name} pool", self)
        self._pools[name] = pool
        processor.initialize(pool, parts.stages.transform, parts.stages.convert, commits)
        return processor

    def _realtime_connector(self, attempt: str) -> SwitchesRealtime:
        if self._lifecycle.state is not State.POLLING_TASKS:
            raise self._lifecycle.misused(attempt)
        if not isinstance(self._parts.connector, SwitchesRealtime):
            raise TailraceError(
                Kind.ENGINE_MISUSED,
                f"{attempt}: {type(self._parts.connector).__name__} does not read a change log",
                "real time is for engines that read a change log",
            )
        return self._parts.connector

    def _task(self, number: int) -> SourceTask:
        if self._lifecycle.state not in (State.STARTING_TASKS, State.POLLING_TASKS, State.STOPPING):
            raise self._lifecycle.misused("use a task")
        return self._tasks[number].task

    def _view_of(self, task: TaskThread, supervision: Supervision) -> TaskView:
        number, counts = task.number, task.counts
        errors = task.errors
        return TaskView(
            number=number,
            state=supervision.phase(number) if task.thread.ident is not None else Phase.CREATED,
            polled=counts.polled,
            batches=counts.batches,
            delivered=counts.delivered,
            dropped=counts.dropped,
            processed=task.processed,
            committed=task.committed,
            retries=counts.polls_retried + counts.retries,
            restarts=supervision.restarts(number),
            batches_under_way=counts.batches_under_way,
            bytes_under_way=counts.bytes_under_way,
            poll_s=counts.poll_s,
            handler_s=counts.handling_s,
            errors=errors,
            error=errors[0] if errors else supervision.error(number),
        )

    @property
    def _is_copy(self) -> bool:
        """Whether the engine runs in the process that this one was forked from."""
        return self._process not in (None, os.getpid()) and not self._stopped.is_set()

    def _refuse_to_wait(self) -> None:
        if self._is_copy:
            raise self._lifecycle.misused("wait for the end, in a process forked while it runs")
        if owner() is self:
            raise self._lifecycle.misused("wait for the end, on a thread of the engine")

    def _wait_stopped(self, timeout_s: float | None) -> bool:
        if not wait_for(self._stopped, timeout_s):
            return False
        if self._thread is not None:
            self._thread.join(GRACE_S)  # it has nothing left to do
        return True

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error
