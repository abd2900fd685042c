"""The type of source `postgresql`: implements `tailrace.sources.contract.Source`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.writer import LogListener
from tailrace.config import PipelineConfig, PostgresSource
from tailrace.config.sections import LogConfig
from tailrace.config.source.postgres import postgres_source
from tailrace.decode.schemas import Catalog
from tailrace.errors import Kind, TailraceError
from tailrace.fair_semaphore import FairSemaphore
from tailrace.model import Relation, SourceFingerprint
from tailrace.protocol.metadata_frames import schema_frames
from tailrace.sources.findings import Finding, error
from tailrace.sources.postgres.connection import server
from tailrace.sources.postgres.connection.quoting import quote_literal
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.preflight.capacity import SourceCapacity, room_findings
from tailrace.sources.postgres.preflight.checked_source import CheckedSource
from tailrace.sources.postgres.preflight.server import room_of
from tailrace.sources.postgres.preflight.tables import source_findings
from tailrace.sources.postgres.schema.catalog import PublishedTable, meant_tables
from tailrace.sources.postgres.schema.source_tables import matching_tables
from tailrace.sources.postgres.slot.health import concerns, look
from tailrace.sources.postgres.slot.way_out import with_way_out
from tailrace.sources.postgres.snapshot.control import SnapshotControl
from tailrace.sources.postgres.streaming.capture_task import CaptureTask
from tailrace.sources.postgres.streaming.reconcile import CapturePhase, slot_missing
from tailrace.sources.postgres.streaming.task_log import capture_state
from tailrace.sources.progress import SourceLook

SERVER_VERSION_MIN = 130000


class PostgresSourceType:
    """PostgreSQL, captured by logical replication with pgoutput."""

    settings = PostgresSource

    def capture(
        self,
        section: PostgresSource,
        log: Path,
        options: LogConfig,
        *,
        name: str,
        semaphore: FairSemaphore | None = None,
        listener: LogListener | None = None,
    ) -> CaptureTask:
        return CaptureTask(section, log, options, name=name, semaphore=semaphore, listener=listener)

    def end(self, section: PostgresSource, stop: threading.Event) -> int:
        """Return the LSN up to which the source's WAL is written now."""
        with Session.connect(section, stop) as session:
            return _wal_end(session)

    def look(
        self, pipeline: PipelineConfig, directory: LogDirectory, timeout_s: float, stop: threading.Event
    ) -> SourceLook:
        source = postgres_source(pipeline.source)
        hurried = source.model_copy(update={"connect_timeout": max(2, int(timeout_s))})
        with Session.connect(hurried, stop) as session:
            end, health = _wal_end(session), look(session, source.slot)
            if health is None:
                return SourceLook(end, lost=_lost_slot(session, source, directory))
        found = tuple(concerns(source.slot, health, source.slot_watch))
        lost = None
        if health.invalidation:
            (concern,) = found
            lost = TailraceError(
                Kind.SLOT_INVALIDATED, concern.message, concern.repair, {"slot": source.slot}
            )
        return SourceLook(end, health.shown(), found, lost)

    def snapshots(self, log: Path) -> SnapshotControl:
        return SnapshotControl(log)

    def check(self, pipeline: PipelineConfig, directory: LogDirectory | None) -> PostgresCheck:
        return PostgresCheck(pipeline, directory)

    def findings_together(self, checks: Sequence[PostgresCheck]) -> Iterator[Finding]:
        """Yield an error for each server whose sources need more slots or WAL senders than are free."""
        rooms = [check.capacity for check in checks if check.capacity is not None]
        gates = {room.server: threading.Lock() for room in rooms}
        for check in checks:
            if check.capacity is not None:
                check.gate = gates[check.capacity.server]
        return room_findings(rooms)

    def with_recovery(self, error: TailraceError, pipeline: PipelineConfig) -> TailraceError:
        return with_way_out(error, pipeline)

    def leftover_repair(self, source: SourceFingerprint) -> str:
        return f"SELECT pg_drop_replication_slot({quote_literal(source.slot)});"


class PostgresCheck:
    """Preflight of one PostgreSQL source.

    `capacity`, known once connected, is how many slots and WAL senders the source needs. `gate` allows only
    one source of a server at a time to use a WAL sender for its checks.
    """

    def __init__(self, pipeline: PipelineConfig, directory: LogDirectory | None) -> None:
        self._pipeline = pipeline
        self._directory = directory
        self._checked: CheckedSource | None = None
        self.capacity: SourceCapacity | None = None
        self.gate = threading.Lock()

    def connect(self) -> Iterator[Finding]:
        session = Session.connect(postgres_source(self._pipeline.source), threading.Event())
        if session.server_version < SERVER_VERSION_MIN:
            session.close()
            yield error(
                Kind.SOURCE_MISCONFIGURED,
                f"the server is PostgreSQL {session.server_version // 10000}; 13 is the oldest supported",
                "upgrade the server",
            )
            return
        try:
            checked = CheckedSource.of(session, self._pipeline, self._directory)
            self.capacity = room_of(checked)
        except BaseException:
            session.close()
            raise
        self._checked = checked

    def findings(self) -> Iterator[Finding]:
        if self._checked is not None:
            yield from source_findings(self._checked, self.gate)

    def tables(self) -> Sequence[tuple[str, str]]:
        if (checked := self._checked) is None:
            return []
        return [table.full_name for table in matching_tables(checked.session, checked.source)]

    def relations(self, wants: Callable[[str, str], bool]) -> Sequence[Relation]:
        if self._checked is None:
            return []
        session, source = self._checked.session, self._checked.source
        wanted = [table.oid for table in matching_tables(session, source) if wants(table.schema, table.name)]
        return [_relation(table, source) for table in meant_tables(session, source, wanted)]

    def close(self) -> None:
        if self._checked is not None:
            self._checked.session.close()
            self._checked = None


def _lost_slot(session: Session, source: PostgresSource, directory: LogDirectory) -> TailraceError | None:
    """Return the error for the missing slot of a log of this server that needs one."""
    state, kept = capture_state(directory), directory.identity.source
    if state is None or state.phase not in {CapturePhase.STREAMING, CapturePhase.RENEWING}:
        return None
    [row] = session.run(
        "SELECT system_identifier::text AS system, current_database() AS database FROM pg_control_system()",
        "identify the server",
    )
    found = SourceFingerprint(kept.type, row.text("system"), row.text("database"), source.slot)
    return slot_missing("look at the replication slot", source.slot) if found == kept else None


def _wal_end(session: Session) -> int:
    if (end := server.wal_end(session)) is None:
        raise TailraceError(
            Kind.SOURCE_QUERY_FAILED,
            "query the end of the source's WAL: the server returned NULL",
            "the server is a standby that has replayed nothing yet: try again when it has",
        )
    return end


def _relation(table: PublishedTable, source: PostgresSource) -> Relation:
    # The frames that capture would write before the table's first row.
    frames = table.schema_frames(0, 0) + table.facts_frame(0)
    in_force = [frame for _, frame in schema_frames(np.frombuffer(frames, np.uint8))]
    return Catalog(in_force, source.value_modes).relation(table.oid)
