"""Reads a log for an engine's handler, batch by batch, from the engine's committed offset on.

    begin    ── from the engine's offset store: everything before that log offset is processed
    batch    ── records that were decoded together, up to a limit; a transaction that is larger
                becomes several batches
    commit   ── to the log's list of readers, so that retention keeps what the engine needs

Offsets are described in `ranges.batches`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.disclosure import disclosure_is_kept
from tailrace.changelog.format import HeldBlock
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.readers import Readers
from tailrace.config import PipelineConfig
from tailrace.config.engine_options import BATCH_RECORDS_MAX
from tailrace.decode.column_policy import TablePolicy
from tailrace.decode.json.debezium import SourceInfo
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.status.views import HANDLER, SinkState, SinkView
from tailrace.ranges.batches import LOG_OFFSET, REMOVE_OFFSETS, batches_of, log_offset_of, offset_of
from tailrace.ranges.changes import decoded_batches
from tailrace.ranges.plan import MIB, InputSplit
from tailrace.realtime.path import RealtimePath
from tailrace.records.batch import Batch, Offset, Partition

#: Most bytes of the log that are planned at a time; they are read and decoded in smaller parts.
RANGE_BYTES_MAX = 256 * MIB


def next_split(
    reader: LogReader,
    task: str,
    start: int,
    *,
    bytes_max: int = RANGE_BYTES_MAX,
    until: int | None = None,
) -> InputSplit | None:
    """Return the part of the log from `start` on, of about `bytes_max` at most; None: nothing yet.

    :param until: a boundary at which the part ends at the latest; None: the log's end.
    :raises TailraceError: as `LogReader.read_on`.
    """
    found = reader.read_on(start, bytes_max, until)
    if found is None:
        return None
    upto, blocks = found
    return InputSplit(task, 0, start, upto, tuple(blocks))


def partition_of(pipeline: PipelineConfig) -> Partition:
    """Return the source partition of a pipeline's source."""
    return {"pipeline": pipeline.name, **pipeline.source.partition}


def reader_name(engine: str) -> str:
    """Return the name under which an engine is registered with a log. No sink can have it."""
    return f"engine:{engine}"


class LogConsumer:
    """Reads one log for one engine. `next` on one thread; the rest from any.

    :param engine: name of the engine.
    :param begin: the offset up to which everything is processed; None: nothing is.
    :param rows_max: most records of a batch. Its bytes are bounded by `DECODED_BYTES_MAX`.
    """

    def __init__(
        self,
        engine: str,
        pipeline: PipelineConfig,
        begin: Offset | None,
        *,
        rows_max: int = BATCH_RECORDS_MAX,
    ) -> None:
        self.partition = partition_of(pipeline)
        self._name = reader_name(engine)
        self._pipeline = pipeline
        self._begin = begin
        self._rows_max = rows_max
        self._table_policy = TablePolicy.of(pipeline.source.disclosure)
        self._log_id = ""
        self._origin: SourceInfo | None = None
        self._at = 0  # everything before was returned
        self._batches: Iterator[Batch] | None = None
        self._reader: LogReader | None = None
        self._readers: Readers | None = None
        self._done: Offset | None = None  # in the offset store, not committed to the log yet
        self._handled = self._released = 0  # the log offset of `_done`; the one committed to the log
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # held while `next` runs
        #: Feeds this consumer from memory while it keeps up.
        self.realtime = RealtimePath(self._name, pipeline.realtime, pipeline.log.segment_bytes)
        self._generation = 0  # generation of the real-time path when `_batches` was made
        self._held: Sequence[HeldBlock] = ()  # the blocks of `_batches`, if they are from memory
        self._rows = 0  # returned
        self._end_on_disk: int | None = None  # the log's, if it was looked at
        self._view = SinkView(self._name, HANDLER)  # replaced as a whole

    def open(self) -> bool:
        """Open the log and register as its reader; return whether there is a log yet.

        :raises TailraceError: `LOG_RANGE_GONE` if retention has removed what is needed;
            `OFFSETS_FOREIGN` if the offset is another log's or beyond this one's end.
        """
        if self._reader is not None:
            return True
        try:
            directory = LogDirectory.open(self._pipeline.log.path)
        except TailraceError as error:
            if error.kind is not Kind.LOG_MISSING:
                raise
            self._refuse_if_begun()
            return False
        if TASK not in directory.tasks() or not directory.segments(TASK):
            self._refuse_if_begun()
            return False
        rules = self._pipeline.source.awaited_policy
        if rules is not None and not disclosure_is_kept(directory, TASK, rules):
            return False  # capture has not asked the server yet which columns the rules name
        reader = LogReader.open(directory, TASK)
        self._log_id = directory.identity.log_id
        self._origin = SourceInfo.of(self._pipeline.name, directory.identity.source)
        if (first := self._first(reader)) is None:
            return False
        self._at = first
        readers = Readers(directory)
        readers.begin(self._name, TASK, reader.boundary_up_to(self._at))
        self._readers = readers
        self._handled = self._released = self._at
        self._reader = reader
        self.realtime.open(directory, self._at)
        self._view = replace(self._view, state=SinkState.RUNNING, position=self._at)
        return True

    def next(self) -> Batch | None:
        """Return the next batch; None if there is nothing new in the log. Never waits.

        After an error the next call continues after the last batch that was returned.

        :raises TailraceError: as `open`; `LOG_CORRUPT`, `DECODE_FAILED`.
        """
        with self._reading:
            return self._next() if self.open() else None

    def _next(self) -> Batch | None:
        self._turn()
        while self._batches is not None or self._plan():
            assert self._batches is not None
            try:
                batch = next(self._batches, None)
            except BaseException:
                self._batches = None
                raise
            if batch is not None:
                assert batch.end is not None
                self._at = batch.end[LOG_OFFSET]
                self._rows += batch.polled
                return batch
            self._batches, self._held = None, ()
        return None

    @property
    def offset(self) -> Offset | None:
        """The offset after the last batch that was returned; None: at the very beginning."""
        return self._begin if self._reader is None else offset_of(self._log_id, self._at)

    @property
    def view(self) -> SinkView:
        """The engine's entry among the sinks of `tailrace status`. Any thread."""
        return replace(self._view, realtime=self.realtime.view())

    @property
    def is_registered(self) -> bool:
        """Whether this reader is registered with the log, so that retention keeps what it needs."""
        return self._readers is not None

    def note(self, offset: Offset) -> None:
        """Note that everything up to `offset` is processed and `offset` is stored; returns at once."""
        with self._lock:
            self._done = offset
        self._view = replace(self._view, position=log_offset_of(offset, self._log_id), rows=self._rows)

    def keep(self) -> None:
        """Commit the noted offset to the log's list of consumers, so that retention may remove what precedes.

        :raises TailraceError: `LOG_RANGE_GONE` if retention has dropped this reader;
            `LOG_WRITE_FAILED`, `LOG_FULL`, `LOG_CORRUPT`.
        """
        done = self._done
        if self._reader is None or self._readers is None:
            return
        if self._reading.acquire(blocking=False):  # else the reading thread does it
            try:
                self._turn()
            finally:
                self._reading.release()
        if done is not None:
            self._handled = log_offset_of(done, self._log_id)
        released = self.realtime.keep(self._handled)
        if released != self._released:
            self._readers.commit(self._name, TASK, self._reader.boundary_up_to(released))
            self._released = released
        with self._lock:
            if self._done is done:
                self._done = None

    def close(self) -> None:
        """Close the log's reader."""
        self._view = replace(self._view, state=SinkState.STOPPED)
        if self._reader is not None:
            self._reader.close()

    def _refuse_if_begun(self) -> None:
        if self._begin is not None:
            raise TailraceError(
                Kind.OFFSETS_FOREIGN,
                f"continue as {self._name!r}: it has read a change log, and there is none",
                f"correct log.path, or restore the log; or {REMOVE_OFFSETS}, to begin with a new log",
                {"path": str(self._pipeline.log.path)},
            )

    def _first(self, reader: LogReader) -> int | None:
        """Return where to begin; None if the end mark is behind the log's files, as after a loss of power,
        until capture has opened the log.
        """
        needed = 0 if self._begin is None else log_offset_of(self._begin, self._log_id)
        end = reader.end().offset
        if needed > end:
            if self._end_on_disk is None:
                self._end_on_disk = reader.end_on_disk()
            if needed <= self._end_on_disk:
                return None
            raise TailraceError(
                Kind.OFFSETS_FOREIGN,
                f"continue as {self._name!r} at log offset {needed}: the change log ends at {end}",
                "the log has lost its end, or the offsets are another log's; nothing was skipped. Begin a "
                f"new log with a new snapshot; or {REMOVE_OFFSETS}, to read this log from its beginning",
                {"path": str(self._pipeline.log.path)},
            )
        if needed < reader.start:
            raise TailraceError(
                Kind.LOG_RANGE_GONE,
                f"continue as {self._name!r}: it needs the log from {needed} on, retention has removed what "
                f"lies before {reader.start}",
                "begin a new log, with a new snapshot: set log.path to a new directory, drop the slot, and "
                f"{REMOVE_OFFSETS}; and give log.retention more room, or set log.retention.on_slow_reader "
                "to hold",
                {"path": str(self._pipeline.log.path)},
            )
        return needed

    def _turn(self) -> None:
        """Let the real-time path do its work. Called while no batch is being returned."""
        self.realtime.turn(self._at, self._rows)
        if self.realtime.generation != self._generation:
            self._generation, self._batches, self._held = self.realtime.generation, None, ()
            self._at = max(self._at, self.realtime.read_from)

    def _plan(self) -> bool:
        """Plan the next part of the log; return whether there is any."""
        assert self._reader is not None
        if not self.realtime.works:
            split = next_split(self._reader, TASK, self._at, until=self.realtime.reads_until)
        else:
            split = self._split_in_memory()
        if split is None:
            return False
        modes = self._pipeline.source.value_modes
        rows_max, origin = self._rows_max, self._origin
        batches = decoded_batches(self._reader, split, None, modes, self._table_policy)
        self._batches = itertools.chain.from_iterable(
            batches_of(self.partition, self._log_id, decoded, rows_max, origin) for decoded in batches
        )
        return True

    def _split_in_memory(self) -> InputSplit | None:
        assert self._reader is not None
        self._held = self.realtime.take_after(self._at, self._held, RANGE_BYTES_MAX)
        if not self._held:
            # Segments without changes are not in memory; unread, retention would have to keep them.
            return next_split(self._reader, TASK, self._at) if self.realtime.lag_segments else None
        return InputSplit(TASK, 0, self._at, self._held[-1].header.end, tuple(self._held))
