"""A backlog to Parquet and to Delta, exactly once, against pg_recvlogical of the same backlog.

The pipeline is warm: it has processed a first load, and is then suspended while the backlog is
created. The time is from its resumption until a reader of the folder sees every row.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tailrace.errors import Kind, TailraceError
from tailrace_bench.support import pg_recvlogical, table
from tailrace_bench.support.process import BenchPipeline
from tailrace_bench.support.report import Result, machine, median
from tailrace_bench.support.visible import ParquetFolder, VisibleDeltaTable
from tailrace_servers.postgres import EmbeddedPostgres

ROWS = 1_000_000
WARM_UP_ROWS = 300_000
TURNS = 2


def measure(rows: int | None = None) -> Result:
    """Measure both sinks, alternating with pg_recvlogical; `value` is the Parquet rate."""
    rows = rows or ROWS
    with table.server() as postgres, tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name:
        directory = Path(name)
        parquet = _Turns(postgres, directory, "parquet", {"type": "parquet"}, rows)
        delta = _Turns(postgres, directory, "delta", {"type": "delta", "mode": "append"}, rows)
    return Result(
        name="e2e",
        value=parquet.rate,
        unit="rows/s",
        ratio=parquet.ratio,
        reference="pg_recvlogical",
        limit="both cores: PostgreSQL's sender takes most of one, decoding and writing files the other",
        setup=machine() | {"rows": rows, "rows_a_transaction": table.ROWS_A_TRANSACTION, "turns": TURNS},
        details={
            "parquet_rows_s": round(parquet.rate),
            "parquet_ratio": round(parquet.ratio, 2),
            "delta_append_rows_s": round(delta.rate),
            "delta_append_ratio": round(delta.ratio, 2),
            "reference_rows_s": round(median(parquet.reference_rates + delta.reference_rates)),
        },
    )


class _Turns:
    """The measurements of one sink: a rate for each turn, and the reference's rate of the same rows."""

    def __init__(
        self, postgres: EmbeddedPostgres, directory: Path, name: str, sink: dict[str, Any], rows: int
    ) -> None:
        self.rates: list[float] = []
        self.reference_rates: list[float] = []
        dsn = postgres.dsn()
        with BenchPipeline(directory, name, dsn, sink | {"name": name}) as pipeline:
            folder = (ParquetFolder if name == "parquet" else VisibleDeltaTable)(pipeline.sink_path)
            pipeline.wait_until(lambda: _has_slot(postgres, f"tailrace_{name}"), 0.1)
            next_key = _next_key(postgres)
            table.load(dsn, WARM_UP_ROWS, first=next_key)
            pipeline.wait_until(lambda: folder.rows() == WARM_UP_ROWS, 0.1)
            for turn in range(TURNS):
                reference_slot = f"reference_{name}_{turn}"
                table.create_slot(dsn, reference_slot)
                pipeline.pause()
                end = table.load(dsn, rows, first=_next_key(postgres))
                self.reference_rates.append(
                    rows / pg_recvlogical.receive(postgres, reference_slot, end).seconds
                )
                table.drop_slot(dsn, reference_slot)
                wanted = WARM_UP_ROWS + rows * (turn + 1)
                pipeline.resume()
                self.rates.append(rows / pipeline.wait_until(_all_of(folder, wanted), 0.02))

    @property
    def rate(self) -> float:
        return median(self.rates)

    @property
    def ratio(self) -> float:
        return median([ours / theirs for ours, theirs in zip(self.rates, self.reference_rates, strict=True)])


def _all_of(folder: ParquetFolder | VisibleDeltaTable, rows: int) -> Any:
    def seen() -> bool:
        visible = folder.rows()
        if visible > rows:
            raise TailraceError(Kind.INTERNAL, f"count the sink's rows: it shows {visible} of {rows}")
        return visible == rows

    return seen


def _has_slot(postgres: EmbeddedPostgres, slot: str) -> bool:
    found = postgres.query("select 1 from pg_replication_slots where slot_name = %s and active", [slot])
    return bool(found)


def _next_key(postgres: EmbeddedPostgres) -> int:
    return int(postgres.query("select coalesce(max(id), 0) + 1 from orders")[0][0])
