"""Snapshots that were cut short: chunks that are in the log stay, the others are read beside the
stream, and what comes of it is what the source holds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from capture.captured import NAME, SLOT, capturing, run_to_end
from capture.delegating import Elsewhere
from capture.folded import Folded, fold, units
from fix_postgres import Database
from fix_proxy import Proxy
from fix_wait import wait_until
from tailrace import failpoints
from tailrace.capture.task import BEGINNINGS_MAX
from tailrace.changelog.directory import LogDirectory
from tailrace.config import LogConfig
from tailrace.errors import Kind
from tailrace.pipeline.retaining import Retaining

#: Small chunks, so that little data has many.
SMALL = {"snapshot_chunk_rows": 500, "snapshot_connections": 3}

#: Ends by itself when no snapshot is missing anything.
RUN = """
import sys, threading, time
from pathlib import Path
sys.path.append(sys.argv[4])
from capture.delegating import Elsewhere
from tailrace.capture.task import CaptureTask
from tailrace.config.postgres import PostgresSource
from tailrace.config.sections import LogConfig
path = Path(sys.argv[2])
source = PostgresSource(
    dsn=sys.argv[1], snapshot_chunk_rows=500, snapshot_connections=3, status_interval_s=1.0,
    reconnect_delay_s=0.05)
config = LogConfig(path=path, segment_bytes=65536, compression="none")
delegate = Elsewhere() if sys.argv[5] == "elsewhere" else None
task = CaptureTask(source, path, config, name=sys.argv[3], delegate=delegate)
def look():
    while not task.caught_up(1):
        time.sleep(0.05)
    task.stop()
threading.Thread(target=look, daemon=True).start()
task.run()
"""

TABLES = [
    "create table items(id bigint primary key, n int not null default 0, big text)",
    "create table pairs(a text, b int, n int not null default 0, primary key (a, b))",
    "create table parts(id int primary key, n int not null default 0) partition by range (id)",
    "create table parts_low partition of parts for values from (0) to (1500)",
    "create table parts_high partition of parts for values from (1500) to (1000000000)",
    "create table plain(id int, n int not null default 0)",
    "alter table plain replica identity full",
    "create table empty(id int primary key)",
    "alter table items alter column big set storage external",
    "insert into items select n, 0, repeat('x', 2100) from generate_series(1, 3000) n",
    "insert into pairs select 'k' || n % 7, n, 0 from generate_series(1, 2500) n",
    "insert into parts select n, 0 from generate_series(1, 2900) n",
    "insert into plain select n, 0 from generate_series(1, 2600) n",
]


def create_tables(pg: Database) -> None:
    for statement in TABLES:
        pg.execute(statement)


@contextmanager
def writers_at_work(pg: Database, seed: int = 1) -> Iterator[None]:
    """Change every table all the time: rows that come, go, move, change their key."""
    over = threading.Event()

    def write(number: int) -> None:
        choose = random.Random(seed * 100 + number)
        with psycopg.connect(pg.dsn, autocommit=True) as connection:
            new = 100_000_000 * (number + 1)
            while not over.is_set():
                new += 1
                old = choose.randrange(1, 2500)
                for statement in choose.sample(
                    [
                        f"insert into items values ({new}, 1, repeat('y', 2100))",
                        f"update items set n = n + 1 where id = {old}",
                        f"update items set id = {new + 5_000_000} where id = {old} and id % 5 = 0",
                        f"delete from items where id = {old} and id % 7 = 0",
                        f"insert into pairs values ('n', {new})",
                        f"update pairs set n = n + 1, a = 'z' where b = {old} and b % 3 = 0",
                        f"delete from pairs where b = {old} and b % 11 = 0",
                        f"insert into parts values ({new})",
                        f"update parts set id = id + 1000000 where id = {old} and false",
                        f"update parts set n = n + 1 where id = {old}",
                        f"delete from parts where id = {old} and id % 13 = 0",
                        f"insert into plain values ({new})",
                        f"update plain set n = n + 1 where id = {old}",
                        f"delete from plain where id = {old} and id % 17 = 0",
                    ],
                    4,
                ):
                    connection.execute(statement)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def armed(failpoint: str) -> dict[str, str]:
    """Return the environment of a process that dies at `failpoint`."""
    return {"TAILRACE_FAILPOINTS": failpoint, "PATH": "", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}


def life(pg: Database, log: Path, failpoint: str, *, script: str = RUN, elsewhere: bool = False) -> int:
    """Run capture in a process of its own until the failpoint kills it, or nothing is missing any
    more; return how it ended."""
    tests = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", script, pg.dsn, str(log), NAME, tests, "elsewhere" if elsewhere else ""],
        env=armed(failpoint),
        timeout=240,
        check=False,
    )
    return done.returncode


def until_whole(pg: Database, log: Path) -> None:
    """Run capture until nothing is missing and everything committed by now is in the log."""
    with capturing(pg.dsn, log, **SMALL) as running:
        running.catch_up(pg.query, 120)


def judge(pg: Database, log: Path) -> dict[str, Folded]:
    """Compare the folded log with the source; return the log's tables."""
    found = fold(log)
    for table, key in (("items", "id"), ("pairs", "a, b"), ("parts", "id")):
        rows = pg.query(f"select to_json(t)::text from (select * from {table} order by {key}) t")
        source = [tuple(_texts(row[0])) for row in rows]
        assert found[table].values == sorted(source), f"{table} differs"
    plain = pg.query("select id::text, n::text, count(*) from plain group by 1, 2")
    bag = {tuple(value for _, value in row): count for row, count in found["plain"].bag.items() if count}
    assert bag == {(row[0], row[1]): row[2] for row in plain}
    came = found["plain"].reads + found["plain"].creates
    assert set(came.values()) == {1}, "a row of the table without a key came by snapshot and stream"
    told = ("snapshot", "table", "generation", "chunk")
    named = [tuple(unit.get(name) for name in told) for unit in units(log)]
    assert len(named) == len(set(named)), "a chunk is in the log twice"
    return found


def _texts(document: str) -> list[str | None]:
    return [None if value is None else str(value) for value in json.loads(document).values()]


#: Where a first start dies, and where those that go on with it do.
LIVES = [
    ("snapshot.after_slot", "snapshot.after_plan", "snapshot.in_copy@3"),
    ("snapshot.after_chunk@1", "snapshot.before_window", "snapshot.in_window@2", "snapshot.after_window"),
    ("snapshot.before_chunk_end@4", "snapshot.in_copy@2", "snapshot.before_chunk_end@2"),
    ("snapshot.after_chunk@6", "snapshot.after_plan@1", "snapshot.after_chunk@2", "log.before_fsync@9"),
    ("snapshot.before_finish", "snapshot.before_finish"),
    ("snapshot.before_handover", "capture.before_append@3"),
    ("snapshot.after_handover", "capture.after_append@2"),
    # Here others read the chunks.
    ("staging.in_copy@5", "staging.before_take@2", "staging.taken@2", "snapshot.before_chunk_end@2"),
    ("staging.taken@4", "staging.in_copy@2", "snapshot.in_window@2", "staging.before_take@1"),
]


@pytest.mark.parametrize("points", LIVES, ids=lambda points: points[0])
@pytest.mark.slow
def test_kills_in_a_snapshot_among_writers_lose_and_double_nothing(
    pg: Database, tmp_path: Path, points: tuple[str, ...]
) -> None:
    elsewhere = points[0].startswith("staging")
    create_tables(pg)
    with writers_at_work(pg, len(points)):
        for turn, point in enumerate(points):
            name, _, count = point.partition("@")
            # What is left to do when a later life begins is up to the threads of the one before.
            ends = {-9} if turn == 0 else {-9, 0}
            fault = f"{name}=kill@{count or 1}"
            assert life(pg, tmp_path / "log", fault, elsewhere=elsewhere) in ends, point
        with capturing(
            pg.dsn, tmp_path / "log", delegate=Elsewhere() if elsewhere else None, **SMALL
        ) as running:
            running.catch_up(pg.query, 120)
    until_whole(pg, tmp_path / "log")
    assert not list((tmp_path / "log").rglob("*.rows"))
    judge(pg, tmp_path / "log")


def test_what_was_read_before_a_kill_is_not_read_again(pg: Database, tmp_path: Path) -> None:
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
    # The first table's first chunk is in the log; nothing of the last ones is.
    assert life(pg, tmp_path / "log", "snapshot.after_chunk=kill@1") == -9
    with writers_at_work(pg), capturing(pg.dsn, tmp_path / "log", **SMALL) as running:
        running.catch_up(pg.query, 120)
    until_whole(pg, tmp_path / "log")
    found = judge(pg, tmp_path / "log")
    came = found["aaa"].reads + found["aaa"].creates
    assert set(came.values()) == {1}


@pytest.mark.parametrize("delegate", [None, Elsewhere()], ids=["here", "elsewhere"])
def test_connections_cut_in_copy_are_gone_on_from(
    pg: Database, tmp_path: Path, proxy: Callable[[int], Proxy], delegate: Elsewhere | None
) -> None:
    create_tables(pg)
    between = proxy(pg.port)
    dsn = pg.dsn.replace(f":{pg.port}/", f":{between.port}/")
    choose = random.Random(7)
    between_us = {**SMALL, "receive_timeout_s": 5.0, "delegate": delegate}
    with writers_at_work(pg, 9), capturing(dsn, tmp_path / "log", **between_us) as running:
        for cut in range(12):
            between.cut_after(choose.randrange(200, 600_000))
            wait_until(
                lambda cut=cut: running.is_over or running.task.progress().reconnects > cut, 60, "a cut"
            )
        running.catch_up(pg.query, 120)
    until_whole(pg, tmp_path / "log")
    judge(pg, tmp_path / "log")


def test_a_slot_that_was_dropped_meanwhile_stops_the_snapshot(pg: Database, tmp_path: Path) -> None:
    create_tables(pg)
    assert life(pg, tmp_path / "log", "snapshot.after_chunk=kill@3") == -9
    wait_until(
        lambda: pg.query("select 1 from pg_replication_slots where slot_name = %s and not active", [SLOT])
    )
    pg.execute("select pg_drop_replication_slot(%s)", [SLOT])
    error = run_to_end(pg.dsn, tmp_path / "log", **SMALL)
    assert error is not None
    assert error.kind is Kind.SLOT_MISSING


def test_a_table_altered_between_windows_is_read_again_with_its_new_columns(
    pg: Database, tmp_path: Path
) -> None:
    create_tables(pg)
    assert life(pg, tmp_path / "log", "snapshot.after_chunk=kill@3") == -9
    pg.execute("alter table items add column later int default 7")
    pg.execute("alter table pairs alter column n type bigint")
    pg.execute("create table parts_later partition of parts for values from (1000000000) to (1100000000)")
    pg.execute("insert into parts values (1000000001)")
    pg.execute("truncate plain")
    pg.execute("insert into plain values (1)")
    until_whole(pg, tmp_path / "log")
    found = judge(pg, tmp_path / "log")
    assert {row["later"] for row in found["items"].rows.values()} == {"7"}


#: Statements that leave a table empty, or not there, for a snapshot that is older.
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
@pytest.mark.parametrize(
    "size", [SMALL, {}, {**SMALL, "delegate": Elsewhere()}], ids=["in chunks", "in one", "elsewhere"]
)
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


def test_retention_among_windows_leaves_what_tells_which_chunks_are_done(
    pg: Database, tmp_path: Path
) -> None:
    create_tables(pg)
    log, kept = tmp_path / "log", tmp_path / "kept"

    def retain() -> None:
        """Remove what may go, and lay it aside."""
        shutil.copytree(log / "tasks" / "0", kept, dirs_exist_ok=True)
        Retaining(LogConfig(path=log, retention={"age_s": 0.001}), "0").turn()

    with writers_at_work(pg, 3):
        for point in ("after_chunk=kill@9", "after_window=kill@2", "before_chunk_end=kill@3"):
            # 0: fewer chunks were left than the point asks for, by the writers' and the windows' luck.
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


def test_only_names_the_table_that_was_rewritten_meanwhile(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tables(pg)
    rewrite = "vacuum full pairs"
    monkeypatch.setattr(failpoints, "hit", lambda name: name == "snapshot.after_slot" and pg.execute(rewrite))
    error = run_to_end(pg.dsn, tmp_path / "log", snapshot="only", **SMALL)
    assert error is not None
    assert error.kind is Kind.SNAPSHOT_FAILED
    assert "public.pairs" in error.message
    monkeypatch.undo()
    assert run_to_end(pg.dsn, tmp_path / "log", snapshot="only", **SMALL) is None
    judge_counts(pg, tmp_path / "log")


def test_only_is_all_or_nothing(pg: Database, tmp_path: Path) -> None:
    create_tables(pg)
    log = tmp_path / "log"
    script = RUN.replace("status_interval_s", "snapshot='only', status_interval_s")
    assert life(pg, log, "snapshot.in_copy=kill@4", script=script) == -9
    assert run_to_end(pg.dsn, log, snapshot="only", **SMALL) is None
    found = judge_counts(pg, log)
    assert len(units(log)) == 1
    assert found["plain"].ops == {"r": 2600}
    assert LogDirectory.open(log).state_read("tasks/0/snapshot.state")["open"] == []  # type: ignore[index]


def judge_counts(pg: Database, log: Path) -> dict[str, Folded]:
    found = fold(log)
    for table in ("items", "pairs", "parts", "plain"):
        assert found[table].ops["r"] == pg.query(f"select count(*) from {table}")[0][0]
    return found
