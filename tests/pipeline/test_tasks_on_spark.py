"""Capture in a Spark task on an executor: killed, duplicated, stopped; the log has everything once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tailrace.changelog.lock import is_written
from tailrace.config import load_engine
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.remote.attempt import Order, capture_until_end
from tailrace.pipeline.remote.channel import Channel, Report
from tailrace.pipeline.status.document import FILE_NAME
from tailrace.records.record import Record
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = [
    pytest.mark.timeout(600),
]
#: Workers that start on a loaded machine take up to a minute to load their modules.
LATE_S = 240.0


def settings(pg: Database, folder: Path) -> dict[str, Any]:
    return {
        "name": "there",
        "source": {
            "type": "postgresql", "dsn": pg.dsn, "tables": ["public.*"], "reconnect_delay_s": 0.1,
            "reconnect_delay_s_max": 0.5,
        },
        "log": {"path": str(folder / "log")},
        "engine": {"tasks_on": "spark", "offset_commit": {"policy": "always"}},
    }  # fmt: skip


class Captured:
    """An engine whose source is captured on an executor, and its delivered records."""

    def __init__(self, pg: Database, folder: Path) -> None:
        self.got: list[int] = []
        self.pg = pg
        self.log = folder / "log"
        self.channel = Channel(self.log)
        pg.execute("create table orders(id int primary key)")
        self.engine = tailrace.Engine(settings(pg, folder), on_record=self._take)

    def _take(self, record: Record) -> None:
        assert record.after is not None
        self.got.append(record.after["id"])

    def insert_and_see(self, *numbers: int) -> None:
        self.pg.execute("insert into orders select unnest(%s::int[])", [list(numbers)])
        wait_until(lambda: set(numbers) <= set(self.got), LATE_S, f"rows {numbers}")

    def report(self) -> Report:
        found = wait_until(self.channel.report, LATE_S, "the first report")
        assert found is not None
        return found

    @property
    def pid(self) -> int:
        return int(self.report().process.split()[1])


def test_a_killed_task_is_restarted_and_continues_from_the_log(
    pg: Database, spark: Any, tmp_path: Path
) -> None:
    captured = Captured(pg, tmp_path)
    with captured.engine:
        captured.insert_and_see(1, 2, 3)
        first = captured.pid
        assert first != os.getpid()
        wait_until((captured.log / FILE_NAME).exists, LATE_S, "the status file")
        os.kill(first, signal.SIGKILL)
        captured.insert_and_see(4, 5)
        wait_until(lambda: captured.pid != first, LATE_S, "the report of the other process")
        wait_until(lambda: '"streaming"' in (captured.log / FILE_NAME).read_text(), LATE_S, "the state")
    assert captured.got == [1, 2, 3, 4, 5]
    assert not is_written(captured.log, "0")
    assert captured.report().capture["phase"] == "stopped"
    tracker = spark.sparkContext.statusTracker()
    wait_until(lambda: not tracker.getActiveJobsIds(), LATE_S, "the end of all jobs")
    again = tailrace.Engine(settings(pg, tmp_path), on_record=captured._take)
    captured.engine = again
    with again:
        captured.insert_and_see(6)
    assert captured.got == [1, 2, 3, 4, 5, 6]


@pytest.mark.follows("spark_failed")
def test_an_attempt_that_goes_on_after_another_replaced_it_appends_nothing(
    pg: Database, spark: Any, tmp_path: Path
) -> None:
    captured = Captured(pg, tmp_path)
    with captured.engine:
        captured.insert_and_see(1)
        wait_until(lambda: captured.report().capture["phase"] == "streaming", LATE_S, "the stream")
        zombie, report = captured.pid, captured.report()
        os.kill(zombie, signal.SIGSTOP)
        try:
            # A file system without locks: only the epoch protects the log.
            (captured.log / "tasks" / "0" / "lock").unlink()
            pg.execute("select pg_terminate_backend(active_pid) from pg_replication_slots where active")
            pipeline = captured.engine._parts.connector._config.pipelines[0]  # type: ignore[attr-defined]
            order = Order(pipeline.model_dump_json(exclude_unset=True), report.run_id, report.attempt[0])
            ended: list[BaseException] = []

            def another() -> None:
                try:
                    capture_until_end(order, report.attempt[1] + 1)
                except BaseException as error:  # noqa: BLE001 - looked at below
                    ended.append(error)

            thread = threading.Thread(target=another)
            thread.start()
            captured.insert_and_see(2, 3)
            wait_until(lambda: captured.pid == os.getpid(), LATE_S, "the report of this process")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(zombie, signal.SIGCONT)
        # It ends; Spark counts it as failed, and the driver starts another round, for which our attempt ends.
        captured.insert_and_see(4, 5)
        thread.join(LATE_S)
        captured.insert_and_see(6)
    assert captured.got == [1, 2, 3, 4, 5, 6]
    [error] = ended
    assert isinstance(error, TailraceError)
    assert error.kind is Kind.SPARK_FAILED
    assert "the driver has begun another job" in error.message
    assert error.hint == "no action is needed: another attempt continues from what is in the log"


@pytest.mark.slow
def test_a_command_over_two_databases_continues_after_its_driver_was_killed(
    pg: Database, tmp_path: Path
) -> None:
    """Each source has its own task and log."""
    other = Database(pg.server, f"{pg.name}_other")
    pg.server.create_database(other.name)
    databases = {"one": pg, "two": other}
    (own := settings(pg, tmp_path)).pop("source")
    sources = [
        {**settings(each, tmp_path)["source"], "name": name, "slot": f"{pg.name}_{name}"}
        for name, each in databases.items()
    ]
    content = {
        **own,
        "sources": sources,
        "engine": {"tasks_on": "spark"},
        "spark": {"master": "local[4]"},
        "sinks": [{"type": "jsonl", "path": str(tmp_path / "lines")}],
    }
    file = tmp_path / "pipeline.yaml"
    file.write_text(json.dumps(content))
    tailrace_command = [sys.executable, "-m", "tailrace"]
    for name, each in databases.items():
        each.execute("create table orders(id int primary key, db text)")
        each.execute("insert into orders values (1, %s)", [name])
    channels = [Channel(pipeline.log.path) for pipeline in load_engine(file).pipelines]
    assert len(channels) == 2
    with subprocess.Popen([*tailrace_command, "run", str(file)]) as first:

        def stream() -> bool:
            reports = [channel.report() for channel in channels]
            return all(report is not None and report.capture["phase"] == "streaming" for report in reports)

        wait_until(stream, LATE_S, "the streams")

        def said() -> list[str]:
            status = [*tailrace_command, "status", str(file), "--json"]
            told = subprocess.run(status, capture_output=True, check=True, timeout=LATE_S)
            return [task["state"] for task in json.loads(told.stdout)["tasks"]]

        # The driver records it once a second.
        wait_until(lambda: said() == ["streaming"] * 2, LATE_S, "the status")
        first.kill()
    for name, each in databases.items():
        each.execute("insert into orders values (2, %s)", [name])
    again = subprocess.run(
        [*tailrace_command, "run", str(file), "--until-caught-up"], check=False, timeout=2 * LATE_S
    )
    assert again.returncode == 0
    rows = [
        json.loads(line)["after"]
        for path in sorted((tmp_path / "lines").rglob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    found = sorted((row["db"], row["id"]) for row in rows)
    assert found == [("one", 1), ("one", 2), ("two", 1), ("two", 2)]
    other.drop()
