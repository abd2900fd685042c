"""Captures a prepared backlog into a log, in a separate process whose CPU and memory are measured."""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tailrace.config import LogConfig, PostgresSource
from tailrace.sources.postgres.streaming.capture_task import CaptureTask
from tailrace_bench.support import table
from tailrace_bench.support.process import answer_of

#: What a run captures: the stream alone, or an initial snapshot.
STREAM, SNAPSHOT = "never", "initial"

#: Timeout of a capture, in seconds.
DEADLINE_S = 600.0

#: Interval of checking the progress, in seconds; it takes CPU time of the measured process.
_LOOK_S = 0.025


@dataclass(frozen=True, slots=True)
class CaptureRun:
    """One timed pass: from the start of the task to the fsync of the backlog's last commit.

    `seconds` excludes the start of the interpreter and its imports. `rss_bytes_max` is the maximum
    of the whole process, `rss_bytes_before` its size before the first byte was received.
    """

    rows: int
    seconds: float
    cpu_seconds: float
    rss_bytes_before: int
    rss_bytes_max: int
    log_bytes: int


def capture(dsn: str, slot: str, log: Path, end_lsn: int) -> CaptureRun:
    """Capture from `slot` until everything before `end_lsn` is durable in the log at `log`, in a
    separate process.

    `prepare` must have created both before the backlog.
    """
    return CaptureRun(**_run_child(dsn, slot, log, end_lsn))


def snapshot(dsn: str, slot: str, log: Path) -> CaptureRun:
    """Take the initial snapshot into a new log at `log`, until it is durable."""
    return CaptureRun(**_run_child(dsn, slot, log, 0, SNAPSHOT))


def prepare(dsn: str, slot: str, log: Path) -> None:
    """Create the slot and its log, as a pipeline's first start does, and stop."""
    _run_child(dsn, slot, log, 0)


def _run_child(dsn: str, slot: str, log: Path, end_lsn: int, how: str = STREAM) -> dict[str, Any]:
    found: dict[str, Any] = answer_of(__name__, dsn, slot, log, end_lsn, how, deadline_s=DEADLINE_S)
    return found


def _rss_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _is_done(task: CaptureTask, end_lsn: int) -> bool:
    return task.caught_up(end_lsn) if end_lsn else task.progress().phase == "streaming"


def _task(dsn: str, slot: str, log: Path, how: str) -> CaptureTask:
    source = PostgresSource.model_validate(table.source(dsn, slot, snapshot=how))
    return CaptureTask(source, log, LogConfig.model_validate({"path": log}), name="bench")


def _capture_here(dsn: str, slot: str, log: Path, end_lsn: int, how: str) -> CaptureRun:
    task = _task(dsn, slot, log, how)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            task.run()
        except BaseException as error:  # noqa: BLE001 — raised by the waiting thread
            failures.append(error)

    thread = threading.Thread(target=run)
    rss_before = _rss_bytes()
    deadline = time.perf_counter() + DEADLINE_S
    started, cpu_before = time.perf_counter(), time.process_time()
    thread.start()
    while not _is_done(task, end_lsn) and thread.is_alive() and time.perf_counter() < deadline:
        time.sleep(_LOOK_S)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_before
    rss_max = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    progress = task.progress()
    task.stop()
    thread.join(30)
    if failures:
        raise failures[0]
    return CaptureRun(
        rows=progress.rows,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        rss_bytes_before=rss_before,
        rss_bytes_max=rss_max,
        log_bytes=progress.bytes,
    )


if __name__ == "__main__":
    _dsn, _slot, _log, _end_lsn, _how = sys.argv[1:]
    print(json.dumps(asdict(_capture_here(_dsn, _slot, Path(_log), int(_end_lsn), _how))))
