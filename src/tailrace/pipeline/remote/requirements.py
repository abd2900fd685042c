"""What captures on executors need: a core each for as long as they work, and some must be left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.errors import Kind, TailraceError

if TYPE_CHECKING:
    from pyspark import SparkContext


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
