"""Snapshots beside the stream: chunks that are missing, tables that came later, requests.

One thread a connection of the stream. It takes windows one after another: a temporary slot
gives a snapshot that is exact for an LSN, a few chunks are read out of it while the stream
comes up to that LSN, stops there, and goes on once they are in the log. So each row stands in
the log after all transactions that had a part in it, and before all that had none.

A window is as large as its chunks: the stream waits for what is left to be read of them, no
longer. Nothing is written to the source.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import structlog

from tailrace import failpoints
from tailrace.backoff import Backoff
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, Policy, Stopped, TailraceError
from tailrace.model import format_lsn
from tailrace.sources.postgres.connection.errors import LOCK_NOT_AVAILABLE, unforeseen
from tailrace.sources.postgres.connection.server import CreatedSlot
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.catalog import PublishedTable, published_table
from tailrace.sources.postgres.snapshot.chunk_planner import (
    SAMPLE_DEADLINE_S,
    facts_digest,
    leaves,
    locked_relations,
    plan_table,
)
from tailrace.sources.postgres.snapshot.chunk_readers import ChunkReaders
from tailrace.sources.postgres.snapshot.chunk_writer import ChunkWriter
from tailrace.sources.postgres.snapshot.chunks import chunks_of, whole_of, written_since
from tailrace.sources.postgres.snapshot.copy import ChunkJob
from tailrace.sources.postgres.snapshot.exported_snapshot import (
    LOCK_WAIT_BESIDE_STREAM_S,
    Exported,
    Observer,
    enter,
    leave,
    release_locks,
)
from tailrace.sources.postgres.snapshot.plan import (
    AGAIN,
    Origin,
    SnapshotOutcome,
    SnapshotPlan,
    TableSnapshotPlan,
)
from tailrace.sources.postgres.snapshot.requests import Requests
from tailrace.sources.postgres.snapshot.slot_creation import SlotCreation, temporary_name
from tailrace.sources.postgres.snapshot.state import SnapshotState
from tailrace.sources.postgres.snapshot.watermark import SnapshotWatermark, StreamEnded
from tailrace.sources.postgres.streaming.appender import Appender
from tailrace.sources.progress import TableProgress

log = structlog.get_logger(__name__)

LOOK_S = 0.5

#: The first and the longest wait after a window that failed.
AGAIN_S = 0.5
AGAIN_S_MAX = 30.0

#: A stream that does not come to a window's LSN in this time is far behind: the snapshot is
#: let go, since it keeps the server from cleaning up, and another one taken later.
ARRIVAL_DEADLINE_S = 600.0

SLOT_DEADLINE_S = 600.0

#: SQLSTATE of a server whose slots are all taken.
NO_SLOT_FREE = "53400"

#: An error names so many tables.
NAMED_MAX = 5


class IncrementalSnapshots:
    """Carries out the ledger's agenda beside one connection's stream. A thread of its own.

    :param ask: has the server tell how far it is.
    :param requests: takes what is asked for into the agenda.
    """

    def __init__(
        self,
        source: PostgresSource,
        appender: Appender,
        ledger: SnapshotState,
        snapshot_watermark: SnapshotWatermark,
        progress: dict[str, TableProgress],
        *,
        ask: Callable[[], None],
        requests: Requests,
    ) -> None:
        self._source = source
        self._appender = appender
        self._ledger = ledger
        self._snapshot_watermark = snapshot_watermark
        self._progress = progress
        self._ask = ask
        self._requests = requests
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tailrace-snapshots", daemon=True)
        self._backoff = Backoff(first_s=AGAIN_S, longest_s=AGAIN_S_MAX)
        self._locked: set[int] = set()  # relations that can't be read now
        self.settled = False
        self.error: Exception | None = None
        ledger.take_moved = snapshot_watermark.take_moved
        requests.settling = self._settling
        self._set_filters()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; a window that is open is given up. The stream must have left."""
        self._ending.set()
        self._snapshot_watermark.leave()
        if self._thread.ident is not None:
            self._thread.join()

    def raise_failure(self) -> None:
        """Raise on another thread what ended this one, if anything did."""
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                try:
                    self._work()
                except TailraceError as error:
                    self._handle_failure(error)
                except (Stopped, StreamEnded):
                    raise
                except Exception as error:
                    log.debug("a snapshot ended by an error", exc_info=True)
                    self._handle_failure(unforeseen(error, "take a snapshot"))
        except (Stopped, StreamEnded):
            pass
        except Exception as error:  # noqa: BLE001 - the receiver raises it on its own thread
            self.error = error

    def _handle_failure(self, error: TailraceError) -> None:
        """Wait before trying again, or raise what will not pass."""
        with self._ledger.lock:
            snapshot = self._current()
        if error.policy is not Policy.RETRY:
            if snapshot is None or not snapshot.may_fail:
                raise error
            log.error("a snapshot failed; the stream goes on", snapshot=snapshot.id, error=str(error))
            self._ledger.abandon(snapshot, SnapshotOutcome.FAILED, error.as_json())
            self._set_filters()
            self._show_no_more()
            return
        wait_s, self._backoff = self._backoff.wait_s, self._backoff.failed()
        log.warning("a snapshot was interrupted; trying again", message=error.message, wait_s=wait_s)
        self._ending.wait(wait_s)

    def _connect(self) -> Session:
        return Session.connect(
            self._source,
            self._ending,
            statement_s=SAMPLE_DEADLINE_S,
            lock_wait_s=LOCK_WAIT_BESIDE_STREAM_S,
        )

    def _work(self) -> None:
        """Work until something fails, over connections that are opened when they are needed."""
        with ExitStack() as stack:
            side = stack.enter_context(closing(self._connect()))
            while not self._ending.is_set():
                if self._requests.take(side):
                    self._set_filters()
                    self._show_no_more()
                self._ledger.turn()
                with self._ledger.lock:
                    snapshot = self._current()
                if snapshot is None:
                    self.settled = True
                    self._ending.wait(LOOK_S)
                    continue
                self.settled = False
                self._show(snapshot)
                if snapshot.all_read:
                    failpoints.hit("snapshot.before_finish")
                    self._ledger.finish(snapshot)
                    self._set_filters()
                    log.info("snapshot done", snapshot=snapshot.id, origin=str(snapshot.origin))
                    continue
                self._take_window(snapshot, side)
                self._backoff = self._backoff.after_success()

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """The stream appends nothing between a look at what the log has and what is left out of it."""
        with self._ledger.lock, self._snapshot_watermark.quiesced():
            yield
            self._set_filters()

    def _set_filters(self) -> None:
        with self._ledger.lock:
            agenda = self._ledger.agenda
            self._snapshot_watermark.set_filters(leave_out=agenda.awaiting(), watch=agenda.in_parts())

    def _current(self) -> SnapshotPlan | None:
        """Return the snapshot that is to be worked on; None if there is none, or all of them are paused."""
        agenda = self._ledger.agenda
        return None if agenda.paused else next(iter(agenda.open), None)

    def _show(self, snapshot: SnapshotPlan) -> None:
        for table in snapshot.tables:
            shown = self._progress.setdefault(
                table.qualified_name, TableProgress(0, table.rows_estimated, done=False)
            )
            if table.chunks is None:
                shown.plan(0, table.rows_estimated)
                shown.done = table.gone
            elif shown.chunks != table.chunks or shown.chunks_done != len(table.done):
                shown.plan(table.chunks, table.rows_estimated, chunks_done=len(table.done), rows=table.rows)

    def _show_no_more(self) -> None:
        """Forget the progress of tables whose snapshot was cancelled or failed."""
        with self._ledger.lock:
            wanted = {table.qualified_name for each in self._ledger.agenda.open for table in each.tables}
        for name in [name for name, shown in self._progress.items() if not shown.done]:
            if name not in wanted:
                self._progress.pop(name, None)

    def _take_window(self, snapshot: SnapshotPlan, side: Session) -> None:
        self._plan_ahead(snapshot, side)
        if snapshot.all_read:
            return
        failpoints.hit("snapshot.before_window")
        with ExitStack() as stack:
            stack.callback(self._snapshot_watermark.release)
            exporting = stack.enter_context(
                closing(Session.connect(self._source, self._ending, replication=True))
            )
            observer = Observer(side, self._source.slot)
            observer.check_slot()
            creation = SlotCreation(exporting, side, self._ending, behind=self._snapshot_watermark.hold)
            created = self._create_slot(creation)
            exported = Exported(created.consistent_point, created.snapshot)
            self._snapshot_watermark.at(exported.lsn)
            self._ask()
            planner = stack.enter_context(closing(self._connect()))
            self._read(snapshot, planner, observer, exported)
            failpoints.hit("snapshot.after_window")

    def _create_slot(self, creation: SlotCreation) -> CreatedSlot:
        try:
            return creation.create(
                temporary_name(self._source.slot), temporary=True, deadline_s=SLOT_DEADLINE_S
            )
        except TailraceError as error:
            if error.context.get("sqlstate") != NO_SLOT_FREE:
                raise
            # Only the snapshot needs one more; the stream has its own.
            raise TailraceError(
                Kind.SNAPSHOT_DELAYED,
                f"take a snapshot beside the stream: {error.message}",
                "it is tried again, and the stream goes on: drop a slot that is not needed, or raise "
                "max_replication_slots and restart the server",
                error.context,
            ) from None

    def _read(self, snapshot: SnapshotPlan, planner: Session, observer: Observer, exported: Exported) -> None:
        units = ChunkWriter(
            self._appender,
            exported.lsn,
            self._ending,
            admitted=self._await_stream,
            closing=self._ledger.closing,
        )
        readers = ChunkReaders(
            self._source,
            exported,
            units,
            observer,
            self._ending,
            lock_wait_s=LOCK_WAIT_BESIDE_STREAM_S,
        )
        try:
            enter(planner, exported)
            readers.read(self._jobs(snapshot, planner))
        finally:
            # The stream still stands at the window's LSN, so the next line sees all its units.
            self._ledger.checkpoint()
            with self._ledger.lock:
                for each in readers.postponed:
                    snapshot.put_off(int(each.job.unit.name["table"]), plan_anew=each.planned_anew)
                self._ledger.write()
            self._set_filters()
        leave(planner)
        log.debug("read a window of a snapshot", snapshot=snapshot.id, position=format_lsn(exported.lsn))

    def _await_stream(self) -> None:
        if not self._snapshot_watermark.await_arrival(self._ending, ARRIVAL_DEADLINE_S):
            raise TailraceError(
                Kind.SNAPSHOT_DELAYED,
                f"take a snapshot beside the stream: the stream did not come to its LSN within "
                f"{ARRIVAL_DEADLINE_S:g} s",
                "it is tried again; `tailrace status` shows how far the stream is behind the source",
            )
        self._snapshot_watermark.require_arrived()
        failpoints.hit("snapshot.in_window")

    def _jobs(self, snapshot: SnapshotPlan, planner: Session) -> Iterator[ChunkJob]:
        """Yield as many chunks as a window takes, from the first tables that miss any."""
        room = self._source.snapshot_connections
        for agenda, table in self._due(snapshot, planner, lambda: release_locks(planner)):
            jobs = self._jobs_of(snapshot, agenda, table, room)
            yield from jobs
            room -= len(jobs)
            if room <= 0:
                return

    def _jobs_of(
        self, snapshot: SnapshotPlan, agenda: TableSnapshotPlan, table: PublishedTable, room: int
    ) -> list[ChunkJob]:
        """Return up to `room` chunks of a table, or all that must be read in one window."""
        stretches = self._ledger.plan(snapshot, agenda)
        condition = snapshot.where
        if snapshot.origin is Origin.INITIAL:
            condition = self._source.snapshot_condition(table.schema, table.name)
        where = [condition]
        unit = None
        if agenda.chunks_done:
            # Rows may have moved from chunk to chunk until the stream stands where this is read.
            chunks = list(whole_of(stretches))
            unit = self._ledger.unit(snapshot, agenda, AGAIN, len(chunks))
            where.append(written_since(agenda.since_xid))
        else:
            missing = set(agenda.missing())
            chunks = [chunk for chunk in chunks_of(stretches) if chunk.number in missing]
            if agenda.whole:
                unit = self._ledger.unit(snapshot, agenda, None, len(chunks))
            else:
                chunks = chunks[:room]
        progress = self._progress[agenda.qualified_name]
        return [
            ChunkJob(
                table,
                chunk,
                unit or self._ledger.unit(snapshot, agenda, chunk.number),
                # On lines of their own: a condition may end in a comment.
                " AND ".join(f"({each}\n)" for each in where if each),
                progress,
                shared=unit is not None and len(chunks) > 1,
                conditional=bool(condition),
            )
            for chunk in chunks
        ]

    def _due(
        self, snapshot: SnapshotPlan, session: Session, recover: Callable[[], object]
    ) -> Iterator[tuple[TableSnapshotPlan, PublishedTable]]:
        """Yield the tables that miss something and that nobody has locked, each with a plan that fits
        what it is now.

        :param recover: called after a lock could not be had, before the next command.
        """
        for agenda in snapshot.tables:
            if agenda.is_done or agenda.oid in self._locked:
                continue
            try:
                table = self._fit(snapshot, agenda, session)
            except TailraceError as error:
                if error.context.get("sqlstate") != LOCK_NOT_AVAILABLE:
                    raise
                recover()
                table = None
                self._locked.add(agenda.oid)
            if table is not None and not agenda.is_done:
                yield agenda, table

    def _fit(
        self, snapshot: SnapshotPlan, agenda: TableSnapshotPlan, session: Session
    ) -> PublishedTable | None:
        """Return the table with a plan that fits what it is now; None if it can't be read now."""
        table = published_table(session, self._source, agenda.oid)
        if table is None:
            self._mark_dropped(agenda)
            return None
        if table.partitioned and not self._locked.isdisjoint(leaves(session, table)):
            self._locked.add(agenda.oid)
            return None
        if agenda.chunks is None or agenda.facts != facts_digest(table):
            self._plan(snapshot, agenda, table, session)
        else:
            self._follow_partitions(snapshot, agenda, table, session)
        return table

    def _plan_ahead(self, snapshot: SnapshotPlan, session: Session) -> None:
        """Plan what the next window reads before it is opened: sampling may take a while.

        :raises TailraceError: `SNAPSHOT_DELAYED` if there is no table that could be read now.
        """
        # In a window the stream waits: it is opened only for tables that nobody has locked.
        self._locked = set(locked_relations(session))
        room = self._source.snapshot_connections
        for agenda, _ in self._due(snapshot, session, lambda: None):
            room -= max(1, (agenda.chunks or 0) - len(agenda.done))
            if room <= 0:
                return
        if room < self._source.snapshot_connections or snapshot.all_read:
            return
        names = [table.qualified_name for table in snapshot.tables if not table.is_done]
        raise TailraceError(
            Kind.SNAPSHOT_DELAYED,
            f"take a snapshot beside the stream: {', '.join(names[:NAMED_MAX])} is locked by somebody "
            "(ACCESS EXCLUSIVE)",
            "it is tried again, and the stream goes on; pg_locks says who has it",
            {"tables": len(names)},
        )

    def _follow_partitions(
        self, snapshot: SnapshotPlan, agenda: TableSnapshotPlan, table: PublishedTable, session: Session
    ) -> None:
        """Take in partitions that came, and leave out those that went, since `table` was planned."""
        if not table.partitioned:
            return
        planned = self._ledger.plan(snapshot, agenda)
        known, now = {stretch.oid for stretch in planned}, leaves(session, table)
        if known == now:
            return
        if not agenda.done:
            self._plan(snapshot, agenda, table, session)
            return
        added = [each for each in plan_table(session, table, self._source).stretches if each.oid not in known]
        stretches = (*planned, *added)
        self._ledger.keep_plan(snapshot, agenda, agenda.generation, stretches)
        with self._ledger.lock:
            agenda.chunks = sum(stretch.chunks for stretch in stretches)
            gone = {chunk.number for chunk in chunks_of(stretches) if chunk.stretch.oid not in now}
            agenda.done |= gone
            if agenda.since_offset and agenda.is_done:
                # That all was read is said in the log by the last unit: another one is read for that.
                agenda.done.discard(max(agenda.done - gone))
            self._ledger.write()

    def _plan(
        self, snapshot: SnapshotPlan, agenda: TableSnapshotPlan, table: PublishedTable, planner: Session
    ) -> None:
        if agenda.done:  # and so not all of it was read under the facts as they are now
            log.warning(
                "a table was changed by DDL in the middle of its snapshot: it is read again from the start",
                table=agenda.qualified_name,
            )
        plan = plan_table(planner, table, self._source)
        self._ledger.keep_plan(snapshot, agenda, agenda.generation + 1, plan.stretches)
        with self._ledger.lock:
            # What is in the log stays there, so its changes are not left out again.
            agenda.fresh = agenda.fresh and not agenda.done
            agenda.schema, agenda.name = table.schema, table.name
            agenda.plan(
                plan.chunks,
                whole=not table.key,
                facts=facts_digest(table),
                rows_estimated=plan.rows_estimated,
                since_xid=plan.since_xid,
                # Of a table whose rows nothing tells apart, nobody could say which are there no more. Of what
                # is durable: the log may end there after a crash, and the plan is kept.
                since_offset=(
                    self._appender.durable.offset if snapshot.replaces and self._has_key(table) else 0
                ),
            )
            self._ledger.write()
        self._progress.setdefault(agenda.qualified_name, TableProgress(0, 0, done=False)).plan(
            plan.chunks, plan.rows_estimated
        )
        failpoints.hit("snapshot.after_plan")

    def _has_key(self, table: PublishedTable) -> bool:
        return bool(table.key or self._source.key_of(table.schema, table.name))

    def _mark_dropped(self, agenda: TableSnapshotPlan) -> None:
        log.warning("a table is not published any more: its snapshot ends", table=agenda.qualified_name)
        with self._ledger.lock:
            agenda.gone = True
            self._ledger.write()
        self._progress.pop(agenda.qualified_name, None)
