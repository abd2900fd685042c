"""What is left of a snapshot when no engine runs: read from where the engine keeps it."""

from __future__ import annotations

from tailrace.changelog.directory import LogDirectory
from tailrace.errors import TailraceError
from tailrace.pipeline.status.views import TableView
from tailrace.sources.postgres.snapshot.plan import SnapshotPlans
from tailrace.sources.postgres.snapshot.requests import concerns_of
from tailrace.sources.postgres.snapshot.state import agenda_name
from tailrace.sources.progress import SourceWarning


def needed_from(directory: LogDirectory, task: str) -> int | None:
    """Return the log offset from which on the log must tell which chunks of a snapshot are done; None
    if no snapshot is open.

    What lies before it is in the agenda. While a snapshot is taken it follows the log within seconds.

    :raises TailraceError: `LOG_CORRUPT`.
    """
    agenda = _agenda(directory, task)
    return agenda.log_offset if agenda.open else None


def snapshot_concerns(directory: LogDirectory, task: str) -> list[SourceWarning]:
    """Return what a person should know of the snapshots: `concerns_of`."""
    try:
        return concerns_of(_agenda(directory, task))
    except TailraceError:
        return []  # the start says what is wrong with it


def unfinished(directory: LogDirectory, task: str) -> tuple[TableView, ...]:
    """Return the tables whose snapshot is not whole, as of the last time that it was written down.

    Chunks that came into the log just before the engine was killed are not counted yet.
    """
    try:
        agenda = _agenda(directory, task)
    except TailraceError:
        return ()  # the start says what is wrong with it
    return tuple(
        TableView(
            table.qualified_name, table.rows, table.rows_estimated, table.chunks or 0, len(table.done), None
        )
        for snapshot in agenda.open
        for table in snapshot.tables
        if not table.is_done
    )


def _agenda(directory: LogDirectory, task: str) -> SnapshotPlans:
    content = directory.state_read(agenda_name(task))
    return SnapshotPlans() if content is None else SnapshotPlans.from_json(content)
