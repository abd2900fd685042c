"""Where PySpark looks for the data source `tailrace-join`: it takes one from each package `pyspark_*`."""

from __future__ import annotations

from tailrace.spark.join.datasource import JoinDataSource

#: `format("tailrace-join")`, under the name that PySpark's look-up demands.
DefaultSource = JoinDataSource
