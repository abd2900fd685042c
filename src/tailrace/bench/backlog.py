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
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tailrace.bench import table
from tailrace.capture.schema_watch import SchemaWatch
from tailrace.capture.session import Session
from tailrace.capture.task import CaptureTask
from tailrace.config import LogConfig, PostgresSource
from tailrace.protocol.frames import Bytes, Numbers

#: How a run captures: as a pipeline does on its own; with all watching that it can be told to do, fifty
#: times as often as by default; with none, which it can't be told; or an initial snapshot.
DEFAULT, WATCHED, UNWATCHED, SNAPSHOT = "default", "watched", "unwatched", "snapshot"
WATCHED_INTERVAL_S = 0.2
_SETTINGS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    WATCHED: {
        "heartbeat": {"action": "transaction", "interval_s": WATCHED_INTERVAL_S},
        "slot_watch": {"interval_s": WATCHED_INTERVAL_S},
    },
    UNWATCHED: {"slot_watch": {"interval_s": 0}},
    SNAPSHOT: {"snapshot": "initial"},
}

#: A capture that has not received its backlog by then has hung.
DEADLINE_S = 600.0

#: How often the run is looked at, and the server asked how far it is, which costs the process that
#: is measured: a run from a row on needs its first moment exactly.
_LOOK_S = 0.025
_LOOK_FROM_ROW_S = 0.002


@dataclass(frozen=True, slots=True)
class CaptureRun:
    """One timed pass: from the start of the task, or from a given row on, to the fsync of the
    backlog's last commit. All figures are of that part alone.

    `seconds` leaves out the start of the interpreter and its imports. `rss_bytes_max` is the
    whole process's high-water mark, `rss_bytes_before` its size before the first byte came.
    """

    rows: int
    seconds: float
    cpu_seconds: float
    looks: int  # of the watch at the slot
    annotating_s: float  # that the receiving thread gave to changes of schemas
    watch_cpu_s: float  # of the thread that watches the slot
    server_cpu_s: float  # of the server's processes for the connections of both watches
    rss_bytes_before: int
    rss_bytes_max: int
    log_bytes: int


def capture(dsn: str, slot: str, log: Path, end_lsn: int) -> CaptureRun:
    """Capture from `slot` until everything before `end_lsn` is durable in the log at `log`, in a
    process of its own.

    Both must come from `prepare`, called before the backlog was made.
    """
    return CaptureRun(**_run_child(dsn, slot, log, end_lsn))


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


class _Watching:
    """What the watches of this process take of the CPU: their thread here, their connections' processes
    at a server on this machine.
    """

    def __init__(self, dsn: str) -> None:
        source = PostgresSource.model_validate(
            {"type": "postgresql", "dsn": dsn, "application_name": "bench"}
        )
        self._session = Session.connect(source, threading.Event())

    def cpu_s(self) -> tuple[float, dict[int, float]]:
        """Return the CPU time so far, in seconds: of the thread; of the processes, by pid."""
        threads = [thread for thread in threading.enumerate() if thread.name == "tailrace-slot-watch"]
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident]
        rows = self._session.run(_WATCHERS, "look for the watches' connections")
        pids = [int(row["pid"] or 0) for row in rows]
        return sum(map(time.clock_gettime, clocks)), {pid: _cpu_s(pid) for pid in pids}

    def close(self) -> None:
        self._session.close()


#: A capture's other connections are walsenders.
_WATCHERS = (
    "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND application_name = 'tailrace'"
)


def _cpu_s(pid: int) -> float:
    try:
        # The scheduler counts nanoseconds, everything else ticks.
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        import psutil

        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)


class _Annotating:
    """Puts itself in the place of `SchemaWatch.annotate`, and measures it or leaves it out."""

    def __init__(self, how: str) -> None:
        self.seconds = 0.0
        self._watched = how != UNWATCHED
        self._annotate = SchemaWatch.annotate

    def __enter__(self) -> Self:
        def annotate(watch: SchemaWatch, chunk: Bytes, state: Numbers) -> Bytes:
            if not self._watched:
                return chunk
            began = time.perf_counter()
            annotated = self._annotate(watch, chunk, state)
            self.seconds += time.perf_counter() - began
            return annotated

        SchemaWatch.annotate = annotate  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        SchemaWatch.annotate = self._annotate  # type: ignore[method-assign]


def _task(dsn: str, slot: str, log: Path, how: str) -> CaptureTask:
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
    return CaptureTask(source, log, LogConfig.model_validate({"path": log}), name="bench")


def capture_here(
    dsn: str, slot: str, log: Path, end_lsn: int, how: str = DEFAULT, *, from_row: int = 0
) -> CaptureRun:
    """As `capture`, in this process, which should do nothing else meanwhile.

    :param how: `DEFAULT`; `WATCHED`: the slot is looked at, and heartbeats write, every
        `WATCHED_INTERVAL_S`; `UNWATCHED`: neither slot nor schema is watched.
    :param from_row: the clock starts when so many rows have come and the slot was looked at once, if it
        is watched; 0: with the task.
    """
    with _Annotating(how) as annotating, closing(_Watching(dsn)) as watching:
        looks_min = int(how == WATCHED)
        return _timed(_task(dsn, slot, log, how), end_lsn, from_row, annotating, watching, looks_min)


def _timed(
    task: CaptureTask,
    end_lsn: int,
    from_row: int,
    annotating: _Annotating,
    watching: _Watching,
    looks_min: int,
) -> CaptureRun:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            task.run()
        except BaseException as error:  # noqa: BLE001 — carried to the waiting thread
            failures.append(error)

    thread = threading.Thread(target=run)
    rss_before = _rss_bytes()
    deadline = time.perf_counter() + DEADLINE_S
    started, cpu_before, rows_before = time.perf_counter(), time.process_time(), 0
    taken: tuple[float, dict[int, float]] = (0.0, {})
    thread.start()
    looks, seen = 0, None
    look_s = _LOOK_FROM_ROW_S if from_row else _LOOK_S
    while not _is_done(task, end_lsn) and thread.is_alive() and time.perf_counter() < deadline:
        time.sleep(look_s)
        progress = task.progress()
        if progress.slot is not seen:
            looks, seen = looks + 1, progress.slot
        if not rows_before and 0 < from_row <= progress.rows and looks >= looks_min:
            taken = watching.cpu_s()
            progress = task.progress()
            started, cpu_before, rows_before = time.perf_counter(), time.process_time(), progress.rows
            annotating.seconds, looks = 0.0, 0
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_before
    thread_s, server_s = watching.cpu_s()
    rss_max = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    progress = task.progress()
    task.stop()
    thread.join(30)
    if failures:
        raise failures[0]
    return CaptureRun(
        rows=progress.rows - rows_before,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        looks=looks,
        annotating_s=annotating.seconds,
        watch_cpu_s=thread_s - taken[0],
        server_cpu_s=sum(cpu_s - taken[1].get(pid, 0.0) for pid, cpu_s in server_s.items()),
        rss_bytes_before=rss_before,
        rss_bytes_max=rss_max,
        log_bytes=progress.bytes,
    )


if __name__ == "__main__":
    _dsn, _slot, _log, _end_lsn, _how = sys.argv[1:]
    print(json.dumps(asdict(capture_here(_dsn, _slot, Path(_log), int(_end_lsn), _how))))
