"""Takes the initial snapshot, from the snapshot that the slot's creation exports.

Creating the slot exports a snapshot of the database as of the slot's consistent point. Several
connections import it first, and then read the published tables from it, chunk by chunk: every
change after that point comes through the slot, every row before it from this snapshot, and none
from both.

Each chunk is a unit of the log: a chunk that is in the log is done. If the snapshot is interrupted,
the log's position is already the slot's consistent point, so the stream begins there, and the
missing chunks are read while streaming (`incremental`).

Tables that together are no larger than a chunk are one unit: if such a small snapshot is
interrupted, or a table is altered, it begins again with a new slot, so the log never has a
transaction without its changes of a table that is read later. The same applies to `snapshot: only`,
which has no stream that could contain the changes made meanwhile.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from operator import itemgetter

import structlog

from tailrace import failpoints
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.model import format_lsn
from tailrace.sources.postgres.connection.server import ExportedSnapshot
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.catalog import PublishedTable, published_tables
from tailrace.sources.postgres.snapshot.chunk_planner import CHUNK_BYTES_MAX, TablePlan, plan_tables
from tailrace.sources.postgres.snapshot.chunk_readers import ChunkJob, Postponement
from tailrace.sources.postgres.snapshot.chunk_writer import Unit
from tailrace.sources.postgres.snapshot.exported_snapshot import (
    LOCK_WAIT_AT_ONE_POINT_S,
    LOCK_WAIT_S,
    Observer,
    enter,
    leave,
    release_locks,
)
from tailrace.sources.postgres.snapshot.plan import (
    Origin,
    SnapshotPlan,
    SnapshotPlans,
    TableSnapshotPlan,
    whole_name,
)
from tailrace.sources.postgres.snapshot.procedure import SnapshotProcedure
from tailrace.sources.postgres.snapshot.requests import check_condition
from tailrace.sources.progress import TableProgress

log = structlog.get_logger(__name__)


#: Number of tables that are planned with one query, and whose plans are stored together.
PLANNED_AT_ONCE = 500


def lock_wait_s(source: PostgresSource) -> float:
    """Return how many seconds an initial snapshot waits for the lock on a table, before it postpones it."""
    return LOCK_WAIT_AT_ONE_POINT_S if source.snapshot == "only" else LOCK_WAIT_S


class InitialSnapshot:
    """Copies the rows of the published tables, as of `exported`, into the log.

    :param may_begin_again: whether the snapshot begins again if a table is altered meanwhile; if not,
        altered tables are read while streaming.
    """

    def __init__(
        self,
        procedure: SnapshotProcedure,
        stopping: threading.Event,
        exported: ExportedSnapshot,
        *,
        may_begin_again: bool,
    ) -> None:
        self._procedure = procedure
        self._source = procedure.source
        self._appender = procedure.state.appender
        self._state = procedure.state
        self._may_begin_again = may_begin_again
        self._stopping = stopping
        self._exported = exported
        self._only = self._source.snapshot == "only"
        self._in_one = self._only
        self._planned: set[int] = set()
        self._unplanned: list[str] = []

    def take(self, planner: Session) -> None:
        """Copy all tables into the log and make them durable.

        :param planner: a new session for SQL. The session that created the slot must stay idle.
        :raises TailraceError: `SNAPSHOT_DELAYED` if the snapshot must begin again; `SNAPSHOT_FAILED`;
            `SLOT_INVALIDATED` or `SLOT_MISSING` if the slot was lost meanwhile; the server's error.
        """
        enter(planner, self._exported)
        tables, others = self._chosen(planner)
        release_locks(planner)
        snapshot = self._write_plan(tables)
        failpoints.hit("snapshot.after_plan")
        with Session.connect(self._source, self._stopping) as side:
            postponed = self._procedure.read_window(
                snapshot,
                self._exported,
                Observer(side, None if self._only else self._source.slot),
                self._jobs(planner, snapshot, tables),
                self._stopping,
                admitted=lambda: None,
                lock_wait_s=lock_wait_s(self._source),
            )
        leave(planner)
        if postponed or self._unplanned:
            self._postpone(postponed)
        else:
            failpoints.hit("snapshot.before_finish")
            if self._in_one:  # one unit: the log does not record the rows of each table
                for table in snapshot.tables:
                    table.rows = self._procedure.progress[table.qualified_name].rows
            self._state.finish(snapshot)
            log.info(
                "snapshot done",
                tables=len(tables),
                rows=sum(table.rows for table in self._procedure.progress.values()),
                position=format_lsn(self._exported.lsn),
            )
        if others:
            # Not earlier: this moves the log's position to the consistent point, after which the snapshot
            # can't begin again.
            self._keep_facts(others)

    def _chosen(self, session: Session) -> tuple[list[PublishedTable], list[PublishedTable]]:
        """Return the tables to read, in order, and the others.

        :raises TailraceError: `SNAPSHOT_FAILED` if the server rejects a condition.
        """
        source = self._source
        placed = [
            (source.snapshot_place(table.schema, table.name), table)
            for table in published_tables(session, source)
        ]
        wanted = sorted(((place, table) for place, table in placed if place is not None), key=itemgetter(0))
        for _, table in wanted:
            if where := source.snapshot_condition(table.schema, table.name):
                check_condition(session, table.schema, table.name, where)
        return [table for _, table in wanted], [table for place, table in placed if place is None]

    def _keep_facts(self, tables: list[PublishedTable]) -> None:
        in_force = self._appender.facts_in_force
        facts = b"".join(table.facts_frame(self._exported.lsn, in_force) for table in tables)
        self._appender.append_progress(self._exported.lsn, facts)
        self._appender.sync()

    def facts_only(self, session: Session) -> None:
        """Write the tables' facts and the consistent point, without rows."""
        enter(session, self._exported)
        tables = published_tables(session, self._source)
        leave(session)
        self._state.replace(SnapshotPlans())
        self._keep_facts(tables)

    def mark_consistent_point(self) -> None:
        """Set the log's position to the consistent point, also if no row was read."""
        if self._appender.tail.position < self._exported.lsn:
            self._appender.append_progress(self._exported.lsn)
            self._appender.sync()

    def _write_plan(self, tables: list[PublishedTable]) -> SnapshotPlan:
        snapshot = SnapshotPlan(
            secrets.token_hex(8),
            Origin.INITIAL,
            [
                TableSnapshotPlan(number, table.oid, table.schema, table.name, True, table.rows_estimated)
                for number, table in enumerate(tables)
            ],
            requested_us=time.time_ns() // 1000,
        )
        self._state.replace(SnapshotPlans([snapshot]))
        for table in tables:
            self._procedure.progress[table.qualified_name] = TableProgress(
                0, table.rows_estimated, done=False
            )
        return snapshot

    def _jobs(
        self, planner: Session, snapshot: SnapshotPlan, tables: list[PublishedTable]
    ) -> Iterator[ChunkJob]:
        """Yield the chunks of all tables; each group of tables is planned just before it is read."""
        found = self._plan_first(planner, tables)
        everything = None
        if self._in_one:
            everything = Unit(whole_name(snapshot), sum(each.chunks for each in found.values()))
        for at in range(0, len(tables), PLANNED_AT_ONCE):
            some = list(zip(snapshot.tables, tables, strict=True))[at : at + PLANNED_AT_ONCE]
            if any(table.oid not in self._planned for _, table in some):
                found = self._plan(planner, [table for _, table in some])
            some = [(plan, table) for plan, table in some if table.oid in found]
            for plan, table in some:
                self._procedure.adopt(snapshot, plan, table, found[table.oid], is_kept=not self._in_one)
            if not self._in_one:
                self._state.write()
            for plan, table in some:
                relations = found[table.oid].relations
                yield from self._procedure.jobs(snapshot, plan, table, relations, unit=everything)

    def _plan_first(self, planner: Session, tables: list[PublishedTable]) -> dict[int, TablePlan]:
        """Plan tables until it is known whether all of them are to be one unit."""
        found: dict[int, TablePlan] = {}
        for at in range(0, len(tables), PLANNED_AT_ONCE):
            found |= self._plan(planner, tables[at : at + PLANNED_AT_ONCE])
            rows = sum(each.rows_estimated for each in found.values())
            size = sum(each.size_bytes for each in found.values())
            large = rows > self._source.snapshot_chunk_rows or size > CHUNK_BYTES_MAX
            if large and not self._only:
                return found
        self._in_one = self._only or (self._may_begin_again and not self._unplanned)
        return found

    def _plan(self, planner: Session, tables: list[PublishedTable]) -> dict[int, TablePlan]:
        """Plan tables, and lock them only meanwhile; dropped and locked tables are not in the result."""
        found = plan_tables(
            planner, tables, self._source, lambda: release_locks(planner), skip_locked=not self._only
        )
        release_locks(planner)
        self._planned |= {table.oid for table in tables}
        self._unplanned += [table.qualified_name for table in tables if table.oid not in found]
        return found

    def _postpone(self, postponed: Sequence[Postponement]) -> None:
        names = sorted({each.job.table.qualified_name for each in postponed} | {*self._unplanned})
        if self._in_one:
            raise TailraceError(
                Kind.SNAPSHOT_DELAYED if self._may_begin_again else Kind.SNAPSHOT_FAILED,
                f"take the snapshot: {', '.join(names)} was locked, truncated, or changed by DDL, meanwhile",
                "it is tried again automatically"
                if self._may_begin_again
                else "run it again: without a stream that follows, all tables must be read at one point",
                {"tables": len(names)},
            )
        log.warning(
            "tables that were locked, or changed by DDL, meanwhile are read while streaming", tables=names
        )
