"""A shop's pipeline, and what a user does who follows an error's hint."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.cli.main import app
from tailrace.config import PipelineConfig, load
from tailrace.errors import Kind, TailraceError
from tailrace.sinks.build import build
from tailrace.sources.postgres.slot.way_out import with_way_out
from tailrace.sources.postgres.snapshot.state import kept_plans
from tailrace.sources.postgres.streaming.capture_task import CaptureTask
from tailrace.sources.snapshot_requests import waiting
from tests.support.capture.captured import Running
from tests.support.postgres import Database
from tests.support.sinks.ddl_story import Nearby, selected, write
from tests.support.sinks.mirrored import mirrored
from tests.support.wait import wait_until


class Shop:
    """A pipeline file, a database, and what a user does who follows a hint."""

    def __init__(self, pg: Database, spark: Any, root: Path) -> None:
        self.pg, self.root = pg, root
        self._spark = spark
        self.file = root / "shop.yaml"
        self.source: dict[str, Any] = {
            "host": "127.0.0.1", "port": pg.port, "user": "postgres", "dbname": pg.name,
            "reconnect_delay_s": 0.05, "status_interval_s": 1.0,
        }  # fmt: skip
        self.log: dict[str, Any] = {"path": "./log"}
        self.sink: dict[str, Any] = {"name": "lake", "type": "delta", "mode": "mirror", "path": "./lake"}

    @property
    def lake(self) -> Path:
        return self.root / self.sink["path"]

    def create_orders(self) -> None:
        """Create the table `orders` with five rows."""
        self.pg.execute("create table orders(id int primary key, n int)")
        self.pg.execute("insert into orders select n, n from generate_series(1, 5) n")

    def config(self) -> PipelineConfig:
        sections = {"name": "shop", "source": self.source, "log": self.log, "sinks": [self.sink]}
        self.file.write_text(yaml.safe_dump(sections))
        return load(self.file)

    @property
    def section(self) -> Any:
        """The validated section of the source."""
        return self.config().source

    def capture(self) -> None:
        """Capture until everything that is committed, and every requested snapshot, is in the log."""
        config = self.config()
        task = CaptureTask(self.section, config.log.path, config.log, name=config.name)
        running = Running(task)
        try:
            wait_until(lambda: running.is_over or task.progress().phase == "streaming", 60, "streaming")
            wait_until(lambda: running.is_over or self._is_whole(config.log.path), 60, "the snapshots")
            if not running.is_over:
                running.catch_up(self.pg.query)
        except AssertionError:
            if running.error is None:
                raise
        finally:
            task.stop()
            running.join()
        if running.error is not None:
            raise running.error

    def feed(self) -> None:
        """Bring the sink to the log's end."""
        config = self.config()
        with LogReader.open(config.log.path, "0") as reader:
            end = reader.end().offset
        (given,) = config.sinks
        sink = build(given, config.source, config.log.path)
        write(sink, config.log.path, end, Nearby(self._spark))

    def run(self) -> None:
        self.capture()
        self.feed()

    def refused(self, kind: Kind) -> TailraceError:
        """Run, and return the error that stops the pipeline."""
        with pytest.raises(TailraceError) as raised:
            self.run()
        assert raised.value.kind is kind, raised.value
        return raised.value

    def command(self, words: str, status: int = 0) -> str:
        """Run a command that a hint printed; return its output."""
        program, *arguments = [str(self.file) if word == "FILE" else word for word in shlex.split(words)]
        assert program == "tailrace"
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == status, done.output
        return done.output

    def tailrace(self, words: str, status: int = 0) -> str:
        """Run a command that a hint printed, or `run`, in another process: it needs a Spark of its own."""
        self.config()
        given = [str(self.file) if word == "FILE" else word for word in shlex.split(words)]
        assert given[0] == "tailrace"
        command = [sys.executable, "-m", *given]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def follow_steps(self, error: TailraceError) -> None:
        """Do what a hint lists after `run: `, except for starting again: the test does that."""
        hint = with_way_out(error, self.config()).hint
        listed = re.split(r"[Rr]un: ", hint)[1]
        steps = [step.strip() for step in re.split(r"\(\d\) ", listed) if step.strip()]
        assert steps.pop().startswith("start the pipeline again")
        for step in steps:
            if step.startswith("in the database: "):
                self.pg.execute(step.removeprefix("in the database: "))
            else:
                subprocess.run(step, shell=True, check=True, cwd=self.root)  # noqa: S602 - a person would type it

    def begin_with_a_new_log(self) -> None:
        """Do what hints ask: a new log, with a new snapshot, and an empty path for the sink."""
        for section, name in ((self.log, "log"), (self.sink, "lake")):
            section["path"] = f"./new {name}"
        slot = self.section.slot
        self.pg.execute("select pg_drop_replication_slot(%s)", [slot])

    def require_equal(self, *tables: str) -> None:
        for table in tables:
            assert mirrored(self.lake, f"public.{table}") == selected(self.pg, table), table

    def _is_whole(self, path: Path) -> bool:
        log = LogDirectory.open(path)
        return not waiting(log) and not kept_plans(log).open


@pytest.fixture
def shop(pg: Database, spark: Any, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(pg, spark, tmp_path)
    yield made
    for row in pg.query("select slot_name from pg_replication_slots where database = %s", [pg.name]):
        pg.execute("select pg_drop_replication_slot(%s)", list(row))
