"""The initial snapshot, read from what the slot's creation exported.

Creating the slot exports a snapshot of the database as of the slot's consistent point. Several
connections take it over before anything else happens, and read the published tables out of it,
chunk by chunk: every change after that point comes through the slot, every row before it from
here, none from both.

Each chunk is a unit of the log: what is in the log is done. When the snapshot is cut short,
the log already has the slot's consistent point as its position, so the stream begins there, and
the chunks that are missing are read beside it (`incremental`).

Tables that together are no more than a chunk are one unit: a snapshot so small that is cut
short, or meets DDL, begins again with a new slot, and no transaction is ever in the log without
its changes of a table that is read later. The same goes for `snapshot: only`, where there is no
stream that could carry what changes meanwhile.
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


#: So many tables are planned by one answer of the server, and written down at once.
PLANNED_AT_ONCE = 500


def lock_wait_s(source: PostgresSource) -> float:
    """Return how long an initial snapshot waits for the lock on a table that is then read later."""
    return LOCK_WAIT_AT_ONE_POINT_S if source.snapshot == "only" else LOCK_WAIT_S


class InitialSnapshot:
    """Copies what the publication sends, as of `exported`, into the log.

    :param may_begin_again: after DDL in the middle of it; if not, tables that DDL changed are read
        beside the stream.
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

        :param planner: a fresh session for SQL. The one that created the slot stays as it is.
        :raises TailraceError: `SNAPSHOT_DELAYED` if it is to begin again; `SNAPSHOT_FAILED`;
            `SLOT_INVALIDATED` or `SLOT_MISSING` if the slot was lost meanwhile; what the server
            refused with.
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
            self._put_off(postponed)
        else:
            failpoints.hit("snapshot.before_finish")
            if self._in_one:  # one unit, of which the log does not say what each table has
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
            # Not before: the log's position is at the consistent point then, and nothing begins again.
            self._keep_facts(others)

    def _chosen(self, session: Session) -> tuple[list[PublishedTable], list[PublishedTable]]:
        """Return the tables to be read, in order, and the others.

        :raises TailraceError: `SNAPSHOT_FAILED` if the server refuses a condition.
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
        """Have the log's position be the consistent point, whatever there was to read."""
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
        """Yield the chunks of all tables; large ones are planned when their turn comes."""
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
        """Plan the first tables until it is clear whether all of them are to be one unit."""
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
        """Plan tables, and lock them no longer than that takes; some may be gone or locked."""
        found = plan_tables(
            planner, tables, self._source, lambda: release_locks(planner), skip_locked=not self._only
        )
        release_locks(planner)
        self._planned |= {table.oid for table in tables}
        self._unplanned += [table.qualified_name for table in tables if table.oid not in found]
        return found

    def _put_off(self, postponed: Sequence[Postponement]) -> None:
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
            "tables that were locked, or changed by DDL, meanwhile are read beside the stream", tables=names
        )
