"""Gaps of tables that were temporarily unlogged or not in the publication."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.sources.postgres.schema.publication import snapshot_command
from tailrace.sources.postgres.schema.source_tables import Name
from tailrace.sources.postgres.snapshot.plan import SnapshotOutcome, SnapshotPlans
from tailrace.sources.progress import SourceWarning

_GAPS = f"tasks/{TASK}/gaps.state"


class CaptureGaps:
    """The gaps of one log. Used by one thread; their file is written when they change.

    :raises TailraceError: `LOG_CORRUPT` if the file can't be read.
    """

    def __init__(self, directory: LogDirectory) -> None:
        self._directory = directory
        content = directory.state_read(_GAPS) or {}
        # By table: when it was last found not to be captured, in µs since 1970.
        self._seen: dict[Name, int] = {
            (schema, name): int(seen_us) for schema, name, seen_us in content.get("tables", ())
        }

    def look(
        self, not_captured: Iterable[Name], published: Iterable[Name], plans: SnapshotPlans
    ) -> list[SourceWarning]:
        """Note which tables are not captured now; return warnings for those captured again, with a gap.

        :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        now_us = time.time_ns() // 1000
        open_now = set(not_captured)
        read = _read_since(plans)
        seen = {name: at for name, at in self._seen.items() if name in open_now or read.get(name, 0) <= at}
        seen |= dict.fromkeys(open_now, now_us)
        if seen != self._seen:
            tables = [[*name, at] for name, at in sorted(seen.items())]
            self._directory.state_write(_GAPS, {"tables": tables})
            self._seen = seen
        return [_concern(*name) for name in sorted(set(seen).intersection(published) - open_now)]


def _read_since(plans: SnapshotPlans) -> dict[Name, int]:
    """Return, by table, when the last finished snapshot that read all of its rows was requested."""
    read: dict[Name, int] = {}
    for snapshot in plans.finished:
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
