"""What captures on executors need: a core each for as long as they work, and some must be left."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from tailrace.config import EngineConfig
from tailrace.errors import Kind, TailraceError

if TYPE_CHECKING:
    from pyspark import SparkContext

_LOCAL = re.compile(r"local(?:\[(\*|\d+)(?:,\s*\d+)?\])?")


def cores_of(master: str) -> int | None:
    """Return how many tasks at a time run under this master; None: only a running Spark knows."""
    found = _LOCAL.fullmatch(master.strip())
    if found is None:
        return None
    if found[1] == "*":
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(found[1] or 1)


def may_grow(context: SparkContext) -> bool:
    """Tell whether more executors come by themselves when tasks wait for them."""
    return context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true"


def too_few(cores: int, tasks: int) -> TailraceError | None:
    """Return the error of `tasks` captures on so many cores, if they would take them all."""
    if cores > tasks:
        return None
    return TailraceError(
        Kind.CONFIG_INVALID,
        f"capture on executors: {tasks} tasks would take all {cores} cores that they have",
        "each source takes one core for as long as it is captured, and others must be left for what else "
        f"Spark does: give more executors, or, locally, spark.master: local[{tasks + 2}]",
    )


def require_own_reading(config: EngineConfig) -> None:
    """Refuse snapshots that Spark is to read.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    if any(pipeline.source.snapshot_read_on != "process" for pipeline in config.pipelines):
        raise TailraceError(
            Kind.CONFIG_INVALID,
            "start the connector postgresql: tasks_on is spark, and so is snapshot_read_on: a task on an "
            "executor can't have Spark read for it",
            "choose one of the two",
        )
