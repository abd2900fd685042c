"""Takes snapshots while streaming: of missing chunks, of tables that were added later, on request.

Each connection of the stream has one such thread. It reads windows one after another: a temporary
slot exports a snapshot that is exact for an LSN, and a few chunks are read from it while the stream
advances to that LSN. The stream stops there, and continues once the chunks are in the log. So each
row is in the log after all transactions that the snapshot sees, and before all later ones.

The stream waits only until the chunks of the window are read. Nothing is written to the source.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import structlog

from tailrace import failpoints
from tailrace.backoff import Backoff
from tailrace.errors import Kind, Policy, Stopped, TailraceError
from tailrace.model import format_lsn
from tailrace.sources.postgres.connection.errors import unforeseen
from tailrace.sources.postgres.connection.server import ExportedSnapshot
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.slot.creation import SlotCreation, temporary_name
from tailrace.sources.postgres.snapshot.chunk_planner import (
    SAMPLE_DEADLINE_S,
)
from tailrace.sources.postgres.snapshot.chunk_readers import COPIED
from tailrace.sources.postgres.snapshot.due_tables import DueTables
from tailrace.sources.postgres.snapshot.exported_snapshot import (
    LOCK_WAIT_BESIDE_STREAM_S,
    Observer,
    enter,
    leave,
)
from tailrace.sources.postgres.snapshot.plan import (
    SnapshotOutcome,
    SnapshotPlan,
)
from tailrace.sources.postgres.snapshot.procedure import SnapshotProcedure
from tailrace.sources.postgres.snapshot.requests import Requests
from tailrace.sources.postgres.snapshot.watermark import SnapshotWatermark, StreamEnded
from tailrace.sources.progress import TableProgress

log = structlog.get_logger(__name__)

LOOK_S = 0.5

#: The first and the longest wait after a failed window, in seconds.
AGAIN_S = 0.5
AGAIN_S_MAX = 30.0

#: Timeout, in seconds, for the stream to reach a window's LSN. A stream that is further behind is
#: not waited for, because an open snapshot prevents vacuum on the server; it is taken later.
ARRIVAL_DEADLINE_S = 600.0

SLOT_DEADLINE_S = 600.0

#: SQLSTATE of a server whose slots are all taken.
NO_SLOT_FREE = "53400"

#: Number of successive broken connections, while the stream continues, after which a condition is blamed.
BREAKS_MAX = 5


class IncrementalSnapshots:
    """Reads the open snapshots, on its own thread, while one connection streams.

    :param ask: asks the server for a keepalive, which has the server's position.
    """

    def __init__(
        self,
        procedure: SnapshotProcedure,
        watermark: SnapshotWatermark,
        ask: Callable[[], None],
    ) -> None:
        self._procedure = procedure
        self._source = procedure.source
        self._state = procedure.state
        self._progress = procedure.progress
        self._watermark = watermark
        self._ask = ask
        self._requests = Requests(self._source, self._state, self._settling)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tailrace-snapshots", daemon=True)
        self._backoff = Backoff(first_s=AGAIN_S, longest_s=AGAIN_S_MAX)
        self._breaks = 0  # of connections since the last window
        self.settled = False
        self.error: Exception | None = None
        self._state.take_moved = watermark.take_moved
        self._set_filters()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; an open window is abandoned. The stream must have ended."""
        self._ending.set()
        self._watermark.leave()
        if self._thread.ident is not None:
            self._thread.join()
        with self._state.lock:
            # The next connection has another watermark, which does not know what this one noted.
            self._state.plans.take_moves(self._state.take_moved())

    def raise_failure(self) -> None:
        """Raise the error that ended the thread, if there is one, on the calling thread."""
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
                    self._handle_failure(unforeseen(error))
        except (Stopped, StreamEnded):
            pass
        except Exception as error:  # noqa: BLE001 - the receiver raises it on its own thread
            self.error = error

    def _handle_failure(self, error: TailraceError) -> None:
        """Wait before trying again; raise a permanent error, or abandon the snapshot that it concerns."""
        with self._state.lock:
            snapshot = self._current()
        if snapshot is not None and snapshot.where and snapshot.may_fail:
            error = self._blamed_on_condition(error)
        if error.policy is not Policy.RETRY:
            if snapshot is None or not snapshot.may_fail:
                raise error
            log.error("a snapshot failed; streaming continues", snapshot=snapshot.id, error=str(error))
            self._state.abandon(snapshot, SnapshotOutcome.FAILED, error.as_json())
            self._breaks = 0
            self._set_filters()
            self._remove_progress()
            return
        wait_s, self._backoff = self._backoff.wait_s, self._backoff.failed()
        log.warning("a snapshot was interrupted; trying again", error=str(error), wait_s=wait_s)
        self._ending.wait(wait_s)

    def _blamed_on_condition(self, error: TailraceError) -> TailraceError:
        """Return an error that blames the condition if the server repeatedly ends the connections that
        evaluate it, but not the stream's: otherwise later requests would wait forever.
        """
        is_broken = error.kind in (Kind.SOURCE_UNREACHABLE, Kind.SOURCE_SHUTTING_DOWN)
        self._breaks += is_broken and COPIED in error.context
        if self._breaks < BREAKS_MAX:
            return error
        return error.changed(
            kind=Kind.SNAPSHOT_FAILED,
            message=f"take a snapshot with a condition: the connection broke {self._breaks} times in a row, "
            f"while that of the stream did not: {error.message}",
            hint="correct the condition and try again: one read-only expression over the table's columns",
        )

    def _connect(self) -> Session:
        return Session.connect(
            self._source,
            self._ending,
            statement_s=SAMPLE_DEADLINE_S,
            lock_wait_s=LOCK_WAIT_BESIDE_STREAM_S,
        )

    def _work(self) -> None:
        """Take requests and read windows until an error occurs."""
        with ExitStack() as stack:
            side = stack.enter_context(self._connect())
            while not self._ending.is_set():
                if self._requests.take(side):
                    self._set_filters()
                    self._remove_progress()
                self._state.turn()
                with self._state.lock:
                    snapshot = self._current()
                if snapshot is None:
                    self.settled = True
                    self._ending.wait(LOOK_S)
                    continue
                self.settled = False
                self._show(snapshot)
                if snapshot.all_read:
                    failpoints.hit("snapshot.before_finish")
                    self._state.finish(snapshot)
                    self._set_filters()
                    log.info("snapshot done", snapshot=snapshot.id, origin=str(snapshot.origin))
                    continue
                self._take_window(snapshot, side)
                self._breaks = 0
                self._backoff = self._backoff.after_success()

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """Keep the stream from appending between a query of what the log has and the new filters."""
        with self._state.lock, self._watermark.quiesced():
            yield
            self._set_filters()

    def _set_filters(self) -> None:
        with self._state.lock:
            plans = self._state.plans
            self._watermark.set_filters(leave_out=plans.awaiting(), watch=plans.in_parts())

    def _current(self) -> SnapshotPlan | None:
        """Return the snapshot to read now; None if there is none, or all are paused."""
        plans = self._state.plans
        return None if plans.paused else next(iter(plans.open), None)

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

    def _remove_progress(self) -> None:
        """Remove the progress of tables whose snapshot was cancelled or failed."""
        with self._state.lock:
            wanted = {table.qualified_name for each in self._state.plans.open for table in each.tables}
        for name in [name for name, shown in self._progress.items() if not shown.done]:
            if name not in wanted:
                self._progress.pop(name, None)

    def _take_window(self, snapshot: SnapshotPlan, side: Session) -> None:
        due = DueTables(self._procedure, snapshot, side)
        due.plan_ahead(side)
        if snapshot.all_read:
            return
        failpoints.hit("snapshot.before_window")
        with ExitStack() as stack:
            stack.callback(self._watermark.release)
            exporting = stack.enter_context(Session.connect(self._source, self._ending, replication=True))
            observer = Observer(side, self._source.slot)
            observer.check_slot()
            creation = SlotCreation(exporting, side, self._ending, behind=self._watermark.hold)
            exported = self._create_slot(creation)
            self._watermark.at(exported.lsn)
            self._ask()
            planner = stack.enter_context(self._connect())
            enter(planner, exported)
            try:
                self._procedure.read_window(
                    snapshot,
                    exported,
                    observer,
                    due.jobs(planner),
                    self._ending,
                    admitted=self._await_stream,
                    lock_wait_s=LOCK_WAIT_BESIDE_STREAM_S,
                )
            finally:
                self._set_filters()
            leave(planner)
            log.debug("read a window of a snapshot", snapshot=snapshot.id, position=format_lsn(exported.lsn))
            failpoints.hit("snapshot.after_window")

    def _create_slot(self, creation: SlotCreation) -> ExportedSnapshot:
        try:
            return creation.create(
                temporary_name(self._source.slot), temporary=True, deadline_s=SLOT_DEADLINE_S
            )
        except TailraceError as error:
            if error.context.get("sqlstate") != NO_SLOT_FREE:
                raise
            # Only the snapshot needs another slot; the stream has its own.
            raise TailraceError(
                Kind.SNAPSHOT_DELAYED,
                f"take a snapshot while streaming: {error.message}",
                "it is tried again, and streaming continues: drop a slot that is not needed, or raise "
                "max_replication_slots and restart the server",
                error.context,
            ) from None

    def _await_stream(self) -> None:
        if not self._watermark.await_arrival(self._ending, ARRIVAL_DEADLINE_S):
            raise TailraceError(
                Kind.SNAPSHOT_DELAYED,
                f"take a snapshot while streaming: the stream did not reach its LSN within "
                f"{ARRIVAL_DEADLINE_S:g} s",
                "it is tried again; `tailrace status` shows how far the stream is behind the source",
            )
        self._watermark.require_arrived()
        failpoints.hit("snapshot.in_window")
