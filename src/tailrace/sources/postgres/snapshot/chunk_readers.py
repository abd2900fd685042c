"""Several readers of one window, each of which reads chunk after chunk over its own connection.

A chunk that could not be read in this window is left to a later one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Stopped
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.snapshot.chunk_writer import ChunkWriter, Postponed, RowFrame
from tailrace.sources.postgres.snapshot.copy import SHARED_HELD_BYTES, ChunkCopy, ChunkJob
from tailrace.sources.postgres.snapshot.exported_snapshot import (
    Exported,
    Observer,
    enter,
    lock_and_check,
    release_locks,
)

#: What a reader holds of a chunk beyond its planned size before it opens the chunk's unit.
HELD_BYTES_MORE = 8 * 1024 * 1024

_QUEUE_WAIT_S = 0.1


@dataclass(slots=True)
class Postponement:
    """A chunk that could not be read in its window."""

    job: ChunkJob
    planned_anew: bool


@dataclass(frozen=True, slots=True)
class Window:
    """What all readers of a window share.

    :ivar over: set when the window is, however it ended.
    :ivar lock_wait_s: a table that can't be locked within it is left to a later window.
    """

    source: PostgresSource
    exported: Exported
    units: ChunkWriter
    observer: Observer
    over: threading.Event
    lock_wait_s: float


class ChunkReader:
    """Reads one chunk after another over a connection that has the window's snapshot. One thread."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._session = self._connect()

    def read(self, job: ChunkJob) -> None:
        """Read a chunk into its unit, and count it.

        :raises Postponed: if it can't be read in this window.
        :raises TailraceError: as `ChunkCopy.run`.
        :raises Stopped: if the window is over, or another chunk failed.
        """
        window = self._window

        def write(rows: Sequence[RowFrame]) -> None:
            head = job.head(window.exported.lsn, window.observer.name_of)
            window.units.write(job.unit, job.table.oid, head, rows)

        held_bytes = window.source.snapshot_chunk_bytes + HELD_BYTES_MORE
        copy = ChunkCopy(
            self._session,
            job,
            write,
            window.over,
            row_bytes_max=window.source.frame_bytes_max,
            held_bytes=min(held_bytes, SHARED_HELD_BYTES) if job.shared else held_bytes,
        )
        try:
            lock_and_check(self._session, window.observer, job.chunk.stretch)
        except Postponed:
            release_locks(self._session)
            raise
        try:
            copy.run()
            window.units.part_done(job.unit, copy.rows)
        except Postponed:
            job.progress.add(-copy.rows)
            # The session is in the middle of its COPY.
            self._session.close()
            self._session = self._connect()
            raise
        release_locks(self._session)

    def close(self) -> None:
        """Close the connection."""
        self._session.close()

    def _connect(self) -> Session:
        window = self._window
        session = Session.connect(window.source, window.over, statement_s=0, lock_wait_s=window.lock_wait_s)
        try:
            enter(session, window.exported)
        except BaseException:
            session.close()
            raise
        return session


class ChunkReaders:
    """As many readers of one window as there are to be connections."""

    def __init__(
        self,
        source: PostgresSource,
        exported: Exported,
        units: ChunkWriter,
        observer: Observer,
        stopping: threading.Event,
        *,
        lock_wait_s: float,
    ) -> None:
        self._over = threading.Event()
        self._window = Window(source, exported, units, observer, self._over, lock_wait_s)
        self._stopping = stopping
        self._count = source.snapshot_connections
        self._jobs: queue.Queue[ChunkJob | None] = queue.Queue(maxsize=self._count)
        self._opened = threading.Semaphore(0)
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self.postponed: list[Postponement] = []

    def read(self, jobs: Iterable[ChunkJob]) -> None:
        """Read all of `jobs`, which is run through on the calling thread as readers get free.

        Those that were postponed are in `postponed` afterwards; what a unit had in the log when
        it failed is not there any more.

        :raises TailraceError: what ended a reader. Units that were closed before stay.
        :raises Stopped: if stopping was asked for.
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
            self._window.units.discard()
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
            # That one stopped because another failed is no news.
            if self.error is None or isinstance(self.error, Stopped):
                self.error = error
        self._over.set()
        self._window.units.fail()

    def _run(self) -> None:
        try:
            with closing(ChunkReader(self._window)) as reader:
                self._opened.release()
                while (job := self._next()) is not None:
                    self._read_one(reader, job)
        except BaseException as error:  # noqa: BLE001 - raised again by `read`
            self._fail(error)

    def _next(self) -> ChunkJob | None:
        while not (self._over.is_set() or self._stopping.is_set()):
            try:
                return self._jobs.get(timeout=_QUEUE_WAIT_S)
            except queue.Empty:
                continue
        raise Stopped

    def _read_one(self, reader: ChunkReader, job: ChunkJob) -> None:
        try:
            self._window.observer.check_slot()
            if job.unit.given_up:
                raise Postponed
            reader.read(job)
        except Postponed as postponed:
            self._window.units.give_up(job.unit)
            with self._lock:
                self.postponed.append(Postponement(job, postponed.planned_anew))
        else:
            job.progress.add(0, chunks=1)


def _has_ended(thread: threading.Thread) -> bool:
    thread.join(_QUEUE_WAIT_S)
    return not thread.is_alive()
