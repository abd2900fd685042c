"""What the watches cost the capture path: the same backlog with all of them on and with none, in pairs.

On: looks at the slot and heartbeats that write, fifty times as often as by default, and the catalogue
asked at each change of a table's schema, of which the backlog has many. Off: nothing of that. Both
passes of a pair read copies of one slot into copies of one log, one right after the other in one
process, so what the machine does besides weighs on both.

Two passes differ by more than the watches take. So what they take is measured by itself, in the pass:
the time for which the receiving thread stood still for a change of a schema, the CPU time of the
watching thread, which may hold the interpreter, and that of the server's processes for the watches'
connections, which may hold a core. All of it counted as if capture had waited for it, to the whole time
of the pass: at most so much slower is capture by them, and one pass after another says nearly the same.
The times of the pairs are there to see that nothing large was overlooked.
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

#: A pass takes about a second: many short ones, so that both of a pair see the same machine.
ROWS = 300_000
#: One change of the schema in so many rows, soon after their first: far more often than in a database that
#: is used. The first comes in the part that is not timed, and the watch connects for it.
ROWS_A_CHANGE = 150_000
CHANGE_AFTER = 1 / 20
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
    """Make the backlog; return how often the schema changes in its timed part, and the WAL after it."""
    changes = end = 0
    for first in range(1, rows + 1, ROWS_A_CHANGE):
        count = min(ROWS_A_CHANGE, rows - first + 1)
        before = int(count * CHANGE_AFTER)
        table.load(postgres.dsn(), before, first=first)
        changes += 1
        postgres.execute(f"alter table orders alter tag type varchar({_LENGTH + changes})")
        end = table.load(postgres.dsn(), count - before, first=first + before)
    return changes - 1, end


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
        costs = [_cost(watched) for watched, _ in pairs]
        low, high = median_interval(costs)
        done = f"{time.monotonic() - began:.0f} of {PAIRS_S:.0f} s, pair {len(pairs)}"
        so_far = f"{costs[-1]:.4f}; median {median(costs):.4f} ({low:.4f} to {high:.4f})"
        print(f"watches: {done}: {so_far}", file=sys.stderr, flush=True)
    return pairs


def _cost(run: backlog.CaptureRun) -> float:
    """Return by how much the watches made a pass longer at most, with them to without."""
    return run.seconds / max(1e-9, run.seconds - run.annotating_s - run.watch_cpu_s - run.server_cpu_s)


def _ratios(pairs: list[Pair]) -> list[float]:
    return [_us_a_row(watched) / _us_a_row(without) for watched, without in pairs]


def _us_a_row(run: backlog.CaptureRun) -> float:
    return run.seconds / max(1, run.rows) * 1e6


def _cpu_us_a_row(run: backlog.CaptureRun) -> float:
    return run.cpu_seconds / max(1, run.rows) * 1e6


def _result(pairs: list[Pair], rows: int, changes: int, turn_cpu_s: float) -> Result:
    costs = [_cost(watched) for watched, _ in pairs]
    ratios = _ratios(pairs)
    cpu_ratios = [_cpu_us_a_row(watched) / _cpu_us_a_row(without) for watched, without in pairs]
    references = [_us_a_row(without) for _, without in pairs]
    # What the same pass, without watches, differs from one time to the next.
    drift = [abs(after / before - 1) for before, after in itertools.pairwise(references)]
    return Result(
        name="watches",
        value=median([_us_a_row(watched) for watched, _ in pairs]),
        unit="µs/row",
        ratio=median(costs),
        reference="the same without what the watches took",
        limit="PostgreSQL's sender, which decodes and sends row by row on one core",
        setup=machine() | {"rows": rows, "rows_a_transaction": table.ROWS_A_TRANSACTION, "pairs": len(pairs),
                           "changes_of_schema": changes, "watched_every_s": backlog.WATCHED_INTERVAL_S,
                           "postgresql": 18},
        details={
            "ratio_interval_95": _rounded(median_interval(costs), 4),
            "schema_watch_share": _share(pairs, lambda run: run.annotating_s),
            "slot_watch_share": _share(pairs, lambda run: run.watch_cpu_s),
            "server_share": _share(pairs, lambda run: run.server_cpu_s),
            "pairs_ratio": round(median(ratios), 3),
            "pairs_ratio_interval_95": _rounded(median_interval(ratios)),
            "cpu_ratio": round(median(cpu_ratios), 3),
            "cpu_ratio_interval_95": _rounded(median_interval(cpu_ratios)),
            "noise": round(median(drift), 3) if drift else None,
            "ratios": [round(cost, 4) for cost in costs],
            "pairs_ratios": [round(ratio, 3) for ratio in ratios],
            "cpu_ratios": [round(ratio, 3) for ratio in cpu_ratios],
            "ms_a_change": round(median([run.annotating_s for run, _ in pairs]) / max(1, changes) * 1e3, 2),
            "reference_us_a_row": round(median(references), 3),
            "cpu_us_a_row": round(median([_cpu_us_a_row(watched) for watched, _ in pairs]), 3),
            "reference_cpu_us_a_row": round(median([_cpu_us_a_row(without) for _, without in pairs]), 3),
            "cpu_ms_a_turn_of_the_watch": round(turn_cpu_s * 1e3, 2),
            "looks_at_the_slot_a_pass": round(sum(run.looks for run, _ in pairs) / len(pairs), 1),
        },
    )  # fmt: skip


def _share(pairs: list[Pair], taken: Callable[[backlog.CaptureRun], float]) -> float:
    return round(median([taken(watched) / watched.seconds for watched, _ in pairs]), 5)


def _rounded(interval: tuple[float, float], places: int = 3) -> list[float]:
    return [round(end, places) for end in interval]
