"""The loop that feeds one sink: read its position, choose a range of the log, write it, commit.

    position ── from the sink's own record, never from the log's list of readers
    range    ── [position, a boundary within the batch limits), as large as possible, so that
                batches grow with the backlog
    write    ── exactly once, whatever failed before: the sink guarantees this
    commit   ── to the log's list of readers, so that retention keeps what the sink needs

After a failure the sink is retried with growing waits, and then stopped alone: neither the source nor the
other sinks wait for it.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tailrace.backoff import Backoff
from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.disclosure import disclosure_is_kept
from tailrace.changelog.format import BlockRef, HeldBlock
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.readers import Readers
from tailrace.config import ColumnPolicy, FolderSink, SinkConfig
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.errors import Kind, TailraceError
from tailrace.fair_semaphore import FairSemaphore
from tailrace.model import LogRange
from tailrace.pipeline.background import as_failure
from tailrace.pipeline.batch_size import BatchGoal
from tailrace.pipeline.spark_host import SparkHost
from tailrace.pipeline.status.views import SinkState, SinkView
from tailrace.ranges import plan
from tailrace.ranges.changes import PENDING_S
from tailrace.realtime.path import RealtimePath
from tailrace.sinks.contract import Beats, Sink, SparkNeededError, require_within_log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from tailrace.ranges.plan import InputSplit

log = structlog.get_logger(__name__)

#: Most successive retries in a run that must end (`--until-caught-up`, `replay`), if the file sets no limit.
ATTEMPTS_AT_END_MAX = 8
#: Interval at which an idle sink checks for new changes that `look` does not announce, in seconds.
POLL_S = 0.05
#: Interval at which a sink's position is committed to the log's list of readers, in seconds. A commit takes
#: two fsyncs, and the position that counts is in the sink's own record.
REGISTER_S = 1.0
#: Largest range, of one split, that is written in this process: Spark would use a single task for it, and
#: take longer to start it than this process to write the range.
IN_PROCESS_BYTES_MAX = plan.SPLIT_BYTES_MIN
#: Interval at which a part of the log without rows is recorded in the sink, in seconds.
QUIET_RECORD_S = 30.0


class SinkWorker:
    """Feeds one sink from the log until `stop`, or until it has reached `finish_at`.

    :param make: creates the sink; called on the thread of `run`.
    :param begin_at: the log offset where an empty sink begins; None: at the log's very start.
    :param semaphore: limits how many sources write a batch to the same sink at once.
    :param source: the name of the log's source; empty if it is the only one.
    :param reader: the sink's name in the log's list of readers; empty: its own.
    :param rules: the rules for columns and masks that capture must have stored in the log before the sink
        begins: capture asks the server which columns they name now. None: there is no wait.
    :param realtime: feeds the sink from memory while it keeps up; None: it is fed from the log alone.
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
        semaphore: FairSemaphore | None = None,
        source: str = "",
        reader: str = "",
        rules: ColumnPolicy | None = None,
        realtime: RealtimePath | None = None,
    ) -> None:
        #: The tag of Spark's jobs for the sink.
        self.job_tag = f"tailrace-{secrets.token_hex(8)}"
        self.view = SinkView(config.name, str(getattr(config, "type", "")))
        self._config = config
        self._pipeline = pipeline
        self._log_path = log_path
        self._make = make
        self._spark = spark
        self._begin_at = begin_at
        self._semaphore = semaphore or FairSemaphore(1)
        self._source = source
        self._reader = reader or config.name
        self._rules = rules
        #: Feeds the sink from memory while it keeps up.
        self.realtime = realtime
        self._generation = 0  # of the real-time path
        self._held: Sequence[HeldBlock] = ()  # taken from memory and not written yet
        self._reached = 0  # the sink's last known position: everything before it was in the sink
        self._stop = threading.Event()
        self._hurry = threading.Event()  # set with `_stop` and `_finish_at`: ends waits between batches
        self._news = threading.Event()  # set when there may be something to do
        self._finish_at: int | None = None
        self._registered = threading.Event()
        # The log has no rows between the sink's position and this log offset.
        self._quiet_until = -1
        self._recorded_s = time.monotonic()
        # The position in the log's list of readers, and when it was written there.
        self._noted, self._noted_s = -1, -REGISTER_S
        self._goal = BatchGoal.first(config.pacing)
        self._in_process = config.small_ranges_in_process

    def stop(self) -> None:
        """Ask for the end after the current batch. Any thread."""
        self._stop.set()
        self._hurry.set()
        self._news.set()

    def look(self) -> None:
        """Notify the worker that transactions have become durable in the log. Any thread."""
        self._news.set()

    def finish_at(self, offset: int) -> None:
        """Ask for the end when everything before `offset` is in the sink. Later calls have no effect.

        Any thread.
        """
        if self._finish_at is None:
            self._finish_at = offset
            self._hurry.set()
            self._news.set()

    @property
    def on_spark(self) -> bool:
        """Whether Spark writes the sink."""
        return self._config.on_spark

    @property
    def is_registered(self) -> bool:
        """Whether the log's list of readers states which part of the log this sink needs."""
        return self._registered.is_set()

    def run(self) -> None:
        """Feed the sink until `stop` or `finish_at`.

        :raises TailraceError: the error that stopped the sink, after all attempts.
        """
        backoff = Backoff(self._config.retry_attempts_max)
        while not self._stop.is_set():
            batches = self.view.batches
            try:
                self._attempt()
            except Exception as error:
                failure = as_failure(error).of_source(self._source)
                if self._stop.is_set():
                    break  # a batch that was cancelled at the end: this is safe, and not reported
                if not self.is_registered:
                    self._register_without_position()
                if self.view.batches > batches:
                    backoff = backoff.after_success()
                if failure.kind is Kind.SCHEMA_PENDING and self._finish_at is None:
                    # Capture queries the facts until it gets them; a standby may be unreachable for long.
                    self._show(state=SinkState.RETRYING, error=failure)
                    self._stop.wait(PENDING_S)
                    continue
                backoff, wait_s = backoff.after(failure)
                if wait_s is None or self._is_out_of_retries(backoff, failure):
                    self._show(state=SinkState.FAILED, error=failure)
                    if self.realtime is not None:
                        self.realtime.leave("the sink has failed")
                        self._held = ()
                        self._show(realtime=self.realtime.view())
                    log.error(  # noqa: TRY400 - the trace is logged by the thread that waits for the end
                        "sink stopped; the pipeline continues without it",
                        sink=self.view.name,
                        error=str(failure),
                    )
                    if failure is error:
                        raise  # it has its own cause
                    raise failure from error
                self._show(state=SinkState.RETRYING, error=failure)
                log.warning(
                    "sink failed; trying again", sink=self.view.name, error=str(failure), wait_s=wait_s
                )
                self._stop.wait(wait_s)
            else:
                break
        self._show(state=SinkState.STOPPED)

    def _is_out_of_retries(self, backoff: Backoff, failure: TailraceError) -> bool:
        # A run that must end does not retry without limit, unless the file sets the number of retries, and
        # does not wait for room on the log's disk.
        at_end = self._finish_at is not None and self._config.retry_attempts_max < 0
        return at_end and (backoff.attempts > ATTEMPTS_AT_END_MAX or failure.kind is Kind.LOG_FULL)

    def _attempt(self) -> None:
        # Each attempt opens the sink again, which completes what a failed attempt left.
        directory = self._wait_for_log()
        if directory is None:
            return
        sink = self._make()
        try:
            sink.open(directory.identity, self._pipeline)
            self._follow(sink, directory)
        finally:
            sink.close()

    def _register_without_position(self) -> None:
        """Let retention use the log's list of readers while the sink's position can't be read.

        Otherwise retention would wait until it can. A sink that is not in the list needs all of the log.
        """
        with contextlib.suppress(TailraceError):
            directory = LogDirectory.open(self._log_path)
            readers, begin = Readers(directory), self._begin_at or 0
            with LogReader.open(directory, TASK) as reader:
                if readers.get(self._reader) is None and begin >= reader.start:
                    readers.register(self._reader, {TASK: begin})
            self._registered.set()

    def _follow(self, sink: Sink, directory: LogDirectory) -> None:
        with LogReader.open(directory, TASK) as reader:
            readers = Readers(directory)
            if not self._await_end(reader, sink.reach(TASK)):
                return
            if isinstance(self._config, KafkaSinkConfig):
                restart = f"reset its offset (`tailrace offsets reset FILE --sink {self.view.name}`)"
                require_within_log(sink, TASK, reader.end().offset, restart)
                self._require_offset(readers, sink.position(TASK), self._config)
            else:
                require_within_log(sink, TASK, reader.end().offset)
            start = self._first_offset(reader, sink.position(TASK))
            self._noted = readers.begin(self._reader, TASK, start)
            if isinstance(self._config, KafkaSinkConfig):
                readers.commit(self._reader, TASK, start, kept=_offset_place(self._config))
            elif isinstance(self._config, FolderSink):
                readers.commit(self._reader, TASK, start, kept={"type": self.view.type})
            has_gone_back, self._reached = start < self._reached, start
            if has_gone_back:
                self._quiet_until = -1
            if self.realtime is not None and (has_gone_back or not self.realtime.is_open):
                self.realtime.open(directory, start)
            self._registered.set()
            self._show(position=start)
            self._feed(sink, reader, readers, start)

    def _await_end(self, reader: LogReader, reach: int | None) -> bool:
        """Wait while the log's end mark is behind its files, and the sink has changes between: after a loss
        of power, until capture has opened the log. Return whether the sink is to be fed.
        """
        if reach is None or not reader.end().offset < reach <= reader.end_on_disk():
            return True
        while True:
            is_last = self._finish_at is not None  # before the look: the end is asked for when capture has it
            if reader.end().offset >= reach:
                return True
            if is_last or self._stop.wait(POLL_S):
                return False

    def _feed(self, sink: Sink, reader: LogReader, readers: Readers, start: int) -> None:
        session: SparkSession | None = None
        while not self._stop.is_set():
            if self._finish_at is not None and start >= self._finish_at:
                break
            self._note(readers, start)
            self._news.clear()
            span, blocks = self._next_held(reader, start) if self._turn(start) else self._next(reader, start)
            if span is None:
                if isinstance(sink, Beats):
                    sink.beat()
                if not self._stop.is_set():
                    self._news.wait(POLL_S)
                continue
            splits = _splits(span, blocks)
            is_small = self._is_small(span, splits)
            if self.on_spark and (not is_small or self._spark.comes_first):
                # Only now: a sink that has everything does not wait for Spark.
                session = session or self._session()
                if session is None:
                    break
            with self._semaphore.turn(self._stop) as given:
                if not given:
                    break
                began_s = time.monotonic()
                try:
                    commit = sink.write(None if is_small else session, self._log_path, span, splits)
                except SparkNeededError:
                    self._in_process = False
                    continue
                except Exception:
                    self._goal = self._goal.after_failure(time.monotonic() - began_s)
                    self._count_part(sink, span)
                    raise
            start, self._reached, self._held = span.end, span.end, ()
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
            )
            log.debug(
                "batch written", sink=self.view.name, rows=commit.rows, end=start, seconds=commit.seconds
            )
            self._goal = self._goal.after(_rows_in(blocks), span.size, took_s)
            if _rows_in(blocks):
                self._pace(sink, reader, start, took_s)
        self._note(readers, start, at_once=True)

    def _note(self, readers: Readers, position: int, *, at_once: bool = False) -> None:
        """Commit the sink's position to the log, for retention; after `REGISTER_S`, or now if `at_once`.

        :raises TailraceError: as `Readers.commit`.
        """
        now = time.monotonic()
        if not at_once and now - self._noted_s < REGISTER_S:
            return
        self._noted_s = now
        released = position if self.realtime is None else self.realtime.keep(position)
        if released > self._noted:
            readers.commit(self._reader, TASK, released)
            self._noted = released

    def _count_part(self, sink: Sink, span: LogRange) -> None:
        """Count a failed batch of which a part was committed: this is progress, so retries start again."""
        with contextlib.suppress(TailraceError):
            if (reached := sink.position(TASK) or 0) > span.start:
                self._show(position=reached, batches=self.view.batches + 1)

    def _is_small(self, span: LogRange, splits: Sequence[InputSplit]) -> bool:
        """Return whether the range is written in this process."""
        return self._in_process and len(splits) <= 1 and span.size <= IN_PROCESS_BYTES_MAX

    def _bytes_wanted(self, waiting: int) -> int:
        """Return the most bytes of the next batch; while Spark starts, the most that this process writes."""
        if not self._in_process or waiting <= IN_PROCESS_BYTES_MAX or self._spark.is_ready:
            return self._goal.bytes
        self._spark.start()
        return min(self._goal.bytes, IN_PROCESS_BYTES_MAX)

    def _session(self) -> SparkSession | None:
        session = self._spark.session(self._stop, self.job_tag)
        if session is not None:
            folders = {"log.path": self._log_path}
            if isinstance(self._config, FolderSink):
                folders[f"the path of sink {self.view.name}"] = self._config.path
            self._spark.require_shared(folders)
        return session

    def _next(self, reader: LogReader, start: int) -> tuple[LogRange | None, Sequence[BlockRef | HeldBlock]]:
        """Return the next range and its blocks; None if there is nothing to write yet."""
        end = reader.end().offset
        if self.realtime is not None and self.realtime.reads_until is not None:
            end = min(end, self.realtime.reads_until)
        seen = max(start, self._quiet_until)
        finishing = self._finish_at is not None and end >= self._finish_at > start
        if end <= seen and not finishing:
            self._show_idle(max(seen, start))
            return None, ()
        upto = reader.boundary_within(start, self._goal.rows, self._bytes_wanted(end - start), end)
        blocks = reader.blocks(start, upto)
        # All blocks up to the end are searched for rows only if the first ones have none.
        fresh = blocks if seen == start and _rows_in(blocks) else reader.blocks(seen, end)
        if _rows_in(fresh) == 0 and not finishing:
            due = time.monotonic() - self._recorded_s >= QUIET_RECORD_S
            self._quiet_until = end
            self._show_idle(end)
            if not due:
                return None, ()
        elif fresh:
            self._show(position=seen, pending_since_us=fresh[0].header.position_time_us or None)
        return LogRange(TASK, start, upto), blocks

    def _turn(self, start: int) -> bool:
        """Let the real-time path do its work; return whether memory feeds the sink."""
        if self.realtime is None:
            return False
        self.realtime.turn(max(start, self._quiet_until), self.view.rows)
        if self.realtime.generation != self._generation:
            self._generation, self._held = self.realtime.generation, ()
        self._show(realtime=self.realtime.view())
        # At the end, the rest of the log is read from disk and recorded, with rows or without.
        return self.realtime.works and self._finish_at is None

    def _next_held(
        self, reader: LogReader, start: int
    ) -> tuple[LogRange | None, Sequence[BlockRef | HeldBlock]]:
        """Return the next range and its blocks from memory, as `_next`."""
        assert self.realtime is not None
        durable = self.realtime.durable_offset
        self._held = self.realtime.take_after(start, self._held, min(self._goal.bytes, IN_PROCESS_BYTES_MAX))
        if not self._held:
            if self.realtime.lag_segments:
                # They have no rows, so they are not in memory; unread, retention would have to keep them.
                return self._next(reader, start)
            self._show_idle(max(start, durable))
            return None, ()
        first, last = self._held[0].header, self._held[-1].header
        self._show(pending_since_us=first.position_time_us or None)
        span = LogRange(TASK, start, last.end)
        if self.on_spark and not (self._in_process and span.size <= IN_PROCESS_BYTES_MAX):
            return span, reader.blocks(start, span.end)  # executors read the range from the log
        return span, self._held

    def _pace(self, sink: Sink, reader: LogReader, start: int, took_s: float) -> None:
        # With a backlog the next batch begins at once; without one, the interval limits how often
        # the fixed costs of a small batch are paid.
        left_s = self._goal.pacing.interval_s - took_s
        end = reader.end().offset
        backlog = min(self._goal.pacing.bytes_max // 8, self._bytes_wanted(end - start))
        if left_s <= 0 or self._finish_at is not None or end - start >= backlog:
            return
        if _rows_in(reader.blocks(start, end)) < self._goal.rows:
            self._rest(sink, left_s)

    def _rest(self, sink: Sink, seconds: float) -> None:
        """Wait `seconds` until the next batch, or until `_hurry` is set; send heartbeats meanwhile."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            if self._hurry.wait(min(left_s, POLL_S) if isinstance(sink, Beats) else left_s):
                return
            if isinstance(sink, Beats):
                sink.beat()

    def _first_offset(self, reader: LogReader, position: int | None) -> int:
        if position is None and self._begin_at is not None:
            return self._begin_at
        needed = position or 0
        if needed >= reader.start:
            return needed
        name = self.view.name
        way_out = "begin a new pipeline, with a new snapshot and new targets"
        if getattr(self._config, "mode", "append") != "mirror":
            way_out = (
                "either let it begin at the log's start, in a new or emptied target: `tailrace replay FILE "
                f"--sink {name} --from {reader.start}`; or {way_out}"
            )
        raise TailraceError(
            Kind.LOG_RANGE_GONE,
            f"feed sink {name!r}: it needs the log from {needed} on, retention has removed what lies before "
            f"{reader.start}",
            way_out,
            {"sink": name},
        )

    def _require_offset(self, readers: Readers, position: int | None, config: KafkaSinkConfig) -> None:
        """Check that an offset outside of the target is where it was when it was last committed to the log,
        and not lower.
        """
        known = readers.get(self._reader)
        committed = 0 if known is None or known.dropped else known.offsets.get(TASK, 0)
        was = None if known is None else known.kept.get(TASK)
        first = self._begin_at or 0
        is_elsewhere = was is not None and was != _offset_place(config)
        # A sink that has committed nothing is registered at the log offset where it begins.
        if committed <= (first if is_elsewhere or position is None else position):
            return
        name = self.view.name
        found = "there is none" if position is None else f"it is {position}"
        cause = "the offsets topic was deleted or lost records, or the sink has another cluster than before"
        if is_elsewhere and was is not None:
            had = ", ".join(f"{key} {value!r}" for key, value in was.items())
            remedy = "give this one another name" if "type" in was else "restore them"
            cause = f"the sink of this name had {had}: {remedy}, or restore the names of exchanged sinks"
        raise TailraceError(
            Kind.SINK_DAMAGED,
            f"continue after the offset of sink {name!r}: {found}, and the log knows that {committed} was "
            "committed; changes would be lost or written again",
            f"{cause}. To continue in topics that have all of that: `tailrace offsets set FILE --sink {name} "
            f"--to {committed} --skip-changes`; to write everything again: `tailrace offsets reset FILE "
            f"--sink {name}`",
            {"sink": name},
        )

    def _wait_for_log(self) -> LogDirectory | None:
        """Return the log once capture has created it; None if the worker must end before."""
        while not self._stop.is_set():
            try:
                directory = LogDirectory.open(self._log_path)
            except TailraceError as error:
                if error.kind is not Kind.LOG_MISSING:
                    raise
            else:
                if TASK in directory.tasks() and directory.segments(TASK):
                    if self._rules is None or disclosure_is_kept(directory, TASK, self._rules):
                        return directory
                    if self._finish_at is not None:
                        return None  # capture has ended before it stored the rules
            if self._finish_at == 0:
                return None  # capture has ended, and has written nothing
            self._stop.wait(POLL_S)
        return None

    def _show_idle(self, position: int) -> None:
        """Show that there is nothing to write, and clear the error of an earlier attempt."""
        self._show(state=SinkState.RUNNING, position=position, pending_since_us=None, error=None)

    def _show(self, **changes: object) -> None:
        self.view = replace(self.view, **changes)  # type: ignore[arg-type]


def _splits(span: LogRange, blocks: Sequence[BlockRef | HeldBlock]) -> Sequence[InputSplit]:
    if blocks and isinstance(blocks[0], HeldBlock):
        return [plan.InputSplit(TASK, 0, span.start, span.end, tuple(blocks))]
    refs = [block for block in blocks if isinstance(block, BlockRef)]
    return plan.input_splits(TASK, refs, span.start, span.end)


def _rows_in(blocks: Sequence[BlockRef | HeldBlock]) -> int:
    return sum(block.header.rows for block in blocks)


def _offset_place(config: KafkaSinkConfig) -> dict[str, str]:
    """Return what says where a Kafka sink's offset is."""
    return {"group": config.group, "offsets_topic": config.offsets_topic}
