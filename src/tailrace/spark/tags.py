"""Tags of Spark's jobs, by which they are cancelled: jobs bear those of the thread that begins them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def bearing(spark: SparkSession | None) -> Callable[[], None]:
    """Return what a new thread calls first, so that its jobs bear the tags of the calling thread's."""
    if spark is None:
        return lambda: None
    context = spark.sparkContext
    tags = set(context.getJobTags())

    def bear() -> None:
        for tag in tags:
            context.addJobTag(tag)

    return bear
