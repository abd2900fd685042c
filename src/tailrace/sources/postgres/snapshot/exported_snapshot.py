"""Reads from the snapshot that a slot's creation exported.

The snapshot shows the database as of the LSN `lsn`: every transaction whose commit record lies
before it, and none after it. So every connection of the window reads the rows as of this LSN,
and that is their place in the log.

A chunk is read under the lock that any SELECT takes, held until its COPY ends (a rollback to a
savepoint releases it). Under that lock it is checked that the table has not changed since its
chunks were planned, and was not rewritten since the snapshot: to an older snapshot, a rewritten
table looks empty.
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

#: How many seconds a reader waits for a lock on a table: if nothing else waits; if the stream waits
#: meanwhile; and if all tables must be read as of one point.
LOCK_WAIT_S = 5.0
LOCK_WAIT_BESIDE_STREAM_S = 1.0
LOCK_WAIT_AT_ONE_POINT_S = 60.0

#: SQLSTATEs, which vary by server version, for a snapshot whose exporting transaction has ended.
_SNAPSHOT_GONE = frozenset({"22023", "42704", "55000"})

#: Savepoint of a window's transaction, to which it is rolled back to release locks.
_LOCKS = "locks"


def enter(session: Session, exported: ExportedSnapshot) -> None:
    """Begin a transaction of `session` in the snapshot.

    :raises TailraceError: `SOURCE_UNREACHABLE` also if the connection that exported it has ended.
    """
    session.run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", "begin the snapshot")
    attempted = "import the snapshot"
    try:
        session.run(f"SET TRANSACTION SNAPSHOT {quote_literal(exported.name)}", attempted)
    except TailraceError as error:
        if error.context.get("sqlstate") not in _SNAPSHOT_GONE:
            raise
        raise connection_lost(attempted, "the connection that exports it has ended") from None
    session.run(f"SAVEPOINT {_LOCKS}", "begin the snapshot")


def release_locks(session: Session) -> None:
    """Release the locks that reading took in the transaction; the transaction stays open."""
    session.run(f"ROLLBACK TO SAVEPOINT {_LOCKS}", "release the tables")


def leave(session: Session) -> None:
    """End the transaction."""
    session.run("COMMIT", "end the snapshot")


class Observer:
    """Queries the present state of slot and tables for all readers of a window. Any thread.

    :param slot: the slot that must stay valid; None: there is none.
    """

    def __init__(self, session: Session, slot: str | None) -> None:
        self._session = session
        self._slot = slot
        self._lock = threading.Lock()

    def check_slot(self) -> None:
        """Check that the stream after the snapshot is still available.

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
        """Return a relation's present schema and name; None if it was dropped."""
        row = self.relation(oid)
        return None if row is None else row.name

    def relation(self, oid: int) -> Row | None:
        """Return a relation's present row, as `relation_row` does."""
        with self._lock:
            return relation_row(self._session, oid)


def lock_and_check(session: Session, observer: Observer, relation: ChunkedRelation) -> None:
    """Lock a relation of a table against DDL, until `release_locks`, and check that it is as it was when
    it was planned, and that it has the rows which the snapshot of `session` sees.

    :raises Postponed: if not, or if it can't be locked soon.
    """
    try:
        session.run(f"SELECT FROM ONLY {relation.sql} WHERE false", "lock the table against changes of it")
    except TailraceError as error:
        if error.context.get("sqlstate") == LOCK_NOT_AVAILABLE:
            raise Postponed from None
        if error.context.get("sqlstate") != UNDEFINED_TABLE:
            raise
        raise Postponed(planned_again=True) from None
    now = observer.relation(relation.oid)
    if now is None or now["shape"] != relation.shape:
        raise Postponed(planned_again=True)
    seen = relation_row(session, relation.oid)
    if seen is None or now["file"] != seen["file"]:
        raise Postponed
