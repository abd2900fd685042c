"""The change log through Spark's own data source to nothing, in typed columns."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from tailrace.bench.decode import captured
from tailrace.bench.report import Result, machine, median
from tailrace.errors import Kind, TailraceError

ROWS = 3_000_000
TURNS = 3


def measure(rows: int | None = None) -> Result:
    """Read a log of `rows` rows three times with `format("tailrace")`, after one warm-up."""
    from tailrace.spark.session import session, warm

    rows = rows or ROWS
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory:
        log = Path(directory) / "log"
        captured(log, rows)
        spark = session(app_name="tailrace-bench")
        warm(spark)
        frame = spark.read.format("tailrace").option("path", str(log)).option("table", "public.orders").load()
        if (counted := frame.count()) != rows:
            raise TailraceError(Kind.INTERNAL, f"read the log with Spark: {counted} rows of {rows}")
        seconds = []
        for _ in range(TURNS):
            started = time.perf_counter()
            frame.write.format("noop").mode("overwrite").save()
            seconds.append(time.perf_counter() - started)
        spark.stop()
    return Result(
        name="replay",
        value=rows / median(seconds),
        unit="rows/s",
        ratio=None,
        reference="",
        limit="both cores: decoding in the Python workers and Arrow's way into the JVM",
        setup=machine() | {"rows": rows, "columns": 10, "turns": TURNS},
        details={"seconds": [round(second, 2) for second in seconds]},
    )
