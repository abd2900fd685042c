"""Capture a prepared backlog into a log, in a process of its own, so that its CPU and memory
can be told from everything else.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tailrace.bench import table
from tailrace.capture.schema_watch import SchemaWatch
from tailrace.capture.task import CaptureTask
from tailrace.config import LogConfig, PostgresSource
from tailrace.protocol.frames import Bytes, Numbers

#: How a run captures: as a pipeline does on its own; with all watching that it can be told to do;
#: with none, which it can't be told; or an initial snapshot.
DEFAULT, WATCHED, UNWATCHED, SNAPSHOT = "default", "watched", "unwatched", "snapshot"
_SETTINGS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    WATCHED: {"heartbeat": {"action": "transaction"}},
    UNWATCHED: {"slot_watch": {"interval_s": 0}},
    SNAPSHOT: {"snapshot": "initial"},
}

#: A capture that has not received its backlog by then has hung.
DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class CaptureRun:
    """One timed pass: from the start of the task to the fsync of the backlog's last commit.

    `seconds` leaves out the start of the interpreter and its imports. `rss_bytes_max` is the
    whole process's high-water mark, `rss_bytes_before` its size before the first byte came.
    """

    rows: int
    seconds: float
    cpu_seconds: float
    looks: int  # of the watch at the slot
    rss_bytes_before: int
    rss_bytes_max: int
    log_bytes: int


def capture(dsn: str, slot: str, log: Path, end_lsn: int, how: str = DEFAULT) -> CaptureRun:
    """Capture from `slot` until everything before `end_lsn` is durable in the log at `log`.

    Both must come from `prepare`, called before the backlog was made.

    :param how: `DEFAULT`, `WATCHED` (also with a heartbeat that writes) or `UNWATCHED` (neither slot
        nor schema).
    """
    return CaptureRun(**_run_child(dsn, slot, log, end_lsn, how))


def snapshot(dsn: str, slot: str, log: Path) -> CaptureRun:
    """Take the initial snapshot into a new log at `log`, until all of it is durable."""
    return CaptureRun(**_run_child(dsn, slot, log, 0, SNAPSHOT))


def prepare(dsn: str, slot: str, log: Path) -> None:
    """Create the slot and its log, as a pipeline's first start does, and stop again."""
    _run_child(dsn, slot, log, 0)


def _run_child(dsn: str, slot: str, log: Path, end_lsn: int, how: str = DEFAULT) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, dsn, slot, str(log), str(end_lsn), how]
    done = subprocess.run(command, check=True, timeout=DEADLINE_S, stdout=subprocess.PIPE, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _rss_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _is_done(task: CaptureTask, end_lsn: int) -> bool:
    return task.caught_up(end_lsn) if end_lsn else task.progress().phase == "streaming"


def _as_it_came(_: SchemaWatch, chunk: Bytes, _state: Numbers) -> Bytes:
    return chunk


def _capture_here(dsn: str, slot: str, log: Path, end_lsn: int, how: str) -> CaptureRun:
    if how == UNWATCHED:
        SchemaWatch.annotate = _as_it_came  # type: ignore[assignment,method-assign]
    source = PostgresSource.model_validate(
        {
            "type": "postgresql",
            "dsn": dsn,
            "tables": ["public.orders"],
            "slot": slot,
            "publication": table.PUBLICATION,
            "snapshot": "never",
            **_SETTINGS[how],
        }
    )
    task = CaptureTask(source, log, LogConfig.model_validate({"path": log}), name="bench")
    failures: list[BaseException] = []

    def run() -> None:
        try:
            task.run()
        except BaseException as error:  # noqa: BLE001 — carried to the waiting thread
            failures.append(error)

    thread = threading.Thread(target=run)
    rss_before = _rss_bytes()
    cpu_before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    thread.start()
    looks, seen = 0, None
    while not _is_done(task, end_lsn) and thread.is_alive() and time.perf_counter() < started + DEADLINE_S:
        time.sleep(0.005)
        if (slot_health := task.progress().slot) is not seen:
            looks, seen = looks + 1, slot_health
    seconds = time.perf_counter() - started
    cpu_after = resource.getrusage(resource.RUSAGE_SELF)
    progress = task.progress()
    task.stop()
    thread.join(30)
    if failures:
        raise failures[0]
    return CaptureRun(
        rows=progress.rows,
        seconds=seconds,
        cpu_seconds=cpu_after.ru_utime + cpu_after.ru_stime - cpu_before.ru_utime - cpu_before.ru_stime,
        looks=looks,
        rss_bytes_before=rss_before,
        rss_bytes_max=cpu_after.ru_maxrss * 1024,
        log_bytes=progress.bytes,
    )


if __name__ == "__main__":
    _dsn, _slot, _log, _end_lsn, _how = sys.argv[1:]
    print(json.dumps(asdict(_capture_here(_dsn, _slot, Path(_log), int(_end_lsn), _how))))
