"""Reading out of the snapshot that a slot's creation exported.

The snapshot is of the database as of the LSN `lsn`: every transaction whose commit record lies
before it, none after. So is every row that is read in the window, whichever connection read
it, and that is where in the log the rows belong.

A chunk is read under a lock that lasts as long as its COPY (it is rolled back to a savepoint
then), the same that any SELECT takes. Under that lock it is made sure that the table is what it
was when its chunks were planned, and that it was not rewritten since the snapshot: a rewritten
table looks empty to an older snapshot.
"""

from __future__ import annotations

import threading

from tailrace.errors import Kind, TailraceError
from tailrace.sources.postgres.connection import server
from tailrace.sources.postgres.connection.errors import LOCK_NOT_AVAILABLE, UNDEFINED_TABLE, connection_lost
from tailrace.sources.postgres.connection.quoting import quote_literal
from tailrace.sources.postgres.connection.server import ExportedSnapshot
from tailrace.sources.postgres.connection.session import Row, Session
from tailrace.sources.postgres.schema.catalog import relation_row
from tailrace.sources.postgres.snapshot.chunk_writer import Postponed
from tailrace.sources.postgres.snapshot.chunks import ChunkedRelation

#: How long a reader waits for a lock on a table: nothing else waits, or the stream does, or all do, where
#: the tables must be read at one point.
LOCK_WAIT_S = 5.0
LOCK_WAIT_BESIDE_STREAM_S = 1.0
LOCK_WAIT_AT_ONE_POINT_S = 60.0

#: What a server says, by its version, of a snapshot whose exporting transaction has ended.
_SNAPSHOT_GONE = frozenset({"22023", "42704", "55000"})

#: What comes after this savepoint of a window's transaction is locks.
_LOCKS = "locks"


def enter(session: Session, exported: ExportedSnapshot) -> None:
    """Begin a transaction of `session` in the snapshot.

    :raises TailraceError: `SOURCE_UNREACHABLE` also if the connection that exports it is gone.
    """
    session.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "begin the snapshot")
    attempted = "take over the snapshot"
    try:
        session.run(f"SET TRANSACTION SNAPSHOT {quote_literal(exported.name)}", attempted)
    except TailraceError as error:
        if error.context.get("sqlstate") not in _SNAPSHOT_GONE:
            raise
        raise connection_lost(attempted, "the connection that exports it has ended") from None
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

    def name_of(self, oid: int) -> tuple[str, str] | None:
        """Return what a relation is called as of now, None if it is gone."""
        row = self.relation(oid)
        return None if row is None else row.name

    def relation(self, oid: int) -> Row | None:
        """Return a relation as of now, as `relation_row`."""
        with self._lock:
            return relation_row(self._session, oid)


def lock_and_check(session: Session, observer: Observer, relation: ChunkedRelation) -> None:
    """Lock a relation of a table against changes of it, until `release_locks`, and make sure that it is
    what it was when it was planned, and has the rows that the snapshot of `session` sees.

    :raises Postponed: if not, or if it can't be locked soon.
    """
    try:
        session.run(f"SELECT FROM ONLY {relation.sql} WHERE false", "lock the table against changes of it")
    except TailraceError as error:
        if error.context.get("sqlstate") == LOCK_NOT_AVAILABLE:
            raise Postponed from None
        if error.context.get("sqlstate") != UNDEFINED_TABLE:
            raise
        raise Postponed(planned_anew=True) from None
    now = observer.relation(relation.oid)
    if now is None or now["shape"] != relation.shape:
        raise Postponed(planned_anew=True)
    seen = relation_row(session, relation.oid)
    if seen is None or now["file"] != seen["file"]:
        raise Postponed
