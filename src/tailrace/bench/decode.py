"""Wire bytes to typed Arrow columns, on one core."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from tailrace.bench import backlog, table
from tailrace.bench.report import Result, machine, median
from tailrace.errors import Kind, TailraceError

ROWS = 500_000
TURNS = 5


def measure(rows: int | None = None) -> Result:
    """Decode a captured log of `rows` rows five times, after one pass that is not counted."""
    rows = rows or ROWS
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory:
        log = Path(directory) / "log"
        captured(log, rows)
        _use_one_core()
        seconds = [_decode(log, rows) for _ in range(TURNS + 1)][1:]
    return Result(
        name="decode",
        value=rows / median(seconds),
        unit="rows/s",
        ratio=None,
        reference="",
        limit="one core; most of it is copying values out of the frames and Arrow's casts",
        setup=machine() | {"rows": rows, "columns": 10, "cores_used": 1, "turns": TURNS},
        details={"fastest_rows_s": round(rows / min(seconds)), "slowest_rows_s": round(rows / max(seconds))},
    )


def captured(log: Path, rows: int) -> None:
    """Fill the new log at `log` with `rows` captured rows of the table."""
    with table.server() as postgres:
        backlog.prepare(postgres.dsn(), "bench", log)
        end = table.load(postgres.dsn(), rows)
        backlog.capture(postgres.dsn(), "bench", log, end)


def _use_one_core() -> None:
    import pyarrow as pa

    pa.set_cpu_count(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _decode(log: Path, rows: int) -> float:
    from tailrace.changelog.reader import LogReader
    from tailrace.decode.changes import decode_block

    reader = LogReader.open(log, "0")
    end = reader.end().offset
    blocks = reader.blocks(reader.start, end)
    schema = reader.all_schema_frames(reader.start, end)
    raw = [(reader.read(block), block.header) for block in blocks]
    decoded = 0
    started = time.perf_counter()
    for frames, header in raw:
        for changes in decode_block(frames, header.log_offset, header.open_at_start, schema):
            decoded += changes.rows().num_rows
    seconds = time.perf_counter() - started
    if decoded != rows:
        raise TailraceError(Kind.INTERNAL, f"decode the log: {decoded} rows of {rows}")
    return seconds
