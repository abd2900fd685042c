"""Spark's side of Tailrace: the data sources `tailrace` and `tailrace-join`, and what pipelines run on.

Importing this package does not import PySpark; what needs it imports it when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Make `format("tailrace")` and `format("tailrace-join")` known to a session.

    Seldom needed: PySpark finds the sources by itself where Tailrace is installed (see
    `pyspark_tailrace`). Doing both does no harm.
    """
    from tailrace.spark.datasource import TailraceDataSource
    from tailrace.spark.join.datasource import JoinDataSource

    spark.dataSource.register(TailraceDataSource)
    spark.dataSource.register(JoinDataSource)
