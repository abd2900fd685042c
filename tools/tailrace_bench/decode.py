"""Wire bytes to typed Arrow columns, on one core."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv

from tailrace.changelog.reader import LogReader
from tailrace.decode.changes import TableChanges, decode_block
from tailrace.errors import Kind, TailraceError
from tailrace_bench.support import backlog, table
from tailrace_bench.support.report import Result, machine, median

ROWS = 500_000
TURNS = 5


def measure(rows: int | None = None) -> Result:
    """Decode a captured log of `rows` rows five times, after one pass that is not counted.

    The reference reads the same rows as CSV into the same types, with Arrow's own reader.
    """
    rows = rows or ROWS
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory:
        log = Path(directory) / "log"
        captured(log, rows)
        use_one_core()
        blocks = Blocks(log, rows)
        csv = _Csv(pa.Table.from_batches(blocks.batches()))
        blocks.decode()
        seconds, reference = [], []
        for _ in range(TURNS):
            seconds.append(timed(blocks.decode))
            reference.append(timed(csv.read))
    return Result(
        name="decode",
        value=rows / median(seconds),
        unit="rows/s",
        ratio=median([theirs / ours for ours, theirs in zip(seconds, reference, strict=True)]),
        reference="Arrow's CSV reader on the same rows, one core",
        limit="one core; finding cells, reading numbers and timestamps, copying texts",
        setup=machine() | {"rows": rows, "columns": 10, "cores_used": 1, "turns": TURNS},
        details={
            "reference_rows_s": round(rows / median(reference)),
            "fastest_rows_s": round(rows / min(seconds)),
            "slowest_rows_s": round(rows / max(seconds)),
        },
    )


def captured(log: Path, rows: int) -> None:
    """Fill the new log at `log` with `rows` captured rows of the table."""
    with table.server() as postgres:
        backlog.prepare(postgres.dsn(), "bench", log)
        end = table.load(postgres.dsn(), rows)
        backlog.capture(postgres.dsn(), "bench", log, end)


def use_one_core() -> None:
    """Restrict this process, including Arrow's threads, to one core."""
    pa.set_cpu_count(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


class Blocks:
    """The blocks of a log of `rows` rows in memory, with the schema frames to decode them."""

    def __init__(self, log: Path, rows: int) -> None:
        reader = LogReader.open(log, "0")
        end = reader.end().offset
        self._rows = rows
        self._schema = reader.all_schema_frames(reader.start, end)
        self._raw = [(reader.read(block), block.header) for block in reader.blocks(reader.start, end)]

    def decode(self) -> None:
        """Decode all rows to typed columns with their metadata columns, batch by batch."""
        found = sum(batch.num_rows for batch in self.batches())
        if found != self._rows:
            raise TailraceError(Kind.INTERNAL, f"decode the log: {found} rows of {self._rows}")

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the decoded rows."""
        for changes in self.changes():
            yield changes.rows()

    def changes(self) -> Iterator[TableChanges]:
        """Yield the changes, parsed again at each call and not yet decoded."""
        for frames, header in self._raw:
            yield from decode_block(frames, header.log_offset, header.open_at_start, self._schema)


class _Csv:
    """The table's own ten columns as CSV in memory."""

    def __init__(self, rows: pa.Table) -> None:
        own = rows.select([name for name in rows.column_names if not name.startswith("_")])
        sink = pa.BufferOutputStream()
        pa_csv.write_csv(own, sink)
        self._text = sink.getvalue()
        self._convert = pa_csv.ConvertOptions(column_types=own.schema)

    def read(self) -> pa.Table:
        """Return the rows, read back into the same types."""
        options = pa_csv.ReadOptions(use_threads=False)
        return pa_csv.read_csv(pa.BufferReader(self._text), options, convert_options=self._convert)


def timed(work: Callable[[], object]) -> float:
    """Return the duration of `work`, in seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
