"""The change log to Kafka: exactly once alternating with at least once, on the same records.

Both are the pipeline's own sink over the same ranges of one log; at least once waits for `acks=all`
and writes its offset, exactly once has both in a transaction. A range has the rows of about one
transaction's interval.

Two passes over a log differ by more than the costs of transactions: the broker's disk, heap and compiler
affect one and not the other. So both write each range directly after one another, with alternating order,
and each range is one pair.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.config.source.postgres import PostgresSource
from tailrace.model import LogRange
from tailrace.ranges import plan
from tailrace.ranges.plan import InputSplit
from tailrace.sinks.build import build
from tailrace.sinks.contract import SinkCommit
from tailrace_bench.decode import captured
from tailrace_bench.support import table, topics
from tailrace_bench.support.passes import compared, in_turn, timed
from tailrace_bench.support.report import Result, machine, median

log = structlog.get_logger(__name__)

ROWS = 1_000_000
#: Number of passes over the log with both, after one that is not counted, during which the broker's code
#: is compiled.
PASSES = 7
#: Seconds between two commits: for the comparison, and for the curve.
INTERVAL_S = 1.0
CURVE_S = (0.1, 0.3, 1.0, 3.0)

_BYTES_MAX = 1 << 40
#: Share of one core from which on the sink's own thread is the limit.
_ONE_CORE = 0.9


@dataclass(frozen=True, slots=True)
class SinkRun:
    """A sink's times for one or more ranges: from the first record to the response to the last commit."""

    rows: int
    seconds: float
    cpu_seconds: float  # of this process: decoding, converting and the client
    commits: int
    commit_seconds: float

    @property
    def rate(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds


#: The runs of one range: exactly once, at least once.
Pair = tuple[SinkRun, SinkRun]
Write = Callable[[LogRange, Sequence[InputSplit]], SinkRun]


def measure(rows: int | None = None) -> Result:
    """Write a log of `rows` rows in pairs, with a transaction every second; then measure the curve."""
    rows = rows or ROWS
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name, topics.cluster() as kafka:
        path = Path(name) / "log"
        captured(path, rows)
        runs = _Runs(kafka.bootstrap, path, rows)
        a_second = max(1, int(runs.alone(rows // 10 or 1).rate * INTERVAL_S))
        pairs: list[Pair] = []
        for number in range(PASSES + 1):
            found = runs.in_pairs(_even(rows, a_second), first=number)
            if number:
                pairs += found
            once, least = (_sum(side) for side in zip(*found, strict=True))
            log.info("a pass", number=number, of=PASSES, exactly_once=round(once.rate),
                     at_least_once=round(least.rate))  # fmt: skip
        curve = {every: runs.alone(max(1, int(a_second * every))) for every in CURVE_S if every != INTERVAL_S}
    return _result(rows, pairs, curve)


def _even(rows: int, a_second: int) -> int:
    """Return the rows per range, so that all ranges, including the last, have about a second's rows.

    It is a multiple of a transaction's rows, as ranges end at the ends of the source's transactions.
    """
    each = -(-rows // max(1, round(rows / a_second)))
    return -(-each // table.ROWS_A_TRANSACTION) * table.ROWS_A_TRANSACTION


def _result(rows: int, pairs: list[Pair], curve: dict[float, SinkRun]) -> Result:
    once, least = (_sum(side) for side in zip(*pairs, strict=True))
    curve = curve | {INTERVAL_S: once}
    ratios = [ours.rate / theirs.rate for ours, theirs in pairs]
    cpu_ratios = [theirs.cpu_seconds / ours.cpu_seconds for ours, theirs in pairs]
    cores_used = once.cpu_seconds / once.seconds
    return Result(
        name="kafka",
        value=once.rate,
        unit="records/s",
        ratio=median(ratios),
        reference="the same sink at least once, acks=all, on the same records",
        limit="one core: decoding, converting and handing over, in the sink's thread"
        if cores_used >= _ONE_CORE
        else f"the cores, of which sink and client take {cores_used:.1f}, and the broker the rest",
        setup=machine()
        | {
            "rows": rows,
            "partitions": topics.PARTITIONS,
            "passes": PASSES,
            "pairs": len(pairs),
            "rows_a_transaction": round(once.rows / once.commits),
            "interval_s": INTERVAL_S,
        },
        details=compared(ratios)
        | {
            "ratio_of_sums": round(once.rate / least.rate, 3),
            "cpu_ratio": round(median(cpu_ratios), 3),
            "at_least_once_records_s": round(least.rate),
            "cpu_us_a_record": round(once.cpu_seconds / once.rows * 1e6, 2),
            "at_least_once_cpu_us_a_record": round(least.cpu_seconds / least.rows * 1e6, 2),
            "curve": [_point(every, curve[every]) for every in sorted(curve)],
        },
    )


def _point(every_s: float, found: SinkRun) -> dict[str, Any]:
    return {
        "interval_s": every_s,
        "records_s": round(found.rate),
        "transactions": found.commits,
        "commit_ms": round(found.commit_seconds / found.commits * 1e3, 1),
    }


def _sum(found: Sequence[SinkRun]) -> SinkRun:
    return SinkRun(
        sum(each.rows for each in found),
        sum(each.seconds for each in found),
        sum(each.cpu_seconds for each in found),
        sum(each.commits for each in found),
        sum(each.commit_seconds for each in found),
    )


class _Runs:
    """Passes over one log, each into separate topics, which are created before it starts."""

    def __init__(self, bootstrap: str, path: Path, rows: int) -> None:
        self._bootstrap = bootstrap
        self._path = path
        self._rows = rows
        self._names = itertools.count(1)

    def alone(self, rows_a_range: int) -> SinkRun:
        """Write the log exactly once."""
        with self._sink(atomic=True) as write:
            return _sum([write(span, splits) for span, splits in self._ranges(rows_a_range)])

    def in_pairs(self, rows_a_range: int, first: int) -> list[Pair]:
        """Write the log exactly once and at least once, range by range.

        :param first: even: exactly once is first.
        """
        pairs = []
        with self._sink(atomic=True) as once, self._sink(atomic=False) as least:
            for turn, (span, splits) in enumerate(self._ranges(rows_a_range), first):
                writes = (functools.partial(write, span, splits) for write in (once, least))
                ours, theirs = in_turn(turn, *writes)
                pairs.append((ours, theirs))
        return pairs

    def _ranges(self, rows_a_range: int) -> Iterator[tuple[LogRange, Sequence[InputSplit]]]:
        with LogReader.open(self._path, TASK) as reader:
            start, end = reader.start, reader.end().offset
            while start < end:
                upto = reader.boundary_within(start, rows_a_range, _BYTES_MAX, end)
                splits = plan.input_splits(TASK, reader.blocks(start, upto), start, upto)
                yield LogRange(TASK, start, upto), splits
                start = upto

    @contextmanager
    def _sink(self, *, atomic: bool) -> Iterator[Write]:
        name = f"pass-{next(self._names)}"
        config = KafkaSinkConfig.model_validate(topics.sink(self._bootstrap, name, atomic=atomic))
        sink = build(config, PostgresSource(), self._path)

        def write(span: LogRange, splits: Sequence[InputSplit]) -> SinkRun:
            done: list[SinkCommit] = []
            took = timed(lambda: done.append(sink.write(None, self._path, span, splits)))
            return SinkRun(done[0].rows, took.seconds, took.cpu_seconds, 1, done[0].seconds["commit"])

        sink.open(LogDirectory.open(self._path).identity, name)
        try:
            yield write
        finally:
            sink.close()
        topics.take_away(self._bootstrap, f"{name}.public.orders", self._rows)
