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
from tailrace.capture.agenda import AGAIN, Outcome, SnapshotAgenda, TableAgenda
from tailrace.capture.appender import Appender
from tailrace.capture.catalog import PublishedTable, published_table
from tailrace.capture.chunks import chunks_of, whole_of, written_since
from tailrace.capture.copying import ChunkJob, TableProgress
from tailrace.capture.delegated import Delegation
from tailrace.capture.exporting import SlotCreation, temporary_name
from tailrace.capture.ledger import Ledger
from tailrace.capture.meeting import Meeting, StreamEnded
from tailrace.capture.planning import facts_digest, leaves, plan_table
from tailrace.capture.readers import OwnConnection, Readers
from tailrace.capture.requests import Requests
from tailrace.capture.session import Session, Stopped
from tailrace.capture.units import UnitWriter
from tailrace.capture.window import Exported, Observer, enter, leave
from tailrace.config.postgres import PostgresSource
from tailrace.errors import Kind, Policy, TailraceError
from tailrace.model import format_lsn

log = structlog.get_logger(__name__)

LOOK_S = 0.5

#: The first and the longest wait after a window that failed.
AGAIN_S = 0.5
AGAIN_S_MAX = 30.0

#: A stream that does not come to a window's LSN in this time is far behind: the snapshot is
#: let go, since it keeps the server from cleaning up, and another one taken later.
ARRIVAL_DEADLINE_S = 600.0

SLOT_DEADLINE_S = 600.0


class Snapshots:
    """Carries out the ledger's agenda beside one connection's stream. A thread of its own.

    :param ask: has the server tell how far it is.
    :param requests: takes what is asked for into the agenda.
    :param delegation: how others read chunks; None: this process does.
    """

    def __init__(
        self,
        source: PostgresSource,
        appender: Appender,
        ledger: Ledger,
        meeting: Meeting,
        progress: dict[str, TableProgress],
        *,
        ask: Callable[[], None],
        requests: Requests,
        delegation: Delegation | None = None,
    ) -> None:
        self._source = source
        self._appender = appender
        self._ledger = ledger
        self._meeting = meeting
        self._progress = progress
        self._ask = ask
        self._requests = requests
        self._delegation = delegation
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tailrace-snapshots", daemon=True)
        self._failures = 0
        self.settled = False
        self.error: Exception | None = None
        ledger.take_moved = meeting.take_moved
        requests.settling = self._settling
        self._heed()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; a window that is open is given up. The stream must have left."""
        self._ending.set()
        self._meeting.leave()
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
                    self._bear(error)
        except (Stopped, StreamEnded):
            pass
        except Exception as error:  # noqa: BLE001 - the receiver raises it on its own thread
            self.error = error

    def _bear(self, error: TailraceError) -> None:
        """Wait before trying again, or raise what will not pass."""
        with self._ledger.lock:
            snapshot = self._current()
        if error.policy is not Policy.RETRY:
            if snapshot is None or not snapshot.may_fail:
                raise error
            log.error("a snapshot failed; the stream goes on", snapshot=snapshot.id, error=str(error))
            self._ledger.abandon(snapshot, Outcome.FAILED, error.as_json())
            self._heed()
            self._show_no_more()
            return
        self._failures += 1
        wait_s = min(AGAIN_S * 2 ** min(self._failures - 1, 10), AGAIN_S_MAX)
        log.warning("a snapshot was interrupted; trying again", message=error.message, wait_s=wait_s)
        self._ending.wait(wait_s)

    def _work(self) -> None:
        """Work until something fails, over connections that are opened when they are needed."""
        with ExitStack() as stack:
            side = stack.enter_context(closing(Session.connect(self._source, self._ending)))
            while not self._ending.is_set():
                if self._requests.take(side):
                    self._heed()
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
                    self._heed()
                    log.info("snapshot done", snapshot=snapshot.id, origin=str(snapshot.origin))
                    continue
                self._take_window(snapshot, side)
                self._failures = 0

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """The stream appends nothing between a look at what the log has and what is left out of it."""
        with self._ledger.lock, self._meeting.still():
            yield
            self._heed()

    def _heed(self) -> None:
        with self._ledger.lock:
            agenda = self._ledger.agenda
            self._meeting.heed(leave_out=agenda.awaiting(), watch=agenda.in_parts())

    def _current(self) -> SnapshotAgenda | None:
        return next(iter(self._ledger.agenda.open), None)

    def _show(self, snapshot: SnapshotAgenda) -> None:
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

    def _take_window(self, snapshot: SnapshotAgenda, side: Session) -> None:
        self._plan_ahead(snapshot, side)
        if snapshot.all_read:
            return
        if self._delegation is not None:
            self._delegation.prepare(self._ending)
        failpoints.hit("snapshot.before_window")
        with ExitStack() as stack:
            stack.callback(self._meeting.release)
            exporting = stack.enter_context(
                closing(Session.connect(self._source, self._ending, replication=True))
            )
            observer = Observer(side, self._source.slot)
            observer.check_slot()
            creation = SlotCreation(exporting, side, self._ending, behind=self._meeting.hold)
            created = creation.create(
                temporary_name(self._source.slot), temporary=True, deadline_s=SLOT_DEADLINE_S
            )
            exported = Exported(created.consistent_point, created.snapshot)
            self._meeting.at(exported.lsn)
            self._ask()
            planner = stack.enter_context(closing(Session.connect(self._source, self._ending)))
            self._read(snapshot, planner, observer, exported)
            failpoints.hit("snapshot.after_window")

    def _read(
        self, snapshot: SnapshotAgenda, planner: Session, observer: Observer, exported: Exported
    ) -> None:
        units = UnitWriter(
            self._appender,
            exported.lsn,
            self._ending,
            admitted=self._await_stream,
            closing=self._ledger.closing,
        )
        open_reader = OwnConnection if self._delegation is None else self._delegation.open_reader
        readers = Readers(self._source, exported, units, observer, self._ending, open_reader)
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
            self._heed()
        leave(planner)
        log.debug("read a window of a snapshot", snapshot=snapshot.id, position=format_lsn(exported.lsn))

    def _await_stream(self) -> None:
        if not self._meeting.await_arrival(self._ending, ARRIVAL_DEADLINE_S):
            raise TailraceError(
                Kind.SNAPSHOT_DELAYED,
                f"take a snapshot beside the stream: the stream did not come to its LSN within "
                f"{ARRIVAL_DEADLINE_S:g} s",
                "it is tried again; `tailrace status` shows how far the stream is behind the source",
            )
        self._meeting.require_arrived()
        failpoints.hit("snapshot.in_window")

    def _jobs(self, snapshot: SnapshotAgenda, planner: Session) -> Iterator[ChunkJob]:
        """Yield as many chunks as a window takes, from the first tables that miss any."""
        room = self._source.snapshot_connections
        for agenda, table in self._due(snapshot, planner):
            jobs = self._jobs_of(snapshot, agenda, table, room)
            yield from jobs
            room -= len(jobs)
            if room <= 0:
                return

    def _jobs_of(
        self, snapshot: SnapshotAgenda, agenda: TableAgenda, table: PublishedTable, room: int
    ) -> list[ChunkJob]:
        """Return up to `room` chunks of a table, or all that must be read in one window."""
        stretches = self._ledger.plan(snapshot, agenda)
        where = [snapshot.where]
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
                " AND ".join(f"({condition})" for condition in where if condition),
                progress,
                shared=unit is not None and len(chunks) > 1,
            )
            for chunk in chunks
        ]

    def _due(
        self, snapshot: SnapshotAgenda, session: Session
    ) -> Iterator[tuple[TableAgenda, PublishedTable]]:
        """Yield the tables that miss something, each with a plan that fits what it is now."""
        for agenda in snapshot.tables:
            if agenda.is_done:
                continue
            table = published_table(session, self._source, agenda.oid)
            if table is None:
                self._say_gone(agenda)
                continue
            if agenda.chunks is None or agenda.facts != facts_digest(table):
                self._plan(snapshot, agenda, table, session)
            else:
                self._follow_partitions(snapshot, agenda, table, session)
            if not agenda.is_done:
                yield agenda, table

    def _plan_ahead(self, snapshot: SnapshotAgenda, session: Session) -> None:
        """Plan what the next window reads before it is opened: sampling may take a while."""
        room = self._source.snapshot_connections
        for agenda, _ in self._due(snapshot, session):
            room -= max(1, (agenda.chunks or 0) - len(agenda.done))
            if room <= 0:
                return

    def _follow_partitions(
        self, snapshot: SnapshotAgenda, agenda: TableAgenda, table: PublishedTable, session: Session
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
            self._ledger.write()

    def _plan(
        self, snapshot: SnapshotAgenda, agenda: TableAgenda, table: PublishedTable, planner: Session
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
            )
            self._ledger.write()
        self._progress.setdefault(agenda.qualified_name, TableProgress(0, 0, done=False)).plan(
            plan.chunks, plan.rows_estimated
        )
        failpoints.hit("snapshot.after_plan")

    def _say_gone(self, agenda: TableAgenda) -> None:
        log.warning("a table is not published any more: its snapshot ends", table=agenda.qualified_name)
        with self._ledger.lock:
            agenda.gone = True
            self._ledger.write()
        self._progress.pop(agenda.qualified_name, None)
