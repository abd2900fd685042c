"""The interfaces that extensions of the engine implement, and the objects that it passes to them.

These docstrings are the specification; `tailrace.testing.conformance` checks an implementation
against them. A connector plans tasks; a task polls batches of one or more source partitions; the
engine processes them, commits offsets, and notifies the task of them. Connectors are found by name
through the entry point `tailrace.connectors`.

The engine makes all calls: no method is called twice at once for one object, unless its docstring says
so, and none is called again after `stop`.
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

    # Modules of records load every kernel; programs that read offsets or a status need none.
    from tailrace.records.batch import Batch, Offset, Partition
    from tailrace.records.events import Event, Events
    from tailrace.records.group import Group
    from tailrace.records.record import Record

#: The configuration of a connector or a task: JSON values; secrets are references, never resolved.
Settings = Mapping[str, Any]

#: Return type of a handler: None, or the awaitable of an async handler.
Handled: TypeAlias = Awaitable[None] | None

#: Handlers of one record or event. If one raises a retriable error, the record is delivered again; any other
#: error stops the task.
RecordHandler: TypeAlias = "Callable[[Record], Handled] | Callable[[Event], Handled]"

#: Handlers of a batch, or of a converted batch. When one returns, the whole batch counts as processed; when
#: it raises, no record of it does.
BatchHandler: TypeAlias = "Callable[[Batch], Handled] | Callable[[Events], Handled]"


class Clock(Protocol):
    """The engine's clock, which tests can replace. Any thread."""

    def monotonic(self) -> float:
        """Return a time in seconds that never decreases."""
        ...

    def time_us(self) -> int:
        """Return microseconds since 1970."""
        ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait for `event`, at most `timeout_s`; return whether it is set."""
        ...


class OffsetReader(Protocol):
    """Reads the offsets that were committed under the engine's name. Any thread."""

    def read(self, partitions: Sequence[Partition]) -> Mapping[int, Offset]:
        """Return the offset of each partition that has one, by its number in `partitions`.

        :raises TailraceError: `OFFSETS_UNREADABLE`.
        """
        ...


class OffsetWriter(Protocol):
    """Writes offsets that belong to no record: the position of an idle source, or a connector's own state.

    Any thread. A written offset never makes a commit skip records: `TaskContext` and `ConnectorContext` say
    when it is stored.
    """

    def write(self, partition: Partition, offset: Offset) -> None:
        """Write the offset of a partition; an offset is a JSON object.

        :raises TailraceError: `ENGINE_MISUSED`, `OFFSETS_PREEMPTED`; a connector's writer also
            `OFFSETS_UNWRITABLE`.
        """
        ...


@runtime_checkable
class OffsetStore(OffsetReader, Protocol):
    """Stores offsets, durably unless its documentation says otherwise.

    Called in this order: `start`, any number of reads and writes, `stop`. An offset is a JSON object.
    """

    def start(self) -> None:
        """Prepare the store: connect, create what is missing.

        :raises TailraceError: the engine does not start.
        """
        ...

    def write(self, offsets: Sequence[tuple[Partition, Offset]], timeout_s: float) -> None:
        """Store these offsets, all or none of them; they are durable when it returns. Any thread.

        :raises TailraceError: `OFFSETS_UNWRITABLE`; the engine continues, logs a warning and retries later.
            `OFFSETS_PREEMPTED`, if another engine has taken over; the task fails with it.
        """
        ...

    def stop(self) -> None:
        """Release all resources. Called once, also if `start` failed."""
        ...


class Metrics(Protocol):
    """Makes metrics that are shown together with the engine's own (`Engine.metrics`).

    Each has the labels `engine` and `task`, the latter empty for a connector. The same name and labels return
    the same metric, also in another attempt of the task, so that counters continue. Names follow Prometheus'
    rules: letters, digits and `_`, with a unit at the end; the prefix `tailrace_engine_` is reserved. Any
    thread. An update takes about a microsecond: update once per batch, not once per record.
    """

    def counter(self, name: str, description: str, labels: Mapping[str, str] = ...) -> Counter:
        """Return a counter, a number that only increases; it is shown as `<name>_total`.

        :param labels: additional labels; a name always has the same ones.
        :raises TailraceError: `ENGINE_MISUSED` for invalid names or labels, for a name that is in use with
            another kind or other labels, and beyond 10 000 time series in total.
        """
        ...

    def gauge(self, name: str, description: str, labels: Mapping[str, str] = ...) -> Gauge:
        """Return a gauge, a number that can increase and decrease; otherwise as `counter`."""
        ...

    def histogram(
        self,
        name: str,
        description: str,
        labels: Mapping[str, str] = ...,
        *,
        buckets: Sequence[float] | None = None,
    ) -> Histogram:
        """Return a histogram, which counts observations by size; otherwise as `counter`.

        :param buckets: upper bounds, rising, inclusive. Default: bounds for seconds, 0.005 to 10.
        """
        ...


@runtime_checkable
class CommitPolicy(Protocol):
    """Decides when committable offsets are committed. One object for each attempt of a task."""

    def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
        """Return whether to commit now; called after each batch and while no records arrive.

        While a batch is processed, it is called several times a second, and after every 256 records.

        :param processed: number of records processed since the last commit, dropped ones included; may be 0.
        :param at_transaction_end: whether no transaction is open after the committable records.
        :param since_commit_s: seconds since the last commit, from the task's start for the first.
        """
        ...


@runtime_checkable
class Committer(Protocol):
    """Tracks processed records. Any thread, in any order.

    An offset is committed only when every record before it, in its partition, is processed: records marked
    out of order wait.
    """

    def mark_processed(self, batch: Batch, place: int | None = None, offset: Offset | None = None) -> None:
        """Count a record of `batch` as processed; without `place`, all of them.

        :param place: the record's `place`.
        :param offset: stored instead of the record's own offset.
        """
        ...

    def mark_places(self, batch: Batch, places: Sequence[int]) -> None:
        """Count records of `batch` as processed, by their places; in any order."""
        ...

    def mark_dropped(self, batch: Batch) -> None:
        """Count the records as processed that were polled with `batch` and dropped by transformations."""
        ...

    def mark_batch_finished(self, batch: Batch) -> None:
        """Note that nothing more will be marked in `batch`; commit now if the policy wants it.

        Never raises `OFFSETS_UNWRITABLE`: a failed write is logged and retried.
        """
        ...


@runtime_checkable
class RecordProcessor(Protocol):
    """Transforms and converts the batches of one task, and delivers them to the handler.

    One object for each attempt of a task. The engine chooses one of its own (`engine.processing`) by its
    handler, converter and order; a user's processor replaces it.
    """

    def initialize(
        self,
        executor: Executor,
        transform: Callable[[Group], Iterable[Group]] | None,
        convert: Callable[[Group], object] | None,
        committer: Committer,
    ) -> None:
        """Initialise the processor; called once, before the first batch, on the task's thread.

        :param executor: of this attempt of the task, with `record_processing.threads` threads.
        :param transform: the chain of transformations, or None: records are not transformed; any thread.
        :param convert: the converter (returns `Converted` for a group), or None; any thread.
        """
        ...

    def process(self, batch: Batch) -> None:
        """Process a batch; on the task's thread. May return before the batch is done.

        It is called for the next batch as soon as it returns: so it must block while too many batches are in
        flight. Errors of earlier batches are raised here.
        :raises BaseException: ends this attempt of the task; a handler's `StopEngine`, raised once its
            records are marked, ends the engine. A processor retries retriable errors itself.
        """
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is delivered and marked, at most `timeout_s`; return whether it is.

        On the task's thread; with 0, also while no records arrive. Abandons nothing: it may be called again.
        :raises BaseException: the error of a batch; as in `process`.
        """
        ...

    def close(self) -> None:
        """Abandon unfinished batches. Called once, on any thread, after the last `process` and `drain`.

        After it has returned, no handler is called and nothing is marked; a handler that is running can't be
        stopped, and is not waited for. Never raises. With `on_task_failure: restart`, the task's next
        attempt, with a new processor, begins when the handlers that the engine's own processors called have
        returned; a user's processor must itself prevent calls that overlap.
        """
        ...


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """The objects that a connector may use, from `start` until `stop` is called.

    :param report: ends the engine with an error; any thread, at any time.
    :param tasks_on: where the tasks are to work: `threads`, or one of `RunsElsewhere.places`.
    :param offset_writer: writes directly to the store; durable when `write` returns. For the connector's own
        partitions, and, until tasks are created, for those that tasks will read. A partition from which a
        task has returned a batch is refused (`ENGINE_MISUSED`): the engine commits its offset.
    :param commit_policy: the connector's own object, made as those of tasks.
    :param transformations: the chain that the engine applies to each group of a task, or None; any thread.
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
    """Checks a source and divides the work among tasks."""

    def start(self, context: ConnectorContext) -> None:
        """Check the settings and prepare the connector. Called once, before anything else.

        :raises TailraceError: `CONFIG_INVALID`, …; the engine ends and calls `stop`.
        """
        ...

    def task_settings(self, tasks_max: int) -> Sequence[Settings]:
        """Return the settings of each task: at most `tasks_max`, each a JSON object.

        No partition of the source belongs to two tasks. An empty sequence ends the engine with an error.
        """
        ...

    def create_task(self) -> SourceTask:
        """Return a new task, not started. Called once for each of `task_settings`, and again before each
        restart of a task.
        """
        ...

    def stop(self) -> None:
        """Release all resources. Called once in every run in which `start` was called, after all tasks were
        stopped.
        """
        ...


@runtime_checkable
class RunsElsewhere(Protocol):
    """A connector whose tasks can work outside the engine's process."""

    @property
    def places(self) -> Collection[str]:
        """The values of the option `tasks_on` that it supports in addition to `threads`."""
        ...


@runtime_checkable
class KeepsOffsets(Protocol):
    """A connector with its own offset store, which is used unless another one is configured."""

    def offset_store(self, name: str, settings: Settings) -> OffsetStore:
        """Return the store for the engine `name`; called once, before `start`; the engine starts it.

        :raises TailraceError: the engine does not start.
        """
        ...


@runtime_checkable
class SwitchesRealtime(Protocol):
    """A connector that can feed consumers in real time: from memory, instead of from the log."""

    def switch_realtime(self, *, on: bool) -> None:
        """Request that real time is switched on or off; returns at once, without a guarantee."""
        ...

    def realtime_status(self) -> Sequence[Mapping[str, Any]]:
        """Return the real-time status of each consumer."""
        ...


@dataclass(frozen=True, slots=True)
class TaskContext:
    """The objects that a task may use, in one of its attempts.

    :param number: of the task, from 0.
    :param settings: the task's own, one of `SourceConnector.task_settings`.
    :param stopping: set when the engine wants the task to end; `start` and `poll` should return then.
    :param finish: the task calls it once when it has no more records; any thread. It is not polled again;
        when all tasks have finished and everything is processed, the engine ends with success.
    :param wanted: whether the engine uses the records; if not, `poll` need not return any.
    :param batch_records_max: most records that a batch may have (`record_processing.batch_records_max`).
    :param offset_writer: for the task's own partitions. A written offset is ordered among the batches: after
        every batch of a `poll` that has returned, before one that a running `poll` returns. It is committed
        as the offset of a batch without records: once everything before it is processed, when the policy
        wants it or at the end; `commit` is called with it. Until then, a later offset replaces an earlier
        one that follows the same batch. Once the task is stopped, writes are ignored.
    :param commit_policy: decides when this task's offsets are committed. The engine calls it, on several
        threads under a lock; a task may read the state of a user's policy here.
    :param transformations: the chain that the engine applies to each group of a batch, or None; any thread.
        A task may leave out records that the chain would drop; it must not change records.
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
    """Reads some partitions of a source. All methods but `commit` and `stop` run on the task's own thread."""

    def start(self, context: TaskContext) -> None:
        """Connect, and continue from the offsets that `context` has.

        Limited by `task_management_timeout_ms`: after that the engine ends, and `stop` is called while
        `start` may still be running; so `start` must check `context.stopping`.
        :raises TailraceError: by its policy, it is retried with a new task, or ends the engine.
        """
        ...

    def poll(self, timeout_s: float) -> Batch | None:
        """Return the next records of one partition, or None if none arrived within `timeout_s`.

        Each record is returned once in an attempt, in the order of its partition. It may block as long as
        the interpreter's lock is released.
        :raises TailraceError: by its policy, `poll` is called again after a wait, and must neither lose nor
            repeat records; so it is for a `RetriableError`. Any other exception ends this attempt.
        """
        ...

    def commit(self, partition: Partition, offset: Offset) -> None:
        """Receive the notification that everything up to `offset` is processed, and the offset stored.

        On any thread, also while `poll` runs; must return quickly. Its errors are logged.
        """
        ...

    def stop(self) -> None:
        """Release all resources. Called once for each task whose `start` was called, also if that failed;
        after the last `commit`. On any thread.

        :raises Exception: ends the engine; before another attempt of the task it is only logged.
        """
        ...


@runtime_checkable
class Recovers(Protocol):
    """A task whose `poll` may return without records while its last error still persists."""

    @property
    def is_recovering(self) -> bool:
        """Whether the last error still persists; then the count of attempts is not reset. Read on the task's
        thread, after a `poll` that returned None.
        """
        ...


class HasErrors(Protocol):
    """A task that continues while it can't read its source, or a part of it: it reconnects by itself."""

    @property
    def errors(self) -> Sequence[TailraceError]:
        """An error for each part that can't be read; empty if there is none. Any thread; returns quickly."""
        ...


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Functions that are called at events of an engine.

    Called on their own thread, one after another, in the order of events. Their errors are logged; one that
    hangs delays only the callbacks after it.

    :param connector_started: the connector has started; no task has.
    :param task_started: a task has started; called with its number.
    :param polling_started: all tasks have started, and are about to poll.
    :param polling_stopped: no task polls any more; they are not stopped yet.
    :param task_stopped: a task was stopped; called with its number.
    :param connector_stopped: the connector was stopped.
    :param completed: the engine has stopped, and nothing is called after this; called with whether it
        succeeded, a message, and the error.
    """

    connector_started: Callable[[], None] = _nothing
    task_started: Callable[[int], None] = _nothing
    polling_started: Callable[[], None] = _nothing
    polling_stopped: Callable[[], None] = _nothing
    task_stopped: Callable[[int], None] = _nothing
    connector_stopped: Callable[[], None] = _nothing
    completed: Callable[[bool, str, BaseException | None], None] = _nothing
