"""Selects the tables that a window reads while streaming: those that lack chunks and can be read now.

Their plans are adapted to the present tables: a table that was altered is planned again, new partitions are
added, partitions that were dropped or detached are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import structlog

from tailrace import failpoints
from tailrace.errors import Kind, TailraceError
from tailrace.sources.postgres.connection.errors import LOCK_NOT_AVAILABLE
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.catalog import PublishedTable, published_table
from tailrace.sources.postgres.snapshot.chunk_planner import (
    facts_digest,
    leaves,
    locked_relations,
    plan_table,
)
from tailrace.sources.postgres.snapshot.chunk_readers import ChunkJob
from tailrace.sources.postgres.snapshot.chunks import chunks_of
from tailrace.sources.postgres.snapshot.exported_snapshot import release_locks
from tailrace.sources.postgres.snapshot.plan import SnapshotPlan, TableSnapshotPlan
from tailrace.sources.postgres.snapshot.procedure import SnapshotProcedure

log = structlog.get_logger(__name__)

#: Number of tables that an error names.
NAMED_MAX = 5


class DueTables:
    """The tables of a snapshot for one window.

    :param session: queries which tables are locked: the stream waits during a window, so a window is opened
        only for tables that no session has locked.
    """

    def __init__(self, procedure: SnapshotProcedure, snapshot: SnapshotPlan, session: Session) -> None:
        self._procedure = procedure
        self._source = procedure.source
        self._state = procedure.state
        self._snapshot = snapshot
        self._locked = set(locked_relations(session))

    def plan_ahead(self, session: Session) -> None:
        """Plan the next window's tables before it is opened, because sampling may take long.

        :raises TailraceError: `SNAPSHOT_DELAYED` if no table can be read now.
        """
        room = self._source.snapshot_connections
        for plan, _ in self._due(session, lambda: None):
            room -= max(1, (plan.chunks or 0) - len(plan.done))
            if room <= 0:
                return
        if room < self._source.snapshot_connections or self._snapshot.all_read:
            return
        names = [table.qualified_name for table in self._snapshot.tables if not table.is_done]
        raise TailraceError(
            Kind.SNAPSHOT_DELAYED,
            f"take a snapshot while streaming: {', '.join(names[:NAMED_MAX])} is locked by another session "
            "(ACCESS EXCLUSIVE)",
            "it is tried again, and streaming continues; pg_locks shows the session",
            {"tables": len(names)},
        )

    def jobs(self, planner: Session) -> Iterator[ChunkJob]:
        """Yield as many chunks as a window may have, from the first tables that lack any."""
        room = self._source.snapshot_connections
        for plan, table in self._due(planner, lambda: release_locks(planner)):
            relations = self._state.plan(self._snapshot, plan)
            jobs = self._procedure.jobs(self._snapshot, plan, table, relations, room=room)
            yield from jobs
            room -= len(jobs)
            if room <= 0:
                return

    def _due(
        self, session: Session, recover: Callable[[], object]
    ) -> Iterator[tuple[TableSnapshotPlan, PublishedTable]]:
        """Yield the tables that lack chunks and that no session has locked, each with a plan that fits the
        present table.

        :param recover: called after a lock was not obtained, before the next command.
        """
        for plan in self._snapshot.tables:
            if plan.is_done or plan.oid in self._locked:
                continue
            try:
                table = self._fit(plan, session)
            except TailraceError as error:
                if error.context.get("sqlstate") != LOCK_NOT_AVAILABLE:
                    raise
                recover()
                table = None
                self._locked.add(plan.oid)
            if table is not None and not plan.is_done:
                yield plan, table

    def _fit(self, plan: TableSnapshotPlan, session: Session) -> PublishedTable | None:
        """Return the table after adapting its plan to its present state; None if it can't be read now."""
        table = published_table(session, self._source, plan.oid)
        if table is None:
            self._mark_dropped(plan)
            return None
        if table.partitioned and not self._locked.isdisjoint(leaves(session, table)):
            self._locked.add(plan.oid)
            return None
        if plan.chunks is None or plan.facts != facts_digest(table):
            self._plan(plan, table, session)
        else:
            self._follow_partitions(plan, table, session)
        return table

    def _follow_partitions(self, plan: TableSnapshotPlan, table: PublishedTable, session: Session) -> None:
        """Add partitions that are new since `table` was planned, and leave out those that are gone."""
        if not table.partitioned:
            return
        planned = self._state.plan(self._snapshot, plan)
        known, now = {relation.oid for relation in planned}, leaves(session, table)
        # Changes made while a partition was detached were not sent, so its rows must be read again.
        is_back = any(relation.gone and relation.oid in now for relation in planned)
        if is_back or (known != now and not plan.done):
            self._plan(plan, table, session)
            return
        relations = tuple(replace(relation, gone=relation.oid not in now) for relation in planned)
        if not now <= known:
            found = plan_table(session, table, self._source).relations
            relations += tuple(each for each in found if each.oid not in known)
        if relations != planned:
            self._state.keep_plan(self._snapshot, plan, plan.generation, relations)
        chunks = sum(relation.chunks for relation in relations)
        gone = {chunk.number for chunk in chunks_of(relations) if chunk.relation.gone}
        # Compared again, because the process may have been killed between the two writes.
        if chunks == plan.chunks and gone <= plan.done:
            return
        with self._state.lock:
            plan.chunks = chunks
            plan.done |= gone
            if plan.since_offset and plan.is_done:
                # The table's last unit records in the log that all was read: so one is read again.
                plan.done.discard(max(plan.done - gone))
            self._state.write()

    def _plan(self, plan: TableSnapshotPlan, table: PublishedTable, planner: Session) -> None:
        if plan.done:  # so the chunks that were read have other facts than the table has now
            log.warning(
                "a table was changed by DDL in the middle of its snapshot: it is read again from the start",
                table=plan.qualified_name,
            )
        self._procedure.adopt(self._snapshot, plan, table, plan_table(planner, table, self._source))
        self._state.write()
        failpoints.hit("snapshot.after_plan")

    def _mark_dropped(self, plan: TableSnapshotPlan) -> None:
        log.warning("a table is no longer published: its snapshot ends", table=plan.qualified_name)
        with self._state.lock:
            plan.gone = True
            self._state.write()
        self._procedure.progress.pop(plan.qualified_name, None)
