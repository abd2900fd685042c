"""What those who extend the engine implement, and what it gives them.

These docstrings are the specification; `tailrace.testing.conformance` checks an implementation
against them. A connector plans tasks; a task polls batches of one or more source partitions; the
engine processes them and commits offsets, and notifies the task of them. Connectors are found by name
through the entry point `tailrace.connectors`.

Everything is driven by the engine: no method is called twice at once for one object, unless its
docstring says so, and none is called again after `stop`.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from tailrace.config.engine_options import BATCH_RECORDS_MAX
from tailrace.errors import RetriableError as RetriableError  # noqa: PLC0414 - offered here, too
from tailrace.errors import StopEngine as StopEngine  # noqa: PLC0414

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram

    from tailrace.errors import TailraceError

    # Records bring every kernel with them; who reads offsets or a status needs none.
    from tailrace.records.batch import Batch, Offset, Partition
    from tailrace.records.events import Event, Events
    from tailrace.records.group import Group
    from tailrace.records.record import Record

#: The configuration of a connector or a task: JSON values; secrets are references, never resolved.
Settings = Mapping[str, Any]

#: What a handler returns: nothing; an async one, when its coroutine has ended.
Handled: TypeAlias = Awaitable[None] | None

#: Handlers of one record or event. What they raise stops the task, or has the record delivered again where
#: the error is one that is retried.
RecordHandler: TypeAlias = "Callable[[Record], Handled] | Callable[[Event], Handled]"

#: Handlers of a batch, or of a batch that was converted. When one returns, the whole batch counts as
#: processed; when it raises, nothing of it does.
BatchHandler: TypeAlias = "Callable[[Batch], Handled] | Callable[[Events], Handled]"


class Clock(Protocol):
    """Time as the engine sees it, so that tests can move it. Any thread."""

    def monotonic(self) -> float:
        """Return seconds that only rise."""
        ...

    def time_us(self) -> int:
        """Return microseconds since 1970."""
        ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait for `event`, at most `timeout_s`; return whether it is set."""
        ...


class OffsetReader(Protocol):
    """Reads what was committed under the engine's name. Any thread."""

    def read(self, partitions: Sequence[Partition]) -> Mapping[int, Offset]:
        """Return, by its number in `partitions`, the offset of each that has one.

        :raises TailraceError: `OFFSETS_UNREADABLE`.
        """
        ...


class OffsetWriter(Protocol):
    """Writes offsets that no record brings: how far an idle source is, what a connector wants to find again.

    Any thread. What is written never lets a commit pass over records: see `TaskContext` and
    `ConnectorContext` for when it is kept.
    """

    def write(self, partition: Partition, offset: Offset) -> None:
        """Write the offset of a partition; an offset is a JSON object.

        :raises TailraceError: `ENGINE_MISUSED`, `OFFSETS_PREEMPTED`; of a connector's also
            `OFFSETS_UNWRITABLE`.
        """
        ...


@runtime_checkable
class OffsetStore(OffsetReader, Protocol):
    """Keeps offsets, durably unless it says otherwise.

    In this order: `start`, any number of reads and writes, `stop`. An offset is a JSON object.
    """

    def start(self) -> None:
        """Make ready; connects, creates what is missing.

        :raises TailraceError: the engine does not start.
        """
        ...

    def write(self, offsets: Sequence[tuple[Partition, Offset]], timeout_s: float) -> None:
        """Keep these offsets, all or none of them; durable when it returns. Any thread.

        :raises TailraceError: `OFFSETS_UNWRITABLE`; the engine goes on, warns and tries again later.
            `OFFSETS_PREEMPTED`, if another engine has taken over; the task fails with it.
        """
        ...

    def stop(self) -> None:
        """Let go of what is held. Called once, also when `start` failed."""
        ...


class Metrics(Protocol):
    """Makes numbers that are shown beside the engine's own (`Engine.metrics`).

    Each has the labels `engine` and `task`, the latter empty for a connector. The same name and labels give
    the same number, also in another attempt of the task, so that counters go on. Names are Prometheus':
    letters, digits and `_`, with a unit at their end; those that begin with `tailrace_engine_` are the
    engine's own. Any thread. To count costs about a microsecond: once a batch, not once a record.
    """

    def counter(self, name: str, description: str, labels: Mapping[str, str] = ...) -> Counter:
        """Return a number that only rises; it is shown as `<name>_total`.

        :param labels: more of them; each name has always the same ones.
        :raises TailraceError: `ENGINE_MISUSED` for a name or labels that can't be, or are another kind's, and
            beyond 10 000 of them in all.
        """
        ...

    def gauge(self, name: str, description: str, labels: Mapping[str, str] = ...) -> Gauge:
        """Return a number that rises and falls; as `counter`."""
        ...

    def histogram(
        self,
        name: str,
        description: str,
        labels: Mapping[str, str] = ...,
        *,
        buckets: Sequence[float] | None = None,
    ) -> Histogram:
        """Return what counts observations by their size; as `counter`.

        :param buckets: upper bounds, rising, inclusive. Default: those for seconds, 0.005 to 10.
        """
        ...


@runtime_checkable
class CommitPolicy(Protocol):
    """Decides when what can be committed is committed. An object for each task."""

    def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
        """Return whether to commit now; called after each batch and while nothing comes.

        While a batch is processed, it is called several times a second, and after each 256 records.

        :param processed: records processed since the last commit, dropped ones included; may be 0.
        :param at_transaction_end: whether no transaction is open after what can be committed.
        :param since_commit_s: seconds since the last commit, from the task's start for the first.
        """
        ...


@runtime_checkable
class Committer(Protocol):
    """Takes note of what is processed. Any thread, in any order.

    An offset is committed only when every record before it, in its partition, is processed: what is
    marked out of order waits.
    """

    def mark_processed(self, batch: Batch, place: int | None = None, offset: Offset | None = None) -> None:
        """Count a record of `batch` as processed; without `place`, all of them.

        :param place: the record's `place`.
        :param offset: kept in the place of the record's own.
        """
        ...

    def mark_places(self, batch: Batch, places: Sequence[int]) -> None:
        """Count records of `batch` as processed, by their places; in any order."""
        ...

    def mark_dropped(self, batch: Batch) -> None:
        """Count as processed what was polled with `batch` and is not among its records any more."""
        ...

    def mark_batch_finished(self, batch: Batch) -> None:
        """Say that no more will be marked in `batch`: commits now if the policy wants it.

        :raises TailraceError: `OFFSETS_UNWRITABLE` never: that is logged and tried again.
        """
        ...


@runtime_checkable
class RecordProcessor(Protocol):
    """Takes the batches of one task through transformation and conversion to their handler.

    An object for each task. The engine's own (`engine.processing`) are chosen by what handler,
    converter and order it was given; a user's takes their place.
    """

    def initialize(
        self,
        executor: Executor,
        transform: Callable[[Group], Iterable[Group]] | None,
        convert: Callable[[Group], object] | None,
        committer: Committer,
    ) -> None:
        """Take what is needed; called once, before the first batch, on the task's thread.

        :param executor: of this attempt of the task, with `record_processing.threads` threads.
        :param transform: the chain of transformations, or None: records stay as they are; any thread.
        :param convert: the converter (`Converted` for a group), or None; any thread.
        """
        ...

    def process(self, batch: Batch) -> None:
        """Process a batch; on the task's thread. May return before the batch is done.

        It is called for the next batch as soon as it returns: so it waits while more than it may
        hold is under way. What goes wrong with an earlier batch is raised here.
        :raises BaseException: ends this attempt of the task; a `StopEngine` of a handler, once what it was
            given is marked, the engine. What may pass, a processor tries again itself (`retrying`).
        """
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is delivered and marked, at most so long; return whether it is.

        On the task's thread, also while nothing comes, with 0. Gives nothing up: it may be called again.
        :raises BaseException: what went wrong with a batch; as in `process`.
        """
        ...

    def close(self) -> None:
        """Give up what is not done. Called once, on any thread, after the last `process` and `drain`.

        Nothing more is handed to a handler, and nothing marked, after it has returned; a handler
        that is running can't be stopped, and is not waited for. Never raises. Under `on_task_failure:
        restart` the task's next attempt, with a new processor, begins when the handlers that the engine's
        own processors called have returned; a user's processor keeps its calls apart itself.
        """
        ...


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """What a connector may use, from `start` until `stop` is called.

    :param report: ends the engine with an error; any thread, at any time.
    :param tasks_on: where the tasks' work is to be done: `threads`, or one of `RunsElsewhere.places`.
    :param offset_writer: straight to the store; durable when `write` returns. For partitions of the
        connector's own, and, until tasks are created, for those that tasks will read. A partition of which a
        task has given a batch is refused (`ENGINE_MISUSED`): its offset is that of what is processed.
    :param commit_policy: an object of the connector's own, made as those of tasks.
    :param transformations: what the engine does to each group that a task gives, or None; any thread.
    """

    name: str
    settings: Settings
    offsets: OffsetReader
    clock: Clock
    report: Callable[[BaseException], None]
    tasks_on: str = "threads"
    _: KW_ONLY
    offset_writer: OffsetWriter
    commit_policy: CommitPolicy
    metrics: Metrics
    transformations: Callable[[Group], Iterable[Group]] | None = None


@runtime_checkable
class SourceConnector(Protocol):
    """Knows a source as a whole: checks it and divides the work among tasks."""

    def start(self, context: ConnectorContext) -> None:
        """Check the settings and make ready. Called once, before anything else.

        :raises TailraceError: `CONFIG_INVALID`, …; the engine ends, `stop` is called.
        """
        ...

    def task_settings(self, tasks_max: int) -> Sequence[Settings]:
        """Return the settings of each task: at most `tasks_max`, and each JSON.

        No partition of the source belongs to two of them. None at all is an error of the engine.
        """
        ...

    def create_task(self) -> SourceTask:
        """Return a new task, not started. Called once for each of `task_settings`, and again for a
        task that is restarted.
        """
        ...

    def stop(self) -> None:
        """Let go of what is held. Called once in every run in which `start` was called, after all
        tasks were stopped.
        """
        ...


@runtime_checkable
class RunsElsewhere(Protocol):
    """A connector whose tasks can have their work done elsewhere than in the engine's process."""

    @property
    def places(self) -> Collection[str]:
        """The values of the option `tasks_on` that it knows beside `threads`."""
        ...


@runtime_checkable
class KeepsOffsets(Protocol):
    """A connector that has a place of its own for offsets: they are kept there if nothing else is said."""

    def offset_store(self, name: str, settings: Settings) -> OffsetStore:
        """Return the store for the engine `name`; called once, before `start`; the engine starts it.

        :raises TailraceError: the engine does not start.
        """
        ...


@runtime_checkable
class SwitchesRealtime(Protocol):
    """A connector whose records may come from memory, before anybody reads them from a log."""

    def switch_realtime(self, *, on: bool) -> None:
        """Ask for it, or for its end; returns at once, and promises nothing."""
        ...

    def realtime_status(self) -> Sequence[Mapping[str, Any]]:
        """Return what each consumer shows of it."""
        ...


@dataclass(frozen=True, slots=True)
class TaskContext:
    """What a task may use, in one of its attempts.

    :param number: of the task, from 0.
    :param settings: its own of `SourceConnector.task_settings`.
    :param stopping: set when the engine wants the task to end; `start` and `poll` should return then.
    :param finish: the task calls it when it has no more to give, once; any thread. It is not polled
        again; when all tasks have finished and everything is processed, the engine ends with success.
    :param wanted: whether anybody gets the records; if not, `poll` need not return any.
    :param batch_records_max: most records that a batch is to have (`record_processing.batch_records_max`).
    :param offset_writer: for partitions of the task's own. What is written has its place among what `poll`
        returns: behind every batch of a `poll` that has returned, in front of one that a `poll` under way
        returns. It is committed as the offset of a batch without records would be: once everything
        before it is processed, when the policy wants it or at the end; `commit` is called with it. Until then
        a later one takes the place of one that directly follows the same batch. Once the task is stopped,
        nothing is heard.
    :param commit_policy: what decides when this task's offsets are committed. The engine asks it, on several
        threads under a lock; a policy with state may look at it here.
    :param transformations: what the engine does to each group of a batch afterwards, or None; any thread. A
        task that can leave out what would be dropped may; it need not, and must not change records.
    """

    name: str
    number: int
    settings: Settings
    offsets: OffsetReader
    clock: Clock
    stopping: threading.Event
    finish: Callable[[], None]
    wanted: bool = True
    _: KW_ONLY
    offset_writer: OffsetWriter
    commit_policy: CommitPolicy
    metrics: Metrics
    transformations: Callable[[Group], Iterable[Group]] | None = None
    batch_records_max: int = BATCH_RECORDS_MAX


@runtime_checkable
class SourceTask(Protocol):
    """Reads some partitions of a source. Everything but `commit` and `stop` on the task's own thread."""

    def start(self, context: TaskContext) -> None:
        """Connect, and go on from the offsets that `context` gives.

        Limited by `task_management_timeout_ms`: after it the engine ends, and `stop` is called while
        `start` may still be running; so `start` heeds `context.stopping`.
        :raises TailraceError: by its policy it is tried again, with a new task, or ends the engine.
        """
        ...

    def poll(self, timeout_s: float) -> Batch | None:
        """Return the next records of one partition, or None if none came within `timeout_s`.

        Each record is returned once in an attempt, in the order of its partition. Blocking is fine as
        long as the interpreter's lock is released.
        :raises TailraceError: by its policy `poll` is called again after a while, having lost and
            repeated nothing; so it is for a `RetriableError`. Any other exception ends this attempt.
        """
        ...

    def commit(self, partition: Partition, offset: Offset) -> None:
        """Take note that everything up to `offset` is processed, and that the store has it.

        On any thread, also while `poll` runs; returns quickly. What it raises is logged.
        """
        ...

    def stop(self) -> None:
        """Let go of what is held. Called once for each task whose `start` was called, also when that
        failed; after the last `commit`. On any thread.
        """
        ...


@runtime_checkable
class Recovers(Protocol):
    """A task whose `poll` may return without records while what it had failed with has not passed yet."""

    @property
    def is_recovering(self) -> bool:
        """Whether that is so. Attempts are not counted again then; asked on the task's thread, after a
        `poll` that returned None.
        """
        ...


class HasErrors(Protocol):
    """A task that goes on while it can't read its source, or a part of it: it connects again by itself."""

    @property
    def errors(self) -> Sequence[TailraceError]:
        """Why that is so, an error for each part; empty if all can be read. Any thread; returns quickly."""
        ...


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Functions that are called when something happens in an engine.

    Called on a thread of their own, one after another, in the order of events. What one raises is
    logged; one that hangs holds up nothing but the callbacks after it.

    :param connector_started: the connector has started; no task has.
    :param task_started: a task has started; with its number.
    :param polling_started: all tasks have started, and are about to poll.
    :param polling_stopped: no task polls any more; they are not stopped yet.
    :param task_stopped: a task was stopped; with its number.
    :param connector_stopped: the connector was stopped.
    :param completed: the engine has stopped, and nothing is called after this; with whether all went
        well, a message, and the error.
    """

    connector_started: Callable[[], None] = _nothing
    task_started: Callable[[int], None] = _nothing
    polling_started: Callable[[], None] = _nothing
    polling_stopped: Callable[[], None] = _nothing
    task_stopped: Callable[[int], None] = _nothing
    connector_stopped: Callable[[], None] = _nothing
    completed: Callable[[bool, str, BaseException | None], None] = _nothing
