"""A task on its thread: it starts, polls and delivers records, ends, and may be restarted.

Decisions are made elsewhere: `Supervision` decides about failures, the engine, through `LifecycleEvents`,
when tasks begin to poll and when they are stopped. Each attempt has its own processor and committer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from tailrace import failpoints
from tailrace.config import EngineOptions
from tailrace.engine.contracts import (
    Clock,
    Metrics,
    RecordProcessor,
    Recovers,
    Settings,
    SourceTask,
    StopEngine,
    TaskContext,
)
from tailrace.engine.failures import (
    GivenUpError,
    Retrying,
    as_task_failure,
    backoff_of,
    named,
    timed_out,
    unkept,
)
from tailrace.engine.offsets.commits import TaskCommits
from tailrace.engine.processing.in_flight import TaskCounts
from tailrace.engine.supervision import Phase, Supervision
from tailrace.engine.threads import adopt
from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Batch
from tailrace.records.group import Group
from tailrace.waits import wait_until

log = structlog.get_logger(__name__)

#: Longest wait of a poll, and the interval at which policies are asked while no records arrive, in seconds.
POLL_S = 0.5

#: Interval of checks while a thread waits for marks or for the end of handlers, in seconds.
LOOK_S = 0.01


class LifecycleEvents:
    """The gates by which the engine controls its tasks. Each is opened once."""

    def __init__(self) -> None:
        #: The engine ends: tasks poll no more.
        self.ending = threading.Event()
        #: All tasks have started, or the engine ends.
        self.may_poll = threading.Event()
        #: No task polls any more: they commit what can be committed, and are stopped.
        self.may_stop = threading.Event()
        self._processing_until_s = 0.0

    def end(self, processing_s: float) -> None:
        """Make tasks end; records in flight may take `processing_s` longer."""
        if not self.ending.is_set():
            self._processing_until_s = time.monotonic() + processing_s
            self.ending.set()

    @property
    def processing_left_s(self) -> float:
        """Seconds that records in flight may still take, once the engine ends."""
        return max(0.0, self._processing_until_s - time.monotonic())


@dataclass(frozen=True, slots=True)
class TaskEnvironment:
    """The objects that the tasks of an engine share.

    :param wanted: whether the engine uses the records.
    :param transform: the chain of transformations, if there are any.
    :param metrics: returns the metrics of a task, by its number.
    :param new_task: creates a task of the connector; one call at a time.
    :param new_processor: returns an initialised processor.
    :param notify: schedules a call of a callback.
    """

    engine: object
    name: str
    options: EngineOptions
    clock: Clock
    latches: LifecycleEvents
    supervision: Supervision
    wanted: bool
    transform: Callable[[Group], Iterable[Group]] | None
    metrics: Callable[[int], Metrics]
    new_task: Callable[[], SourceTask]
    new_commits: Callable[[SourceTask, int], TaskCommits]
    new_processor: Callable[[TaskCommits, str, TaskCounts], RecordProcessor]
    notify: Callable[[str, int], None]


@dataclass(slots=True, eq=False)
class _Attempt:
    # One attempt of a task. `stop` may be called by another thread, if the task's hangs.
    number: int
    task: SourceTask
    environment: TaskEnvironment
    counts: TaskCounts
    commits: TaskCommits
    doing: str = "start"
    called: bool = False  # whether the task's `start` was called
    started: bool = False
    taken: int = 0  # number of records passed to the committer
    unkept: bool = False  # whether a commit at the end failed
    finished: threading.Event = field(default_factory=threading.Event)
    processor: RecordProcessor | None = None
    _stopped: threading.Lock = field(default_factory=threading.Lock)

    def start(self, settings: Settings) -> None:
        environment = self.environment
        offsets = self.commits.begin()
        context = TaskContext(
            environment.name,
            self.number,
            settings,
            offsets,
            environment.clock,
            environment.latches.ending,
            self.finished.set,
            environment.wanted,
            offset_writer=self.commits,
            commit_policy=self.commits.policy,
            metrics=environment.metrics(self.number),
            transformations=environment.transform,
            batch_records_max=environment.options.record_processing.batch_records_max,
        )
        self.called = True
        self.task.start(context)
        self.processor = environment.new_processor(self.commits, f"task {self.number}", self.counts)
        self.started = True

    def turn(self, polling: Retrying) -> None:
        """Poll once, and process the batch."""
        assert self.processor is not None
        self.doing = "poll"
        batch = polling.call(self._poll)
        if self.environment.latches.ending.is_set():
            if batch is not None:
                self.commits.drop()  # it is not processed: it is delivered again in the next attempt
            return
        self.doing = "process"
        if batch is None:
            self.processor.drain(0.0)
            self.commits.tick()
            return
        failpoints.hit("engine.after_poll")
        self.counts.polled += batch.polled
        self.counts.batches += 1
        self.commits.take(batch)
        self.taken += batch.polled
        self.processor.process(batch)

    def _poll(self) -> Batch | None:
        began_s = time.monotonic()
        try:
            found = self.task.poll(POLL_S)
        finally:
            self.counts.poll_s += time.monotonic() - began_s
        if found is not None and not isinstance(found, Batch):
            raise TailraceError(
                Kind.RECORD_INVALID,
                f"poll: the task returned {type(found).__name__}, not a Batch",
                "a poll returns a tailrace.records.batch.Batch (Batch.of_records makes one), or None",
            )
        return found

    def settle(self) -> bool:
        """Wait up to `POLL_S` for records in flight; return whether all are processed."""
        assert self.processor is not None
        self.doing = "process"
        settled = self.processor.drain(POLL_S)
        self.commits.tick()
        return settled

    def end_processing(self, timeout_s: float) -> None:
        """Wait until the records in flight are processed, at most `timeout_s`; then abandon them.

        :raises BaseException: the error of a batch.
        """
        processor, self.processor = self.processor, None
        if processor is None:
            return
        self.doing = "process"
        until_s = time.monotonic() + timeout_s
        try:
            # Handlers that mark records themselves may still do so, on their own threads.
            if not processor.drain(timeout_s) or not wait_until(
                lambda: self.commits.processed >= self.taken, until_s - time.monotonic(), LOOK_S
            ):
                log.warning(
                    "records in flight are abandoned and redelivered", task=self.number, after_s=timeout_s
                )
        finally:
            processor.close()

    def stop(self) -> bool:
        """Commit what can be committed and stop the task; return whether this was the first call.

        :raises BaseException: the task's error.
        """
        if not self._stopped.acquire(blocking=False):
            return False
        if not self.commits.finish(self.environment.options.offset_commit.timeout_ms / 1000):
            log.warning("not all processed records are committed: they are delivered again", task=self.number)
            self.unkept = True
        self.doing = "stop"
        failpoints.hit("engine.before_stop")
        if self.called:
            self.task.stop()
        return True


class TaskThread:
    """One task of the engine.

    :param first: the task of its first attempt.
    """

    def __init__(
        self, number: int, settings: Settings, first: SourceTask, environment: TaskEnvironment
    ) -> None:
        self.number = number
        self.counts = TaskCounts()
        self._settings = settings
        self._first = first
        self._environment = environment
        self._attempt: _Attempt | None = None
        what = f"task {number}"
        clock, ending = environment.clock, environment.latches.ending
        self._start_backoff = backoff_of(environment.options)
        self._commit_backoff = backoff_of(environment.options)  # after failed transactions
        self._start_error: BaseException | None = None  # until a start succeeds
        self._polling = Retrying(
            f"{what}: poll",
            backoff_of(environment.options),
            clock,
            ending,
            self._count_retry,
            self._has_passed,
        )
        #: The first start has ended, with or without success.
        self.start_ended = threading.Event()
        self.polling_ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"{environment.name} {what}", daemon=True)

    @property
    def task(self) -> SourceTask:
        """The task of the present attempt."""
        attempt = self._attempt
        return self._first if attempt is None else attempt.task

    @property
    def processed(self) -> int:
        """Number of records up to which everything is processed, in all attempts."""
        attempt = self._attempt
        return self.counts.processed + (attempt.commits.processed if attempt is not None else 0)

    @property
    def committed(self) -> int:
        """Number of records up to the last commit of each partition, in all attempts."""
        attempt = self._attempt
        return self.counts.committed + (attempt.commits.committed if attempt is not None else 0)

    @property
    def errors(self) -> tuple[TailraceError, ...]:
        """The errors for which the source, or parts of it, can't be read now; empty if none. Any thread."""
        if self._environment.supervision.phase(self.number) not in (Phase.STARTING, Phase.POLLING):
            return ()
        found: list[tuple[BaseException, str]] = []
        if (error := self._start_error) is not None:
            found.append((error, "start"))
        if (error := self._polling.error) is not None:
            found.append((error, "poll"))
        # `HasErrors` is looked up by name: a check of the protocol takes half a millisecond for each view of
        # the engine. A user's task may have an unrelated attribute `errors`.
        errors: Any = getattr(self.task, "errors", ())
        if isinstance(errors, Sequence):
            found += [(error, "poll") for error in errors if isinstance(error, BaseException)]
        return tuple(as_task_failure(error, self.number, doing) for error, doing in found)

    def force_stop(self) -> None:
        """Stop the task from another thread, because its own hangs in user code."""
        attempt = self._attempt
        if attempt is not None:
            processor = attempt.processor
            if processor is not None:
                processor.close()
            attempt.stop()

    def _run(self) -> None:
        adopt(self._environment.engine)
        try:
            task, ending = self._first, self._environment.latches.ending
            while (wait_s := self._run_attempt(task)) is not None:
                if self._environment.clock.wait(ending, wait_s) or not self._attempt_ended():
                    break
                task = self._environment.new_task()
        except BaseException as error:  # noqa: BLE001 - all failures are handled in one place
            self._environment.supervision.failed(
                self.number, error, "restart", got_on=False, may_restart=False
            )
        finally:
            self.start_ended.set()
            self.polling_ended.set()
            self._environment.supervision.note(self.number, Phase.STOPPED)

    def _attempt_ended(self) -> bool:
        """Wait until the previous attempt has completely ended; return whether another one may begin.

        Two attempts must not call a handler at once with the same records, and a write of the previous one
        must not overwrite commits of the next. If the previous attempt hangs, the engine ends.
        """
        ending, limit_s = (
            self._environment.latches.ending,
            self._environment.options.task_management_timeout_ms / 1000,
        )
        if left := self._left_under_way():
            log.warning("a task's restart waits for its previous attempt", task=self.number, what=left)
        if wait_until(lambda: not self._left_under_way(), limit_s, LOOK_S, ending):
            return True
        if ending.is_set():
            return False
        raise timed_out(f"restart a task whose {self._left_under_way() or left}", [self.number], limit_s)

    def _left_under_way(self) -> str:
        if self.counts.calls:
            return "handler still runs"
        attempt = self._attempt
        return "offsets are still being written" if attempt is not None and attempt.commits.is_writing else ""

    def _run_attempt(self, task: SourceTask) -> float | None:
        """Run one attempt of the task; return the seconds until the next, None if it is the last."""
        environment, supervision = self._environment, self._environment.supervision
        commits = environment.new_commits(task, self.number)
        if self._attempt is not None:
            self.counts.processed += self._attempt.commits.processed
            self.counts.committed += self._attempt.commits.committed
        attempt = self._attempt = _Attempt(self.number, task, environment, self.counts, commits)
        wait_s = None
        try:
            self._start_and_poll(attempt)
        except GivenUpError:
            pass
        except StopEngine:
            supervision.stop_asked()
        except BaseException as error:  # noqa: BLE001 - it decides what follows
            wait_s = self._decide_wait(error, attempt)
        restarts = wait_s is not None
        is_failed = restarts or supervision.phase(self.number) is Phase.FAILED
        self._end(attempt, failed=is_failed, restarts=restarts)
        return wait_s

    def _start_and_poll(self, attempt: _Attempt) -> None:
        environment, supervision, latches = (
            self._environment,
            self._environment.supervision,
            self._environment.latches,
        )
        supervision.note(self.number, Phase.STARTING)
        attempt.start(self._settings)
        self._start_backoff, self._start_error = self._start_backoff.after_success(), None
        environment.notify("task_started", self.number)
        self.start_ended.set()
        latches.may_poll.wait()
        supervision.note(self.number, Phase.POLLING)
        while not latches.ending.is_set() and not attempt.finished.is_set():
            attempt.turn(self._polling)
        while not latches.ending.is_set():
            if attempt.settle():
                supervision.finished(self.number)
                break
        while not latches.ending.wait(POLL_S):
            attempt.commits.tick()

    def _decide_wait(self, error: BaseException, attempt: _Attempt) -> float | None:
        if not self._environment.latches.ending.is_set():
            wait_s = self._wait_before_next(error, attempt)
            if wait_s is not None:
                self._start_error = error
                self._count_retry()
                log.warning(
                    "restarting a task" if attempt.started else "a task did not start, retrying",
                    task=self.number,
                    error=str(error) if isinstance(error, TailraceError) else named(error),
                    wait_s=wait_s,
                )
                return wait_s
        doing = attempt.doing
        if self._environment.options.on_task_failure == "restart":
            # Batches delivered before count as progress, once they are processed.
            self._end_processing(attempt, failed=True)
        wait_s = self._environment.supervision.failed(
            self.number,
            error,
            doing,
            got_on=attempt.commits.processed > 0,
            may_restart=not self._environment.latches.ending.is_set(),
        )
        self.start_ended.set()
        return wait_s

    def _wait_before_next(self, error: BaseException, attempt: _Attempt) -> float | None:
        """Return the seconds until the next attempt if that may overcome `error`; None: it can't."""
        if not attempt.started:
            self._start_backoff, wait_s = self._start_backoff.after(error)
            return wait_s
        if error is not attempt.commits.failure:
            return None
        backoff = self._commit_backoff
        self._commit_backoff, wait_s = (
            backoff.after_success() if attempt.commits.committed else backoff
        ).after(error)
        return wait_s

    def _end(self, attempt: _Attempt, *, failed: bool, restarts: bool) -> None:
        """End an attempt: first its processing, then, once no task polls any more, commit and stop it."""
        environment, latches = self._environment, self._environment.latches
        self._end_processing(attempt, failed=failed)
        if latches.ending.is_set():
            # The engine may still wait for the start of this task, which is not retried.
            self.start_ended.set()
            self.polling_ended.set()
            latches.may_stop.wait()
        try:
            stopped = attempt.stop()
        except BaseException as error:  # noqa: BLE001 - `Supervision` decides what follows
            stopped = True
            if restarts:  # often a consequence: what is closed was broken or never opened
                log.warning("a task's stop() failed", task=self.number, error=named(error))
            else:
                self._report_failure(error, attempt)
        if stopped and attempt.started:
            environment.notify("task_stopped", self.number)
        if attempt.unkept and not failed and latches.ending.is_set():
            self._report_failure(unkept(attempt.commits.failure), attempt)

    def _end_processing(self, attempt: _Attempt, *, failed: bool) -> None:
        try:
            attempt.end_processing(self._processing_left_s())
        except GivenUpError:
            pass
        except StopEngine:
            self._environment.supervision.stop_asked()
        except BaseException as error:  # noqa: BLE001 - `Supervision` decides what follows
            # A failed attempt has already reported its error; this one is a consequence.
            if not failed:
                self._report_failure(error, attempt)

    def _processing_left_s(self) -> float:
        latches, processing = self._environment.latches, self._environment.options.record_processing
        return latches.processing_left_s if latches.ending.is_set() else processing.shutdown_timeout_ms / 1000

    def _report_failure(self, error: BaseException, attempt: _Attempt) -> None:
        self._environment.supervision.failed(
            self.number, error, attempt.doing, got_on=True, may_restart=False
        )

    def _has_passed(self, polled: Batch | None) -> bool:
        task = self.task
        return polled is not None or not isinstance(task, Recovers) or not task.is_recovering

    def _count_retry(self) -> None:
        self.counts.polls_retried += 1
