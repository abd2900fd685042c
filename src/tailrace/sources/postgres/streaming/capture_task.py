"""A capture task: captures one slot of one PostgreSQL database into one task of the change log.

Read `CaptureTask.run` first: connect, reconcile, begin or resume, stream; and the same again after
a transient error. The calling thread receives and appends. A second thread makes durable what was
appended (appender), a third one acknowledges it to the server (status).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import structlog

from tailrace import failpoints
from tailrace.changelog.writer import LogListener, LogOptions, Tail
from tailrace.config.sections import LogConfig
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, Stopped, TailraceError
from tailrace.fair_semaphore import FairSemaphore
from tailrace.model import format_lsn
from tailrace.sources.postgres.connection import server
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.column_lists import check_disclosure
from tailrace.sources.postgres.schema.publication import (
    prepare_publication,
    publication_row,
    publication_warnings,
    require_publication,
    warn_unmatched,
)
from tailrace.sources.postgres.schema.relation_messages import SchemaWatch
from tailrace.sources.postgres.schema.replica_identity import set_identities
from tailrace.sources.postgres.slot.creation import create_own_slot
from tailrace.sources.postgres.slot.monitor import SlotWatch
from tailrace.sources.postgres.snapshot.chunk_planner import SAMPLE_DEADLINE_S
from tailrace.sources.postgres.snapshot.control import concerns_of
from tailrace.sources.postgres.snapshot.incremental import IncrementalSnapshots
from tailrace.sources.postgres.snapshot.initial import InitialSnapshot, lock_wait_s
from tailrace.sources.postgres.snapshot.procedure import SnapshotProcedure
from tailrace.sources.postgres.snapshot.requests import Requests
from tailrace.sources.postgres.snapshot.watermark import SnapshotWatermark
from tailrace.sources.postgres.streaming.frame_filters import MessageFilter
from tailrace.sources.postgres.streaming.reconcile import (
    Action,
    CapturePhase,
    CaptureState,
    LogFacts,
    ServerState,
    Start,
    decide,
)
from tailrace.sources.postgres.streaming.renewal import renew
from tailrace.sources.postgres.streaming.standby_status import StatusTimer
from tailrace.sources.postgres.streaming.stream import AwaitedPosition, Stream
from tailrace.sources.postgres.streaming.task_log import TaskLog
from tailrace.sources.postgres.streaming.timeline import StandbyTimeline
from tailrace.sources.progress import CaptureProgress, PhaseName, TableProgress
from tailrace.sources.reconnection import Reconnection

log = structlog.get_logger(__name__)

START_DEADLINE_S = 60.0
#: Number of attempts at a small snapshot, which begins again when a table is altered meanwhile.
BEGINNINGS_MAX = 5
#: Upper limit, in seconds, of the silence timeout. It doubles while connections end in silence before a
#: transaction was received: servers before 16 send nothing while they decode a large transaction of other
#: tables. They do answer while they read it, so other messages do not count.
SILENCE_S_MAX = 3600.0


class CaptureTask:
    """Captures one database into one log. `run` is called once, the other methods from any thread.

    :param path: the log's directory, which may not exist yet.
    :param name: the pipeline's name, for messages.
    :param semaphore: limits how many sources create their slots and take initial snapshots at once.
    :param listener: of the log's writer.
    """

    def __init__(
        self,
        source: PostgresSource,
        path: Path,
        log_config: LogConfig,
        *,
        name: str,
        semaphore: FairSemaphore | None = None,
        listener: LogListener | None = None,
    ) -> None:
        self._source = source.for_pipeline(name)
        self._path = path
        self._options = LogOptions(segment_bytes=log_config.segment_bytes, compression=log_config.compression)
        self._name = name
        self._semaphore = semaphore or FairSemaphore(1)
        self._listener = listener
        self._stopping = threading.Event()
        self._log: TaskLog | None = None  # open from the first connection on
        self._status: StatusTimer | None = None
        self._stream: Stream | None = None
        self._snapshots: IncrementalSnapshots | None = None
        self._wanted = AwaitedPosition()
        self._phase: PhaseName = "connecting"
        self._snapshot: dict[str, TableProgress] = {}
        self._beginnings = 0
        self._silence_s = source.receive_timeout_s
        self._connections = Reconnection(
            source, self._stopping, name=name, position=self._position, is_heard=self._heard
        )
        self._watch = SlotWatch(self._source, name, lambda: self._log)

    def run(self) -> None:
        """Capture until `stop` is called, or, with `snapshot: only`, until the snapshot is done.

        :raises TailraceError: an error that the user must repair, or a transient one that lasted longer
            than `source.reconnect_s_max`.
        """
        self._watch.start()
        try:
            self._connections.run(self._run_connection)
        except Stopped:
            pass
        finally:
            self._phase = "stopped"
            self._watch.close()
            if self._log is not None:
                self._log.appender.close()

    def stop(self) -> None:
        """Ask `run` to return, after making durable and acknowledging what was received."""
        self._stopping.set()

    def caught_up(self, lsn: int) -> bool:
        """Return whether everything that was committed before `lsn` is durable in the log, and all
        snapshots are complete, except paused ones.

        If not, this asks the server for its position; call again.
        """
        self._wanted.position = max(self._wanted.position, lsn)
        if self._log is None:
            return False
        appender = self._log.appender
        if appender.durable.position >= lsn:
            return self._snapshots is not None and self._snapshots.settled
        if (status := self._status) is not None and appender.tail.position < lsn:
            status.ask()
        return False

    def progress(self) -> CaptureProgress:
        """Return the task's progress."""
        task_log, stream, status = self._log, self._stream, self._status
        appender = None if task_log is None else task_log.appender
        nowhere = Tail(0, 0, 0)
        waiting = appender is not None and appender.waiting_for_disk and self._phase != "stopped"
        return CaptureProgress(
            phase="waiting_for_disk" if waiting else self._phase,
            rows=appender.rows if appender else 0,
            bytes=appender.bytes if appender else 0,
            appended=appender.tail if appender else nowhere,
            durable=appender.durable if appender else nowhere,
            source_end=stream.server_end if stream else 0,
            acknowledged=status.acknowledged if status else 0,
            snapshot={name: replace(table) for name, table in dict(self._snapshot).items()},
            reconnects=self._connections.count,
            error=self._connections.error,
            health=self._watch.health,
            warnings=(*self._watch.concerns, *(concerns_of(task_log.snapshots.plans) if task_log else ())),
        )

    # Connections

    def _run_connection(self) -> None:
        self._phase, self._stream = "connecting", None
        if self._log is not None:
            # A process that took over the log has also advanced the slot, whose position would mislead.
            self._log.appender.check_fence()
            self._log.appender.discard_open_unit()
        with Session.connect(self._source, self._stopping, replication=True) as session:
            for failure in server.unsupported(self._source, session.server_version):
                raise failure
            if self._log is None:  # the log is locked before slot or publication are changed
                self._log = TaskLog.open(
                    self._path, session, self._source, self._options, self._stopping, self._listener
                )
            task_log = self._log
            state = task_log.state
            facts = server.facts(session, self._source.slot, state.timeline if state else None)
            start = self._decide(task_log, facts, state)
            if start.action in {Action.FRESH, Action.RESTART}:
                with self._turn():
                    self._begin(task_log, session, facts, drop_slot=start.action is Action.RESTART)
                if self._source.snapshot == "only":
                    return
            elif start.action is Action.FINISHED:
                return
            else:
                if start.lost is not None:
                    renew(session, self._source, task_log, facts, start.lost, self._stopping)
                self._resume(task_log, facts)
                self._keep_failover(session, facts)
        self._connections.error = None
        with ExitStack() as stack:
            session = stack.enter_context(Session.connect(self._source, self._stopping, replication=True))
            server.require_unchanged(session, facts)
            timeline = self._timeline_of(task_log, session, facts)
            if timeline is not None:
                stack.callback(timeline.close)
            self._receive(task_log, session, timeline)

    def _decide(self, task_log: TaskLog, facts: ServerState, state: CaptureState | None) -> Start:
        kept = task_log.directory.identity.source
        if kept.slot != self._source.slot:
            raise TailraceError(
                Kind.LOG_FOREIGN,
                f"open the change log: it belongs to the slot {kept.slot!r}, the configuration names "
                f"{self._source.slot!r}",
                "restore source.slot, or the pipeline's name, after which a slot is named by default; or "
                "give this pipeline a log of its own",
                {"path": str(task_log.directory.path)},
            )
        try:
            start = decide(
                facts, LogFacts(kept, task_log.appender.tail.position, state), self._source.snapshot
            )
        except TailraceError as error:
            if error.kind is Kind.SOURCE_BEHIND_LOG and state is not None:
                # Its WAL will reach the log's end, with other transactions than the log has.
                task_log.keep(replace(state, behind_at=state.behind_at or facts.flush_lsn))
            raise
        log.info(
            "begin" if start.action in {Action.FRESH, Action.RESTART} else "resume",
            pipeline=self._name,
            action=start.action.value,
            position=format_lsn(start.position),
        )
        return start

    # Beginning

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self._phase = "queued" if self._semaphore.must_wait else "snapshot"
        with self._semaphore.turn(self._stopping) as given:
            if not given:
                raise Stopped
            self._phase = "snapshot"
            yield

    def _begin(self, task_log: TaskLog, session: Session, facts: ServerState, *, drop_slot: bool) -> None:
        """Create publication and slot, and take the snapshot; before, store durably that this begins.

        If a beginning was interrupted, the log has nothing of it.
        """
        self._snapshot.clear()
        source, before = self._source, task_log.state
        exists = publication_row(session, source.publication) is not None
        state = CaptureState(
            phase=CapturePhase.BEGINNING,
            system_identifier=facts.system_identifier,
            timeline=facts.timeline,
            announced_lsn=facts.flush_lsn,
            consistent_point=0,
            own_publication=not exists or (before is not None and before.own_publication),
            standby=facts.standby,
        )
        if drop_slot:
            server.drop_slot(session, source.slot)
        task_log.keep(state)
        set_identities(session, source, begins=True)
        prepare_publication(session, source, is_own=state.own_publication)
        check_disclosure(session, source)
        exported = create_own_slot(session, source, self._stopping)
        failpoints.hit("snapshot.after_slot")
        if facts.standby:  # a promotion ends the wait for the primary: the slot may be on a new timeline
            with Session.connect(source, self._stopping, replication=True) as other:
                server.require_unchanged(other, facts)
        state = replace(state, consistent_point=exported.lsn)
        task_log.keep(state)
        self._beginnings += 1
        snapshot = InitialSnapshot(
            self._procedure(task_log),
            self._stopping,
            exported,
            may_begin_again=self._beginnings < BEGINNINGS_MAX,
        )
        # The session that created the slot holds the exported snapshot: it must stay idle meanwhile.
        with Session.connect(
            source, self._stopping, statement_s=SAMPLE_DEADLINE_S, lock_wait_s=lock_wait_s(source)
        ) as reading:
            if source.snapshot == "never":
                snapshot.facts_only(reading)
            else:
                snapshot.take(reading)
        snapshot.mark_consistent_point()
        failpoints.hit("snapshot.before_handover")
        phase = CapturePhase.FINISHED if source.snapshot == "only" else CapturePhase.STREAMING
        task_log.keep(replace(state, phase=phase))
        failpoints.hit("snapshot.after_handover")

    def _resume(self, task_log: TaskLog, facts: ServerState) -> None:
        """Check what may have changed while the task did not run, and store the new state."""
        source, state = self._source, task_log.state
        with Session.connect(source, self._stopping) as session:
            require_publication(session, source.publication)
            warn_unmatched(session, source)
            set_identities(session, source, begins=False)
            for warning in publication_warnings(session, source):
                log.warning(warning.message, pipeline=self._name, repair=warning.repair)
            check_disclosure(session, source)
            task_log.column_names.look(session, source)
            # Before the stream begins, so that changes of a new table are left out until its rows are read.
            Requests(source, task_log.snapshots).take(session)
        resumed = CaptureState(
            phase=CapturePhase.STREAMING,
            system_identifier=facts.system_identifier,
            timeline=facts.timeline,
            announced_lsn=state.announced_lsn if state else 0,
            consistent_point=state.consistent_point if state else 0,
            standby=facts.standby,
        )
        if resumed != state:
            task_log.keep(resumed)

    def _keep_failover(self, session: Session, facts: ServerState) -> None:
        if self._source.slot_failover and facts.slot is not None and not facts.slot.failover:
            server.make_failover(session, self._source.slot)
            log.info("the slot is synchronised to standbys from now on", pipeline=self._name)

    # Streaming

    def _timeline_of(self, task_log: TaskLog, session: Session, facts: ServerState) -> StandbyTimeline | None:
        if not facts.standby:
            return None

        def keep(timeline: int) -> None:
            state = task_log.state
            assert state is not None
            task_log.keep(replace(state, timeline=timeline))

        return StandbyTimeline(
            lambda: Session.connect(self._source, self._stopping),
            self._source.slot,
            session.backend_pid,
            facts.timeline,
            keep,
        )

    def _receive(self, task_log: TaskLog, session: Session, timeline: StandbyTimeline | None) -> None:
        """Stream until the task is asked to stop; then make durable and acknowledge what was received."""
        appender, source = task_log.appender, self._source
        interval_s = server.status_interval_s(session, source.status_interval_s)
        command = server.start_command(source, appender.tail.position, session.server_version)
        transport = session.streaming(source.frame_bytes_max)
        try:
            transport.start(session.encoded(command), START_DEADLINE_S)
            status = StatusTimer(
                transport, lambda: appender.durable.position, appender.check_fence, interval_s
            )
            self._status = status
            snapshot_watermark = SnapshotWatermark(appender)
            self._snapshots = IncrementalSnapshots(self._procedure(task_log), snapshot_watermark, status.ask)
            self._stream = Stream(
                transport,
                appender,
                status,
                self._stopping,
                silence_s=self._silence_s,
                idle_s=source.heartbeat.interval_s,
                wanted=self._wanted,
                snapshot_watermark=snapshot_watermark,
                messages=MessageFilter(source),
                timeline=timeline,
                encoding=session.row_encoding,
                raise_others=self._snapshots.raise_failure,
            )
            self._phase = "streaming"
            appender.on_durable = status.progressed
            watch = SchemaWatch(
                lambda: Session.connect(source, self._stopping),
                lambda: appender.schema_in_force,
                lambda: appender.facts_in_force,
                source,
            )
            appender.schema_watch = watch
            status.start()
            self._snapshots.start()
            try:
                self._stream.run()
            finally:
                self._extend_silence_timeout(self._stream)
                try:
                    self._snapshots.close()
                    watch.close()
                    appender.sync()
                finally:
                    status.close()
        finally:
            transport.close()

    def _procedure(self, task_log: TaskLog) -> SnapshotProcedure:
        return SnapshotProcedure(self._source, task_log.snapshots, self._snapshot)

    def _extend_silence_timeout(self, stream: Stream) -> None:
        if stream.is_any_transaction:
            self._silence_s = self._source.receive_timeout_s
        elif stream.was_silent:
            self._silence_s = min(2 * self._silence_s, SILENCE_S_MAX)

    def _heard(self) -> bool:
        return self._stream is not None and self._stream.heard

    def _position(self) -> int:
        return 0 if self._log is None else self._log.appender.tail.position
