"""Paused snapshots beside the stream: nothing is read, the stream goes on, also after a restart or a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace import failpoints
from tailrace.changelog.directory import LogDirectory
from tailrace.sources.postgres.snapshot.control import SnapshotControl
from tailrace.sources.postgres.snapshot.plan import SnapshotOutcome
from tailrace.sources.postgres.snapshot.state import kept_plans
from tailrace.sources.snapshot_requests import ask, waiting
from tests.support.capture.captured import SLOT, capturing
from tests.support.capture.folded import units
from tests.support.capture.requested import KEYED, await_end, found, request
from tests.support.capture.resumed import (
    RUN,
    SMALL,
    create_tables,
    judge,
    life,
    until_whole,
    writers_at_work,
)
from tests.support.postgres import Database
from tests.support.wait import wait_until


def pause(log: Path, *, pauses: bool) -> None:
    ask(LogDirectory.open(log), pauses=pauses)


def keys(log: Path) -> list[str]:
    return [concern.key for concern in SnapshotControl(log).warnings]


def states(log: Path, pg: Database) -> dict[str, str]:
    return {each["id"]: each["state"] for each in SnapshotControl(log).known()}


def test_a_snapshot_paused_in_the_middle_reads_no_more_until_resumed(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    until_whole(pg, log)
    asked = request(log, *KEYED)
    hits: list[str] = []

    def hit(name: str) -> None:
        hits.append(name)
        if hits.count("snapshot.after_window") == 1 and name == "snapshot.after_window":
            pause(log, pauses=True)

    monkeypatch.setattr(failpoints, "hit", hit)
    with writers_at_work(pg, 3):
        with capturing(pg.dsn, log, **SMALL) as running:
            wait_until(lambda: running.is_over or keys(log) == ["snapshots_paused"], 60, "the pause")
            assert [each.key for each in running.task.progress().warnings] == ["snapshots_paused"]
            later = request(log, "public.items", where="n > 0")
            wait_until(lambda: found(log, later) is not None, 60, "the request to be taken")
            running.catch_up(pg.query, 60)  # does not wait for paused snapshots
            read = len(list(units(log)))
            assert not pg.query(
                "select 1 from pg_replication_slots where temporary and database = %s", [pg.name]
            )
        windows = hits.count("snapshot.before_window")
        assert windows == 1
        assert states(log, pg) == {**states(log, pg), asked: "paused", later: "paused"}
        assert SnapshotControl(log).unfinished
        # It stays paused over a restart, and after a request is cancelled.
        request(log, "public.items", cancels=True)
        again = request(log, *KEYED)
        with capturing(pg.dsn, log, **SMALL) as running:
            wait_until(lambda: not waiting(LogDirectory.open(log)), 60, "the requests to be taken")
            running.catch_up(pg.query, 60)
            assert hits.count("snapshot.before_window") == windows
            assert len(list(units(log))) == read
            assert states(log, pg)[asked] == states(log, pg)[later] == "cancelled"
            pause(log, pauses=False)
            assert await_end(running, log, again).outcome is SnapshotOutcome.DONE
            assert keys(log) == []
    until_whole(pg, log)
    judge(pg, log)


@pytest.mark.slow
def lacks_chunks(log: Path) -> bool:
    """Return whether a table of an open snapshot has chunks that are not in the log."""
    opened = kept_plans(LogDirectory.open(log)).open
    return any(not table.is_done for snapshot in opened for table in snapshot.tables)


@pytest.mark.ci
def test_the_rest_of_the_initial_snapshot_stays_paused_over_kills(pg: Database, tmp_path: Path) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    assert life(pg, log, "snapshot.after_chunk=kill@3") == -9
    pause(log, pauses=True)
    with writers_at_work(pg, 4):
        # Killed after the pause was accepted, it is still paused: nothing more is read.
        for point in ("capture.after_append=kill@2", "log.after_fsync=kill@2", ""):
            life(pg, log, point)
            assert keys(log) == ["snapshots_paused"]
            assert lacks_chunks(log)
        pause(log, pauses=False)
        assert life(pg, log, "snapshot.in_window=kill@2") == -9
        assert keys(log) == []
    until_whole(pg, log)
    judge(pg, log)


def test_a_pause_that_is_resumed_at_once_has_no_effect(pg: Database, tmp_path: Path) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    until_whole(pg, log)
    pause(log, pauses=True)
    asked = request(log, *KEYED)
    pause(log, pauses=False)
    assert life(pg, log, "", script=RUN) == 0
    snapshot = found(log, asked)
    assert snapshot is not None
    assert snapshot.outcome is SnapshotOutcome.DONE
    assert kept_plans(LogDirectory.open(log)).paused is False
    assert pg.query("select 1 from pg_replication_slots where slot_name = %s", [SLOT])
