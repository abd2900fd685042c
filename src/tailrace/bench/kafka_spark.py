"""The change log to Kafka on Spark: our sink, exactly once, in turn with Spark's own, at least once.

Both read the same log, and bring the same keys and values, made by the same converter, into topics of as
many partitions. The reference is the quickest job that we know of for Spark's sink: each task decodes a
piece of the log and converts it in the same kernels, hands the columns to Java as Arrow, and
`format("kafka")` sends them with a producer that is set as ours is. It keeps no order across pieces and
commits nothing.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from tailrace.bench import topics
from tailrace.bench.debezium import PRODUCER
from tailrace.bench.decode import captured
from tailrace.bench.events_source import EventsSource
from tailrace.bench.kafka import TASK, cores
from tailrace.bench.report import Result, machine, median, median_interval
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.config import SparkConfig
from tailrace.config.disclosure import Disclosure
from tailrace.config.kafka import KafkaSink
from tailrace.errors import Kind, TailraceError
from tailrace.model import LogRange, ValueModes
from tailrace.ranges import plan
from tailrace.sinks.build import build
from tailrace.spark.session import session, warm

if TYPE_CHECKING:
    import psutil
    from pyspark.sql import SparkSession

log = structlog.get_logger(__name__)

ROWS = 1_000_000
PAIRS = 15
JARS = Path(sys.prefix) / "share" / "tailrace" / "spark-kafka"


@dataclass(frozen=True, slots=True)
class Pass:
    """One timed pass over the log: from the first job to the end of the last."""

    seconds: float
    cpu_seconds: float  # of this process, of Spark and of its workers; without the broker


def measure(rows: int | None = None) -> Result:
    """Write a log of `rows` rows with either sink, in pairs, after a pair that is not counted.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if Spark's Kafka sink is not here: there is nothing else to
        compare with.
    """
    rows = rows or ROWS
    jars = sorted(str(jar) for jar in JARS.glob("*.jar"))
    if not jars:
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT, "look for Spark's Kafka sink: it was not fetched", "make bench-peers"
        )
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name, topics.cluster() as kafka:
        path = Path(name) / "log"
        captured(path, rows)
        broker = _tree()
        config = SparkConfig.model_validate({"conf": {"spark.driver.extraClassPath": ":".join(jars)}})
        spark = session(config, "tailrace-bench")
        warm(spark)
        spark.dataSource.register(EventsSource)
        runs = _Runs(spark, kafka.bootstrap, path, rows, broker)
        pairs = [runs.pair(turn) for turn in range(PAIRS + 1)][1:]
        spark.stop()
    return _result(rows, pairs)


def _result(rows: int, pairs: list[tuple[Pass, Pass]]) -> Result:
    ratios = [theirs.seconds / ours.seconds for ours, theirs in pairs]
    cpu_ratios = [theirs.cpu_seconds / ours.cpu_seconds for ours, theirs in pairs]
    return Result(
        name="kafka_spark",
        value=rows / median([ours.seconds for ours, _ in pairs]),
        unit="records/s",
        ratio=median(ratios),
        reference="Spark's own Kafka sink, at least once, given the same keys and values by the same kernels",
        limit=f"the {cores()} cores, which the broker shares with Spark's workers: each producer reads the "
        "whole range and finds all keys",
        setup=machine()
        | {
            "rows": rows,
            "partitions": topics.PARTITIONS,
            "producers": cores(),
            "pairs": len(pairs),
            "reference_producer": PRODUCER,
        },
        details={
            "ratio_interval_95": [round(end, 3) for end in median_interval(ratios)],
            "ratios": [round(ratio, 3) for ratio in ratios],
            "cpu_ratio": round(median(cpu_ratios), 3),
            "reference_records_s": round(rows / median([theirs.seconds for _, theirs in pairs])),
            "cpu_us_a_record": round(median([ours.cpu_seconds for ours, _ in pairs]) / rows * 1e6, 2),
            "reference_cpu_us_a_record": round(
                median([theirs.cpu_seconds for _, theirs in pairs]) / rows * 1e6, 2
            ),
        },
    )


class _Runs:
    """Passes over one log, each into a topic of its own, which is there before it begins."""

    def __init__(
        self, spark: SparkSession, bootstrap: str, path: Path, rows: int, broker: set[psutil.Process]
    ) -> None:
        self._spark = spark
        self._bootstrap = bootstrap
        self._path = path
        self._rows = rows
        self._broker = broker
        self._names = itertools.count(1)

    def pair(self, turn: int) -> tuple[Pass, Pass]:
        """Write the log with ours and with Spark's sink; Spark's first in every other turn."""
        if turn % 2:
            theirs, ours = self.theirs(), self.ours()
        else:
            ours, theirs = self.ours(), self.theirs()
        log.info("a pair", number=turn, of=PAIRS, ours=round(self._rows / ours.seconds),
                 theirs=round(self._rows / theirs.seconds))  # fmt: skip
        return ours, theirs

    def ours(self) -> Pass:
        """Write the log exactly once, as a pipeline with a backlog does; opening the sink is not counted."""
        name = f"ours-{next(self._names):03}"
        config = self._config(name)
        sink = build(config, Disclosure(), ValueModes(), self._path)
        sink.open(LogDirectory.open(self._path).identity, name)
        try:
            return self._timed(name, lambda: self._write(sink, config))
        finally:
            sink.close()

    def theirs(self) -> Pass:
        """Write the same keys and values with Spark's sink."""
        name = f"them-{next(self._names):03}"
        topic = f"{name}.public.orders"
        topics.create(self._bootstrap, topic)
        settings = {f"kafka.{key}": value for key, value in PRODUCER.items()}
        settings |= {"kafka.bootstrap.servers": self._bootstrap, "topic": topic}
        given = {"path": str(self._path), "name": name}
        events = self._spark.read.format(EventsSource.name()).options(**given).load()
        return self._timed(name, events.write.format("kafka").options(**settings).save)

    def _config(self, name: str) -> KafkaSink:
        given = topics.sink(self._bootstrap, name, atomic=True)
        return KafkaSink.model_validate({**given, "runs_on": "spark", "producers": cores()})

    def _write(self, sink: Any, config: KafkaSink) -> None:
        with LogReader.open(self._path, TASK) as reader:
            start, end = reader.start, reader.end().offset
            while start < end:
                upto = reader.boundary_within(start, config.batch_rows_max, config.batch_bytes_max, end)
                pieces = plan.pieces(TASK, reader.blocks(start, upto), start, upto)
                sink.write(self._spark, self._path, LogRange(TASK, start, upto), pieces)
                start = upto

    def _timed(self, name: str, work: Callable[[], object]) -> Pass:
        cpu, began = self._cpu_s(), time.perf_counter()
        work()
        found = Pass(time.perf_counter() - began, self._cpu_s() - cpu)
        topic = f"{name}.public.orders"
        topics.require_rows(self._bootstrap, topic, self._rows)
        topics.remove(self._bootstrap, topic)
        return found

    def _cpu_s(self) -> float:
        return sum(sum(each.cpu_times()[:2]) for each in _tree() - self._broker)


def _tree() -> set[psutil.Process]:
    """Return this process and all that come of it."""
    import psutil

    here = psutil.Process()
    return {here, *here.children(recursive=True)}
