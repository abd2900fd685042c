"""Snapshots on demand, from outside the engine: what is asked for, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.lock_probe import is_written
from tailrace.config import PipelineConfig
from tailrace.pipeline.sink_worker import TASK
from tailrace.sources.postgres.snapshot import requests
from tailrace.sources.postgres.snapshot.plan import Origin, SnapshotOutcome, SnapshotPlan, SnapshotPlans
from tailrace.sources.postgres.snapshot.state import agenda_name


def ask(pipeline: PipelineConfig, *, tables: Sequence[str], where: str) -> dict[str, Any]:
    """Ask for a snapshot of `tables`, each as `schema.table`.

    :raises TailraceError: `LOG_MISSING`: the first run reads all tables anyway; `LOG_FULL`,
        `LOG_WRITE_FAILED`.
    """
    return _asked(pipeline, requests.ask(_directory(pipeline), TASK, tables=tables, where=where))


def ask_for_end(pipeline: PipelineConfig, *, tables: Sequence[str]) -> dict[str, Any]:
    """Ask for the end of the asked-for snapshots that have one of `tables`; of all if none are named.

    :raises TailraceError: as `ask`.
    """
    return _asked(pipeline, requests.ask(_directory(pipeline), TASK, tables=tables, cancels=True))


def ask_for_pause(pipeline: PipelineConfig, *, pauses: bool) -> dict[str, Any]:
    """Ask that snapshots beside the stream pause, or go on if not `pauses`.

    :raises TailraceError: as `ask`.
    """
    return _asked(pipeline, requests.ask(_directory(pipeline), TASK, pauses=pauses))


def known(pipeline: PipelineConfig) -> list[dict[str, Any]]:
    """Return the snapshots of a pipeline: those that are over, those at work, those that wait.

    :raises TailraceError: `LOG_MISSING`, `LOG_CORRUPT`.
    """
    directory = _directory(pipeline)
    content = directory.state_read(agenda_name(TASK))
    agenda = SnapshotPlans() if content is None else SnapshotPlans.from_json(content)
    taken = [_told(each, paused=agenda.paused) for each in (*agenda.finished, *agenda.open)]
    wait = [
        {
            "id": request.id, "origin": str(Origin.REQUESTED), "state": "waiting", "where": request.where,
            "tables": [_table(name) for name in request.tables], "requested_us": request.requested_us,
            "finished_us": None, "error": None,
        }
        for request in requests.waiting(directory, TASK)
        if request.wants_rows and agenda.find(request.id) is None
    ]  # fmt: skip
    return [*taken, *wait]


def _directory(pipeline: PipelineConfig) -> LogDirectory:
    return LogDirectory.open(pipeline.log.path)


def _asked(pipeline: PipelineConfig, request: requests.Request) -> dict[str, Any]:
    return {"id": request.id, "engine_runs": is_written(pipeline.log.path, TASK)}


def _told(snapshot: SnapshotPlan, *, paused: bool) -> dict[str, Any]:
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
