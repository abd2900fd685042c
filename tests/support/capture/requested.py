"""Snapshots that are requested while a capture runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tailrace.changelog.directory import LogDirectory
from tailrace.sources.postgres.snapshot.plan import (
    SnapshotOutcome,
    SnapshotPlan,
)
from tailrace.sources.postgres.snapshot.state import kept_plans
from tailrace.sources.snapshot_requests import ask
from tests.support.capture.captured import Running
from tests.support.wait import wait_until

KEYED = ("public.items", "public.pairs", "public.parts")


def request(log: Path, *tables: str, where: str = "", cancels: bool = False) -> str:
    return ask(LogDirectory.open(log), tables=tables, where=where, cancels=cancels).id


def found(log: Path, id_: str) -> SnapshotPlan | None:
    return kept_plans(LogDirectory.open(log)).find(id_)


def is_over(log: Path, id_: str) -> Callable[[], bool]:
    def look() -> bool:
        snapshot = found(log, id_)
        return snapshot is not None and snapshot.outcome is not SnapshotOutcome.OPEN

    return look


def await_end(running: Running, log: Path, id_: str) -> SnapshotPlan:
    over = is_over(log, id_)
    wait_until(lambda: running.is_over or over(), 120, "the snapshot")
    assert not running.is_over, running.error
    snapshot = found(log, id_)
    assert snapshot is not None
    return snapshot
