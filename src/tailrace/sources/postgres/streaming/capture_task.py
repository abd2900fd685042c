"""A capture task: one slot of one PostgreSQL database into one task of the change log.

`CaptureTask.run` is the loop to read first: connect, reconcile, begin or resume, stream; and
again after anything that may pass. The thread that calls it receives and appends. Two more
threads make durable what was appended (appender) and acknowledge it to the server (status).
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from tailrace import failpoints
from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.disclosure import keep_disclosure, kept_disclosure
from tailrace.changelog.writer import LogListener, LogOptions, LogWriter, Tail
from tailrace.config.sections import LogConfig
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, Stopped, TailraceError
from tailrace.fair_semaphore import FairSemaphore
from tailrace.model import SourceFingerprint, format_lsn
from tailrace.sources.postgres.connection import server
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.column_lists import check_disclosure
from tailrace.sources.postgres.schema.column_patterns import ColumnNames, require_columns
from tailrace.sources.postgres.schema.publication import (
    check_publication,
    complete_publication,
    create_publication,
    publication_row,
    publication_warnings,
    require_publication,
    warn_unmatched,
)
from tailrace.sources.postgres.schema.published_tables import terms_digest
from tailrace.sources.postgres.schema.relation_messages import SchemaWatch
from tailrace.sources.postgres.schema.replica_identity import set_identities
from tailrace.sources.postgres.slot.monitor import CaptureGaps, SlotWatch
from tailrace.sources.postgres.snapshot.chunk_planner import SAMPLE_DEADLINE_S
from tailrace.sources.postgres.snapshot.exported_snapshot import SlotCreation, require_steady
from tailrace.sources.postgres.snapshot.incremental import IncrementalSnapshots
from tailrace.sources.postgres.snapshot.initial import InitialSnapshot, lock_wait_s, renew
from tailrace.sources.postgres.snapshot.plan import SnapshotPlans
from tailrace.sources.postgres.snapshot.procedure import SnapshotProcedure
from tailrace.sources.postgres.snapshot.requests import Requests, concerns_of
from tailrace.sources.postgres.snapshot.state import SnapshotState
from tailrace.sources.postgres.snapshot.watermark import SnapshotWatermark
from tailrace.sources.postgres.streaming.appender import PostgresAppender
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
from tailrace.sources.postgres.streaming.standby_status import StatusTimer
from tailrace.sources.postgres.streaming.stream import AwaitedPosition, Stream
from tailrace.sources.postgres.streaming.timeline import StandbyTimeline
from tailrace.sources.postgres.streaming.unchanged_updates import UnchangedUpdates
from tailrace.sources.progress import CaptureProgress, PhaseName, SourceWarning, TableProgress
from tailrace.sources.reconnection import Reconnection

log = structlog.get_logger(__name__)

STATE_NAME = f"tasks/{TASK}/capture.state"
START_DEADLINE_S = 60.0
#: A small snapshot begins again when DDL comes into it, so many times.
BEGINNINGS_MAX = 5
#: The silence that is borne doubles while connections end in silence before a transaction came, up to this:
#: servers before 16 say nothing while they decode a large transaction that is not for us. They answer while
#: they read it: that anything else came does not count.
SILENCE_S_MAX = 3600.0


class CaptureTask:
    """Captures one database into one log. `run` once; the rest from any thread.

    :param directory: the log, or where it is or is to be.
    :param name: of the pipeline, for messages.
    :param semaphore: to begin (slot, snapshot), where others begin, too.
    :param listener: of the log's writer.
    """

    def __init__(
        self,
        source: PostgresSource,
        directory: LogDirectory | Path,
        log_config: LogConfig,
        *,
        name: str,
        semaphore: FairSemaphore | None = None,
        listener: LogListener | None = None,
    ) -> None:
        self._source = source.for_pipeline(name)
        self._directory = directory
        self._options = LogOptions(
            segment_bytes=log_config.segment_bytes,
            compression=log_config.compression,
        )
        self._name = name
        self._semaphore = semaphore or FairSemaphore(1)
        self._listener = listener
        self._stopping = threading.Event()
        self._appender: PostgresAppender | None = None
        self._log: LogDirectory | None = None
        self._status: StatusTimer | None = None
        self._stream: Stream | None = None
        self._snapshot_state: SnapshotState | None = None
        self._snapshots: IncrementalSnapshots | None = None
        self._wanted = AwaitedPosition()
        self._phase: PhaseName = "connecting"
        self._snapshot: dict[str, TableProgress] = {}
        self._beginnings = 0
        self._silence_s = source.receive_timeout_s
        self._connections = Reconnection(
            source, self._stopping, name=name, position=self._position, is_heard=self._heard
        )
        self._gaps: CaptureGaps | None = None
        self._watch = SlotWatch(self._source, self._captured, name=name, gaps=self._gaps_known)

    def run(self) -> None:
        """Capture until `stop`, or until the snapshot is done if that is all that is wanted.

        :raises TailraceError: what a person must deal with, or what did not pass within
            `source.reconnect_s_max`.
        """
        self._watch.start()
        try:
            self._connections.run(self._run_connection)
        except Stopped:
            pass
        finally:
            self._phase = "stopped"
            self._watch.close()
            if self._appender is not None:
                self._appender.close()

    def stop(self) -> None:
        """Ask `run` to return: it makes durable and acknowledges what was received."""
        self._stopping.set()

    def caught_up(self, lsn: int) -> bool:
        """Return whether everything that was committed before `lsn` is durable in the log, and no
        snapshot is wanted that is not there whole; one that is paused is not wanted now.

        If it is not yet, the server is asked how far it is; call again.
        """
        self._wanted.position = max(self._wanted.position, lsn)
        if self._appender is None:
            return False
        if self._appender.durable.position >= lsn:
            return self._snapshots is not None and self._snapshots.settled
        if (status := self._status) is not None and self._appender.tail.position < lsn:
            status.ask()
        return False

    def progress(self) -> CaptureProgress:
        """Return how far the task is."""
        appender, stream, status = self._appender, self._stream, self._status
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
            warnings=(*self._watch.concerns, *self._snapshot_concerns()),
        )

    def _gaps_known(self) -> tuple[CaptureGaps, SnapshotPlans] | None:
        gaps, state = self._gaps, self._snapshot_state
        return None if gaps is None or state is None else (gaps, state.plans)

    def _snapshot_concerns(self) -> list[SourceWarning]:
        return [] if self._snapshot_state is None else concerns_of(self._snapshot_state.plans)

    # Connections

    def _run_connection(self) -> None:
        self._phase, self._stream = "connecting", None
        if self._appender is not None:
            # The process that took the log over has moved the slot on, too: what it says would mislead.
            self._appender.check_fence()
            self._appender.discard_open_unit()
        with closing(Session.connect(self._source, self._stopping, replication=True)) as session:
            server.require_supported(self._source, session.server_version)
            appender = self._open_log(session)
            state = self._state()
            facts = server.facts(session, self._source.slot, state.timeline if state else None)
            start = self._decide(facts, appender.tail.position, state)
            if start.action in {Action.FRESH, Action.RESTART}:
                self._begin_in_turn(session, facts, state, drop_slot=start.action is Action.RESTART)
                if self._source.snapshot == "only":
                    return
            elif start.action is Action.FINISHED:
                return
            else:
                if start.lost is not None:
                    renew(
                        session, self._source, appender, self._requests(), facts.slot, start.lost,
                        may_keep=state is None or state.phase is not CapturePhase.RENEWING,
                        create=partial(self._create_new_slot, session, state),
                    )  # fmt: skip
                    state = self._state()
                self._resume(facts, state)
                self._keep_failover(session, facts)
        self._connections.error = None
        with ExitStack() as stack:
            session = stack.enter_context(
                closing(Session.connect(self._source, self._stopping, replication=True))
            )
            timeline = self._timeline_of(session, facts)
            if timeline is not None:
                stack.callback(timeline.close)
            self._receive(session, timeline)

    def _open_log(self, session: Session) -> PostgresAppender:
        """Take the log's lock before anything is done to slot or publication."""
        if self._appender is not None:
            return self._appender
        if isinstance(self._directory, LogDirectory):
            self._log = self._directory
        else:
            self._log = self._open_directory(session, self._directory)
        writer = LogWriter.open(self._log, TASK, options=self._options, listener=self._listener)
        try:
            names = ColumnNames(self._log, TASK, writer, session, self._source)
            kept = kept_disclosure(self._log, TASK)
            require_columns(session, self._source, kept, names.renames)
            # Readers that wait for these rules find the names of today then.
            keep_disclosure(self._log, TASK, self._source.disclosure)
        except BaseException:
            writer.close()
            raise
        self._appender = PostgresAppender(writer, self._stopping)
        self._appender.column_names = names
        if self._source.skip_unchanged_updates:
            self._appender.unchanged_updates = UnchangedUpdates(self._source, lambda: names.renames)
        self._appender.start()
        self._snapshot_state = SnapshotState(self._log, TASK, self._appender)
        self._snapshot_state.open()
        self._gaps = CaptureGaps(self._log, TASK)
        return self._appender

    def _open_directory(self, session: Session, path: Path) -> LogDirectory:
        try:
            return LogDirectory.open(path)
        except TailraceError as error:
            if error.kind is not Kind.LOG_MISSING:
                raise
        system_identifier, _, _, database = server.system(session)
        fingerprint = SourceFingerprint("postgresql", system_identifier, database, self._source.slot)
        return LogDirectory.create_or_open(path, fingerprint)

    def _decide(self, facts: ServerState, position: int, state: CaptureState | None) -> Start:
        assert self._log is not None
        kept = self._log.identity.source
        if kept.slot != self._source.slot:
            raise TailraceError(
                Kind.LOG_FOREIGN,
                f"open the change log: it belongs to the slot {kept.slot!r}, the configuration names "
                f"{self._source.slot!r}",
                "correct source.slot, or give this pipeline a log of its own",
                {"path": str(self._log.path)},
            )
        start = decide(facts, LogFacts(kept, position, state), self._source.snapshot)
        log.info(
            "begin" if start.action in {Action.FRESH, Action.RESTART} else "resume",
            pipeline=self._name,
            action=start.action.value,
            position=format_lsn(start.position),
        )
        return start

    # Beginning

    def _begin_in_turn(
        self, session: Session, facts: ServerState, before: CaptureState | None, *, drop_slot: bool
    ) -> None:
        self._phase = "queued" if self._semaphore.must_wait else "snapshot"
        with self._semaphore.turn(self._stopping) as given:
            if not given:
                raise Stopped
            self._begin(session, facts, before, drop_slot=drop_slot)

    def _begin(
        self, session: Session, facts: ServerState, before: CaptureState | None, *, drop_slot: bool
    ) -> None:
        """Create publication and slot, and take the snapshot; the intent is on disk before.

        :param before: of an interrupted beginning, of which nothing is in the log.
        """
        assert self._appender is not None
        self._phase = "snapshot"
        self._snapshot.clear()
        source = self._source
        exists = publication_row(session, source.publication) is not None
        state = CaptureState(
            phase=CapturePhase.BEGINNING,
            system_identifier=facts.system_identifier,
            timeline=facts.timeline,
            announced_lsn=facts.flush_lsn,
            consistent_point=0,
            own_publication=not exists or (before is not None and before.own_publication),
        )
        if drop_slot:
            server.drop_slot(session, source.slot)
        self._keep(state)
        set_identities(session, source, begins=True)
        if not exists:
            create_publication(session, source)
        elif state.own_publication:
            complete_publication(session, source)
        else:
            check_publication(session, source)
        check_disclosure(session, source)
        slot = self._create_slot(session)
        failpoints.hit("snapshot.after_slot")
        state = replace(state, consistent_point=slot.consistent_point)
        self._keep(state)
        self._beginnings += 1
        snapshot = InitialSnapshot(
            self._procedure(), self._stopping, slot, may_begin_again=self._beginnings < BEGINNINGS_MAX
        )
        # The session that created the slot holds the exported snapshot: it stays idle meanwhile.
        reading = Session.connect(
            source, self._stopping, statement_s=SAMPLE_DEADLINE_S, lock_wait_s=lock_wait_s(source)
        )
        with closing(reading):
            if source.snapshot == "never":
                snapshot.facts_only(reading)
            else:
                snapshot.take(reading)
        snapshot.mark_consistent_point()
        failpoints.hit("snapshot.before_handover")
        phase = CapturePhase.FINISHED if source.snapshot == "only" else CapturePhase.STREAMING
        self._keep(replace(state, phase=phase))
        failpoints.hit("snapshot.after_handover")

    def _create_slot(self, session: Session) -> server.CreatedSlot:
        temporary = self._source.snapshot == "only"
        with closing(Session.connect(self._source, self._stopping)) as side:
            before = terms_digest(side, self._source.publication)
            creation = SlotCreation(session, side, self._stopping)
            created = creation.create(
                self._source.slot,
                temporary=temporary,
                failover=self._source.slot_failover,
                deadline_s=server.SLOT_CREATION_DEADLINE_S,
            )
            if not temporary:  # else nothing is decoded
                try:
                    require_steady(side, self._source.publication, created, before)
                except TailraceError:
                    server.drop_slot(session, self._source.slot)
                    raise
            return created

    def _create_new_slot(self, session: Session, state: CaptureState | None) -> server.CreatedSlot:
        """Create the slot of a renewal. If this one does not end, the next one drops the slot."""
        if state is not None:
            self._keep(replace(state, phase=CapturePhase.RENEWING))
        return self._create_slot(session)

    def _resume(self, facts: ServerState, state: CaptureState | None) -> None:
        """Check what may have changed while nothing ran, and write down what did."""
        assert self._appender is not None
        source = self._source
        with closing(Session.connect(source, self._stopping)) as session:
            require_publication(session, source.publication)
            warn_unmatched(session, source)
            set_identities(session, source, begins=False)
            for warning in publication_warnings(session, source):
                log.warning(warning.message, pipeline=self._name, repair=warning.repair)
            check_disclosure(session, source)
            if self._appender.column_names is not None:
                self._appender.column_names.look(session, source)
            # Before the stream begins: changes of a table that is new in it wait for its rows.
            self._requests().take(session)
        resumed = CaptureState(
            phase=CapturePhase.STREAMING,
            system_identifier=facts.system_identifier,
            timeline=facts.timeline,
            announced_lsn=state.announced_lsn if state else 0,
            consistent_point=state.consistent_point if state else 0,
        )
        if resumed != state:
            self._keep(resumed)

    def _keep_failover(self, session: Session, facts: ServerState) -> None:
        if self._source.slot_failover and facts.slot is not None and not facts.slot.failover:
            server.make_failover(session, self._source.slot)
            log.info("the slot is synchronised to standbys from now on", pipeline=self._name)

    def _captured(self) -> list[int]:
        """Return the oids of the tables in the log. Any thread."""
        appender = self._appender
        # A list of a dictionary's keys is made in one step, whatever the receiver does meanwhile.
        keys = [] if appender is None else list(appender.schema_in_force)
        return [int(key[1:]) for key in keys if key.startswith("F")]

    # Streaming

    def _timeline_of(self, session: Session, facts: ServerState) -> StandbyTimeline | None:
        if not facts.standby:
            return None

        def keep(timeline: int) -> None:
            state = self._state()
            assert state is not None
            self._keep(replace(state, timeline=timeline))

        return StandbyTimeline(
            lambda: Session.connect(self._source, self._stopping),
            self._source.slot,
            session.backend_pid,
            facts.timeline,
            keep,
        )

    def _receive(self, session: Session, timeline: StandbyTimeline | None) -> None:
        """Stream until stopping is asked for; then make durable and acknowledge what came."""
        assert self._appender is not None
        appender, source = self._appender, self._source
        interval_s = server.status_interval_s(session, source.status_interval_s)
        command = server.start_command(source, appender.tail.position, session.server_version)
        transport = session.streaming(source.frame_bytes_max)
        try:
            transport.start(session.encoded(command), START_DEADLINE_S)
            status = StatusTimer(
                transport,
                lambda: appender.durable.position,
                appender.check_fence,
                interval_s,
            )
            self._status = status
            snapshot_watermark = SnapshotWatermark(appender)
            self._snapshots = IncrementalSnapshots(
                self._procedure(), snapshot_watermark, ask=status.ask, requests=self._requests()
            )
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

    def _procedure(self) -> SnapshotProcedure:
        assert self._appender is not None
        assert self._snapshot_state is not None
        return SnapshotProcedure(self._source, self._appender, self._snapshot_state, self._snapshot)

    def _requests(self) -> Requests:
        assert self._log is not None
        assert self._snapshot_state is not None
        return Requests(
            self._log,
            TASK,
            self._source,
            self._snapshot_state,
            lambda: {} if self._appender is None else self._appender.schema_in_force,
        )

    def _extend_silence_timeout(self, stream: Stream) -> None:
        if stream.is_any_transaction:
            self._silence_s = self._source.receive_timeout_s
        elif stream.was_silent:
            self._silence_s = min(2 * self._silence_s, SILENCE_S_MAX)

    def _heard(self) -> bool:
        return self._stream is not None and self._stream.heard

    def _position(self) -> int:
        return self._appender.tail.position if self._appender is not None else 0

    # State

    def _state(self) -> CaptureState | None:
        assert self._log is not None
        content = self._log.state_read(STATE_NAME)
        return None if content is None else CaptureState.from_json(content)

    def _keep(self, state: CaptureState) -> None:
        assert self._log is not None
        self._log.state_write(STATE_NAME, state.as_json())
