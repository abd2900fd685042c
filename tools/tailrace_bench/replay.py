"""Reading the change log with Spark's data source `tailrace`, in typed columns that are discarded."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tailrace.errors import Kind, TailraceError
from tailrace.spark.session import session, warm
from tailrace_bench.decode import captured
from tailrace_bench.support.report import Result, machine, median

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROWS = 3_000_000
TURNS = 3


def measure(rows: int | None = None) -> Result:
    """Read a log of `rows` rows three times with `format("tailrace")`, after one warm-up.

    The reference reads the same rows from Parquet files with Spark, in alternation.
    """
    rows = rows or ROWS
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory:
        log, parquet = Path(directory) / "log", str(Path(directory) / "parquet")
        captured(log, rows)
        spark = session(app_name="tailrace-bench")
        warm(spark)
        frame = spark.read.format("tailrace").option("path", str(log)).option("table", "public.orders").load()
        frame.write.parquet(parquet)
        files = spark.read.parquet(parquet)
        if (counted := files.count()) != rows:
            raise TailraceError(Kind.INTERNAL, f"read the log with Spark: {counted} rows of {rows}")
        _to_nothing(files)
        seconds, reference = [], []
        for _ in range(TURNS):
            seconds.append(_to_nothing(frame))
            reference.append(_to_nothing(files))
        spark.stop()
    return Result(
        name="replay",
        value=rows / median(seconds),
        unit="rows/s",
        ratio=median([theirs / ours for ours, theirs in zip(seconds, reference, strict=True)]),
        reference="Spark reading the same rows from Parquet",
        limit="both cores: decoding in the Python workers and Arrow's way into Java; Parquet stays in Java",
        setup=machine() | {"rows": rows, "columns": 10, "turns": TURNS},
        details={
            "reference_rows_s": round(rows / median(reference)),
            "seconds": [round(second, 2) for second in seconds],
        },
    )


def _to_nothing(frame: DataFrame) -> float:
    started = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - started
