"""Gaps of tables that were temporarily unlogged or not in the publication."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

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
        # By oid, as a table can be renamed meanwhile: when it was last not captured, in µs since 1970.
        self._seen: dict[int, int] = {int(oid): int(seen_us) for oid, seen_us in content.get("oids", ())}
        # As earlier versions noted them.
        self._named = {(schema, name): int(seen_us) for schema, name, seen_us in content.get("tables", ())}

    def look(
        self, not_captured: Collection[int], published: Mapping[int, Name], plans: SnapshotPlans
    ) -> list[SourceWarning]:
        """Note which tables are not captured now; return warnings for those captured again, with a gap.

        :param not_captured: their oids.
        :param published: the names of the publication's tables, by oid.
        :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        now_us = time.time_ns() // 1000
        self._seen |= {oid: self._named.pop(name) for oid, name in published.items() if name in self._named}
        read = _read_since(plans)
        seen = {oid: at for oid, at in self._seen.items() if oid in not_captured or read.get(oid, 0) <= at}
        seen |= dict.fromkeys(not_captured, now_us)
        if seen != self._seen:
            self._directory.state_write(_GAPS, {"oids": sorted(seen.items())})
            self._seen = seen
        again = seen.keys() & published.keys() - set(not_captured)
        return [_concern(*name) for name in sorted(published[oid] for oid in again)]


def _read_since(plans: SnapshotPlans) -> dict[int, int]:
    """Return, by the table's oid, when the last finished snapshot that read all of its rows was requested."""
    read: dict[int, int] = {}
    for snapshot in plans.finished:
        if snapshot.outcome is SnapshotOutcome.DONE and snapshot.replaces:
            for table in snapshot.tables:
                read[table.oid] = max(read.get(table.oid, 0), snapshot.requested_us)
    return read


def _concern(schema: str, name: str) -> SourceWarning:
    return SourceWarning(
        f"table_gap:{schema}.{name}",
        f"the table {schema}.{name} was unlogged, or not in the publication, for a while: its changes of "
        "that time are not captured",
        snapshot_command(schema, name),
    )
