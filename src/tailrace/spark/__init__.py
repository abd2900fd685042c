"""Spark's side of Tailrace: the data source `tailrace`, and what pipelines run on.

Importing this package does not import PySpark; what needs it imports it when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Make `format("tailrace")` known to a session.

    Seldom needed: PySpark finds the source by itself where Tailrace is installed (see
    `pyspark_tailrace`). Doing both does no harm.
    """
    from tailrace.spark.datasource import TailraceDataSource

    spark.dataSource.register(TailraceDataSource)
