"""The examples work as they stand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace import config
from tests.support.postgres import Database
from tests.support.torture.harness import Round
from tests.support.wait import wait_until

pytestmark = pytest.mark.any_postgres("the examples begin where the log ends")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_pipeline_file_is_valid_and_fifteen_lines_long() -> None:
    text = (EXAMPLES / "pipeline.yaml").read_text()
    assert len([line for line in text.splitlines() if not line.startswith("#")]) == 15
    loaded = config.load(EXAMPLES / "pipeline.yaml")
    assert [sink.path.name for sink in loaded.sinks] == ["current", "history"]


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_spark_job_that_is_not_ours_reads_the_log(pg: Database, tmp_path: Path) -> None:
    round_ = Round(tmp_path, pg, [], seed=5)
    round_.workload.burst(20)
    round_.write_file()
    assert round_.live().wait() == 0
    round_.workload.burst(40)
    round_.workload.stop()
    assert round_.live().wait() == 0
    job = [sys.executable, str(EXAMPLES / "read_log_with_spark.py"), str(round_.log), "public.marker"]
    # Elsewhere, and with nothing in the environment but what Spark needs itself.
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "JAVA_HOME") if name in os.environ}
    done = subprocess.run(
        job, capture_output=True, text=True, check=False, timeout=400, cwd=tmp_path,
        env={**kept, "PYSPARK_PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    markers = pg.query("select count(*) from marker")[0][0]
    counted = {}
    for line in done.stdout.split("Batch:")[-1].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1].isdigit():
            counted[cells[0]] = int(cells[1])
    assert set(counted) == {"r", "c"}
    assert sum(counted.values()) == markers


@pytest.mark.timeout(600)
def test_an_engine_of_twenty_lines_prints_what_is_committed_and_goes_on_where_it_was(
    pg: Database, tmp_path: Path
) -> None:
    pg.execute("create table orders(id int primary key, what text)")
    pg.execute("insert into orders values (1, 'before')")
    seen = []
    for number in (2, 3):
        command = [sys.executable, str(EXAMPLES / "embedded_engine.py"), pg.dsn, str(tmp_path / "log")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
            assert engine.stdout is not None
            pg.execute("insert into orders values (%s, 'after')", [number])
            while not seen or seen[-1]["after"]["id"] != number:
                seen.append(json.loads(engine.stdout.readline()))
            engine.send_signal(signal.SIGINT)
            assert engine.wait(60) == 0
    assert [value["after"]["id"] for value in seen] == [1, 2, 3]
    assert (seen[0]["op"], seen[-1]["op"]) == ("r", "c")


@pytest.mark.timeout(700)
@pytest.mark.slow
def test_an_engine_whose_handler_runs_on_executors_tells_the_story_of_each_row(
    pg: Database, tmp_path: Path
) -> None:
    folder = tmp_path / "stories"
    folder.mkdir()
    pg.execute("create table orders(id int primary key, what text)")
    pg.execute("insert into orders values (1, 'before'), (2, 'before')")
    command = [
        sys.executable,
        str(EXAMPLES / "engine_on_spark.py"),
        pg.dsn,
        str(tmp_path / "log"),
        str(folder),
    ]
    stories = {folder / "public.orders.1": "ruud", folder / "public.orders.2": "ruu"}

    def lines(path: Path) -> list[str]:
        return path.read_text().splitlines() if path.exists() else []

    with subprocess.Popen(command) as engine:
        wait_until(lambda: all(lines(path) for path in stories), 400, "the snapshot")
        pg.execute("update orders set what = 'first'")
        pg.execute("update orders set what = 'second'")
        pg.execute("delete from orders where id = 1")
        wait_until(
            lambda: all(len(lines(path)) >= len(ops) for path, ops in stories.items()), 120, "the changes"
        )
        engine.send_signal(signal.SIGINT)
        assert engine.wait(60) == 0
    for path, ops in stories.items():
        told = lines(path)
        assert "".join(line[0] for line in told) == ops
        assert "first" in told[1]
        assert "second" in told[2]
