"""CPU time of an idle engine: with one task, and with a hundred."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tailrace.engine.engine import Engine
from tailrace.engine.offsets.stores import MemoryOffsetStore
from tailrace.testing import LinesSource
from tailrace_bench.support import table
from tailrace_bench.support.report import Result, machine

TASKS = 100
#: Duration of each measurement after the engine's start, in seconds.
WATCHED_S = 10.0
#: Goals as shares of one core: for one task alone, and for each of a hundred.
GOAL_ALONE = 0.01
GOAL_EACH = 0.001


def measure(rows: int | None = None) -> Result:
    """Measure engines whose tasks poll and get nothing: with one task, with a hundred, and of PostgreSQL.

    CPU time does not depend on other load of the machine.

    :param rows: number of tasks; default: a hundred.
    """
    tasks = rows or TASKS
    without = _watched()
    alone, together = _lines(1), _lines(tasks)
    with table.server() as postgres, tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name:
        postgresql = _postgresql(postgres.dsn(), Path(name))
    goal = GOAL_EACH * tasks
    return Result(
        name="idle",
        value=round(together * 100, 3),
        unit=f"% of a core, {tasks} tasks",
        ratio=round(together / goal, 3),
        reference=f"the goal, {goal:.1%} of a core (below 1 is cheaper)",
        limit="the source of these tasks looks for news ten times a second, the engine twice",
        setup=machine() | {"tasks": tasks, "seconds": WATCHED_S},
        details={
            "one_task_percent": round(alone * 100, 3),
            "one_task_to_goal_of_1_percent": round(alone / GOAL_ALONE, 3),
            "one_postgresql_task_percent": round(postgresql * 100, 3),
            "no_engine_percent": round(without * 100, 3),
        },
    )


def _lines(tasks: int) -> float:
    source = LinesSource(0, tasks=tasks, ends=False)
    return _waiting(connector=source, tasks_max=tasks, offsets=MemoryOffsetStore())


def _postgresql(dsn: str, directory: Path) -> float:
    source = {"type": "postgresql", "dsn": dsn, "tables": ["public.orders"], "slot": "idle"}
    return _waiting({"name": "idle", "source": source, "log": {"path": str(directory / "log")}})


def _waiting(config: dict[str, Any] | None = None, **parts: Any) -> float:
    with Engine(config, on_batch=lambda _: None, **parts):
        return _watched()


def _watched() -> float:
    """Return the share of a core that this process takes during `WATCHED_S`."""
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    threading.Event().wait(WATCHED_S)
    return (time.process_time() - began_cpu_s) / (time.monotonic() - began_s)
