"""The change log to Kafka: exactly once in turn with at least once, on the same records.

Both are the pipeline's own sink over the same ranges of one log; at least once waits for `acks=all`
and writes its offset, exactly once has both in a transaction. A range is as many rows as take about
so long as a transaction is to last.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from tailrace.bench import topics
from tailrace.bench.decode import captured
from tailrace.bench.report import Result, machine, median
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.config.disclosure import Disclosure
from tailrace.config.kafka import KafkaSink
from tailrace.model import LogRange, ValueModes
from tailrace.ranges import plan
from tailrace.sinks.build import build

log = structlog.get_logger(__name__)

ROWS = 1_000_000
PAIRS = 3
#: Seconds between two commits: what is compared, and the curve.
INTERVAL_S = 1.0
CURVE_S = (0.1, 0.3, 1.0, 3.0)

TASK = "0"
_BYTES_MAX = 1 << 40
#: Of one core, from where on the sink's own thread is the limit.
_ONE_CORE = 0.9


@dataclass(frozen=True, slots=True)
class Pass:
    """One timed pass over the log: from the first record to the last commit; topics are there before."""

    rows: int
    seconds: float
    cpu_seconds: float  # of this process: decoding, converting and the client
    commits: int
    commit_seconds: float

    @property
    def rate(self) -> float:
        """Rows a second."""
        return self.rows / self.seconds


def measure(rows: int | None = None) -> Result:
    """Write a log of `rows` rows in pairs of passes, at a transaction every second; then the curve."""
    rows = rows or ROWS
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name, topics.cluster() as kafka:
        path = Path(name) / "log"
        captured(path, rows)
        run = _Runs(kafka.bootstrap, path, rows)
        run(False, rows // 10 or 1)  # the broker's code is compiled as it runs
        warm = run(True, rows // 10 or 1)
        a_second = max(1, int(warm.rate * INTERVAL_S))
        pairs = []
        for turn in range(PAIRS):
            order = (True, False) if turn % 2 else (False, True)
            found = {atomic: run(atomic, a_second) for atomic in order}
            pairs.append((found[True], found[False]))
            log.info("a pair", exactly_once=round(found[True].rate), at_least_once=round(found[False].rate))
        curve = {every: run(True, max(1, int(warm.rate * every))) for every in CURVE_S if every != INTERVAL_S}
    return _result(rows, pairs, curve)


def _result(rows: int, pairs: list[tuple[Pass, Pass]], curve: dict[float, Pass]) -> Result:
    once, least = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    rate = median([each.rate for each in once])
    curve = curve | {INTERVAL_S: sorted(once, key=lambda each: each.rate)[len(once) // 2]}
    cpu = median([each.cpu_seconds / each.seconds for each in once])
    return Result(
        name="kafka",
        value=rate,
        unit="records/s",
        ratio=median([ours.rate / theirs.rate for ours, theirs in pairs]),
        reference="the same sink at least once, acks=all, on the same records",
        limit="one core: decoding, converting and handing over, in the sink's thread"
        if cpu >= _ONE_CORE
        else f"the cores, of which sink and client take {cpu:.1f}, and the broker the rest",
        setup=machine()
        | {"rows": rows, "partitions": topics.PARTITIONS, "pairs": PAIRS, "interval_s": INTERVAL_S},
        details={
            "at_least_once_records_s": round(median([each.rate for each in least])),
            "ratios": [round(ours.rate / theirs.rate, 3) for ours, theirs in pairs],
            "cpu_us_a_record": round(median([each.cpu_seconds / rows * 1e6 for each in once]), 2),
            "at_least_once_cpu_us_a_record": round(
                median([each.cpu_seconds / rows * 1e6 for each in least]), 2
            ),
            "curve": [_point(every, curve[every]) for every in sorted(curve)],
        },
    )


def _point(every_s: float, found: Pass) -> dict[str, Any]:
    return {
        "interval_s": every_s,
        "records_s": round(found.rate),
        "transactions": found.commits,
        "commit_ms": round(found.commit_seconds / found.commits * 1e3, 1),
    }


class _Runs:
    """Passes over one log, each into topics of its own."""

    def __init__(self, bootstrap: str, path: Path, rows: int) -> None:
        self._bootstrap = bootstrap
        self._path = path
        self._rows = rows
        self._names = itertools.count(1)

    def __call__(self, atomic: bool, rows_a_transaction: int) -> Pass:
        name = f"pass-{next(self._names)}"
        config = KafkaSink.model_validate(topics.sink(self._bootstrap, name, atomic=atomic))
        sink = build(config, Disclosure(), ValueModes(), self._path)
        directory = LogDirectory.open(self._path)
        sink.open(directory.identity, name)
        try:
            with LogReader.open(directory, TASK) as reader:
                found = self._timed(sink, reader, rows_a_transaction)
        finally:
            sink.close()
        topic = f"{name}.public.orders"
        topics.require_rows(self._bootstrap, topic, self._rows)
        topics.remove(self._bootstrap, topic)
        return found

    def _timed(self, sink: Any, reader: LogReader, rows_a_transaction: int) -> Pass:
        start, end, commits, commit_s = reader.start, reader.end().offset, 0, 0.0
        cpu, began = time.process_time(), time.perf_counter()
        while start < end:
            upto = reader.boundary_within(start, rows_a_transaction, _BYTES_MAX, end)
            pieces = plan.pieces(TASK, reader.blocks(start, upto), start, upto)
            written = sink.write(None, self._path, LogRange(TASK, start, upto), pieces)
            commits, commit_s = commits + 1, commit_s + written.seconds["commit"]
            start = upto
        seconds = time.perf_counter() - began
        return Pass(self._rows, seconds, time.process_time() - cpu, commits, commit_s)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
