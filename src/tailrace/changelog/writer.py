"""The writer of a task's log: appends, makes durable, starts segments, cuts off an open transaction.

Two threads use it. One appends and cuts; another calls `sync`. Appending continues during an fsync, so
that one fsync covers everything that was appended during the previous one. Any thread may `insert` a
frame, which is written between two transactions.

Four locks, in the order in which they are taken: `_append_lock` is held by the thread that writes;
`_fsync_lock` during an fsync, and while a segment is sealed, cut or closed; `_file_lock` during a write, and
while the part that a failed fsync left is cut off; `_lock` guards the few values that both threads use.

A write that fails because the disk is full is undone and may be repeated. After any other failed write,
or any failed fsync, the file's content is unknown: the writer refuses every further call (the kernel
reports a lost page only once, and a second fsync would succeed).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from tailrace import failpoints
from tailrace.changelog import durable
from tailrace.changelog import format as codec
from tailrace.changelog.blocks import Encoder, Place, up_to_boundary
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.endmark import MARK_NAME, UNKNOWN, EndMarkFile, read_mark
from tailrace.changelog.format import BlockHeader, EndMark, Tail
from tailrace.changelog.lock import take_lock
from tailrace.changelog.recovery import Recovered, highest_epoch, recover
from tailrace.changelog.runs import RunBuilder
from tailrace.errors import REPORT, Kind, TailraceError
from tailrace.protocol import frames, metadata_frames
from tailrace.protocol.frames import Bytes, Numbers, Summary

__all__ = ["Insertion", "LogListener", "LogOptions", "LogWriter", "Tail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Settings of a log's writer.

    `segment_bytes`: once a segment has reached this size on disk, it is sealed, and the next block starts
    a new one. Retention removes whole segments.

    `compression`: `none`, `lz4` or `zstd`, block by block; readers accept any mixture. Measured on
    pgoutput frames of a ten-column table (184 bytes a frame, blocks of 2 MiB, one core): lz4 stores
    44 % at 670 MB/s, zstd 26 % at 560 MB/s; `none` appends 1 to 3 GB/s. So `none` costs capture
    the least, and lz4 halves the log for about 0.2 µs CPU per row.

    Blocks with rows of a snapshot are not compressed. Measured on COPY's text of that table, 114 bytes per
    row: lz4 costs 0.15 µs CPU of the 0.34 that a row costs altogether.
    """

    segment_bytes: int = 256 << 20
    compression: str = "none"


class LogListener(Protocol):
    """Is notified of a writer's actions, on the thread of the action. Every method returns at once."""

    def opened(self, writer: LogWriter) -> None:
        """`writer` has opened the log and continues it at its `offset`."""
        ...

    def appended(self, header: BlockHeader, frames: Bytes, schema: Mapping[str, bytes]) -> None:
        """A block was appended. It is not durable yet.

        :param frames: the caller's memory, which it reuses after the call.
        :param schema: the schema frames in force where the block starts, by key; never modified.
        """
        ...

    def cut(self, log_offset: int) -> None:
        """The log was cut back to this offset."""
        ...

    def durable(self, tail: Tail) -> None:
        """Everything before `tail` is durable."""
        ...

    def closed(self) -> None:
        """The writer was closed."""
        ...


@dataclass(slots=True, eq=False)
class Insertion:
    """A frame to write at the log's next boundary.

    :param frame_at: returns the frame for the log's position and time at the boundary. The frame changes
        neither, and its length is always the same.
    :param rolls: whether a new segment starts after the frame.
    :param end: log offset after the frame; -1 until it is appended.
    """

    frame_at: Callable[[int, int], bytes]
    rolls: bool = False
    end: int = -1


@dataclass(slots=True)
class _Segment:
    """The segment that is being written."""

    path: Path
    fd: int
    begun_at: int  # end of the header and the preamble
    file_at: int  # end of the last whole block
    boundary_at: int  # end of the last block with a boundary
    durable_at: int  # end of the part that is known to be durable
    runs: RunBuilder

    @property
    def size(self) -> int:
        """Without the preamble, which may be larger than a small segment if there are very many tables."""
        return self.file_at - self.begun_at


class LogWriter:
    """The writer of one task's log, returned by `open`. The module's docstring describes its threads."""

    def __init__(
        self,
        directory: LogDirectory,
        task: str,
        options: LogOptions,
        mark: EndMarkFile,
        lock_fd: int,
        listener: LogListener | None,
    ) -> None:
        """Use `open` instead."""
        self._listener = listener
        self.directory, self.task, self._options = directory, task, options
        self._log_id = directory.identity.log_id
        self._path = directory.task_path(task)
        self._mark, self._lock_fd = mark, lock_fd
        self._encoder = Encoder(self._log_id, task, mark.mark.epoch, options.compression)
        self._append_lock = threading.RLock()
        self._fsync_lock, self._file_lock, self._lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._failure: TailraceError | None = None
        self._segment: _Segment | None = None
        self._place = Place(0, 0, 0, 0, 0, None)
        self._tail = self._durable = Tail(0, 0, 0)
        self._schema: dict[str, bytes] = {}  # replaced, not modified
        self._described: frozenset[int] = frozenset()  # the tables that it describes
        self._insertions: list[Insertion] = []
        self._rolls = False  # whether the next block starts a new segment
        self._replaceable = UNKNOWN  # offset of a segment without changes, which may be replaced

    @classmethod
    def open(
        cls,
        directory: LogDirectory,
        task: str,
        *,
        options: LogOptions | None = None,
        listener: LogListener | None = None,
    ) -> LogWriter:
        """Take the lock, fence a previous writer, recover the log, and return a writer that may append.

        :param listener: is notified of everything that is appended.
        :raises TailraceError: `LOG_LOCKED`, `LOG_CORRUPT` (nothing was changed), `LOG_FULL`,
            `LOG_WRITE_FAILED`, `LOG_FORMAT_UNKNOWN`.
        """
        path = directory.task_path(task)
        log_id = directory.identity.log_id
        seed = codec.seed_of(log_id, task)
        durable.make_directory(path)
        with contextlib.ExitStack() as undo:
            lock_fd = take_lock(path)
            undo.callback(os.close, lock_fd)
            durable.remove_temporaries(path)
            before = read_mark(path / MARK_NAME, seed)
            if before is None:
                epoch = highest_epoch(path, log_id, task)
                before = EndMark(0, epoch or 0, 0 if epoch is None else UNKNOWN, 0, 0)
            mark = EndMarkFile(path / MARK_NAME, seed, before._replace(epoch=before.epoch + 1))
            undo.callback(mark.close)
            writer = cls(directory, task, options or LogOptions(), mark, lock_fd, listener)
            writer._recover(before.offset)
            if listener is not None:
                listener.opened(writer)
            undo.pop_all()
        return writer

    @property
    def tail(self) -> Tail:
        """The last boundary that was appended; it may not be durable yet."""
        return self._tail

    @property
    def durable(self) -> Tail:
        """The last boundary that is durable: everything before it may be acknowledged."""
        return self._durable

    @property
    def offset(self) -> int:
        """Log offset at which the next chunk starts."""
        return self._place.offset

    @property
    def epoch(self) -> int:
        """Number of this writer among the task's writers so far, from 1."""
        return self._mark.mark.epoch

    @property
    def schema_in_force(self) -> dict[str, bytes]:
        """The schema frames in force at the end of the log, by key; a copy."""
        return dict(self._schema)

    def scan_state(self) -> Numbers:
        """Return the scan state with which `frames.summarise` continues at the end of the log."""
        return self._place.scan_state()

    def append(self, chunk: Bytes, summary: Summary) -> None:
        """Write whole frames, or none, at the end of the log. Not durable before `sync`.

        :param summary: the result of `frames.summarise` for `chunk` with this writer's scan state.
        :raises TailraceError: `LOG_FULL`: nothing of the chunk is in the log, and the same call may
            be repeated. `SCHEMA_MISSING`: it has a change of a table that is not described before, and
            nothing of it is in the log. `LOG_WRITE_FAILED`, `LOG_FENCED`: this writer can't be used any more.
        """
        with self._append_lock:
            self.check_fence()
            if not len(chunk):
                return
            self._check_continues(chunk, summary)
            self._check_described(chunk, summary)
            chunks = up_to_boundary(chunk, summary)
            inserted = self._insertions if len(chunks) > 1 else []
            if inserted:
                chunks.insert(1, _joined(inserted, chunks[0][1].position, chunks[0][1].position_time_us))
            headers = self._write_blocks(chunks)
            if inserted:
                self._note_inserted(headers[1].log_offset)
            with contextlib.suppress(TailraceError):  # the chunk is in the log; the next call fails
                self._write_insertions()

    def insert(self, insertion: Insertion) -> None:
        """Write a frame at the next boundary, which may be now. From any thread. Not durable before `sync`.

        If the disk is full, the frame is written with the next one.

        :raises TailraceError: `LOG_WRITE_FAILED`, `LOG_FENCED`: this writer can't be used any more.
        """
        with self._append_lock:
            self.check_fence()
            self._insertions.append(insertion)
            try:
                self._write_insertions()
            except TailraceError as error:
                if error.kind is not Kind.LOG_FULL:
                    raise

    def sync(self) -> Tail:
        """Make everything that was appended before this call durable, publish its last boundary to
        readers, and return it. From threads other than the one that appends. Fast if nothing is new.

        :raises TailraceError: `LOG_WRITE_FAILED`, `LOG_FENCED`: this writer can't be used any more,
            and nothing more may be acknowledged.
        """
        with self._fsync_lock:
            self.check_fence()
            with self._lock:
                target, segment = self._tail, self._segment
                boundary_at = segment.boundary_at if segment else 0
            if target == self._durable:
                return target
            with self._ending("make the change log durable", self._path):
                failpoints.hit("log.before_fsync")
                if segment is not None:  # those before it were made durable when they were sealed
                    self._fsync(segment)
                    segment.durable_at = boundary_at
                failpoints.hit("log.after_fsync")
                self.check_fence()
                self._mark.publish(target)
            self._durable = target
            if self._listener is not None:
                self._listener.durable(target)
            return target

    def discard_open_unit(self) -> None:
        """Cut the log back to its last boundary, durably, after a connection was lost within a
        transaction. From the thread that appends. Does nothing if the log ends at a boundary.

        :raises TailraceError: as `open`, but not `LOG_FULL`; this writer can then not be used any more.
        """
        with self._append_lock:
            self.check_fence()
            if self._place.offset == self._tail.offset:
                return
            with self._fsync_lock:
                self.check_fence()  # an fsync that has failed may have left frames that are not durable
                self._close_segment()
                try:
                    self._recover(self._durable.offset)
                except TailraceError as error:
                    self._failure = error
                    if error.kind is not Kind.LOG_FULL:
                        raise
                    # Even when there is room again, only another writer can continue.
                    self._failure = error.changed(kind=Kind.LOG_WRITE_FAILED)
                    raise self._failure from error
            if self._listener is not None:
                self._listener.cut(self._place.offset)
                self._listener.durable(self._durable)  # recovery has made that durable

    def close(self) -> None:
        """Make everything that was appended durable, seal the segment and release the lock.

        A failed writer only releases the lock. May be called twice.

        :raises TailraceError: as `sync`; the lock and the files are released even then.
        """
        with self._append_lock:
            if self._lock_fd < 0:
                return
            try:
                if self._failure is None:
                    self.sync()
                    if self._segment is not None:
                        self._seal_if_room(self._segment)
            finally:
                if self._listener is not None:
                    self._listener.closed()
                with self._fsync_lock:  # an fsync of another thread may still run
                    self._close_segment()
                    self._mark.close()
                os.close(self._lock_fd)
                self._lock_fd = -1
                self._failure = self._failure or TailraceError(
                    Kind.INTERNAL, "use a writer of the change log: it is closed", REPORT
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _recover(self, durable_to: int) -> None:
        recovered: Recovered = recover(self._path, self._log_id, self.task, durable_to)
        with self._ending("publish the end of the change log", self._path):
            self._mark.publish(recovered.tail)
        tail = self._durable = recovered.tail
        with self._lock:
            self._tail = tail
        self._place = recovered.place
        self._keep_schema(recovered.schema)
        self._replaceable = tail.offset if recovered.empty_segment else UNKNOWN

    def _write_blocks(self, chunks: Sequence[tuple[Bytes, Summary]]) -> list[BlockHeader]:
        """Write a block for each chunk, all or none; return their headers."""
        with self._repeatable("begin a segment of the change log", self._path):
            segment = self._segment
            if segment is not None and (self._rolls or segment.size >= self._options.segment_bytes):
                self._roll(segment)
            if self._segment is None:
                self._segment = self._begin_segment()
                self._rolls = False
                failpoints.hit("log.after_roll")
            segment = self._segment
        encoded = self._encoder.blocks(chunks, self._place)
        file_at = self._write(segment, encoded.parts)
        block_at = segment.file_at
        for header in encoded.headers:
            segment.runs.add(block_at, header)
            block_at += header.size_on_disk
        self._place = encoded.after
        with self._lock:
            if encoded.tail is not None:
                self._tail = encoded.tail
                segment.boundary_at = segment.file_at + encoded.size_to_tail
            segment.file_at = file_at
        for header, (raw, summary) in zip(encoded.headers, chunks, strict=True):
            if self._listener is not None:
                self._listener.appended(header, raw, self._schema)
            if summary.has_schema:
                self._keep_schema(self._schema | dict(metadata_frames.kept_frames(raw)))
        return encoded.headers

    def _keep_schema(self, schema: dict[str, bytes]) -> None:
        self._schema = schema
        self._described = frozenset(int(key[1:]) for key in schema if key[0] == "R")

    def _write_insertions(self) -> None:
        """Write the frames that wait for a boundary, if the log ends at one."""
        if self._insertions and self._place.unit is None:
            position, time_us = self._place.position, self._place.position_time_us
            (header,) = self._write_blocks([_joined(self._insertions, position, time_us)])
            self._note_inserted(header.log_offset)

    def _note_inserted(self, log_offset: int) -> None:
        for insertion in self._insertions:
            log_offset += len(insertion.frame_at(0, 0))
            insertion.end = log_offset
            self._rolls |= insertion.rolls
        self._insertions = []

    def _roll(self, segment: _Segment) -> None:
        with self._fsync_lock:
            failpoints.hit("log.before_roll")
            self._seal(segment)
            failpoints.hit("log.after_seal")
            self._close_segment()

    def _seal(self, segment: _Segment) -> None:
        """Write the footer and make the whole segment durable, before the next one exists."""
        footer = self._encoder.footer(segment.runs.refs(), self._place)
        self._write(segment, [footer])
        self._fsync(segment)

    def _seal_if_room(self, segment: _Segment) -> None:
        try:
            self._seal(segment)
        except TailraceError as error:
            if error.kind is not Kind.LOG_FULL:  # the footer is a cache and may be missing
                raise

    def _begin_segment(self) -> _Segment:
        """Create the next segment: its header and preamble are durable before it gets its name.

        :raises OSError: it has no name yet; if there was no room, this may be called again.
        """
        path = self._path / codec.segment_name(self._place.offset)
        parts, place = self._encoder.head(self._schema, self._place, time.time_ns() // 1000)
        temporary = durable.write_temporary(path, parts)
        try:
            self.check_fence()
            if self._replaceable == self._place.offset:
                temporary.replace(path)
            else:
                path.hardlink_to(temporary)  # never replaces a segment of another writer
        finally:
            with contextlib.suppress(OSError):  # else the next writer removes it
                temporary.unlink(missing_ok=True)
        with self._ending("begin a segment of the change log", path):
            durable.sync_directory(self._path)
            fd = os.open(path, os.O_RDWR)
        self._place, self._replaceable = place, UNKNOWN
        size = sum(len(part) for part in parts)
        return _Segment(path, fd, size, size, size, size, RunBuilder(path.name))

    def _close_segment(self) -> None:
        with self._lock:
            segment, self._segment = self._segment, None
        if segment is not None:
            os.close(segment.fd)

    def _write(self, segment: _Segment, parts: Sequence[Any]) -> int:
        """Write at the segment's end and return its new end; undo the write if the disk is full."""
        with self._repeatable("append to the change log", segment.path), self._file_lock:
            if self._failure is not None:  # failed since the last check; the segment may be shorter now
                raise self._failure
            try:
                return durable.write_fully(segment.fd, parts, segment.file_at)
            except OSError:
                self.check_fence()
                with self._ending("undo a write to the change log", segment.path):
                    os.ftruncate(segment.fd, segment.file_at)
                raise

    def _fsync(self, segment: _Segment) -> None:
        try:
            os.fsync(segment.fd)
        except OSError as error:
            # What is not durable can still be read from the page cache, so recovery would accept it.
            # Cut it off; the source sends it again. Nothing is written from then on: after the part that
            # was cut off it would be damage.
            with self._file_lock:
                self._failure = durable.final(error, "make the change log durable", segment.path)
                with contextlib.suppress(OSError, TailraceError):
                    self._mark.check()  # a writer that has taken over may have accepted that part
                    os.ftruncate(segment.fd, segment.durable_at)
            raise self._failure from error

    @contextlib.contextmanager
    def _repeatable(self, attempted: str, path: Path) -> Iterator[None]:
        """Raise an `OSError` from inside as an error of the log, which ends this writer unless the disk is
        full.
        """
        try:
            yield
        except OSError as error:
            failure = durable.write_failure(error, attempted, path)
            if failure.kind is not Kind.LOG_FULL:
                self._failure = failure
            raise failure from error

    @contextlib.contextmanager
    def _ending(self, attempted: str, path: Path) -> Iterator[None]:
        """Raise an `OSError` from inside as an error of the log that ends this writer."""
        try:
            yield
        except OSError as error:
            self._failure = durable.final(error, attempted, path)
            raise self._failure from error

    def check_fence(self) -> None:
        """Check that this writer has not failed and that no other one has taken over the log. From any
        thread; takes about a microsecond. To be called before anything is acknowledged.

        :raises TailraceError: `LOG_FENCED`, or the error that ended this writer before.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._mark.check()
        except TailraceError as error:
            self._failure = error
            raise

    def _check_continues(self, chunk: Bytes, summary: Summary) -> None:
        if (
            len(chunk) != summary.size
            or not 0 < summary.size <= codec.BLOCK_BYTES_MAX
            or summary.open_at_start != self._place.unit
            or summary.position_at_start != self._place.position
        ):
            raise TailraceError(
                Kind.INTERNAL,
                "append to the change log: the chunk does not start where the log ends",
                REPORT,
                {"log_offset": self._place.offset, "size": summary.size},
            )

    def _check_described(self, chunk: Bytes, summary: Summary) -> None:
        if summary.tables is not None and self._described.issuperset(summary.tables):
            return
        table = metadata_frames.undescribed(chunk, self._described)
        if table is not None:
            raise TailraceError(
                Kind.SCHEMA_MISSING,
                "append to the change log: a change is of a table that is not described before it, so no "
                "reader could decode it; nothing of the chunk was stored",
                "the source must describe each table before its first change (`RowFrames.describe`)",
                {"relation": table},
            )


def _joined(insertions: Sequence[Insertion], position: int, time_us: int) -> tuple[Bytes, Summary]:
    """Return the frames to insert at a boundary with this position and time, as a chunk."""
    raw = b"".join(insertion.frame_at(position, time_us) for insertion in insertions)
    chunk = np.frombuffer(raw, np.uint8)
    return chunk, frames.summarise(chunk, frames.new_state(position, time_us))
