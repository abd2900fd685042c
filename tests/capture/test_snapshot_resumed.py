"""Interrupted snapshots: chunks that are in the log stay, the others are read beside the stream, and the
result equals the source.
"""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace import failpoints
from tailrace.changelog.directory import LogDirectory
from tailrace.config import LogConfig
from tailrace.config.sections import RetentionConfig
from tailrace.errors import Kind
from tailrace.pipeline.source_worker import RetentionTimer
from tailrace.sources.postgres.snapshot.control import SnapshotControl
from tailrace.sources.postgres.snapshot.watermark import StreamEnded
from tailrace.sources.postgres.streaming.capture_task import BEGINNINGS_MAX
from tests.support.capture.captured import SLOT, capturing, run_to_end
from tests.support.capture.folded import Folded, fold, units
from tests.support.capture.requested import await_end, request
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
from tests.support.proxy import Proxy
from tests.support.wait import wait_until

#: Failpoints of a first start, and of the processes that continue it.
LIVES = [
    ("snapshot.after_slot", "snapshot.after_plan", "snapshot.in_copy@3"),
    ("snapshot.after_chunk@1", "snapshot.before_window", "snapshot.in_window@2", "snapshot.after_window"),
    ("snapshot.before_chunk_end@4", "snapshot.in_copy@2", "snapshot.before_chunk_end@2"),
    ("snapshot.after_chunk@6", "snapshot.after_plan@1", "snapshot.after_chunk@2", "log.before_fsync@9"),
    ("snapshot.before_finish", "snapshot.before_finish"),
    ("snapshot.before_handover", "capture.before_append@3"),
    ("snapshot.after_handover", "capture.after_append@2"),
    # Here others read the chunks.
]


@pytest.mark.parametrize("points", LIVES, ids=lambda points: points[0])
@pytest.mark.ci
def test_kills_in_a_snapshot_among_writers_lose_and_repeat_nothing(
    pg: Database, tmp_path: Path, points: tuple[str, ...]
) -> None:
    create_tables(pg)
    with writers_at_work(pg, len(points)):
        for turn, point in enumerate(points):
            name, _, count = point.partition("@")
            # How much is left when a later process starts depends on the threads of the one before.
            ends = {-9} if turn == 0 else {-9, 0}
            fault = f"{name}=kill@{count or 1}"
            assert life(pg, tmp_path / "log", fault) in ends, point
        with capturing(pg.dsn, tmp_path / "log", **SMALL) as running:
            running.catch_up(pg.query, 120)
    until_whole(pg, tmp_path / "log")
    judge(pg, tmp_path / "log")


def test_chunks_read_before_a_kill_are_not_read_again(pg: Database, tmp_path: Path) -> None:
    create_tables(pg)
    assert life(pg, tmp_path / "log", "snapshot.after_chunk=kill@8") == -9
    before = units(tmp_path / "log")
    until_whole(pg, tmp_path / "log")
    assert before
    assert units(tmp_path / "log")[: len(before)] == before
    found = judge(pg, tmp_path / "log")
    for table in ("items", "pairs", "parts"):
        assert set(found[table].reads.values()) == {1}
        assert found[table].ops["r"] == len(found[table].rows)
    assert found["plain"].ops == {"r": 2600}


def test_a_table_of_one_window_is_handed_over_exactly(pg: Database, tmp_path: Path) -> None:
    pg.execute("create table aaa(id int primary key, n int)")
    pg.execute("insert into aaa select n, 0 from generate_series(1, 400) n")
    create_tables(pg)
    # The first table's first chunk is in the log; nothing of the last tables is.
    assert life(pg, tmp_path / "log", "snapshot.after_chunk=kill@1") == -9
    with writers_at_work(pg), capturing(pg.dsn, tmp_path / "log", **SMALL) as running:
        running.catch_up(pg.query, 120)
    until_whole(pg, tmp_path / "log")
    found = judge(pg, tmp_path / "log")
    came = found["aaa"].reads + found["aaa"].creates
    assert set(came.values()) == {1}


def test_a_snapshot_continues_after_connections_cut_in_copy(
    pg: Database, tmp_path: Path, proxy: Callable[[int], Proxy]
) -> None:
    create_tables(pg)
    between = proxy(pg.port)
    dsn = pg.dsn.replace(f":{pg.port}/", f":{between.port}/")
    choose = random.Random(7)
    between_us = {**SMALL, "receive_timeout_s": 5.0}
    with writers_at_work(pg, 9), capturing(dsn, tmp_path / "log", **between_us) as running:
        for cut in range(12):
            between.cut_after(choose.randrange(200, 600_000))
            wait_until(
                functools.partial(
                    lambda cut: running.is_over or running.task.progress().reconnects > cut, cut
                ),
                60,
                "a cut",
            )
        running.catch_up(pg.query, 120)
    until_whole(pg, tmp_path / "log")
    judge(pg, tmp_path / "log")


def test_a_row_that_changed_its_key_is_read_again_also_after_a_lost_connection(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pg.execute("create table big(id int primary key, note text)")
    pg.execute("alter table big alter note set storage external")
    pg.execute("insert into big select g, repeat(md5(g::text), 100) from generate_series(1, 30) g")
    pg.execute("analyze big")
    log = tmp_path / "log"
    windows: list[str] = []

    def hit(name: str) -> None:
        if name == "snapshot.before_window":
            windows.append(name)
            if len(windows) == 2:
                before = running.task.progress().rows
                pg.execute("update big set id = 0 where id = 30")
                wait_until(lambda: running.task.progress().rows > before, 10, "the update")
                pg.execute("select pg_terminate_backend(active_pid) from pg_replication_slots where active")
                raise StreamEnded

    with capturing(pg.dsn, log, snapshot_connections=1, snapshot_chunk_rows=10) as running:
        running.wait_for("streaming")
        monkeypatch.setattr(failpoints, "hit", hit)
        table = await_end(running, log, request(log, "public.big")).tables[0]
    assert running.task.progress().reconnects == 1
    assert table.moved
    assert table.read_again


@pytest.mark.each_postgres("what the server says of slots")
def test_a_slot_dropped_meanwhile_stops_the_snapshot(pg: Database, tmp_path: Path) -> None:
    create_tables(pg)
    assert life(pg, tmp_path / "log", "snapshot.after_chunk=kill@3") == -9
    wait_until(
        lambda: pg.query("select 1 from pg_replication_slots where slot_name = %s and not active", [SLOT])
    )
    pg.execute("select pg_drop_replication_slot(%s)", [SLOT])
    error = run_to_end(pg.dsn, tmp_path / "log", **SMALL)
    assert error is not None
    assert error.kind is Kind.SLOT_MISSING


@pytest.mark.each_postgres("what a snapshot sees of an altered table")
def test_a_table_altered_between_windows_is_read_again_with_its_new_columns(
    pg: Database, tmp_path: Path
) -> None:
    create_tables(pg)
    # At the second chunk of three: at the third, all may be in the log, and nothing would be read again.
    assert life(pg, tmp_path / "log", "snapshot.after_chunk=kill@2") == -9
    pg.execute("alter table items add column later int default 7")
    pg.execute("alter table pairs alter column n type bigint")
    pg.execute("create table parts_later partition of parts for values from (1000000000) to (1100000000)")
    pg.execute("insert into parts values (1000000001)")
    pg.execute("truncate plain")
    pg.execute("insert into plain values (1)")
    until_whole(pg, tmp_path / "log")
    found = judge(pg, tmp_path / "log")
    assert {row["later"] for row in found["items"].rows.values()} == {"7"}


#: Statements after which an older snapshot sees a table as empty, or does not see it.
BETWEEN = [
    "create domain positive as int check (value > 0)",
    "alter table items add column checked positive",
    "truncate pairs",
    "insert into pairs values ('after', 1)",
    "truncate parts_low",
    "insert into parts values (7)",
    "alter table plain alter column n type bigint",
    "alter table renamed_later rename to renamed",
    "alter table kept rename column n to m",
    "drop table gone",
    "insert into kept values (100000, 5)",
]


@pytest.mark.parametrize("point", ["snapshot.after_slot", "snapshot.after_plan"])
@pytest.mark.parametrize("size", [SMALL, {}], ids=["in chunks", "in one"])
@pytest.mark.each_postgres("what a snapshot sees of a rewritten table")
def test_a_table_rewritten_between_the_snapshot_and_its_copy_is_not_read_as_empty(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: dict[str, Any], point: str
) -> None:
    create_tables(pg)
    for name in ("renamed_later", "kept", "gone"):
        pg.execute(f"create table {name}(id int primary key, n int)")
        pg.execute(f"insert into {name} select n, n from generate_series(1, 1200) n")
    reached: list[str] = []

    def hit(name: str) -> None:
        if name == point and name not in reached:
            reached.append(name)
            for statement in BETWEEN:
                pg.execute(statement)

    monkeypatch.setattr(failpoints, "hit", hit)
    with capturing(pg.dsn, tmp_path / "log", **size) as running:
        running.catch_up(pg.query, 120)
    found = judge(pg, tmp_path / "log")
    assert len(found["items"].rows) == 3000
    assert {row["checked"] for row in found["items"].rows.values()} == {None}
    assert len(found["renamed"].rows) == 1200
    assert len(found["kept"].rows) == 1201
    assert found["kept"].rows["100000",] == {"id": "100000", "m": "5"}
    assert not found.get("gone", Folded()).rows
    if not size:
        assert {change for table in found.values() for change in table.ops} == {"r"}, "it began again"


@pytest.mark.each_postgres("what a snapshot sees of a rewritten table")
def test_a_table_rewritten_at_each_beginning_is_read_beside_the_stream(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tables(pg)
    beginnings = []

    def hit(name: str) -> None:
        if name == "snapshot.after_slot":
            beginnings.append(name)
            pg.execute("vacuum full pairs")

    monkeypatch.setattr(failpoints, "hit", hit)
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.catch_up(pg.query, 120)
    assert len(beginnings) == BEGINNINGS_MAX
    found = judge(pg, tmp_path / "log")
    assert found["pairs"].ops["r"] == 2500


@pytest.mark.ci
def test_retention_between_windows_keeps_the_record_of_chunks(pg: Database, tmp_path: Path) -> None:
    create_tables(pg)
    log, kept = tmp_path / "log", tmp_path / "kept"

    def retain() -> None:
        """Move away what retention may remove."""
        shutil.copytree(log / "tasks" / "0", kept, dirs_exist_ok=True)
        RetentionTimer(
            LogConfig(path=log, retention=RetentionConfig(age_s=0.001)), "0", SnapshotControl(log)
        ).turn()

    with writers_at_work(pg, 3):
        for point in ("after_chunk=kill@9", "after_window=kill@2", "before_chunk_end=kill@3"):
            # 0: by chance fewer chunks were left than the failpoint needs.
            assert life(pg, log, f"snapshot.{point}") in {-9, 0}
            retain()
        with capturing(pg.dsn, log, **SMALL) as running:
            running.catch_up(pg.query, 120)
    until_whole(pg, log)
    retain()
    removed = {path.name for path in kept.glob("*.seg")} - {path.name for path in log.glob("tasks/0/*.seg")}
    assert removed
    for name in removed:
        shutil.copy(kept / name, log / "tasks" / "0")
    judge(pg, log)


@pytest.mark.follows("snapshot_failed")
def test_snapshot_only_names_a_table_that_was_rewritten_meanwhile(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tables(pg)
    rewrite = "vacuum full pairs"
    monkeypatch.setattr(failpoints, "hit", lambda name: name == "snapshot.after_slot" and pg.execute(rewrite))
    error = run_to_end(pg.dsn, tmp_path / "log", snapshot="only", **SMALL)
    assert error is not None
    assert error.kind is Kind.SNAPSHOT_FAILED
    assert "public.pairs" in error.message
    assert "run it again: without a stream that follows" in error.hint
    monkeypatch.undo()
    assert run_to_end(pg.dsn, tmp_path / "log", snapshot="only", **SMALL) is None
    judge_counts(pg, tmp_path / "log")


def test_snapshot_only_is_all_or_nothing(pg: Database, tmp_path: Path) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    script = RUN.replace("status_interval_s", "snapshot='only', status_interval_s")
    assert life(pg, log, "snapshot.in_copy=kill@4", script=script) == -9
    assert run_to_end(pg.dsn, log, snapshot="only", **SMALL) is None
    found = judge_counts(pg, log)
    assert len(units(log)) == 1
    assert found["plain"].ops == {"r": 2600}
    assert LogDirectory.open(log).state_read("tasks/0/snapshot.state")["open"] == []


def judge_counts(pg: Database, log: Path) -> dict[str, Folded]:
    found = fold(log)
    for table in ("items", "pairs", "parts", "plain"):
        assert found[table].ops["r"] == pg.query(f"select count(*) from {table}")[0][0]
    return found
