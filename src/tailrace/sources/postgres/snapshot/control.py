"""The snapshots of a log for people, from any process: asking for them, and what there is to know of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.lock import is_written
from tailrace.errors import Kind, TailraceError
from tailrace.sources.postgres.snapshot.plan import Origin, SnapshotOutcome, SnapshotPlan, SnapshotPlans
from tailrace.sources.postgres.snapshot.requests import not_taken
from tailrace.sources.postgres.snapshot.state import kept_plans
from tailrace.sources.progress import SourceWarning, TableProgress
from tailrace.sources.snapshot_requests import ask, waiting


class SnapshotControl:
    """The snapshots of the log at a path; see `tailrace.sources.contract.Snapshots`."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def request(self, tables: Sequence[str], where: str) -> dict[str, Any]:
        if not tables:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                "ask for a snapshot of what is lost: PostgreSQL has no shards, of which one could be",
                "name tables: tailrace snapshot FILE --table schema.table",
            )
        return self._ask(tables=tables, where=where)

    def cancel(self, tables: Sequence[str]) -> dict[str, Any]:
        return self._ask(tables=tables, cancels=True)

    def pause(self, *, pauses: bool) -> dict[str, Any]:
        return self._ask(pauses=pauses)

    def known(self) -> list[dict[str, Any]]:
        plans = self._plans()
        asked = [
            not_taken(request)
            for request in waiting(LogDirectory.open(self._log))
            if request.wants_rows and plans.find(request.id) is None
        ]
        return [
            *(_shown(each, paused=plans.paused) for each in (*plans.finished, *plans.open)),
            *(_shown(each, paused=False) | {"state": "waiting"} for each in asked),
        ]

    @property
    def is_request_open(self) -> bool:
        return any(
            each["origin"] == str(Origin.REQUESTED)
            and each["state"] in ("waiting", str(SnapshotOutcome.OPEN))
            for each in self.known()
        )

    @property
    def needed_from(self) -> int | None:
        # What lies before it is in the plans, which follow the log within seconds.
        plans = self._plans()
        return plans.log_offset if plans.open else None

    @property
    def warnings(self) -> list[SourceWarning]:
        try:
            return concerns_of(self._plans())
        except TailraceError:
            return []  # the start says what is wrong with it

    @property
    def unfinished(self) -> dict[str, TableProgress]:
        try:
            plans = self._plans()
        except TailraceError:
            return {}  # the start says what is wrong with it
        return {
            table.qualified_name: TableProgress(
                table.rows, table.rows_estimated, False, table.chunks or 0, len(table.done)
            )
            for snapshot in plans.open
            for table in snapshot.tables
            if not table.is_done
        }

    def _plans(self) -> SnapshotPlans:
        return kept_plans(LogDirectory.open(self._log))

    def _ask(self, **what: Any) -> dict[str, Any]:
        request = ask(LogDirectory.open(self._log), **what)
        return {"id": request.id, "engine_runs": is_written(self._log, TASK)}


def _shown(snapshot: SnapshotPlan, *, paused: bool) -> dict[str, Any]:
    return {
        "id": snapshot.id,
        "origin": str(snapshot.origin),
        "state": "paused" if paused and snapshot.outcome is SnapshotOutcome.OPEN else str(snapshot.outcome),
        "where": snapshot.where,
        "tables": [
            {
                "name": table.qualified_name,
                "rows": table.rows,
                "chunks": table.chunks or 0,
                "chunks_done": len(table.done),
            }
            for table in snapshot.tables
        ],
        "requested_us": snapshot.requested_us,
        "finished_us": snapshot.finished_us or None,
        "error": snapshot.error,
    }


def concerns_of(plans: SnapshotPlans) -> list[SourceWarning]:
    """Return what a person should know of: that snapshots are paused, and those that were asked for and
    failed, until one of the same tables is done.
    """
    found = [_paused(plans)] if plans.paused else []
    done: set[str] = set()
    for snapshot in reversed(plans.finished):
        named = {table.qualified_name for table in snapshot.tables}
        if snapshot.outcome is SnapshotOutcome.DONE:
            done |= named
        elif snapshot.outcome is SnapshotOutcome.FAILED and not named <= done:
            error = snapshot.error or {}
            tables = ", ".join(sorted(named))
            found.append(
                SourceWarning(
                    f"snapshot_failed:{snapshot.id}",
                    f"the snapshot {snapshot.id} of {tables} failed: {error.get('message', '')}",
                    f"{error.get('hint', '')}; or, to end this warning: {_cancel_command(snapshot)}",
                )
            )
    return found


def _paused(plans: SnapshotPlans) -> SourceWarning:
    tables = sum(not table.is_done for snapshot in plans.open for table in snapshot.tables)
    return SourceWarning(
        "snapshots_paused",
        f"snapshots beside the stream are paused: {tables} tables are not whole",
        shlex.join(["tailrace", "snapshot", "FILE", "--resume"]),
    )


def _cancel_command(snapshot: SnapshotPlan) -> str:
    named = [part for table in snapshot.tables for part in ("--table", table.qualified_name)]
    return shlex.join(["tailrace", "snapshot", "FILE", "--cancel", *named])
