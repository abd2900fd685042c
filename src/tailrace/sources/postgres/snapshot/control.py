"""Snapshots of a pipeline from outside its capture: requests for them, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.lock_probe import is_written
from tailrace.errors import TailraceError
from tailrace.sources.postgres.snapshot import requests
from tailrace.sources.postgres.snapshot.plan import Origin, SnapshotOutcome, SnapshotPlan, SnapshotPlans
from tailrace.sources.postgres.snapshot.state import agenda_name
from tailrace.sources.progress import SourceWarning, TableProgress

_TASK = "0"


class SnapshotControl:
    """The snapshots of the log at a path; see `tailrace.sources.contract.Snapshots`."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def request(self, tables: Sequence[str], where: str) -> dict[str, Any]:
        return self._asked(requests.ask(self._directory(), _TASK, tables=tables, where=where))

    def cancel(self, tables: Sequence[str]) -> dict[str, Any]:
        return self._asked(requests.ask(self._directory(), _TASK, tables=tables, cancels=True))

    def pause(self, *, pauses: bool) -> dict[str, Any]:
        return self._asked(requests.ask(self._directory(), _TASK, pauses=pauses))

    def known(self) -> list[dict[str, Any]]:
        directory = self._directory()
        plans = _plans(directory)
        taken = [_as_json(each, paused=plans.paused) for each in (*plans.finished, *plans.open)]
        wait = [
            {
                "id": request.id, "origin": str(Origin.REQUESTED), "state": "waiting",
                "where": request.where, "tables": [_table(name) for name in request.tables],
                "requested_us": request.requested_us, "finished_us": None, "error": None,
            }
            for request in requests.waiting(directory, _TASK)
            if request.wants_rows and plans.find(request.id) is None
        ]  # fmt: skip
        return [*taken, *wait]

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
        plans = _plans(self._directory())
        return plans.log_offset if plans.open else None

    @property
    def warnings(self) -> list[SourceWarning]:
        try:
            return requests.concerns_of(_plans(self._directory()))
        except TailraceError:
            return []  # the start says what is wrong with it

    @property
    def unfinished(self) -> dict[str, TableProgress]:
        try:
            plans = _plans(self._directory())
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

    def _directory(self) -> LogDirectory:
        return LogDirectory.open(self._log)

    def _asked(self, request: requests.Request) -> dict[str, Any]:
        return {"id": request.id, "engine_runs": is_written(self._log, _TASK)}


def _plans(directory: LogDirectory) -> SnapshotPlans:
    content = directory.state_read(agenda_name(_TASK))
    return SnapshotPlans() if content is None else SnapshotPlans.from_json(content)


def _as_json(snapshot: SnapshotPlan, *, paused: bool) -> dict[str, Any]:
    return {
        "id": snapshot.id,
        "origin": str(snapshot.origin),
        "state": "paused" if paused and snapshot.outcome is SnapshotOutcome.OPEN else str(snapshot.outcome),
        "where": snapshot.where,
        "tables": [
            _table(table.qualified_name, table.rows, table.chunks or 0, len(table.done))
            for table in snapshot.tables
        ],
        "requested_us": snapshot.requested_us,
        "finished_us": snapshot.finished_us or None,
        "error": snapshot.error,
    }


def _table(name: str, rows: int = 0, chunks: int = 0, chunks_done: int = 0) -> dict[str, Any]:
    return {"name": name, "rows": rows, "chunks": chunks, "chunks_done": chunks_done}
