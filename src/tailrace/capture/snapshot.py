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

import numpy as np
import structlog

from tailrace import failpoints
from tailrace.capture.agenda import Agenda, Origin, SnapshotAgenda, TableAgenda, whole_name
from tailrace.capture.appender import Appender
from tailrace.capture.catalog import PublishedTable, published_tables
from tailrace.capture.chunks import chunks_of
from tailrace.capture.copying import ChunkJob, TableProgress
from tailrace.capture.ledger import Ledger
from tailrace.capture.planning import TablePlan, facts_digest, plan_table
from tailrace.capture.readers import OpenReader, OwnConnection, Readers
from tailrace.capture.server import CreatedSlot
from tailrace.capture.session import Session
from tailrace.capture.units import Unit, UnitWriter
from tailrace.capture.window import (
    UNDEFINED_TABLE,
    Exported,
    Observer,
    enter,
    leave,
    observing,
    release_locks,
)
from tailrace.config.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.model import format_lsn
from tailrace.protocol import frames

log = structlog.get_logger(__name__)


class InitialSnapshot:
    """Copies what the publication sends, as of `created`, into the log.

    :param ledger: keeps what is to be read and what is done.
    :param progress: filled as it goes, by qualified name.
    :param open_reader: opens those who read chunks.
    :param may_begin_again: after DDL in the middle of it; if not, tables that DDL changed are read
        beside the stream.
    """

    def __init__(
        self,
        source: PostgresSource,
        appender: Appender,
        ledger: Ledger,
        stopping: threading.Event,
        created: CreatedSlot,
        progress: dict[str, TableProgress],
        *,
        may_begin_again: bool,
        open_reader: OpenReader = OwnConnection,
    ) -> None:
        self._source = source
        self._open_reader = open_reader
        self._may_begin_again = may_begin_again
        self._appender = appender
        self._ledger = ledger
        self._stopping = stopping
        self._exported = Exported(created.consistent_point, created.snapshot)
        self._progress = progress
        self._only = source.snapshot == "only"
        self._in_one = self._only
        self._everything: Unit | None = None
        self._unplanned: list[str] = []

    def take(self, planner: Session) -> None:
        """Copy all tables into the log and make them durable.

        :param planner: a fresh session for SQL. The one that created the slot stays as it is.
        :raises TailraceError: `SNAPSHOT_DELAYED` if it is to begin again; `SNAPSHOT_FAILED`;
            `SLOT_INVALIDATED` or `SLOT_MISSING` if the slot was lost meanwhile; what the server
            refused with.
        """
        enter(planner, self._exported)
        tables = published_tables(planner, self._source)
        release_locks(planner)
        snapshot = self._write_agenda(tables)
        failpoints.hit("snapshot.after_plan")
        with observing(self._source, self._stopping) as side:
            observer = Observer(side, None if self._only else self._source.slot)
            units = UnitWriter(
                self._appender,
                self._exported.lsn,
                self._stopping,
                admitted=lambda: None,
                closing=self._ledger.closing,
            )
            readers = Readers(
                self._source, self._exported, units, observer, self._stopping, self._open_reader
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

    def facts_only(self, session: Session) -> None:
        """Write the tables' facts and the consistent point, without rows."""
        enter(session, self._exported)
        tables = published_tables(session, self._source)
        leave(session)
        self._ledger.replace(Agenda())
        in_force = self._appender.schema_in_force
        self._append(b"".join(table.facts_frame(self._exported.lsn, in_force) for table in tables))

    def mark_consistent_point(self) -> None:
        """Have the log's position be the consistent point, whatever there was to read."""
        if self._appender.tail.position < self._exported.lsn:
            self._append(b"")

    def _append(self, frames_before: bytes) -> None:
        now_us = time.time_ns() // 1000
        end = frames.control_frame(frames.PROGRESS, self._exported.lsn, now_us, {})
        self._appender.append(np.frombuffer(frames_before + end, np.uint8))
        self._appender.sync()

    def _write_agenda(self, tables: list[PublishedTable]) -> SnapshotAgenda:
        snapshot = SnapshotAgenda(
            secrets.token_hex(8),
            Origin.INITIAL,
            [
                TableAgenda(number, table.oid, table.schema, table.name, True, table.rows_estimated)
                for number, table in enumerate(tables)
            ],
            requested_us=time.time_ns() // 1000,
        )
        self._ledger.replace(Agenda([snapshot]))
        for table in tables:
            self._progress[table.qualified_name] = TableProgress(0, table.rows_estimated, done=False)
        return snapshot

    def _jobs(
        self, planner: Session, snapshot: SnapshotAgenda, tables: list[PublishedTable]
    ) -> Iterator[ChunkJob]:
        """Yield the chunks of all tables; large ones are planned when their turn comes."""
        plans = self._plan_first(planner, tables)
        if self._in_one:
            parts = sum(plan.chunks for plan in plans if plan is not None)
            self._everything = Unit(whole_name(snapshot), parts)
        for number, (agenda, table) in enumerate(zip(snapshot.tables, tables, strict=True)):
            plan = plans[number] if number < len(plans) else self._plan(planner, table)
            if plan is None:
                self._unplanned.append(table.qualified_name)
                continue
            whole = not table.key
            if not self._in_one:
                self._ledger.keep_plan(snapshot, agenda, agenda.generation + 1, plan.stretches)
            with self._ledger.lock:
                agenda.plan(
                    plan.chunks,
                    whole=whole,
                    facts=facts_digest(table),
                    rows_estimated=plan.rows_estimated,
                    since_xid=plan.since_xid,
                )
                if not self._in_one:
                    self._ledger.write()
            progress = self._progress[table.qualified_name]
            progress.plan(plan.chunks, plan.rows_estimated)
            unit = self._ledger.unit(snapshot, agenda, None, plan.chunks) if whole else None
            for chunk in chunks_of(plan.stretches):
                each = self._everything or unit or self._ledger.unit(snapshot, agenda, chunk.number)
                yield ChunkJob(table, chunk, each, "", progress, shared=each.parts > 1)

    def _plan_first(self, planner: Session, tables: list[PublishedTable]) -> list[TablePlan | None]:
        """Plan the first tables until it is clear whether all of them are to be one unit."""
        plans: list[TablePlan | None] = []
        rows = size = 0
        for table in tables:
            plan = self._plan(planner, table)
            plans.append(plan)
            if plan is not None:
                rows, size = rows + plan.rows_estimated, size + plan.size_bytes
            large = rows > self._source.snapshot_chunk_rows or size > self._source.snapshot_chunk_bytes
            if large and not self._only:
                return plans
        self._in_one = self._only or self._may_begin_again
        return plans

    def _plan(self, planner: Session, table: PublishedTable) -> TablePlan | None:
        """Plan a table, and lock it no longer than that takes; None if it is not there any more."""
        try:
            plan = plan_table(planner, table, self._source)
        except TailraceError as error:
            if error.context.get("sqlstate") != UNDEFINED_TABLE:
                raise
            plan = None
        release_locks(planner)
        return plan

    def _put_off(self, readers: Readers, snapshot: SnapshotAgenda) -> None:
        names = sorted({each.job.table.qualified_name for each in readers.postponed} | {*self._unplanned})
        if self._in_one:
            raise TailraceError(
                Kind.SNAPSHOT_DELAYED if self._may_begin_again else Kind.SNAPSHOT_FAILED,
                f"take the snapshot: {', '.join(names)} was truncated, or changed by DDL, meanwhile",
                "it begins again by itself"
                if self._may_begin_again
                else "run it again: without a stream that follows, all tables must be read at one point",
                {"tables": len(names)},
            )
        for each in readers.postponed:
            snapshot.put_off(int(each.job.unit.name["table"]), plan_anew=each.planned_anew)
        self._ledger.checkpoint()
        log.warning("tables that were changed by DDL meanwhile are read beside the stream", tables=names)
