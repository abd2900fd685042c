"""Commit to visible row: how long after PostgreSQL's commit a reader of the folder sees it."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psycopg
import pyarrow.parquet as pq

from tailrace.bench import table
from tailrace.bench.process import PipelineProcess
from tailrace.bench.report import Result, machine
from tailrace.bench.visible import ParquetFolder

ROWS_A_SECOND = 1_000
ROWS_A_TRANSACTION = 10
WARM_UP_S = 5.0
MEASURED_S = 30.0
POLL_S = 0.005
#: No peer brings rows into Parquet as they come; the median is held against this.
TARGET_MS = 1_000.0


def measure(rows: int | None = None) -> Result:
    """Measure at `rows` rows a second for half a minute, after five seconds of warm-up."""
    rate = rows or ROWS_A_SECOND
    with table.server() as postgres, tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name:
        stop = threading.Event()
        writer = threading.Thread(target=_write, args=(postgres.dsn(), rate, stop))
        with PipelineProcess(Path(name), "latency", postgres.dsn(), {"type": "parquet"}) as pipeline:
            writer.start()
            try:
                folder = ParquetFolder(pipeline.sink_path)
                first_row_s = pipeline.wait_until(lambda: folder.rows() > 0, 0.05)
                milliseconds = _observe(folder)
            finally:
                stop.set()
                writer.join(60)
    p50, p95, p99 = (float(np.percentile(milliseconds, p)) for p in (50, 95, 99))
    return Result(
        name="latency",
        value=round(p50),
        unit="ms (median)",
        ratio=round(TARGET_MS / p50, 2),
        reference="one second, the goal (above 1 is faster)",
        limit="the sink's interval_ms between batches (500 by default), then the cost of one Spark job",
        setup=machine() | {"rows_a_second": rate, "rows_a_transaction": ROWS_A_TRANSACTION},
        details={
            "p50_ms": round(p50),
            "p95_ms": round(p95),
            "p99_ms": round(p99),
            "max_ms": round(float(milliseconds.max())),
            "rows": len(milliseconds),
            "run_to_first_row_s": round(first_row_s, 1),
        },
    )


def _write(dsn: str, rate: int, stop: threading.Event) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        started, key = time.perf_counter(), 1
        while not stop.is_set():
            connection.execute(table.INSERT, {"first": key, "last": key + ROWS_A_TRANSACTION - 1})
            key += ROWS_A_TRANSACTION
            stop.wait(max(0.0, started + key / rate - time.perf_counter()))


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
