"""Commit to visible row: the time from PostgreSQL's commit of a row until a reader of the folder sees it.

Then the memory of a pipeline with `spark: {start: when_needed}` that never needs Spark.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psycopg
import pyarrow.parquet as pq

from tailrace_bench.support import table
from tailrace_bench.support.process import BenchPipeline
from tailrace_bench.support.report import Result, machine
from tailrace_bench.support.visible import ParquetFolder

ROWS_A_SECOND = 1_000
ROWS_A_TRANSACTION = 10
WARM_UP_S = 5.0
MEASURED_S = 30.0
WITHOUT_SPARK_S = 10.0
POLL_S = 0.005
#: The goal with which the median is compared, as no peer writes rows to Parquet continuously.
TARGET_MS = 1_000.0


def measure(rows: int | None = None) -> Result:
    """Measure at `rows` rows per second for half a minute, after five seconds of warm-up."""
    rate = rows or ROWS_A_SECOND
    with table.server() as postgres, tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name:
        stop = threading.Event()
        writer = threading.Thread(target=write, args=(postgres.dsn(), rate, stop))
        with BenchPipeline(Path(name), "latency", postgres.dsn(), {"type": "parquet"}) as pipeline:
            writer.start()
            try:
                folder = ParquetFolder(pipeline.sink_path)
                first_row_s = pipeline.wait_until(lambda: folder.rows() > 0, 0.05)
                milliseconds = _observe(folder)
            finally:
                stop.set()
                writer.join(60)
        rss_mb, without_spark_first_row_s = _without_spark(Path(name), postgres.dsn(), rate)
    p50, p95, p99 = (float(np.percentile(milliseconds, p)) for p in (50, 95, 99))
    return Result(
        name="latency",
        value=round(p50),
        unit="ms (median)",
        ratio=round(TARGET_MS / p50, 2),
        reference="one second, the goal (above 1 is faster)",
        limit="the sink's interval_ms between batches, then fsync of the log, of a file and of its manifest",
        setup=machine() | {"rows_a_second": rate, "rows_a_transaction": ROWS_A_TRANSACTION},
        details={
            "p50_ms": round(p50),
            "p95_ms": round(p95),
            "p99_ms": round(p99),
            "max_ms": round(float(milliseconds.max())),
            "rows": len(milliseconds),
            "first_row_s": round(first_row_s, 2),
            "rss_mb": round(rss_mb),
            "when_needed_first_row_s": round(without_spark_first_row_s, 2),
        },
    )


def _without_spark(directory: Path, dsn: str, rate: int) -> tuple[float, float]:
    """Run a pipeline without a backlog; return its largest size in MB, and the seconds to its first row."""
    stop = threading.Event()
    writer = threading.Thread(target=write, args=(dsn, rate, stop), kwargs={"first": 10_000_000})
    spark = {"start": "when_needed"}
    with BenchPipeline(directory, "without_spark", dsn, {"type": "parquet"}, spark=spark) as pipeline:
        writer.start()
        try:
            folder = ParquetFolder(pipeline.sink_path)
            first_row_s = pipeline.wait_until(lambda: folder.rows() > 0, 0.05)
            ends_s = time.monotonic() + WITHOUT_SPARK_S
            most = 0.0
            while time.monotonic() < ends_s:
                most = max(most, pipeline.rss_mb())
                time.sleep(0.5)
        finally:
            stop.set()
            writer.join(60)
    return most, first_row_s


def write(dsn: str, rate: int, stop: threading.Event, first: int = 1) -> None:
    """Insert `rate` rows per second, in transactions of `ROWS_A_TRANSACTION`, until `stop` is set.

    :param first: the first row's key.
    """
    with psycopg.connect(dsn, autocommit=True) as connection:
        # The usual setting: otherwise a commit is sent only after wal_writer_delay, 200 ms.
        connection.execute("set synchronous_commit = on")
        started, key = time.perf_counter(), first
        while not stop.is_set():
            connection.execute(table.INSERT, {"first": key, "last": key + ROWS_A_TRANSACTION - 1})
            key += ROWS_A_TRANSACTION
            stop.wait(max(0.0, started + (key - first) / rate - time.perf_counter()))


def _observe(folder: ParquetFolder) -> np.ndarray:
    began = time.time()
    measured: list[np.ndarray] = []
    while (now := time.time()) < began + WARM_UP_S + MEASURED_S:
        files = folder.new_files()
        seen_us = time.time() * 1e6
        for file in files if now > began + WARM_UP_S else ():
            committed = pq.read_table(file, columns=["_commit_ts"]).column(0).cast("int64").to_numpy()
            measured.append((seen_us - committed) / 1e3)
        time.sleep(POLL_S)
    return np.concatenate(measured)
