"""Tables whose changes were not captured for a while, until a snapshot has read them again.

A table that is taken out of the publication, or made unlogged under one for all tables, is not told of by the
stream, nor is it when it comes back. What was seen so is kept beside the log, also over restarts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from tailrace.changelog.directory import LogDirectory
from tailrace.config.source.postgres import PostgresSource
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.publication import snapshot_command
from tailrace.sources.postgres.schema.source_tables import Name
from tailrace.sources.postgres.snapshot.plan import SnapshotOutcome, SnapshotPlans
from tailrace.sources.progress import SourceWarning

_UNLOGGED = """
SELECT n.nspname AS schema, c.relname AS name
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND c.relpersistence = 'u'
"""


class CaptureGaps:
    """The gaps of one task. One thread; the file is written when something changes.

    :raises TailraceError: `LOG_CORRUPT` if the file can't be read.
    """

    def __init__(self, directory: LogDirectory, task: str) -> None:
        self._directory = directory
        self._file = f"tasks/{task}/gaps.state"
        content = directory.state_read(self._file) or {}
        # By table: when it was last seen not to be captured, in µs since 1970.
        self._seen: dict[Name, int] = {
            (schema, name): int(seen_us) for schema, name, seen_us in content.get("tables", ())
        }

    def look(
        self, not_captured: Iterable[Name], published: Iterable[Name], agenda: SnapshotPlans
    ) -> list[SourceWarning]:
        """Take in which tables are not captured now; return those that are again, and miss something.

        :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        now_us = time.time_ns() // 1000
        open_now = set(not_captured)
        read = _read_since(agenda)
        seen = {name: at for name, at in self._seen.items() if name in open_now or read.get(name, 0) <= at}
        seen |= dict.fromkeys(open_now, now_us)
        if seen != self._seen:
            tables = [[*name, at] for name, at in sorted(seen.items())]
            self._directory.state_write(self._file, {"tables": tables})
            self._seen = seen
        return [_concern(*name) for name in sorted(set(seen).intersection(published) - open_now)]


def unlogged_tables(session: Session, source: PostgresSource) -> frozenset[Name]:
    """Return the tables that `source` means and that are unlogged."""
    rows = session.run(_UNLOGGED, "look for unlogged tables")
    names = ((row["schema"] or "", row["name"] or "") for row in rows)
    return frozenset(name for name in names if source.captures(*name))


def _read_since(agenda: SnapshotPlans) -> dict[Name, int]:
    """Return when the last snapshot was asked for that read a table as a whole, by table."""
    read: dict[Name, int] = {}
    for snapshot in agenda.finished:
        if snapshot.outcome is SnapshotOutcome.DONE and snapshot.replaces:
            for table in snapshot.tables:
                name = table.schema, table.name
                read[name] = max(read.get(name, 0), snapshot.requested_us)
    return read


def _concern(schema: str, name: str) -> SourceWarning:
    return SourceWarning(
        f"table_gap:{schema}.{name}",
        f"the table {schema}.{name} was unlogged, or not in the publication, for a while: its changes of "
        "that time are not captured",
        snapshot_command(schema, name),
    )
