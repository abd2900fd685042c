"""Spark: the data sources `tailrace` and `tailrace-join`, and the session and jobs of pipelines.

Importing this package does not import PySpark; functions import it when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Register `format("tailrace")` and `format("tailrace-join")` in a session.

    Rarely needed: PySpark finds the data sources by itself if Tailrace is installed (see
    `pyspark_tailrace`). Registering them again is harmless.
    """
    from tailrace.spark.datasource import TailraceDataSource
    from tailrace.spark.join.datasource import JoinDataSource

    spark.dataSource.register(TailraceDataSource)
    spark.dataSource.register(JoinDataSource)
