"""One sink's loop: read its position, choose a range of the log, write it, remember.

    position ── from the sink's own record, never from ours
    range    ── [position, a boundary within the batch limits); all that is there, so that
                batches grow with the backlog
    write    ── exactly once, whatever came before: the sink's promise
    commit   ── to the log's list of readers, so that retention knows what is still needed

A failure is tried again with growing waits and then stops this sink alone: neither the source
nor the other sinks wait for it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tailrace.capture.turns import Turns
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.changelog.readers import Readers
from tailrace.config import SinkConfig
from tailrace.engine.backoff import Backoff
from tailrace.errors import Kind, TailraceError
from tailrace.model import LogRange
from tailrace.pipeline.background import as_failure
from tailrace.pipeline.batch_goal import BatchGoal
from tailrace.pipeline.spark_host import SparkHost
from tailrace.pipeline.views import SinkState, SinkView
from tailrace.ranges import plan
from tailrace.sinks.contract import Beats, Sink, require_within_log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from tailrace.changelog.format import BlockRef

log = structlog.get_logger(__name__)

#: PostgreSQL's stream is one task.
TASK = "0"

#: How often an idle sink looks for new changes.
POLL_S = 0.05
#: A stretch of the log without rows is recorded in the sink only so often.
QUIET_RECORD_S = 30.0


class Feed:
    """Feeds one sink from the log until it is told to stop, or has reached `finish_at`.

    :param make: makes the sink; called on the feed's own thread.
    :param begin_at: where a sink that holds nothing begins; None: at the log's very start.
    :param turns: to write a batch, where the same sink gets other sources' changes, too.
    :param source: whose changes these are, among several sources; empty: the only one's.
    """

    def __init__(
        self,
        config: SinkConfig,
        pipeline: str,
        log_path: Path,
        make: Callable[[], Sink],
        spark: SparkHost,
        *,
        begin_at: int | None = None,
        turns: Turns | None = None,
        source: str = "",
    ) -> None:
        #: Spark's jobs for the sink bear it.
        self.job_tag = f"tailrace-{secrets.token_hex(8)}"
        self.view = SinkView(config.name, str(getattr(config, "type", "")))
        self._config = config
        self._pipeline = pipeline
        self._log_path = log_path
        self._make = make
        self._spark = spark
        self._begin_at = begin_at
        self._turns = turns or Turns(1)
        self._source = source
        self._stop = threading.Event()
        self._hurry = threading.Event()  # set with `_stop` and `_finish_at`: nothing more is waited for
        self._finish_at: int | None = None
        self._registered = threading.Event()
        # Up to here the log holds no rows beyond the sink's position.
        self._quiet_until = -1
        self._recorded_s = time.monotonic()
        self._goal = BatchGoal.first(config.pacing)

    def stop(self) -> None:
        """Ask for the end after the batch that is being written. Any thread."""
        self._stop.set()
        self._hurry.set()

    def finish_at(self, offset: int) -> None:
        """Ask for the end when everything before `offset` is in the sink; the first call counts.

        Any thread.
        """
        if self._finish_at is None:
            self._finish_at = offset
            self._hurry.set()

    @property
    def is_registered(self) -> bool:
        """Whether the log knows of this reader, so that retention respects it."""
        return self._registered.is_set()

    def run(self) -> None:
        """Feed the sink; returns when asked to.

        :raises TailraceError: what stopped the sink, after all attempts.
        """
        backoff = Backoff(self._config.retry_attempts_max)
        while not self._stop.is_set():
            batches = self.view.batches
            try:
                self._attempt()
            except Exception as error:
                failure = as_failure(error)
                if self._stop.is_set():
                    break  # a batch that was given up at the end: safe, and no news
                if self.view.batches > batches:
                    backoff = backoff.after_success()
                backoff, wait_s = backoff.after(failure)
                if wait_s is None:
                    self._show(state=SinkState.FAILED, error=failure)
                    raise failure from error
                self._show(state=SinkState.RETRYING, error=failure)
                log.warning(
                    "sink failed; trying again", sink=self.view.name, error=str(failure), wait_s=wait_s
                )
                self._stop.wait(wait_s)
            else:
                break
        self._show(state=SinkState.STOPPED)

    def _attempt(self) -> None:
        # Each attempt opens the sink anew: what a failed one left is brought to its end there.
        directory = self._wait_for_log()
        if directory is None:
            return
        sink = self._make()
        try:
            sink.open(directory.identity, self._pipeline)
            self._follow(sink, directory)
        finally:
            sink.close()

    def _follow(self, sink: Sink, directory: LogDirectory) -> None:
        with LogReader.open(directory, TASK) as reader:
            require_within_log(sink, TASK, reader.end().offset)
            start = self._first_offset(reader, sink.position(TASK))
            readers = Readers(directory)
            if readers.register(self.view.name, {TASK: start}).offsets[TASK] > start:
                # Its owner has emptied the target: the sink needs again what it had read.
                readers.remove(self.view.name)
                readers.register(self.view.name, {TASK: start})
            self._registered.set()
            self._show(position=start)
            self._feed(sink, reader, readers, start)

    def _feed(self, sink: Sink, reader: LogReader, readers: Readers, start: int) -> None:
        spark: SparkSession | None = None
        while not self._stop.is_set():
            if self._finish_at is not None and start >= self._finish_at:
                return
            span, blocks = self._next(reader, start)
            if span is None:
                if isinstance(sink, Beats):
                    sink.beat()
                self._stop.wait(POLL_S)
                continue
            if self._config.on_spark:
                # Only now: a sink that lacks nothing does not wait for Spark.
                spark = spark or self._spark.session(self._stop, self.job_tag)
                if spark is None:
                    return
            with self._turns.turn(self._stop) as given:
                if not given:
                    return
                began_s = time.monotonic()
                pieces = plan.pieces(TASK, blocks, span.start, span.end)
                commit = sink.write(spark, self._log_path, span, pieces)
            readers.commit(self.view.name, TASK, span.end)
            start = span.end
            self._recorded_s = time.monotonic()
            took_s = self._recorded_s - began_s
            self._show(
                state=SinkState.RUNNING,
                position=start,
                error=None,
                rows=self.view.rows + commit.rows,
                bytes=self.view.bytes + span.size,
                dead_letters=self.view.dead_letters + commit.dead_letters,
                batches=self.view.batches + 1,
                last_batch_s=took_s,
                seconds=commit.seconds,
            )
            log.debug(
                "batch written", sink=self.view.name, rows=commit.rows, end=start, seconds=commit.seconds
            )
            self._goal = self._goal.after(sum(block.header.rows for block in blocks), took_s)
            self._pace(reader, start, took_s)

    def _next(self, reader: LogReader, start: int) -> tuple[LogRange | None, Sequence[BlockRef]]:
        """Return the next range and its blocks; None if there is nothing worth a batch yet."""
        end = reader.end().offset
        seen = max(start, self._quiet_until)
        finishing = self._finish_at is not None and end >= self._finish_at > start
        if end <= seen and not finishing:
            self._show(state=SinkState.RUNNING, position=max(seen, start), pending_since_us=None)
            return None, ()
        fresh = reader.blocks(seen, end)
        if sum(block.header.rows for block in fresh) == 0 and not finishing:
            due = time.monotonic() - self._recorded_s >= QUIET_RECORD_S
            self._quiet_until = end
            self._show(state=SinkState.RUNNING, position=end, pending_since_us=None)
            if not due:
                return None, ()
        elif fresh:
            self._show(position=seen, pending_since_us=fresh[0].header.position_time_us or None)
        upto = reader.boundary_within(start, self._goal.rows, self._goal.pacing.bytes_max, end)
        return LogRange(TASK, start, upto), reader.blocks(start, upto)

    def _pace(self, reader: LogReader, start: int, took_s: float) -> None:
        # With a backlog the next batch begins at once; without one, small batches are not
        # worth their fixed costs more often than the interval says.
        left_s = self._goal.pacing.interval_s - took_s
        end = reader.end().offset
        if left_s <= 0 or self._finish_at is not None or end - start >= self._goal.pacing.bytes_max // 8:
            return
        if sum(block.header.rows for block in reader.blocks(start, end)) < self._goal.rows:
            self._hurry.wait(left_s)

    def _first_offset(self, reader: LogReader, position: int | None) -> int:
        if position is None and self._begin_at is not None:
            return self._begin_at
        needed = position or 0
        if needed >= reader.start:
            return needed
        name = self.view.name
        way_out = "begin a new pipeline, with a new snapshot and new targets"
        if getattr(self._config, "mode", "append") != "mirror":
            which = f"--source {self._source} --sink {name}" if self._source else f"--sink {name}"
            way_out = (
                "either let it begin where the log does, in a new or emptied target: `tailrace replay FILE "
                f"{which} --from {reader.start}`; or {way_out}"
            )
        raise TailraceError(
            Kind.LOG_RANGE_GONE,
            f"feed sink {name!r}: it needs the log from {needed} on, retention has removed what lies before "
            f"{reader.start}",
            way_out,
            {"sink": name},
        )

    def _wait_for_log(self) -> LogDirectory | None:
        """Return the log once capture has made it; None if the end came first."""
        while not self._stop.is_set():
            try:
                directory = LogDirectory.open(self._log_path)
            except TailraceError as error:
                if error.kind is not Kind.LOG_MISSING:
                    raise
            else:
                if TASK in directory.tasks() and directory.segments(TASK):
                    return directory
            self._stop.wait(POLL_S)
        return None

    def _show(self, **changes: object) -> None:
        self.view = replace(self.view, **changes)  # type: ignore[arg-type]
