"""The procedure of every snapshot: tables are planned, and their chunks are read window by window.

A window is one exported snapshot, which is exact for an LSN, and the chunks that are read from it. The first
window of an initial snapshot uses the snapshot that the slot's creation exported, before streaming begins
(`initial`). All others are taken while streaming (`incremental`): for missing chunks, for tables that were
added later, for requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from tailrace.config.source.postgres import PostgresSource
from tailrace.sources.postgres.connection.server import ExportedSnapshot
from tailrace.sources.postgres.schema.catalog import PublishedTable
from tailrace.sources.postgres.snapshot.chunk_planner import TablePlan, facts_digest
from tailrace.sources.postgres.snapshot.chunk_readers import ChunkJob, ChunkReaders, Postponement
from tailrace.sources.postgres.snapshot.chunk_writer import ChunkWriter, Unit
from tailrace.sources.postgres.snapshot.chunks import ChunkedRelation, chunks_of, whole_of, written_since
from tailrace.sources.postgres.snapshot.exported_snapshot import Observer
from tailrace.sources.postgres.snapshot.plan import (
    AGAIN,
    Origin,
    SnapshotPlan,
    TableSnapshotPlan,
    unit_name,
)
from tailrace.sources.postgres.snapshot.state import SnapshotState
from tailrace.sources.progress import TableProgress


class SnapshotProcedure:
    """Reads the snapshots of one task into its log.

    :ivar state: stores what is to be read and what is done.
    :ivar progress: of tables, by qualified name; updated while reading.
    """

    def __init__(
        self,
        source: PostgresSource,
        state: SnapshotState,
        progress: dict[str, TableProgress],
    ) -> None:
        self.source = source
        self.state = state
        self.progress = progress

    def adopt(
        self,
        snapshot: SnapshotPlan,
        plan: TableSnapshotPlan,
        table: PublishedTable,
        found: TablePlan,
        *,
        is_kept: bool = True,
    ) -> None:
        """Use the planned chunks `found` for a table; the caller then writes the state.

        :param is_kept: other windows may read them, too, so the chunks' bounds are stored durably.
        """
        if is_kept:
            self.state.keep_plan(snapshot, plan, plan.generation + 1, found.relations)
        with self.state.lock:
            plan.schema, plan.name = table.schema, table.name
            plan.plan(
                found.chunks,
                whole=not table.key,
                facts=facts_digest(table),
                rows_estimated=found.rows_estimated,
                since_xid=found.since_xid,
                # Without a key, deleted rows could not be found. The durable offset,
                # because after a crash the log may end there, while the plan is kept.
                since_offset=(
                    self.state.appender.durable.offset if snapshot.replaces and self._has_key(table) else 0
                ),
            )
        progress = self.progress.setdefault(plan.qualified_name, TableProgress(0, 0, done=False))
        progress.plan(found.chunks, found.rows_estimated)

    def jobs(
        self,
        snapshot: SnapshotPlan,
        plan: TableSnapshotPlan,
        table: PublishedTable,
        relations: Sequence[ChunkedRelation],
        *,
        room: int | None = None,
        unit: Unit | None = None,
    ) -> list[ChunkJob]:
        """Return up to `room` missing chunks of a table, or all that must be read in one window.

        :param unit: the unit for all of them; default: units of this table.
        """
        condition = snapshot.where
        if snapshot.origin is Origin.INITIAL:
            condition = self.source.snapshot_condition(table.schema, table.name)
        where = [condition]
        if plan.chunks_done:
            # Rows may have moved between chunks until the LSN of this window.
            chunks = list(whole_of([relation for relation in relations if not relation.gone]))
            unit = Unit(unit_name(snapshot, plan, AGAIN), len(chunks))
            where.append(written_since(plan.since_xid))
        else:
            missing = set(plan.missing())
            chunks = [chunk for chunk in chunks_of(relations) if chunk.number in missing]
            if unit is None and plan.whole:
                unit = Unit(unit_name(snapshot, plan, None), len(chunks))
            elif unit is None:
                chunks = chunks[:room]
        progress = self.progress[plan.qualified_name]
        return [
            ChunkJob(
                table,
                chunk,
                unit or Unit(unit_name(snapshot, plan, chunk.number)),
                # Each on its own line: a condition may end in a comment.
                " AND ".join(f"({each}\n)" for each in where if each),
                progress,
                conditional=bool(condition),
            )
            for chunk in chunks
        ]

    def read_window(
        self,
        snapshot: SnapshotPlan,
        exported: ExportedSnapshot,
        observer: Observer,
        jobs: Iterable[ChunkJob],
        stopping: threading.Event,
        *,
        admitted: Callable[[], None],
        lock_wait_s: float,
    ) -> list[Postponement]:
        """Read chunks from an exported snapshot, and store which are done; return those that could not be
        read, which later windows read.

        :param jobs: iterated over on this thread, as readers become free.
        :param admitted: waits until units may be written at this point of the log; raises an error if that
            will never happen.
        :param lock_wait_s: a table that can't be locked within this time is postponed to a later window.
        :raises TailraceError: as `ChunkReaders.read`; the finished chunks are stored also then.
        """
        writer = ChunkWriter(
            self.state.appender,
            exported.lsn,
            stopping,
            name_of=observer.name_of,
            admitted=admitted,
            closing=self.state.closing,
        )
        readers = ChunkReaders(self.source, exported, writer, observer, stopping, lock_wait_s=lock_wait_s)
        try:
            readers.read(jobs)
        finally:
            # The stream still waits at the window's LSN, so the next line sees all units of the window.
            self.state.checkpoint()
            if readers.postponed:
                with self.state.lock:
                    for each in readers.postponed:
                        snapshot.put_off(each.job.table.oid, plan_again=each.planned_again)
                    self.state.write()
        return readers.postponed

    def _has_key(self, table: PublishedTable) -> bool:
        return bool(table.key or self.source.key_of(table.schema, table.name))
