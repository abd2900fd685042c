"""A task on its thread: it starts, polls and hands over, ends, and may begin a life anew.

Who decides is elsewhere: `Supervision` about failures, the engine, by `Gates`, about when tasks begin
to poll and when they are stopped. A life of a task has a processor and a committer of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog

from tailrace import failpoints
from tailrace.config import EngineOptions
from tailrace.engine.backoff import Backoff, is_retriable
from tailrace.engine.contracts import (
    Clock,
    Metrics,
    OffsetReader,
    RecordProcessor,
    Recovers,
    Settings,
    SourceTask,
    StopEngine,
    TaskCommits,
    TaskContext,
)
from tailrace.engine.failures import named
from tailrace.engine.processing.tally import Tally
from tailrace.engine.retrying import GivenUpError, Retrying
from tailrace.engine.supervision import Phase, Supervision
from tailrace.engine.threads import adopt
from tailrace.errors import TailraceError
from tailrace.records.batch import Batch
from tailrace.records.group import Group

log = structlog.get_logger(__name__)

#: How long a poll may wait for records: so often policies are asked while nothing comes.
POLL_S = 0.5

#: How often who waits for marks looks.
LOOK_S = 0.01


class Gates:
    """What the engine lets tasks do. It opens each gate once."""

    def __init__(self) -> None:
        #: The engine ends: nothing more is polled.
        self.ending = threading.Event()
        #: All tasks have started, or the engine ends.
        self.may_poll = threading.Event()
        #: No task polls any more: they commit what can be committed, and are stopped.
        self.may_stop = threading.Event()
        self._processing_until_s = 0.0

    def end(self, processing_s: float) -> None:
        """Have tasks end; what is under way may take so long."""
        if not self.ending.is_set():
            self._processing_until_s = time.monotonic() + processing_s
            self.ending.set()

    @property
    def processing_left_s(self) -> float:
        """How long what is under way may still take, once the engine ends."""
        return max(0.0, self._processing_until_s - time.monotonic())


@dataclass(frozen=True, slots=True)
class Company:
    """What the tasks of an engine have in common.

    :param wanted: whether anybody gets the records.
    :param transform: the chain of transformations, if there are any.
    :param metrics: of a task, by its number.
    :param new_task: of the connector; one call at a time.
    :param new_processor: a processor that was initialised.
    :param tell: has a callback called.
    """

    engine: object
    name: str
    options: EngineOptions
    clock: Clock
    offsets: OffsetReader
    gates: Gates
    supervision: Supervision
    wanted: bool
    transform: Callable[[Group], Iterable[Group]] | None
    metrics: Callable[[int], Metrics]
    new_task: Callable[[], SourceTask]
    new_commits: Callable[[SourceTask, str], TaskCommits]
    new_processor: Callable[[TaskCommits, str, Tally], RecordProcessor]
    tell: Callable[[str, int], None]

    def backoff(self) -> Backoff:
        """Return the waits between attempts."""
        options = self.options
        return Backoff(
            options.errors_retries_max,
            options.errors_retry_delay_initial_ms / 1000,
            options.errors_retry_delay_max_ms / 1000,
        )


@dataclass(slots=True)
class Counts:
    """What a task has done, over all its lives."""

    polled: int = 0
    batches: int = 0
    processed: int = 0  # in lives that have ended, as what follows
    committed: int = 0
    retries: int = 0  # of starts and polls
    poll_s: float = 0.0
    tally: Tally = field(default_factory=Tally)


@dataclass(slots=True, eq=False)
class _Life:
    # One life of a task. `stop` may come from another thread, when this one hangs.
    number: int
    task: SourceTask
    company: Company
    counts: Counts
    commits: TaskCommits
    doing: str = "start"
    started: bool = False
    taken: int = 0  # records
    finished: threading.Event = field(default_factory=threading.Event)
    processor: RecordProcessor | None = None
    _stopped: threading.Lock = field(default_factory=threading.Lock)

    def start(self, settings: Settings) -> None:
        company = self.company
        context = TaskContext(
            company.name,
            self.number,
            settings,
            company.offsets,
            company.clock,
            company.gates.ending,
            self.finished.set,
            company.wanted,
            offset_writer=self.commits,
            commit_policy=self.commits.policy,
            metrics=company.metrics(self.number),
            transformations=company.transform,
        )
        self.task.start(context)
        self.processor = company.new_processor(self.commits, f"task {self.number}", self.counts.tally)
        self.started = True

    def turn(self, polling: Retrying) -> None:
        """Poll once, and hand over what came."""
        assert self.processor is not None
        self.doing = "poll"
        batch = polling.call(self._poll)
        if self.company.gates.ending.is_set():
            return  # what came was handed to nobody: it comes again in the next life
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
            return self.task.poll(POLL_S)
        finally:
            self.counts.poll_s += time.monotonic() - began_s

    def settle(self) -> bool:
        """Wait a while for what is under way; tell whether nothing is."""
        assert self.processor is not None
        self.doing = "process"
        settled = self.processor.drain(POLL_S)
        self.commits.tick()
        return settled

    def end_processing(self, timeout_s: float) -> None:
        """Let what is under way come to its end; then give it up.

        :raises BaseException: what went wrong with it.
        """
        processor, self.processor = self.processor, None
        if processor is None:
            return
        self.doing = "process"
        until_s = time.monotonic() + timeout_s
        try:
            if not (processor.drain(timeout_s) and self._all_marked(until_s)):
                log.warning(
                    "records under way are given up: they come again", task=self.number, after_s=timeout_s
                )
        finally:
            processor.close()

    def _all_marked(self, until_s: float) -> bool:
        # Handlers that mark by themselves may still be about it, on threads of their own.
        while self.commits.processed < self.taken:
            if time.monotonic() >= until_s:
                return False
            time.sleep(LOOK_S)
        return True

    def stop(self) -> bool:
        """Commit what can be committed and stop the task; tell whether it is this call that did.

        :raises BaseException: of the task.
        """
        if not self._stopped.acquire(blocking=False):
            return False
        if not self.commits.finish(self.company.options.offset_commit.timeout_ms / 1000):
            log.warning("not all that could be committed was: it comes again", task=self.number)
        self.doing = "stop"
        failpoints.hit("engine.before_stop")
        self.task.stop()
        return True


class TaskThread:
    """One task of the engine.

    :param first: the task of its first life.
    """

    def __init__(self, number: int, settings: Settings, first: SourceTask, company: Company) -> None:
        self.number = number
        self.counts = Counts()
        self._settings = settings
        self._first = first
        self._company = company
        self._life: _Life | None = None
        what = f"task {number}"
        clock, ending = company.clock, company.gates.ending
        self._start_backoff = company.backoff()
        self._polling = Retrying(
            f"{what}: poll", company.backoff(), clock, ending, self._count_retry, self._has_passed
        )
        #: The first start has ended, well or not.
        self.start_ended = threading.Event()
        self.polling_ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name=f"{company.name} {what}", daemon=True)

    @property
    def task(self) -> SourceTask:
        """The task of the present life."""
        life = self._life
        return self._first if life is None else life.task

    @property
    def processed(self) -> int:
        """Records before which everything is processed, in all lives."""
        life = self._life
        return self.counts.processed + (life.commits.processed if life is not None else 0)

    @property
    def committed(self) -> int:
        """Records up to the last commit of each partition, in all lives."""
        life = self._life
        return self.counts.committed + (life.commits.committed if life is not None else 0)

    def force_stop(self) -> None:
        """Stop the task from another thread, as its own hangs in somebody's code."""
        life = self._life
        if life is not None:
            processor = life.processor
            if processor is not None:
                processor.close()
            life.stop()

    def _run(self) -> None:
        adopt(self._company.engine)
        try:
            task, ending = self._first, self._company.gates.ending
            while (wait_s := self._live(task)) is not None:
                if self._company.clock.wait(ending, wait_s):
                    break
                task = self._company.new_task()
        except BaseException as error:  # noqa: BLE001 - all failures end in one place
            self._company.supervision.failed(self.number, error, "create", got_on=False, may_restart=False)
        finally:
            self.start_ended.set()
            self.polling_ended.set()
            self._company.supervision.note(self.number, Phase.STOPPED)

    def _live(self, task: SourceTask) -> float | None:
        """Live one life of the task; return the seconds until the next, None if there is none."""
        company, supervision = self._company, self._company.supervision
        commits = company.new_commits(task, f"task {self.number}")
        if self._life is not None:
            self.counts.processed += self._life.commits.processed
            self.counts.committed += self._life.commits.committed
        life = self._life = _Life(self.number, task, company, self.counts, commits)
        wait_s = None
        try:
            self._start_and_poll(life)
        except GivenUpError:
            pass
        except StopEngine:
            supervision.stop_asked()
        except BaseException as error:  # noqa: BLE001 - what it means is decided in one place
            wait_s = self._verdict(error, life)
        self._end(life, failed=wait_s is not None or supervision.phase(self.number) is Phase.FAILED)
        return wait_s

    def _start_and_poll(self, life: _Life) -> None:
        company, supervision, gates = self._company, self._company.supervision, self._company.gates
        supervision.note(self.number, Phase.STARTING)
        life.start(self._settings)
        self._start_backoff = self._start_backoff.after_success()
        company.tell("task_started", self.number)
        self.start_ended.set()
        gates.may_poll.wait()
        supervision.note(self.number, Phase.POLLING)
        while not gates.ending.is_set() and not life.finished.is_set():
            life.turn(self._polling)
        while not gates.ending.is_set():
            if life.settle():
                supervision.finished(self.number)
                break
        while not gates.ending.wait(POLL_S):
            life.commits.tick()

    def _verdict(self, error: BaseException, life: _Life) -> float | None:
        if not life.started and is_retriable(error) and not self._company.gates.ending.is_set():
            self._start_backoff, wait_s = self._start_backoff.after(error)
            if wait_s is not None:
                self._count_retry()
                log.warning(
                    "a task did not start, tried again",
                    task=self.number,
                    error=str(error) if isinstance(error, TailraceError) else named(error),
                    wait_s=wait_s,
                )
                return wait_s
        doing = life.doing
        if self._company.options.on_task_failure == "restart":
            # What was handed over before counts as having got on, once it is done.
            self._end_processing(life, failed=True)
        wait_s = self._company.supervision.failed(
            self.number,
            error,
            doing,
            got_on=life.commits.processed > 0,
            may_restart=not self._company.gates.ending.is_set(),
        )
        self.start_ended.set()
        return wait_s

    def _end(self, life: _Life, *, failed: bool) -> None:
        """End a life: processing first, then, once no task polls any more, the commit and the stop."""
        company, gates = self._company, self._company.gates
        self._end_processing(life, failed=failed)
        if gates.ending.is_set():
            # The engine may still wait for the start of this task, which is not tried again.
            self.start_ended.set()
            self.polling_ended.set()
            gates.may_stop.wait()
        try:
            stopped = life.stop()
        except BaseException as error:  # noqa: BLE001 - what it means is decided in one place
            stopped = True
            self._broke(error, life)
        if stopped and life.started:
            company.tell("task_stopped", self.number)

    def _end_processing(self, life: _Life, *, failed: bool) -> None:
        try:
            life.end_processing(self._processing_left_s())
        except GivenUpError:
            pass
        except StopEngine:
            self._company.supervision.stop_asked()
        except BaseException as error:  # noqa: BLE001 - what it means is decided in one place
            # One that failed has told its error already; what it drags along is no news.
            if not failed:
                self._broke(error, life)

    def _processing_left_s(self) -> float:
        gates, processing = self._company.gates, self._company.options.record_processing
        return gates.processing_left_s if gates.ending.is_set() else processing.shutdown_timeout_ms / 1000

    def _broke(self, error: BaseException, life: _Life) -> None:
        self._company.supervision.failed(self.number, error, life.doing, got_on=True, may_restart=False)

    def _has_passed(self, polled: Batch | None) -> bool:
        task = self.task
        return polled is not None or not isinstance(task, Recovers) or not task.is_recovering

    def _count_retry(self) -> None:
        self.counts.retries += 1
