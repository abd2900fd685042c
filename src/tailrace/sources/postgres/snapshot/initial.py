"""The initial snapshot: rows that existed before the slot, in the same log as what follows.

Creating the slot exports a snapshot of the database as of the slot's consistent point. Several
connections take it over before anything else happens, and read the published tables out of it,
chunk by chunk: every change after that point comes through the slot, every row before it from
here, none from both.

Each chunk is a unit of the log: what is in the log is done. When the snapshot is cut short,
the log already has the slot's consistent point as its position, so the stream begins there, and
the chunks that are missing are read beside it (`snapshots`).

Tables that together are no more than a chunk are one unit: a snapshot so small that is cut
short, or meets DDL, begins again with a new slot, and no transaction is ever in the log without
its changes of a table that is read later. The same goes for `snapshot: only`, where there is no
stream that could carry what changes meanwhile.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from operator import itemgetter

import numpy as np
import structlog

from tailrace import failpoints
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.model import format_lsn
from tailrace.protocol import frames
from tailrace.sources.postgres.connection.server import CreatedSlot
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.catalog import PublishedTable, published_tables
from tailrace.sources.postgres.snapshot.chunk_planner import TablePlan, facts_digest, plan_tables
from tailrace.sources.postgres.snapshot.chunk_readers import ChunkReaders
from tailrace.sources.postgres.snapshot.chunk_writer import ChunkWriter, Unit
from tailrace.sources.postgres.snapshot.chunks import chunks_of
from tailrace.sources.postgres.snapshot.copy import ChunkJob
from tailrace.sources.postgres.snapshot.exported_snapshot import (
    LOCK_WAIT_AT_ONE_POINT_S,
    LOCK_WAIT_S,
    Exported,
    Observer,
    enter,
    leave,
    observing,
    release_locks,
)
from tailrace.sources.postgres.snapshot.plan import (
    Origin,
    SnapshotPlan,
    SnapshotPlans,
    TableSnapshotPlan,
    whole_name,
)
from tailrace.sources.postgres.snapshot.requests import check_condition
from tailrace.sources.postgres.snapshot.state import SnapshotState
from tailrace.sources.postgres.streaming.appender import Appender
from tailrace.sources.progress import TableProgress

log = structlog.get_logger(__name__)


#: So many tables are planned by one answer of the server, and written down at once.
PLANNED_AT_ONCE = 500


def lock_wait_s(source: PostgresSource) -> float:
    """Return how long an initial snapshot waits for the lock on a table that is then read later."""
    return LOCK_WAIT_AT_ONE_POINT_S if source.snapshot == "only" else LOCK_WAIT_S


class InitialSnapshot:
    """Copies what the publication sends, as of `created`, into the log.

    :param ledger: keeps what is to be read and what is done.
    :param progress: filled as it goes, by qualified name.
    :param may_begin_again: after DDL in the middle of it; if not, tables that DDL changed are read
        beside the stream.
    """

    def __init__(
        self,
        source: PostgresSource,
        appender: Appender,
        ledger: SnapshotState,
        stopping: threading.Event,
        created: CreatedSlot,
        progress: dict[str, TableProgress],
        *,
        may_begin_again: bool,
    ) -> None:
        self._source = source
        self._may_begin_again = may_begin_again
        self._appender = appender
        self._ledger = ledger
        self._stopping = stopping
        self._exported = Exported(created.consistent_point, created.snapshot)
        self._progress = progress
        self._only = source.snapshot == "only"
        self._in_one = self._only
        self._everything: Unit | None = None
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
        snapshot = self._write_agenda(tables)
        failpoints.hit("snapshot.after_plan")
        with observing(self._source, self._stopping) as side:
            observer = Observer(side, None if self._only else self._source.slot)
            units = ChunkWriter(
                self._appender,
                self._exported.lsn,
                self._stopping,
                admitted=lambda: None,
                closing=self._ledger.closing,
            )
            readers = ChunkReaders(
                self._source,
                self._exported,
                units,
                observer,
                self._stopping,
                lock_wait_s=lock_wait_s(self._source),
            )
            try:
                readers.read(self._jobs(planner, snapshot, tables))
            finally:
                self._ledger.checkpoint()
        leave(planner)
        if readers.postponed or self._unplanned:
            self._put_off(readers, snapshot)
        else:
            failpoints.hit("snapshot.before_finish")
            self._ledger.finish(snapshot)
            log.info(
                "snapshot done", tables=len(tables), rows=units.rows, position=format_lsn(self._exported.lsn)
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
        self._append(b"".join(table.facts_frame(self._exported.lsn, in_force) for table in tables))

    def facts_only(self, session: Session) -> None:
        """Write the tables' facts and the consistent point, without rows."""
        enter(session, self._exported)
        tables = published_tables(session, self._source)
        leave(session)
        self._ledger.replace(SnapshotPlans())
        self._keep_facts(tables)

    def mark_consistent_point(self) -> None:
        """Have the log's position be the consistent point, whatever there was to read."""
        if self._appender.tail.position < self._exported.lsn:
            self._append(b"")

    def _append(self, frames_before: bytes) -> None:
        now_us = time.time_ns() // 1000
        end = frames.control_frame(frames.PROGRESS, self._exported.lsn, now_us, {})
        self._appender.append(np.frombuffer(frames_before + end, np.uint8))
        self._appender.sync()

    def _write_agenda(self, tables: list[PublishedTable]) -> SnapshotPlan:
        snapshot = SnapshotPlan(
            secrets.token_hex(8),
            Origin.INITIAL,
            [
                TableSnapshotPlan(number, table.oid, table.schema, table.name, True, table.rows_estimated)
                for number, table in enumerate(tables)
            ],
            requested_us=time.time_ns() // 1000,
        )
        self._ledger.replace(SnapshotPlans([snapshot]))
        for table in tables:
            self._progress[table.qualified_name] = TableProgress(0, table.rows_estimated, done=False)
        return snapshot

    def _jobs(
        self, planner: Session, snapshot: SnapshotPlan, tables: list[PublishedTable]
    ) -> Iterator[ChunkJob]:
        """Yield the chunks of all tables; large ones are planned when their turn comes."""
        plans = self._plan_first(planner, tables)
        if self._in_one:
            parts = sum(plan.chunks for plan in plans.values())
            self._everything = Unit(whole_name(snapshot), parts)
        for at in range(0, len(tables), PLANNED_AT_ONCE):
            some = list(zip(snapshot.tables, tables, strict=True))[at : at + PLANNED_AT_ONCE]
            if any(table.oid not in self._planned for _, table in some):
                plans = self._plan(planner, [table for _, table in some])
            yield from self._jobs_of(snapshot, some, plans)

    def _jobs_of(
        self,
        snapshot: SnapshotPlan,
        some: list[tuple[TableSnapshotPlan, PublishedTable]],
        plans: dict[int, TablePlan],
    ) -> Iterator[ChunkJob]:
        """Yield the chunks of tables that were planned, once the agenda knows the plans."""
        there = [(agenda, table) for agenda, table in some if table.oid in plans]
        for agenda, table in there:
            plan = plans[table.oid]
            if not self._in_one:
                self._ledger.keep_plan(snapshot, agenda, agenda.generation + 1, plan.stretches)
            with self._ledger.lock:
                agenda.plan(
                    plan.chunks,
                    whole=not table.key,
                    facts=facts_digest(table),
                    rows_estimated=plan.rows_estimated,
                    since_xid=plan.since_xid,
                )
            self._progress[table.qualified_name].plan(plan.chunks, plan.rows_estimated)
        if not self._in_one:
            self._ledger.write()
        for agenda, table in there:
            plan, progress = plans[table.oid], self._progress[table.qualified_name]
            condition = self._source.snapshot_condition(table.schema, table.name)
            where = f"({condition}\n)" if condition else ""
            unit = None if table.key else self._ledger.unit(snapshot, agenda, None, plan.chunks)
            for chunk in chunks_of(plan.stretches):
                each = self._everything or unit or self._ledger.unit(snapshot, agenda, chunk.number)
                yield ChunkJob(
                    table,
                    chunk,
                    each,
                    where,
                    progress,
                    shared=each.parts > 1,
                    conditional=bool(where),
                )

    def _plan_first(self, planner: Session, tables: list[PublishedTable]) -> dict[int, TablePlan]:
        """Plan the first tables until it is clear whether all of them are to be one unit."""
        plans: dict[int, TablePlan] = {}
        for at in range(0, len(tables), PLANNED_AT_ONCE):
            plans |= self._plan(planner, tables[at : at + PLANNED_AT_ONCE])
            rows = sum(plan.rows_estimated for plan in plans.values())
            size = sum(plan.size_bytes for plan in plans.values())
            large = rows > self._source.snapshot_chunk_rows or size > self._source.snapshot_chunk_bytes
            if large and not self._only:
                return plans
        self._in_one = self._only or (self._may_begin_again and not self._unplanned)
        return plans

    def _plan(self, planner: Session, tables: list[PublishedTable]) -> dict[int, TablePlan]:
        """Plan tables, and lock them no longer than that takes; some may be gone or locked."""
        plans = plan_tables(
            planner, tables, self._source, lambda: release_locks(planner), skip_locked=not self._only
        )
        release_locks(planner)
        self._planned |= {table.oid for table in tables}
        self._unplanned += [table.qualified_name for table in tables if table.oid not in plans]
        return plans

    def _put_off(self, readers: ChunkReaders, snapshot: SnapshotPlan) -> None:
        names = sorted({each.job.table.qualified_name for each in readers.postponed} | {*self._unplanned})
        if self._in_one:
            raise TailraceError(
                Kind.SNAPSHOT_DELAYED if self._may_begin_again else Kind.SNAPSHOT_FAILED,
                f"take the snapshot: {', '.join(names)} was locked, truncated, or changed by DDL, meanwhile",
                "it begins again by itself"
                if self._may_begin_again
                else "run it again: without a stream that follows, all tables must be read at one point",
                {"tables": len(names)},
            )
        for each in readers.postponed:
            snapshot.put_off(int(each.job.unit.name["table"]), plan_anew=each.planned_anew)
        self._ledger.checkpoint()
        log.warning(
            "tables that were locked, or changed by DDL, meanwhile are read beside the stream", tables=names
        )
