"""The command with a snapshot that Spark's executors read: killed itself, and its workers killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from capture.folded import fold, units
from fix_postgres import Database

pytestmark = pytest.mark.any_postgres("what reads a chunk is the same code, which the capture's tests cover")

ROWS = 12_000


def tailrace(*arguments: object, failpoints: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tailrace", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, "TAILRACE_FAILPOINTS": failpoints},
    )


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_executors_read_a_snapshot_and_may_die_of_it(pg: Database, tmp_path: Path) -> None:
    pg.execute("create table orders(id int primary key, what text)")
    pg.execute(f"insert into orders select g, repeat('x', g % 50) from generate_series(1, {ROWS}) g")
    pg.execute("create table plain(id int, what text)")
    pg.execute("insert into plain select g, 'y' from generate_series(1, 2000) g")
    pg.execute("analyze")
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        f"name: {pg.name}\n"
        f"source: {{dsn: '{pg.dsn}', snapshot_read_on: spark, snapshot_chunk_rows: 1000,\n"
        "  snapshot_connections: 4, reconnect_delay_s: 0.05}\n"
        "log: {path: ./log}\n"
        "spark: {master: 'local[2]'}\n"
    )
    log = tmp_path / "log"

    # The engine is killed in the middle: what is in the log stays.
    killed = tailrace("run", file, failpoints="snapshot.after_chunk=kill@3")
    assert killed.returncode == -9, killed.stderr
    before = units(log)
    assert before
    assert list(log.rglob("staged/*"))

    # Each worker dies at its fourth chunk; the chunks are read again, each is in the log once.
    pg.execute("update orders set what = 'new' where id = 1")
    done = tailrace("run", file, "--until-caught-up", failpoints="staging.in_copy=kill@4")
    assert done.returncode == 0, done.stderr
    assert "it is read again" in done.stderr
    assert units(log)[: len(before)] == before
    assert not list(log.rglob("staged/*"))
    found = fold(log)
    assert found["orders"].values == sorted(pg.query("select id::text, what from orders"))
    assert set(found["orders"].reads.values()) == {1}
    assert sum(found["plain"].bag.values()) == 2000
    told = json.loads(tailrace("status", file, "--json").stdout)
    assert (told["state"], told["tasks"][0]["snapshot"]) == ("stopped", [])
