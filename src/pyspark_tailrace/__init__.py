"""Where PySpark looks for data sources by itself: top-level packages named `pyspark_*` that
have a `DefaultSource`. With it `spark.readStream.format("tailrace")` works in any job whose
Python has Tailrace installed, without a line of set-up.
"""

from __future__ import annotations

from tailrace.spark.datasource import TailraceDataSource


class DefaultSource(TailraceDataSource):
    """`format("tailrace")`, under the name that PySpark's look-up demands."""
