"""The pipeline of a `Story`: the real command with its sinks, killed and restarted under the workload."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from tailrace.changelog.reader import LogReader
from tailrace.model import parse_lsn
from tests.support.capture.captured import SLOT
from tests.support.differential.story import Story
from tests.support.torture.harness import Life
from tests.support.wait import wait_until

SINKS: dict[str, dict[str, Any]] = {
    "parquet": {"type": "parquet"},
    "append": {"type": "delta", "mode": "append", "on_type_change": "follow"},
    "mirror": {"type": "delta", "mode": "mirror", "keyless": "full_row"},
}
WAIT_S = 240.0


class Pipeline:
    """A context manager that kills its process at the end. Not thread-safe."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self._root = story.root
        self._file = story.root / "sinks.yaml"
        self._file.write_text(yaml.safe_dump(self._sections()))
        self._life: Life | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._life is not None:
            self._life.close()

    @property
    def is_over(self) -> bool:
        return self._life is None or self._life.is_over

    @property
    def was_killed(self) -> bool:
        assert self._life is not None
        return self._life.wait(WAIT_S) == -signal.SIGKILL

    def last_words(self) -> str:
        assert self._life is not None
        return self._life.last_words()

    def sink(self, kind: str) -> Path:
        return self._root / kind

    def start(self, failpoints: str = "") -> None:
        """Start the process, with `failpoints` armed in the engine."""
        assert self.is_over
        self._life = Life(
            [sys.executable, "-m", "tailrace", "run", str(self._file)],
            {**os.environ, "PYTHONUNBUFFERED": "1", "TAILRACE_FAILPOINTS": failpoints},
            self._root / "output",
        )

    def end(self) -> None:
        """Send SIGTERM and require a good exit status."""
        assert self._life is not None
        assert self._life.end() == 0, self._life.last_words()

    def wait_until_streaming(self) -> None:
        self._wait(lambda: self._status().get("state") == "streaming", "the stream")

    def catch_up(self) -> None:
        """Wait until everything committed so far is in every sink."""
        self.catch_up_log()
        with LogReader.open(self._story.log, "0") as reader:
            end = reader.end().offset

        def is_in_sinks() -> bool:
            status = self._status()
            failed = [sink for sink in status.get("sinks", []) if sink["state"] == "failed"]
            assert not failed, failed
            return (
                bool(status)
                and (status["tasks"][0]["log_end"] or 0) >= end
                and all((sink["position"] or 0) >= end for sink in status["sinks"])
            )

        self._wait(is_in_sinks, "the sinks")

    def catch_up_log(self) -> bool:
        """Wait until everything committed so far is durable in the log."""
        query = self._story.database.query
        query("select pg_switch_wal()")  # otherwise a quiet server keeps some WAL unflushed
        lsn = parse_lsn(query("select pg_current_wal_flush_lsn()::text")[0][0])

        def acknowledged() -> bool:
            found = query(
                "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", [SLOT]
            )
            return bool(found) and parse_lsn(found[0][0] or "0/0") >= lsn

        self._wait(acknowledged, "the log")
        return True

    def _wait(self, condition: Any, what: str) -> None:
        assert self._life is not None
        life = self._life
        try:
            wait_until(lambda: life.is_over or condition(), WAIT_S, what)
        except AssertionError as error:
            error.add_note(f"{self._status()}\n{life.last_words()}")
            raise
        assert not life.is_over, life.last_words()

    def _status(self) -> dict[str, Any]:
        assert self._life is not None
        try:
            status: dict[str, Any] = json.loads((self._story.log / "status.json").read_text("utf-8"))
        except FileNotFoundError:
            return {}
        return status if status["pid"] == self._life.pid else {}

    def _sections(self) -> dict[str, Any]:
        return {
            **self._story.sections(),
            "sinks": [
                {**SINKS[kind], "name": kind, "path": str(self.sink(kind)), "interval_ms": 50}
                for kind in SINKS
            ],
            "spark": {"master": "local[2]", "conf": {"spark.ui.enabled": "false"}},
        }
