"""What the watches cost the capture path: the same backlog with all of them on and with none.

On: looks at the slot and heartbeats that write, at their default intervals, and the catalogue
asked at each change of a table's schema, of which the backlog has many. Off: nothing of that.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tailrace.bench import backlog, table
from tailrace.bench.report import Result, machine, median

#: So many that a pass outlasts the interval from one look at the slot to the next.
ROWS = 4_000_000
TURNS = 5
#: One change of the schema in so many rows: far more often than in any database that is used.
ROWS_A_CHANGE = 100_000
#: Length of the last column in the table's definition; each change makes it one longer.
_LENGTH = 20


def measure(rows: int | None = None) -> Result:
    """Measure `rows` rows in turns of two passes, each kind first in every other turn."""
    rows = rows or ROWS
    kinds = {backlog.WATCHED: "on", backlog.UNWATCHED: "off"}
    runs: dict[str, list[backlog.CaptureRun]] = {kind: [] for kind in kinds}
    with table.server() as postgres, tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory:
        dsn = postgres.dsn()
        for turn in range(TURNS):
            for word in kinds.values():
                backlog.prepare(dsn, f"{word}_{turn}", Path(directory) / f"{word}-{turn}")
        changes = -(-rows // ROWS_A_CHANGE)
        for change in range(changes):
            first = change * ROWS_A_CHANGE + 1
            postgres.execute(f"alter table orders alter tag type varchar({_LENGTH + change + 1})")
            end = table.load(dsn, min(ROWS_A_CHANGE, rows - first + 1), first=first)
        for turn in range(TURNS):
            for kind in sorted(kinds, reverse=turn % 2 == 1):
                slot, log = f"{kinds[kind]}_{turn}", Path(directory) / f"{kinds[kind]}-{turn}"
                runs[kind].append(backlog.capture(dsn, slot, log, end, kind))
                table.drop_slot(dsn, slot)
    on, off = runs[backlog.WATCHED], runs[backlog.UNWATCHED]
    ratios = [without.seconds / watched.seconds for watched, without in zip(on, off, strict=True)]
    return Result(
        name="watches",
        value=median([run.rows / run.seconds for run in on]),
        unit="rows/s",
        ratio=median(ratios),
        reference="the same without watches",
        limit="PostgreSQL's sender, which decodes and sends row by row on one core",
        setup=machine() | {"rows": rows, "rows_a_transaction": table.ROWS_A_TRANSACTION, "turns": TURNS,
                           "changes_of_schema": changes, "postgresql": 18},
        details={
            "ratios": [round(ratio, 3) for ratio in ratios],
            "reference_rows_s": round(median([run.rows / run.seconds for run in off])),
            "cpu_us_a_row": round(median([run.cpu_seconds / run.rows * 1e6 for run in on]), 3),
            "reference_cpu_us_a_row": round(median([run.cpu_seconds / run.rows * 1e6 for run in off]), 3),
            "looks_at_the_slot": sum(run.looks for run in on),
        },
    )  # fmt: skip
