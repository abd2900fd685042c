"""The concurrent readers of one window: each reads chunk after chunk with COPY over its own connection.

The text that the server sends becomes frames of rows, unchanged. A chunk is done when the command has
completed and the server's count of rows equals the received ones. Until then its rows are held in memory or,
if that is too much, in a unit of the log that is not closed yet. A chunk that could not be read in this
window is postponed to a later one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, Stopped, TailraceError
from tailrace.protocol import frames
from tailrace.sources.postgres.connection.backend_messages import lines
from tailrace.sources.postgres.connection.errors import condition_failure, connection_lost, of_condition
from tailrace.sources.postgres.connection.server import ExportedSnapshot
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.connection.transport import Transport
from tailrace.sources.postgres.schema.catalog import PublishedTable
from tailrace.sources.postgres.snapshot.chunk_planner import CHUNK_BYTES_MAX
from tailrace.sources.postgres.snapshot.chunk_writer import ChunkWriter, Postponed, RowFrame, Unit
from tailrace.sources.postgres.snapshot.chunks import Chunk
from tailrace.sources.postgres.snapshot.exported_snapshot import (
    Observer,
    enter,
    lock_and_check,
    release_locks,
)
from tailrace.sources.progress import TableProgress

#: Size, in bytes, after which a frame of rows ends at the next line end.
FRAME_BYTES = 1024 * 1024

#: Longest silence of the server, in seconds: it may compute for long (a filter, a slow disk); TCP notices
#: if it ends.
SILENCE_S_MAX = 3600.0

#: Longest silence, in seconds, while a user's condition is evaluated: meanwhile, the stream may wait.
CONDITION_S_MAX = 300.0

#: In the context of an error that ended a COPY with a condition: the table.
COPIED = "copied"

RECEIVE_WAIT_S = 0.2

#: Bytes of a chunk that each of several readers of one unit holds in memory: they write in turns.
SHARED_HELD_BYTES = 4 * 1024 * 1024

#: Bytes, beyond a chunk's planned size, that a reader holds before it opens the chunk's unit.
HELD_BYTES_MORE = 8 * 1024 * 1024

_QUEUE_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """A chunk to be read, and the unit into which it is written."""

    table: PublishedTable
    chunk: Chunk
    unit: Unit
    where: str
    progress: TableProgress
    conditional: bool = False  # `where` contains a user's condition for this snapshot

    @property
    def shared(self) -> bool:
        """Whether the unit has other chunks, too."""
        return self.unit.parts > 1

    def command(self) -> str:
        """Return the COPY that reads the chunk."""
        filters = [text for text in (self.table.row_filter, self.where) if text]
        # The stream continues with the same Relation message, which has the columns that are left out.
        columns = [None if column.left_out else column.name for column in self.table.columns]
        return self.chunk.copy_command(self.table.name, columns, filters)


class ChunkCopy:
    """Reads one chunk over a session whose transaction uses the window's snapshot.

    :param write: called with frames of rows in order, each with its number of rows: whole lines in
        COPY's format, with ordinal 0. The last ones only after the server's count was found correct.
    :param held_bytes: how much of a chunk is held in memory before it is written.
    """

    def __init__(
        self,
        session: Session,
        job: ChunkJob,
        write: Callable[[Sequence[RowFrame]], None],
        stopping: threading.Event,
        *,
        row_bytes_max: int,
        held_bytes: int,
    ) -> None:
        self._session = session
        self._encoding = session.row_encoding
        self._job = job
        self._table = job.table.qualified_name
        self._write_frames = write
        self._stopping = stopping
        self._row_bytes_max = row_bytes_max
        self._held_bytes = held_bytes
        self._frame = _new_frame()
        self._held: list[RowFrame] = []
        self._size = 0
        self._rows = 0

    def run(self) -> None:
        """Read the chunk and write it.

        :raises TailraceError: `SNAPSHOT_FAILED` if the count is wrong, or the user's condition fails
            or takes too long; `SOURCE_UNREACHABLE`; the server's error; the errors of `write`.
        :raises Stopped: if the task was asked to stop.
        """
        transport = self._session.copying(self._row_bytes_max, f"copy {self._table}")
        began = time.monotonic()
        try:
            command = self._session.encoded(self._job.command())
            transport.start(command, SILENCE_S_MAX, lambda: self._check(began))
            said = self._receive(transport)
        except TailraceError as error:
            if not self._job.conditional:
                raise
            found = of_condition(error, f"copy {self._table}")
            raise found.changed({COPIED: self._table}) from None
        finally:
            transport.release()
        if said != self._rows:
            raise self._failure(f"the server counts {said} rows, {self._rows} were received")
        self._write()

    def _receive(self, transport: Transport) -> int:
        """Receive the rows; return the server's count of them."""
        said: int | None = None
        heard_at = time.monotonic()
        while True:
            received = transport.receive(RECEIVE_WAIT_S)
            self._check(heard_at if received.nothing else time.monotonic())
            if received.nothing:
                continue
            if len(received.data):
                self._frame += received.data.data
                if len(self._frame) >= FRAME_BYTES:
                    self._cut()
            elif received.message is not None:
                kind, body = received.message
                if kind == b"C":
                    said = int(body.rstrip(b"\0").rpartition(b" ")[2])
                elif kind == b"Z":
                    break
            # Only waiting for the source is silence, not the time that the log needed.
            heard_at = time.monotonic()
        self._cut()
        if len(self._frame) > frames.SNAPSHOT_TEXT_AT or said is None:
            raise self._failure("the rows end within a line or without the server's count")
        return said

    def _cut(self) -> None:
        """Make a frame of the complete lines that were received, and keep the rest."""
        frame = self._frame
        rows, end = lines(np.frombuffer(frame, np.uint8)[frames.SNAPSHOT_TEXT_AT :])
        end += frames.SNAPSHOT_TEXT_AT
        if len(frame) - end > self._row_bytes_max:
            raise TailraceError(
                Kind.FRAME_TOO_LARGE,
                f"copy {self._table}: a row is larger than {self._row_bytes_max} bytes",
                "raise source.frame_bytes_max, if there is memory for such a row",
                {"table": self._table},
            )
        if not rows:
            return
        self._frame = _new_frame()
        self._frame += memoryview(frame)[end:]
        del frame[end:]
        if self._encoding is not None:
            frame[frames.SNAPSHOT_TEXT_AT :] = self._encoding.rows(bytes(frame[frames.SNAPSHOT_TEXT_AT :]))
        frames.put_rows_head(frame, self._job.table.oid, rows)
        self._held.append((frame, rows))
        self._size += len(frame)
        self._rows += rows
        self._job.progress.add(rows)
        if self._size > self._held_bytes:
            self._write()

    def _write(self) -> None:
        held, self._held, self._size = self._held, [], 0
        self._write_frames(held)

    @property
    def rows(self) -> int:
        """Number of rows received so far."""
        return self._rows

    def _check(self, heard_at: float) -> None:
        """Raise `Stopped` if the reader is to stop, or an error if the server was silent for too long."""
        if self._stopping.is_set():
            raise Stopped
        silence_s_max = CONDITION_S_MAX if self._job.conditional else SILENCE_S_MAX
        if time.monotonic() - heard_at <= silence_s_max:
            return
        attempted, found = f"copy {self._table}", f"nothing came for {silence_s_max:g} s"
        if self._job.conditional:
            raise condition_failure(attempted, found)
        raise connection_lost(attempted, found)

    def _failure(self, found: str) -> TailraceError:
        return TailraceError(
            Kind.SNAPSHOT_FAILED,
            f"copy {self._table}: {found}",
            "nothing of this chunk is kept; it is read again at the next start",
            {"table": self._table, "chunk": self._job.chunk.number},
        )


def _new_frame() -> bytearray:
    return bytearray(frames.SNAPSHOT_TEXT_AT)


@dataclass(slots=True)
class Postponement:
    """A chunk that could not be read in its window."""

    job: ChunkJob
    planned_again: bool


class ChunkReaders:
    """The readers of one window, one for each connection, each on its own thread.

    :param lock_wait_s: a table that can't be locked within this time is postponed to a later window.
    """

    def __init__(
        self,
        source: PostgresSource,
        exported: ExportedSnapshot,
        units: ChunkWriter,
        observer: Observer,
        stopping: threading.Event,
        *,
        lock_wait_s: float,
    ) -> None:
        self._source = source
        self._exported = exported
        self._units = units
        self._observer = observer
        self._over = threading.Event()  # set when the window has ended, with or without an error
        self._stopping = stopping
        self._lock_wait_s = lock_wait_s
        self._count = source.snapshot_connections
        self._jobs: queue.Queue[ChunkJob | None] = queue.Queue(maxsize=self._count)
        self._opened = threading.Semaphore(0)
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self.postponed: list[Postponement] = []

    def read(self, jobs: Iterable[ChunkJob]) -> None:
        """Read all `jobs`; the calling thread iterates over them as readers become free.

        Afterwards, `postponed` has those that were postponed, and the log has nothing of a unit
        that failed.

        :raises TailraceError: the error that ended a reader. Units that were closed before stay.
        :raises Stopped: if the task was asked to stop.
        """
        threads = [
            threading.Thread(target=self._run, name=f"tailrace-snapshot-{number}", daemon=True)
            for number in range(self._count)
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in threads:
                self._wait(lambda: self._opened.acquire(timeout=_QUEUE_WAIT_S))
            for job in jobs:
                self._put(job)
            for _ in threads:
                self._put(None)
            for thread in threads:
                self._wait(lambda thread=thread: _has_ended(thread))  # type: ignore[misc]
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            for thread in threads:
                thread.join()
            self._units.discard()
        if self.error is not None:
            raise self.error

    def _put(self, job: ChunkJob | None) -> None:
        def put() -> bool:
            try:
                self._jobs.put(job, timeout=_QUEUE_WAIT_S)
            except queue.Full:
                return False
            return True

        self._wait(put)

    def _wait(self, done: Callable[[], bool]) -> None:
        while not done():
            if self._over.is_set() or self._stopping.is_set():
                raise self.error or Stopped

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            # Readers stop when another one fails: the first error is the cause.
            if self.error is None or isinstance(self.error, Stopped):
                self.error = error
        self._over.set()
        self._units.fail()

    def _run(self) -> None:
        try:
            session = self._connect()
            try:
                self._opened.release()
                while (job := self._next()) is not None:
                    if not self._read_one(session, job):
                        session.close()
                        session = self._connect()
            finally:
                session.close()
        except BaseException as error:  # noqa: BLE001 - raised again by `read`
            self._fail(error)

    def _connect(self) -> Session:
        session = Session.connect(self._source, self._over, statement_s=0, lock_wait_s=self._lock_wait_s)
        try:
            enter(session, self._exported)
        except BaseException:
            session.close()
            raise
        return session

    def _next(self) -> ChunkJob | None:
        while not (self._over.is_set() or self._stopping.is_set()):
            try:
                return self._jobs.get(timeout=_QUEUE_WAIT_S)
            except queue.Empty:
                continue
        raise Stopped

    def _read_one(self, session: Session, job: ChunkJob) -> bool:
        """Read a chunk into its unit, or postpone it; return whether the session is still usable."""

        def write(rows: Sequence[RowFrame]) -> None:
            self._units.write(job.unit, job.table, rows)

        held_bytes = CHUNK_BYTES_MAX + HELD_BYTES_MORE
        copy = ChunkCopy(
            session,
            job,
            write,
            self._over,
            row_bytes_max=self._source.frame_bytes_max,
            held_bytes=min(held_bytes, SHARED_HELD_BYTES) if job.shared else held_bytes,
        )
        copies = False
        try:
            self._observer.check_slot()
            if job.unit.given_up:
                raise Postponed
            lock_and_check(session, self._observer, job.chunk.relation)
            copies = True
            copy.run()
            self._units.part_done(job.unit, copy.rows)
        except Postponed as postponed:
            if copies:
                job.progress.add(-copy.rows)
            self._units.give_up(job.unit)
            with self._lock:
                self.postponed.append(Postponement(job, postponed.planned_again))
            if copies:
                return False  # the session is in the middle of its COPY
        else:
            job.progress.add(0, chunks=1)
        release_locks(session)
        return True


def _has_ended(thread: threading.Thread) -> bool:
    thread.join(_QUEUE_WAIT_S)
    return not thread.is_alive()
