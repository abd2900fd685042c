"""What the watches cost the capture path: the same backlog with all of them on and with none, in pairs.

On: looks at the slot and heartbeats that write, as often as the watch lets itself (its pauses are fifty
times as long as its turns: dozens of times as often as by default), and the catalogue asked at each
change of a table's schema, of which the backlog has many. Off: nothing of that. Both
passes of a pair read copies of one slot into copies of one log, one right after the other in one
process, so what the machine does besides weighs on both. Of many short pairs the median counts.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tailrace.bench import backlog, table
from tailrace.bench.report import Result, machine, median, median_interval
from tailrace.capture.heartbeat import Heartbeat
from tailrace.capture.session import Session
from tailrace.capture.slot_watch import look
from tailrace.config import PostgresSource
from tailrace.config.slot_care import HeartbeatConfig
from tailrace.embedded.postgres import EmbeddedPostgres

#: A pass takes less than a second: many short ones, so that both of a pair see the same machine.
ROWS = 200_000
#: One change of the schema in so many rows, in their middle: far more often than in a database that is used.
ROWS_A_CHANGE = 100_000
#: The part of a pass that is not timed: the stream and the watches connect.
UNTIMED_SHARE = 0.1
#: Pairs are made for so long, then the last one is ended; server and backlog take some seconds before.
PAIRS_S = 65.0
PAIRS_MAX = 100
#: So often a turn of the watch is made by itself, to know what one takes.
TURNS = 100
#: Length of the last column in the table's definition; each change makes it one longer.
_LENGTH = 20

Pair = tuple[backlog.CaptureRun, backlog.CaptureRun]


def measure(rows: int | None = None) -> Result:
    """Measure pairs of passes over `rows` rows, each kind first in every other pair."""
    rows = rows or ROWS
    with table.server() as postgres, tempfile.TemporaryDirectory(prefix="tailrace-bench-") as directory:
        dsn, empty = postgres.dsn(), Path(directory) / "empty"
        backlog.prepare(dsn, "bench", empty)
        table.copy_slot(dsn, "bench", "origin")
        table.drop_slot(dsn, "bench")
        changes, end = _load(postgres, rows)

        def run(how: str) -> backlog.CaptureRun:
            log = Path(directory) / "log"
            table.copy_slot(dsn, "origin", "bench")
            shutil.copytree(empty, log)
            done = backlog.capture_here(dsn, "bench", log, end, how, from_row=int(rows * UNTIMED_SHARE))
            table.drop_slot(dsn, "bench")
            shutil.rmtree(log)
            return done

        pairs = _pairs(run)
        turn_cpu_s = _turn_cpu_s(dsn)
    return _result(pairs, rows, changes, turn_cpu_s)


def _load(postgres: EmbeddedPostgres, rows: int) -> tuple[int, int]:
    """Make the backlog; return how often the schema changes in it, and the WAL position after it."""
    changes = end = 0
    for first in range(1, rows + 1, ROWS_A_CHANGE):
        count = min(ROWS_A_CHANGE, rows - first + 1)
        table.load(postgres.dsn(), count // 2, first=first)
        changes += 1
        postgres.execute(f"alter table orders alter tag type varchar({_LENGTH + changes})")
        end = table.load(postgres.dsn(), count - count // 2, first=first + count // 2)
    return changes, end


def _turn_cpu_s(dsn: str) -> float:
    """Return the CPU time of this process that one turn of the slot's watch takes: a heartbeat and a look."""
    source = PostgresSource.model_validate({"type": "postgresql", "dsn": dsn})
    heartbeat = Heartbeat(HeartbeatConfig(action="transaction"))
    with closing(Session.connect(source, threading.Event())) as session:
        look(session, "origin")
        before = time.process_time()
        for _ in range(TURNS):
            heartbeat.beat(session)
            look(session, "origin")
        return (time.process_time() - before) / TURNS


def _pairs(run: Callable[[str], backlog.CaptureRun]) -> list[Pair]:
    """Return pairs of a watched pass and one that is not; tell of each on standard error."""
    for how in (backlog.WATCHED, backlog.UNWATCHED):  # nothing is loaded or cached before
        run(how)
    began = time.monotonic()
    pairs: list[Pair] = []
    while len(pairs) < PAIRS_MAX and (not pairs or time.monotonic() - began < PAIRS_S):
        if len(pairs) % 2:
            watched, without = run(backlog.WATCHED), run(backlog.UNWATCHED)
        else:
            without, watched = run(backlog.UNWATCHED), run(backlog.WATCHED)
        pairs.append((watched, without))
        ratios = _ratios(pairs)
        low, high = median_interval(ratios)
        done = f"{time.monotonic() - began:.0f} of {PAIRS_S:.0f} s, pair {len(pairs)}"
        so_far = f"{ratios[-1]:.3f}; median {median(ratios):.3f} ({low:.3f} to {high:.3f})"
        print(f"watches: {done}: {so_far}", file=sys.stderr, flush=True)
    return pairs


def _ratios(pairs: list[Pair]) -> list[float]:
    return [_us_a_row(watched) / _us_a_row(without) for watched, without in pairs]


def _us_a_row(run: backlog.CaptureRun) -> float:
    return run.seconds / max(1, run.rows) * 1e6


def _cpu_us_a_row(run: backlog.CaptureRun) -> float:
    return run.cpu_seconds / max(1, run.rows) * 1e6


def _result(pairs: list[Pair], rows: int, changes: int, turn_cpu_s: float) -> Result:
    ratios = _ratios(pairs)
    cpu_ratios = [_cpu_us_a_row(watched) / _cpu_us_a_row(without) for watched, without in pairs]
    references = [_us_a_row(without) for _, without in pairs]
    # What the same pass, without watches, differs from one time to the next.
    drift = [abs(after / before - 1) for before, after in itertools.pairwise(references)]
    return Result(
        name="watches",
        value=median([_us_a_row(watched) for watched, _ in pairs]),
        unit="µs/row",
        ratio=median(ratios),
        reference="the same without watches",
        limit="PostgreSQL's sender, which decodes and sends row by row on one core",
        setup=machine() | {"rows": rows, "rows_a_transaction": table.ROWS_A_TRANSACTION, "pairs": len(pairs),
                           "changes_of_schema": changes, "watched_every_s": backlog.WATCHED_INTERVAL_S,
                           "postgresql": 18},
        details={
            "ratio_interval_95": _rounded(median_interval(ratios)),
            "cpu_ratio": round(median(cpu_ratios), 3),
            "cpu_ratio_interval_95": _rounded(median_interval(cpu_ratios)),
            "noise": round(median(drift), 3) if drift else None,
            "ratios": [round(ratio, 3) for ratio in ratios],
            "cpu_ratios": [round(ratio, 3) for ratio in cpu_ratios],
            "ms_a_change": round(median([run.annotating_s for run, _ in pairs]) / changes * 1e3, 2),
            "schema_watch_share": round(median([run.annotating_s / run.seconds for run, _ in pairs]), 4),
            "reference_us_a_row": round(median(references), 3),
            "cpu_us_a_row": round(median([_cpu_us_a_row(watched) for watched, _ in pairs]), 3),
            "reference_cpu_us_a_row": round(median([_cpu_us_a_row(without) for _, without in pairs]), 3),
            "cpu_ms_a_turn_of_the_watch": round(turn_cpu_s * 1e3, 2),
            "looks_at_the_slot_a_pass": round(sum(run.looks for run, _ in pairs) / len(pairs), 1),
        },
    )  # fmt: skip


def _rounded(interval: tuple[float, float]) -> list[float]:
    return [round(end, 3) for end in interval]
