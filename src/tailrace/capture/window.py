"""A window: chunks read by several connections out of one exported snapshot.

The snapshot is of the database as of the LSN `lsn`: every transaction whose commit record lies
before it, none after. So is every row that is read in the window, whichever connection read
it, and that is where in the log the rows belong.

A chunk is read under a lock that lasts as long as its COPY (it is rolled back to a savepoint
then), the same that any SELECT takes. Under that lock it is made sure that the table is what it
was when its chunks were planned, and that it was not rewritten since the snapshot: a rewritten
table looks empty to an older snapshot.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass

from tailrace.capture import server
from tailrace.capture.catalog import file_of, shape_of
from tailrace.capture.copying import ChunkCopy, ChunkJob
from tailrace.capture.session import Session, Stopped, quote_literal
from tailrace.capture.units import Postponed, UnitWriter
from tailrace.config.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError

#: What a reader holds of a chunk beyond its planned size before it opens the chunk's unit.
HELD_BYTES_MORE = 8 * 1024 * 1024

UNDEFINED_TABLE = "42P01"

_QUEUE_WAIT_S = 0.1

#: What comes after this savepoint of a window's transaction is locks.
_LOCKS = "locks"


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported snapshot and the LSN that it is exact for."""

    lsn: int
    snapshot: str


@dataclass(slots=True)
class Postponement:
    """A chunk that could not be read in its window."""

    job: ChunkJob
    planned_anew: bool


def enter(session: Session, exported: Exported) -> None:
    """Begin a transaction of `session` in the snapshot."""
    session.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "begin the snapshot")
    session.run(f"SET TRANSACTION SNAPSHOT {quote_literal(exported.snapshot)}", "take over the snapshot")
    session.run(f"SAVEPOINT {_LOCKS}", "begin the snapshot")


def release_locks(session: Session) -> None:
    """Let go of the locks that reading took in the transaction, which goes on."""
    session.run(f"ROLLBACK TO SAVEPOINT {_LOCKS}", "let go of the tables")


def leave(session: Session) -> None:
    """End the transaction."""
    session.run("COMMIT", "end the snapshot")


class Observer:
    """Looks at slot and tables as they are now, for all readers of a window. Any thread.

    :param slot: None: there is none that must live.
    """

    def __init__(self, session: Session, slot: str | None) -> None:
        self._session = session
        self._slot = slot
        self._lock = threading.Lock()

    def check_slot(self) -> None:
        """Make sure that the stream behind the snapshot is still to be had.

        :raises TailraceError: `SLOT_MISSING`, `SLOT_INVALIDATED`.
        """
        if self._slot is None:
            return
        with self._lock:
            slot = server.slot_facts(self._session, self._slot)
        if slot is None or slot.invalidation:
            raise TailraceError(
                Kind.SLOT_MISSING if slot is None else Kind.SLOT_INVALIDATED,
                f"take the snapshot: the slot {self._slot!r} "
                + ("was dropped" if slot is None else f"was invalidated ({slot.invalidation})")
                + " meanwhile",
                "raise max_slot_wal_keep_size, then begin a new log with a new snapshot: set log.path to a "
                "new directory" + ("" if slot is None else " and drop the slot"),
                {"slot": self._slot},
            )

    def shape(self, oid: int) -> tuple[str | None, str | None]:
        """Return a relation's shape and file as of now, None if it is gone."""
        with self._lock:
            return shape_of(self._session, oid), file_of(self._session, oid)


class Readers:
    """Several connections that read chunks of one window.

    :param connect: opens one more connection.
    """

    def __init__(
        self,
        source: PostgresSource,
        exported: Exported,
        units: UnitWriter,
        observer: Observer,
        stopping: threading.Event,
    ) -> None:
        self._source = source
        self._exported = exported
        self._units = units
        self._observer = observer
        self._stopping = stopping
        self._jobs: queue.Queue[ChunkJob | None] = queue.Queue(maxsize=source.snapshot_connections)
        self._entered = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self.error: BaseException | None = None
        self.postponed: list[Postponement] = []

    def read(self, jobs: Iterable[ChunkJob], entered: Callable[[], None] = lambda: None) -> None:
        """Read all of `jobs`, which is run through on the calling thread as readers get free.

        Those that were postponed are in `postponed` afterwards; what a unit had in the log when
        it failed is not there any more.

        :param entered: called once all readers are in the snapshot.
        :raises TailraceError: what ended a reader. Units that were closed before stay.
        :raises Stopped: if stopping was asked for.
        """
        threads = [
            threading.Thread(target=self._run, name=f"tailrace-snapshot-{number}", daemon=True)
            for number in range(self._source.snapshot_connections)
        ]
        for thread in threads:
            thread.start()
        try:
            for _ in threads:
                self._wait(lambda: self._entered.acquire(timeout=_QUEUE_WAIT_S))
            entered()
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
            # That one stopped because another failed is no news.
            if self.error is None or isinstance(self.error, Stopped):
                self.error = error
        self._over.set()
        self._units.fail()

    def _run(self) -> None:
        try:
            session = self._connect()
            self._entered.release()
            try:
                while (job := self._next()) is not None:
                    session = self._read_one(session, job)
                leave(session)
            finally:
                session.close()
        except BaseException as error:  # noqa: BLE001 - raised again by `read`
            self._fail(error)

    def _connect(self) -> Session:
        session = Session.connect(self._source, self._over)
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

    def _read_one(self, session: Session, job: ChunkJob) -> Session:
        """Read a chunk; return the session to go on with."""
        copy = ChunkCopy(
            session,
            job,
            self._units,
            self._over,
            lsn=self._exported.lsn,
            row_bytes_max=self._source.frame_bytes_max,
            held_bytes=self._source.snapshot_chunk_bytes + HELD_BYTES_MORE,
        )
        in_copy = False
        try:
            self._observer.check_slot()
            if job.unit.given_up:
                raise Postponed
            self._lock_and_check(session, job)
            in_copy = True
            copy.run()
        except Postponed as postponed:
            job.progress.add(-copy.rows)
            self._units.give_up(job.unit)
            with self._lock:
                self.postponed.append(Postponement(job, postponed.planned_anew))
            if in_copy:
                session.close()
                return self._connect()
        else:
            job.progress.add(0, chunks=1)
        release_locks(session)
        return session

    def _lock_and_check(self, session: Session, job: ChunkJob) -> None:
        stretch = job.chunk.stretch
        try:
            session.run(f"SELECT FROM ONLY {stretch.sql} WHERE false", "lock the table against changes of it")
        except TailraceError as error:
            if error.context.get("sqlstate") != UNDEFINED_TABLE:
                raise
            raise Postponed(planned_anew=True) from None
        shape, file = self._observer.shape(stretch.oid)
        if shape != stretch.shape:
            raise Postponed(planned_anew=True)
        if file != file_of(session, stretch.oid):
            raise Postponed


def _has_ended(thread: threading.Thread) -> bool:
    thread.join(_QUEUE_WAIT_S)
    return not thread.is_alive()


def observing(source: PostgresSource, stopping: threading.Event) -> closing[Session]:
    """Return a connection for an `Observer`, to be closed by `with`."""
    return closing(Session.connect(source, stopping))
