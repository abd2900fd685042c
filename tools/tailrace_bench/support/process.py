"""Measured programs in separate processes: `tailrace run`, or a module of the benchmarks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import yaml

from tailrace.errors import Kind, TailraceError
from tailrace_bench.support import table

DEADLINE_S = 600.0


def answer_of(module: str, *arguments: object, deadline_s: float = DEADLINE_S) -> Any:
    """Run a module as a program, and return the JSON document in the last line of its output."""
    command = [sys.executable, "-m", "tailrace_bench.support.child", module, *map(str, arguments)]
    done = subprocess.run(command, check=True, timeout=deadline_s, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


class BenchPipeline:
    """`tailrace run` with one sink, in a separate process; a context manager.

    Standard error goes to `<directory>/<name>.err`.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        dsn: str,
        sink: dict[str, Any],
        *,
        spark: dict[str, Any] | None = None,
    ) -> None:
        self.sink_path = directory / name
        self._file = directory / f"{name}.yaml"
        self._errors = directory / f"{name}.err"
        document = {
            "name": name,
            "source": {
                "type": "postgresql",
                "dsn": dsn,
                "tables": ["public.orders"],
                "publication": table.PUBLICATION,
                "snapshot": "never",
            },
            "log": {"path": str(directory / f"{name}.log")},
            "sinks": [sink if sink["type"] == "kafka" else sink | {"path": str(self.sink_path)}],
            "spark": spark or {},
        }
        self._file.write_text(yaml.safe_dump(document))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tailrace", "run", str(self._file)],
                stdout=errors,
                stderr=errors,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._running()
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()

    def rss_mb(self) -> float:
        """Return the resident memory of the process and all its children, in megabytes."""
        process = psutil.Process(self._running().pid)
        return (
            sum(float(each.memory_info().rss) for each in (process, *process.children(recursive=True))) / 1e6
        )

    def pause(self) -> None:
        """Suspend the process; its Spark process is idle. Later commits form a backlog."""
        os.kill(self._running().pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume the process."""
        os.kill(self._running().pid, signal.SIGCONT)

    def wait_until(self, done: Callable[[], bool], every_s: float) -> float:
        """Wait until `done()` is true, tested every `every_s` seconds; return the duration in seconds.

        :raises TailraceError: if the process ends first, or after ten minutes.
        """
        started = time.perf_counter()
        while not done():
            if self._running().poll() is not None:
                said = self._errors.read_text(errors="replace")[-2000:]
                raise TailraceError(Kind.INTERNAL, f"run the benchmark's pipeline: it ended early:\n{said}")
            if time.perf_counter() > started + DEADLINE_S:
                raise TailraceError(
                    Kind.INTERNAL, f"run the benchmark's pipeline: not done within {DEADLINE_S:g} s"
                )
            time.sleep(every_s)
        return time.perf_counter() - started

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise TailraceError(Kind.INTERNAL, "use the benchmark's pipeline: it was not started")
        return self._process
