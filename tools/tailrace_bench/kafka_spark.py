"""The change log to Kafka on Spark: our sink, exactly once, alternating with Spark's own, at least once.

All read the same log and write to topics with the same number of partitions, with the same settings of the
producers. Spark's sink has no order between input splits of the log and commits nothing. It writes

- the rows of `format("tailrace")`, converted by Spark's `to_json`: what users without our sink would
  write; this is the reference;
- the same keys and values as our sink, converted in Python tasks by the same kernels and passed to Java as
  Arrow. No user has such a source; it compares only the sinks, as far as possible (`sinks_ratio`).
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.config import SparkConfig
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.model import LogRange
from tailrace.ranges import plan
from tailrace.sinks.build import build
from tailrace.spark.session import session, warm
from tailrace_bench.decode import captured
from tailrace_bench.support import topics
from tailrace_bench.support.debezium import PRODUCER
from tailrace_bench.support.events_source import EventsSource
from tailrace_bench.support.passes import Pass, compared, cores, cpu_us, in_turn, timed
from tailrace_bench.support.report import Result, machine, median

if TYPE_CHECKING:
    import psutil
    from pyspark.sql import DataFrame, SparkSession

log = structlog.get_logger(__name__)

ROWS = 1_000_000
TURNS = 9
JARS = Path(sys.prefix) / "share" / "tailrace" / "spark-kafka"


#: Passes from the first job to the end of the last, with the CPU time except the broker's: our sink, Spark's
#: sink with public rows, Spark's sink with the same keys and values.
Turn = tuple[Pass, Pass, Pass]


def measure(rows: int | None = None) -> Result:
    """Write a log of `rows` rows with each sink, in turns, after one that is not counted.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if Spark's Kafka sink, the only reference, is not installed.
    """
    rows = rows or ROWS
    jars = sorted(str(jar) for jar in JARS.glob("*.jar"))
    if not jars:
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT, "find Spark's Kafka sink: it is not installed", "make bench-peers"
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
        turns = [runs.turn(number) for number in range(TURNS + 1)][1:]
        spark.stop()
    return _result(rows, turns)


def _result(rows: int, turns: list[Turn]) -> Result:
    def rate(passes: list[Pass]) -> int:
        return round(rows / median([each.seconds for each in passes]))

    ours, public, given = ([turn[place] for turn in turns] for place in range(3))
    ratios = [theirs.seconds / our.seconds for our, theirs in zip(ours, public, strict=True)]
    sinks = [theirs.seconds / our.seconds for our, theirs in zip(ours, given, strict=True)]
    return Result(
        name="kafka_spark",
        value=rows / median([each.seconds for each in ours]),
        unit="records/s",
        ratio=median(ratios),
        reference='Spark\'s own Kafka sink, at least once, given the rows of format("tailrace") by to_json',
        limit=f"the {cores()} cores, which the broker shares with Spark's workers: each producer reads the "
        "whole range and finds all keys",
        setup=machine()
        | {
            "rows": rows,
            "partitions": topics.PARTITIONS,
            "producers": cores(),
            "turns": len(turns),
            "reference_producer": PRODUCER,
        },
        details=compared(ratios)
        | {
            "cpu_us_a_record": cpu_us(ours, rows),
            "reference_records_s": rate(public),
            "reference_cpu_us_a_record": cpu_us(public, rows),
            "sinks_ratio": round(median(sinks), 3),
            **{f"sinks_{name}": found for name, found in compared(sinks).items()},
            "sinks_reference": "Spark's sink, given the same keys and values by the same kernels",
            "sinks_reference_records_s": rate(given),
            "sinks_reference_cpu_us_a_record": cpu_us(given, rows),
        },
    )


class _Runs:
    """Passes over one log, each into a separate topic, which is created before it starts."""

    def __init__(
        self, spark: SparkSession, bootstrap: str, path: Path, rows: int, broker: set[psutil.Process]
    ) -> None:
        self._spark = spark
        self._bootstrap = bootstrap
        self._path = path
        self._rows = rows
        self._broker = broker
        self._names = itertools.count(1)

    def turn(self, number: int) -> Turn:
        """Write the log with our sink, and with Spark's: public rows, and the same keys and values."""
        ours, public, given = in_turn(number, self.ours, self.public, self.given)
        found = {"ours": ours, "public": public, "given": given}
        log.info("a turn", number=number, of=TURNS,
                 **{name: round(self._rows / each.seconds) for name, each in found.items()})  # fmt: skip
        return ours, public, given

    def ours(self) -> Pass:
        """Write the log exactly once, as a pipeline with a backlog does; opening the sink is not counted."""
        name = f"ours-{next(self._names):03}"
        config = self._config(name)
        sink = build(config, PostgresSource(), self._path)
        sink.open(LogDirectory.open(self._path).identity, name)
        try:
            return self._timed(name, lambda: self._write(sink, config))
        finally:
            sink.close()

    def public(self) -> Pass:
        """Write the rows with Spark's sink, as a user would."""
        rows = self._spark.read.format("tailrace").option("table", "public.orders").load(str(self._path))
        return self._theirs("rows", rows.selectExpr("to_json(struct(id)) key", "to_json(struct(*)) value"))

    def given(self) -> Pass:
        """Write the same keys and values with Spark's sink."""
        given = {"path": str(self._path), "name": "ours-000"}
        return self._theirs("them", self._spark.read.format(EventsSource.name()).options(**given).load())

    def _theirs(self, kind: str, events: DataFrame) -> Pass:
        name = f"{kind}-{next(self._names):03}"
        topic = f"{name}.public.orders"
        topics.create(self._bootstrap, topic)
        settings = {f"kafka.{key}": value for key, value in PRODUCER.items()}
        settings |= {"kafka.bootstrap.servers": self._bootstrap, "topic": topic}
        return self._timed(name, events.write.format("kafka").options(**settings).save)

    def _config(self, name: str) -> KafkaSinkConfig:
        given = topics.sink(self._bootstrap, name, atomic=True)
        return KafkaSinkConfig.model_validate({**given, "runs_on": "spark", "producers": cores()})

    def _write(self, sink: Any, config: KafkaSinkConfig) -> None:
        with LogReader.open(self._path, TASK) as reader:
            start, end = reader.start, reader.end().offset
            while start < end:
                upto = reader.boundary_within(start, config.batch_rows_max, config.batch_bytes_max, end)
                splits = plan.input_splits(TASK, reader.blocks(start, upto), start, upto)
                sink.write(self._spark, self._path, LogRange(TASK, start, upto), splits)
                start = upto

    def _timed(self, name: str, work: Callable[[], object]) -> Pass:
        found = timed(work, self._cpu_s)
        topics.take_away(self._bootstrap, f"{name}.public.orders", self._rows)
        return found

    def _cpu_s(self) -> float:
        return sum(sum(each.cpu_times()[:2]) for each in _tree() - self._broker)


def _tree() -> set[psutil.Process]:
    """Return this process and all its descendants."""
    import psutil

    here = psutil.Process()
    return {here, *here.children(recursive=True)}
