"""Captures in other processes that are killed and restarted while writers change the tables."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from tests.support.capture.captured import NAME, capturing
from tests.support.capture.folded import Folded, fold, units
from tests.support.postgres import Database

#: Small chunks, so that a small table has many.
SMALL = {"snapshot_chunk_rows": 500, "snapshot_connections": 3}


#: Pause between a writer's statements, four at a time. Without it most time goes into comparing rows.
PAUSE_S = 0.01


#: Ends by itself once no snapshot misses anything.
RUN = """
import sys, threading, time
from pathlib import Path
sys.path.append(sys.argv[4])
from tailrace.sources.postgres.streaming.capture_task import CaptureTask
from tailrace.config.source.postgres import PostgresSource
from tailrace.config.sections import LogConfig
path = Path(sys.argv[2])
source = PostgresSource(
    dsn=sys.argv[1], snapshot_chunk_rows=500, snapshot_connections=3, status_interval_s=1.0,
    reconnect_delay_s=0.05)
config = LogConfig(path=path, segment_bytes=65536, compression="none")
task = CaptureTask(source, path, config, name=sys.argv[3])
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
    """Change all tables in several threads: insert, delete and update rows, and change their keys."""
    over = threading.Event()

    def write(number: int) -> None:
        choose = random.Random(seed * 100 + number)
        with psycopg.connect(pg.dsn, autocommit=True) as connection:
            new = 100_000_000 * (number + 1)
            while not over.wait(PAUSE_S):
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
    """Return the environment of a process that is killed at `failpoint`."""
    return {"TAILRACE_FAILPOINTS": failpoint, "PATH": "", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}


def life(pg: Database, log: Path, failpoint: str, *, script: str = RUN) -> int:
    """Run capture in another process until the failpoint kills it or nothing is missing;
    return how it ended.
    """
    tests = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.script", script, pg.dsn, str(log), NAME, tests],
        env=armed(failpoint),
        timeout=240,
        check=False,
    )
    return done.returncode


def until_whole(pg: Database, log: Path) -> None:
    """Run capture until nothing is missing and everything committed so far is in the log."""
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
