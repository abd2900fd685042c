"""Random transactions of several sessions, interleaved statement by statement, from one seed.

One thread drives all sessions, so the order of commits is known, and the same seed makes the
same statements. A session that would wait for another fails at once (`lock_timeout`) and
rolls back, to a savepoint if it has one.

At its end each transaction writes a logical message `tx` with its number in the order of
commits and its number of changes; each schema change writes a message `ddl` that describes it,
at its place in the stream (see `fold`). Messages of what is rolled back are never sent.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import errors

from tests.support.differential import kinds, statements
from tests.support.differential.ddl import DDL, LAKE_DDL
from tests.support.differential.statements import Cursor
from tests.support.differential.tables import Table, create_statements, random_table

#: Errors that a random statement may raise; the transaction, or a part of it, is then rolled back.
EXPECTED = (
    errors.UniqueViolation,
    errors.CardinalityViolation,
    errors.LockNotAvailable,
    errors.DeadlockDetected,
    errors.ObjectInUse,
    errors.ObjectNotInPrerequisiteState,
    errors.NumericValueOutOfRange,
    errors.FeatureNotSupported,
)
SESSIONS = 4


@dataclass
class Session:
    """One connection, and its open transaction.

    :ivar tables: as this session sees them, with its own schema changes.
    :ivar savepoints: (changes, tables) to return to.
    """

    connection: psycopg.Connection[Any]
    tables: dict[int, Table]
    steps: Iterator[Callable[[Cursor], int]] | None = None
    changes: int = 0
    has_ddl: bool = False
    ends_well: bool = True
    savepoints: list[tuple[int, dict[int, Table]]] = field(default_factory=list)


class Workload:
    """The sessions and the tables of one database. Not thread-safe.

    :param ddl: names of `ddl.LAKE_DDL`: which schema changes happen.
    :param for_lakes: see `tables.random_table`.
    :param publication: new tables are added to it.
    """

    def __init__(
        self, dsn: str, seed: int, publication: str, ddl: Collection[str] = (), *, for_lakes: bool = False
    ) -> None:
        self.rng = random.Random(f"workload {seed}")
        self.committed: list[int] = []  # number of changes of each transaction, in the order of commits
        self.tables: dict[int, Table] = {}
        self.for_lakes = for_lakes
        self.publication = publication
        #: No schema change and no TRUNCATE begins while this is set.
        self.is_calm = False
        #: Called before a table is dropped.
        self.may_drop: Callable[[], bool] = lambda: not for_lakes
        self._ddl = [{**DDL, **LAKE_DDL}[name] for name in sorted(ddl)]
        self._names = 0
        self._dsn = dsn
        with psycopg.connect(dsn, autocommit=True) as connection:
            for statement in kinds.TYPES:
                connection.execute(statement)
            for _ in range(self.rng.randint(1, 6)):
                table = self.create(statements.Cursor(connection), self.new_table())
                self.tables[table.oid] = table
        self._sessions = [self._session() for _ in range(SESSIONS)]

    # ------------------------------------------------------------------ for tests

    def run(self, transactions: int) -> None:
        """Go on until so many more transactions are committed; others stay open then."""
        goal = len(self.committed) + transactions
        while len(self.committed) < goal:
            self.step()

    def step(self) -> None:
        """Run one statement of one session."""
        self._step(self.rng.choice(self._sessions))

    def rest(self, *, all_ended: bool = False) -> None:
        """End the transactions that lock whole tables, or all of them."""
        for session in self._sessions:
            while session.steps is not None and (session.has_ddl or all_ended):
                self._step(session)

    def touch(self) -> None:
        """Commit a new row in every table, so that schema changes show in the stream."""
        session = Session(self._sessions[0].connection, dict(self.tables))
        assert session.connection.info.transaction_status.name == "IDLE"
        cursor = Cursor(session.connection)
        cursor.execute("begin")
        for table in self.tables.values():
            session.changes += self._insert(cursor, table)
        self._end(session, cursor)

    def close(self) -> None:
        for session in self._sessions:
            session.connection.close()

    # ------------------------------------------------------------------ for statements

    def new_table(self) -> Table:
        self._names += 1
        return random_table(self.rng, self._names, for_lakes=self.for_lakes)

    def create(self, cursor: Cursor, table: Table) -> Table:
        """Make a table; return it with its oid."""
        for statement in create_statements(table):
            cursor.execute(statement)
        oid = cursor.one("select %s::regclass::oid::bigint", [table.sql])
        return Table(oid, *(getattr(table, name) for name in Table.__slots__[1:]))

    # ------------------------------------------------------------------ inside

    def _session(self) -> Session:
        connection = psycopg.connect(
            self._dsn, autocommit=True, prepare_threshold=None, options="-c lock_timeout=10ms"
        )
        return Session(connection, dict(self.tables))

    def _step(self, session: Session) -> None:
        cursor = Cursor(session.connection)
        try:
            if session.steps is None:
                self._begin(session, cursor)
                return
            step = next(session.steps, None)
            if step is None:
                self._end(session, cursor)
            else:
                session.changes += step(cursor)
        except EXPECTED:
            self._undo(session, cursor)

    def _begin(self, session: Session, cursor: Cursor) -> None:
        session.tables, session.changes, session.has_ddl = dict(self.tables), 0, False
        session.savepoints.clear()
        session.ends_well = self.rng.random() < 0.9
        # One schema change at a time: two could block each other for ever.
        may_alter = (
            bool(self._ddl) and not self.is_calm and not any(other.has_ddl for other in self._sessions)
        )
        session.has_ddl = may_alter and self.rng.random() < (0.25 if self.for_lakes else 0.12)
        session.steps = self._plan(session)
        cursor.execute("begin")

    def _plan(self, session: Session) -> Iterator[Callable[[Cursor], int]]:
        count = self.rng.choice((1, 1, 2, 3, 5, 8))
        alters_at = self.rng.randrange(count) if session.has_ddl else -1
        for at in range(count):
            if self.rng.random() < 0.15:
                yield lambda cursor: self._savepoint(session, cursor)
            if at == alters_at:
                yield lambda cursor: self._alter(session, cursor)
            table = self.rng.choice(list(session.tables.values()))
            others = [] if self.is_calm else list(session.tables.values())
            yield statements.random_act(self.rng, table, others)
            if session.savepoints and self.rng.random() < 0.2:
                yield lambda cursor: self._back(session, cursor)

    def _insert(self, cursor: Cursor, table: Table) -> int:
        gone = 0
        for attempt in range(100):  # the key may exist already, and so may all keys of its type
            if attempt >= 20 and table.is_updatable:
                gone += statements.delete(self.rng, table, cursor)
            cursor.execute("savepoint one")
            try:
                count = statements.insert(self.rng, table, cursor)
                cursor.execute("set constraints all immediate")
                if count:
                    return gone + count
            except EXPECTED:
                cursor.execute("rollback to savepoint one")
        raise AssertionError(f"no row for {table.name}")

    def _alter(self, session: Session, cursor: Cursor) -> int:
        act = self.rng.choice(self._ddl)
        told = act(self, cursor, session.tables)
        for fact in told:
            cursor.execute("select pg_logical_emit_message(true, 'ddl', %s)", [json.dumps(fact)])
        return 0

    def _savepoint(self, session: Session, cursor: Cursor) -> int:
        cursor.execute(f"savepoint s{len(session.savepoints)}")
        session.savepoints.append((session.changes, dict(session.tables)))
        return 0

    def _back(self, session: Session, cursor: Cursor) -> int:
        """Roll back to the newest savepoint; it is kept half of the time."""
        before = session.changes
        changes, tables = session.savepoints[-1]
        cursor.execute(f"rollback to savepoint s{len(session.savepoints) - 1}")
        session.tables = dict(tables)
        if self.rng.random() < 0.5:
            cursor.execute(f"release savepoint s{len(session.savepoints) - 1}")
            session.savepoints.pop()
        return changes - before

    def _undo(self, session: Session, cursor: Cursor) -> None:
        """After an error roll back to a savepoint, or the whole transaction."""
        if session.savepoints and session.connection.info.transaction_status.name == "INERROR":
            session.changes += self._back(session, cursor)
            return
        cursor.execute("rollback")
        session.steps, session.has_ddl = None, False

    def _end(self, session: Session, cursor: Cursor) -> None:
        if not session.ends_well:
            cursor.execute("rollback")
        else:
            told = json.dumps({"number": len(self.committed), "changes": session.changes})
            cursor.execute("select pg_logical_emit_message(true, 'tx', %s)", [told])
            cursor.execute("commit")
            self.committed.append(session.changes)
            self._adopt(session)
        session.steps, session.has_ddl = None, False

    def _adopt(self, session: Session) -> None:
        """Show the schema changes to the other sessions; locks kept them from using these tables so far."""
        if not session.has_ddl:
            return
        self.tables = dict(session.tables)
        for other in self._sessions:
            other.tables = dict(self.tables)
            other.savepoints = [(changes, dict(self.tables)) for changes, _ in other.savepoints]
