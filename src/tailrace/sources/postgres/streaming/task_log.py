"""The log of a capture task, open for writing, and the state that is stored with it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.disclosure import keep_disclosure, kept_disclosure
from tailrace.changelog.writer import LogListener, LogOptions, LogWriter
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.model import SourceFingerprint
from tailrace.sources.postgres.connection import server
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.column_names import ColumnNames
from tailrace.sources.postgres.schema.column_patterns import require_columns
from tailrace.sources.postgres.slot.gaps import CaptureGaps
from tailrace.sources.postgres.snapshot.state import SnapshotState
from tailrace.sources.postgres.streaming.appender import PostgresAppender
from tailrace.sources.postgres.streaming.reconcile import CaptureState
from tailrace.sources.postgres.streaming.unchanged_updates import UnchangedUpdates

_STATE = f"tasks/{TASK}/capture.state"


def capture_state(directory: LogDirectory) -> CaptureState | None:
    """Return the stored state of the log's capture task; None if it has not begun.

    :raises TailraceError: `LOG_CORRUPT`.
    """
    content = directory.state_read(_STATE)
    return None if content is None else CaptureState.from_json(content)


@dataclass(frozen=True, slots=True)
class TaskLog:
    """A log that this process has locked.

    :ivar gaps: the gaps of tables that were temporarily not captured.
    """

    directory: LogDirectory
    appender: PostgresAppender
    column_names: ColumnNames
    snapshots: SnapshotState
    gaps: CaptureGaps

    @classmethod
    def open(
        cls,
        path: Path,
        session: Session,
        source: PostgresSource,
        options: LogOptions,
        stopping: threading.Event,
        listener: LogListener | None,
    ) -> TaskLog:
        """Lock and open the log at `path`, which may not exist yet.

        :param session: a replication session; slot and publication are not changed.
        :raises TailraceError: as `LogWriter.open`; `CONFIG_INVALID` if a pattern matches no column.
        """
        directory = _directory(path, session, source)
        writer = LogWriter.open(directory, TASK, options=options, listener=listener)
        try:
            names = ColumnNames(directory, writer, session, source)
            require_columns(session, source, kept_disclosure(directory, TASK), names.renames)
            # After the names, which readers that wait for these rules then find.
            keep_disclosure(directory, TASK, source.disclosure)
            appender = PostgresAppender(writer, stopping)
            appender.column_names = names
            if source.skip_unchanged_updates:
                appender.unchanged_updates = UnchangedUpdates(source, lambda: names.renames)
            snapshots = SnapshotState(directory, appender)
            snapshots.open()
            gaps = CaptureGaps(directory)
        except BaseException:
            writer.close()
            raise
        appender.start()
        return cls(directory, appender, names, snapshots, gaps)

    @property
    def state(self) -> CaptureState | None:
        """The stored state of the task."""
        return capture_state(self.directory)

    def keep(self, state: CaptureState) -> None:
        """Store the task's state durably.

        :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        self.directory.state_write(_STATE, state.as_json())


def _directory(path: Path, session: Session, source: PostgresSource) -> LogDirectory:
    try:
        return LogDirectory.open(path)
    except TailraceError as error:
        if error.kind is not Kind.LOG_MISSING:
            raise
    system_identifier, _, _, database = server.system(session)
    fingerprint = SourceFingerprint("postgresql", system_identifier, database, source.slot)
    return LogDirectory.create_or_open(path, fingerprint)
