"""The interface of sinks. The docstrings of `Sink` are the specification; one suite tests all sinks.

The basic rule: the written log range is recorded atomically with the data, and read before the
next write. No other record of a sink's progress counts: neither Spark's checkpoint nor the log's
list of readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from tailrace.errors import Kind, StopEngine, TailraceError
from tailrace.model import LogRange

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tailrace.changelog.directory import LogIdentity
    from tailrace.ranges.plan import InputSplit


@dataclass(frozen=True, slots=True)
class SinkCommit:
    """The result of one `write`.

    `rows` and `bytes` count what this call wrote: a range that the sink already had gives 0.
    `seconds` is the time of each step, in order. `dead_letters` counts records that the target
    refuses and that were written to the dead-letter topic, if the user has set one.
    """

    range: LogRange
    rows: int = 0
    bytes: int = 0
    tables: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    dead_letters: int = 0


class SparkNeededError(Exception):
    """Raised by `Sink.write` without a session if only Spark can write the range. A retry is safe."""


def required(spark: SparkSession | None) -> SparkSession:
    """Return the session.

    :raises SparkNeededError: it is None.
    """
    if spark is None:
        raise SparkNeededError
    return spark


class Sink(Protocol):
    """A target that takes ranges of the log, each change exactly once.

    Called by one thread at a time. Any error leaves the sink usable: the caller may ask for
    the position again and write again, in this process or in another after a crash.
    """

    @property
    def name(self) -> str:
        """The sink's name in the configuration."""

    @property
    def type(self) -> str:
        """The sink's type in the configuration: parquet, jsonl, delta."""

    def open(self, log: LogIdentity, pipeline: str) -> None:
        """Lock the target for this process, and complete an interrupted commit.

        :raises TailraceError: `SINK_LOCKED` if another engine has locked it; `SINK_FOREIGN` if it
            has data of another log, pipeline, kind of sink or program.
        """

    def position(self, task: str) -> int | None:
        """Return the log offset up to which every change of `task` is in the sink.

        Read from the target itself at `open` and after each failed write. None: nothing of
        this task was ever written. For sinks of several tables it is a lower bound: some
        tables may have more, which `write` takes into account.
        """

    def reach(self, task: str) -> int | None:
        """Return the highest log offset that a part of the sink has reached.

        If it is beyond the log's end, the log has lost changes that the sink has: `require_within_log`.
        """

    def write(
        self, spark: SparkSession | None, log: Path, span: LogRange, splits: Sequence[InputSplit]
    ) -> SinkCommit:
        """Write the changes of `span` into the sink and record the range, atomically.

        Exactly once, whatever failed before: changes that the sink already has are left out, so
        a range may be repeated, also with another end, after any crash or error. Once `write`
        returns, `position` is at least `span.end`, durably.

        :param spark: None: write in this process. A sink without Spark (`SinkConfig.on_spark`) never gets
            a session; others get none for small ranges (`SinkConfig.small_ranges_in_process`).
        :param log: the log's directory, as executors see it.
        :param span: starts at or before `position`; both ends are boundaries of the log.
        :param splits: `ranges.plan.input_splits` of exactly `span`.
        :raises SparkNeededError: without a session, if only Spark can write the range.
        :raises TailraceError: `LOG_RANGE_INVALID` if `span` would leave a gap;
            `SINK_SCHEMA_REFUSED`, `SINK_KEY_MISSING`, `SINK_WRITE_FAILED`, `SINK_FOREIGN`,
            `SPARK_FAILED`, and errors of reading the log.
        """

    def close(self) -> None:
        """Release the target. Not calling it loses no data."""


@runtime_checkable
class Beats(Protocol):
    """A sink that sends heartbeats while there is nothing to write."""

    def beat(self) -> None:
        """Send the target a heartbeat, if one is due.

        Called by the thread that calls `write`, about every 50 ms while there is nothing to write.
        :raises TailraceError: as `Sink.write`.
        """


def require_within_log(
    sink: Sink, task: str, log_end: int, restart: str = "give the sink a new, empty path"
) -> None:
    """Check, before writing, that the sink has no changes that the log lacks.

    :param log_end: the durable end of the task's log.
    :param restart: in words for the hint: how to make the sink read the log from its start.
    :raises TailraceError: `SINK_AHEAD_OF_LOG`.
    """
    reach = sink.reach(task)
    if reach is not None and reach > log_end:
        raise ahead_of_log(sink.name, task, reach, log_end, restart)


def ahead_of_log(
    name: str, task: str, reach: int, log_end: int, restart: str = "give the sink a new, empty path"
) -> TailraceError:
    """Return the error for a sink that has changes up to `reach`, which the log lacks."""
    return TailraceError(
        Kind.SINK_AHEAD_OF_LOG,
        f"compare the sink with the log: the sink holds changes up to {reach}, the log ends at {log_end}",
        "the log was restored from an older copy, or lost its end: restore the newer log, or "
        f"{restart} and let it read the log from its start",
        {"sink": name, "task": task},
    )


def first_missing(name: str, span: LogRange, position: int | None) -> int:
    """Return the log offset of the first change of `span` that the sink may lack.

    :param position: the log offset up to which the sink has everything, or None.
    :raises TailraceError: `LOG_RANGE_INVALID` if `span` begins after it: a bug of the caller,
        independent of the data.
    """
    if position is None:
        return span.start
    if span.start > position:
        raise TailraceError(
            Kind.LOG_RANGE_INVALID,
            f"write the log range {span.start} to {span.end}: the sink has everything up to "
            f"{position}, so changes would be left out",
            "please report this; nothing was written",
            {"sink": name, "task": span.task},
        )
    return position


def function_failure(error: Exception, attempted: str, sink: str) -> TailraceError:
    """Return the error of a sink for `error`, which the user's function raised. Its text is left out, since
    it may quote a row.

    `SINK_WRITE_FAILED`, which is retried; `TASK_FAILED` for `StopEngine`, which only an engine supports.
    """
    if isinstance(error, StopEngine):
        return TailraceError(
            Kind.TASK_FAILED,
            f"{attempted}: it raised StopEngine, which a sink can't follow",
            "stop the pipeline from outside",
            {"sink": sink},
        )
    return TailraceError(
        Kind.SINK_WRITE_FAILED,
        f"{attempted}: it raised {type(error).__name__}",
        "the cause of this error has its message and traceback (--debug shows them)",
        {"sink": sink},
    )
