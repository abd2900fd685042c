"""PostgreSQL to the fsynced change log, alternating with pg_recvlogical on the same backlog."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tailrace_bench.support import backlog, pg_recvlogical, table
from tailrace_bench.support.report import Result, machine, median

ROWS = 2_000_000
TURNS = 3


def measure(rows: int | None = None) -> Result:
    """Measure `rows` rows in three turns each, and memory with one transaction of as many rows."""
    rows = rows or ROWS
    ours: list[backlog.CaptureRun] = []
    theirs: list[pg_recvlogical.ReceiverRun] = []
    with table.server() as postgres, tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory:
        dsn = postgres.dsn()
        for turn in range(TURNS):
            table.create_slot(dsn, f"theirs_{turn}")
            backlog.prepare(dsn, f"ours_{turn}", Path(directory) / f"log-{turn}")
        end = table.load(dsn, rows)
        for turn in range(TURNS):
            theirs.append(pg_recvlogical.receive(postgres, f"theirs_{turn}", end))
            ours.append(backlog.capture(dsn, f"ours_{turn}", Path(directory) / f"log-{turn}", end))
        backlog.prepare(dsn, "large", Path(directory) / "log-large")
        end = table.load(dsn, rows, first=rows + 1, rows_a_transaction=rows)
        large = backlog.capture(dsn, "large", Path(directory) / "log-large", end)
    rates = [run.rows / run.seconds for run in ours]
    reference = [rows / run.seconds for run in theirs]
    return Result(
        name="capture",
        value=median(rates),
        unit="rows/s",
        ratio=median([a / b for a, b in zip(rates, reference, strict=True)]),
        reference="pg_recvlogical",
        limit="PostgreSQL's sender, which decodes and sends row by row on one core",
        setup=machine() | {"rows": rows, "rows_a_transaction": table.ROWS_A_TRANSACTION, "turns": TURNS,
                           "postgresql": 18},
        details={
            "reference_rows_s": round(median(reference)),
            "cpu_us_a_row": round(median([run.cpu_seconds / run.rows * 1e6 for run in ours]), 2),
            "reference_cpu_us_a_row": round(median([run.cpu_seconds / rows * 1e6 for run in theirs]), 2),
            "rss_mb_max": round(max(run.rss_bytes_max for run in ours) / 1e6),
            "large_transaction_rows_s": round(large.rows / large.seconds),
            "large_transaction_growth_mb": round((large.rss_bytes_max - large.rss_bytes_before) / 1e6),
            "large_transaction_rss_mb_max": round(large.rss_bytes_max / 1e6),
        },
    )  # fmt: skip
