"""Small transactions of the source to Kafka, each in a Kafka transaction, alternating with a plain client.

The peer is a transactional producer of confluent-kafka in a loop, with the same keys and values, already
converted in memory. It writes no offset and reads no log, so it shows what the cluster and the client allow.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import structlog
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition

from tailrace.changelog.directory import TASK
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.readers import Readers
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.sink_worker import SinkWorker
from tailrace.pipeline.spark_host import SparkHost
from tailrace.sinks.build import build
from tailrace_bench.support import backlog, table, topics
from tailrace_bench.support.passes import Pass, compared, in_turn, timed
from tailrace_bench.support.report import Result, machine, median

log = structlog.get_logger(__name__)

TRANSACTIONS = 1_000
ROWS_A_TRANSACTION = 10
PAIRS = 6
_TIMEOUT_S = 60.0

#: Keys and values of a transaction, in order.
Messages = Sequence[tuple[bytes, bytes]]


#: Passes from the start of a producer to the response to its last commit: ours, a plain client's.
Pair = tuple[Pass, Pass]


def measure(rows: int | None = None) -> Result:
    """Write `rows` rows in transactions of ten, in pairs, after a pass of ours that produces the messages."""
    transactions = max(1, (rows or TRANSACTIONS * ROWS_A_TRANSACTION) // ROWS_A_TRANSACTION)
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as name, topics.cluster() as kafka:
        path = Path(name) / "log"
        _capture(path, transactions)
        passes = _Passes(kafka.bootstrap, path, transactions)
        topics.warm_up(kafka.bootstrap)
        passes.ours()
        messages = passes.messages_of_first()
        passes.theirs(messages)
        pairs: list[Pair] = []
        for number in range(PAIRS):
            ours, theirs = in_turn(number, passes.ours, lambda: passes.theirs(messages))
            pairs.append((ours, theirs))
            log.info("a pair", number=number + 1, of=PAIRS, ours=round(transactions / ours.seconds),
                     plain_client=round(transactions / theirs.seconds))  # fmt: skip
    return _result(transactions, pairs)


def _result(transactions: int, pairs: list[Pair]) -> Result:
    ratios = [theirs.seconds / ours.seconds for ours, theirs in pairs]
    ours, theirs = zip(*pairs, strict=True)
    return Result(
        name="kafka_transactions",
        value=transactions / median([each.seconds for each in ours]),
        unit="transactions/s",
        ratio=median(ratios),
        reference="a plain transactional client, given the same keys and values",
        limit="the cluster's answers to each transaction: its partitions, its records, its end",
        setup=machine()
        | {
            "transactions": transactions,
            "rows_a_transaction": ROWS_A_TRANSACTION,
            "partitions": topics.PARTITIONS,
            "pairs": len(pairs),
        },
        details=compared(ratios)
        | {
            "plain_client_transactions_s": round(transactions / median([each.seconds for each in theirs])),
            "cpu_ms_a_transaction": _cpu_ms(transactions, ours),
            "plain_client_cpu_ms_a_transaction": _cpu_ms(transactions, theirs),
        },
    )


def _cpu_ms(transactions: int, found: Sequence[Pass]) -> float:
    return round(median([each.cpu_seconds for each in found]) / transactions * 1e3, 2)


def _capture(path: Path, transactions: int) -> None:
    rows = transactions * ROWS_A_TRANSACTION
    with table.server() as postgres:
        backlog.prepare(postgres.dsn(), "bench", path)
        end = table.load(postgres.dsn(), rows, rows_a_transaction=ROWS_A_TRANSACTION)
        backlog.capture(postgres.dsn(), "bench", path, end)


class _Passes:
    """Passes over one log, each into a separate topic, which is created before it starts."""

    def __init__(self, bootstrap: str, path: Path, transactions: int) -> None:
        self._bootstrap = bootstrap
        self._path = path
        self._rows = transactions * ROWS_A_TRANSACTION
        self._names = itertools.count(1)
        with LogReader.open(path, TASK) as reader:
            self._end = reader.end().offset

    def ours(self) -> Pass:
        """Write the log as a pipeline does, with a sink worker and its file of a registered reader."""
        name = f"ours-{next(self._names)}"
        topics.create(self._bootstrap, f"{name}.public.orders")
        section = topics.sink(self._bootstrap, name, atomic=True) | {"transaction_boundary": "transaction"}
        config = KafkaSinkConfig.model_validate(section)
        Readers.open(self._path).remove(config.name)
        feed = SinkWorker(
            config,
            name,
            self._path,
            lambda: build(config, PostgresSource(), self._path),
            # Spark is never needed.
            SparkHost(None),  # type: ignore[arg-type]
        )
        feed.finish_at(self._end)
        found = timed(feed.run)
        topics.require_rows(self._bootstrap, f"{name}.public.orders", self._rows)
        return found

    def theirs(self, transactions: Sequence[Messages]) -> Pass:
        """Write the same messages with a plain client."""
        topic = f"plain-{next(self._names)}"
        topics.create(self._bootstrap, topic)
        found = timed(lambda: self._write_plainly(topic, transactions))
        topics.require_rows(self._bootstrap, topic, self._rows)
        return found

    def _write_plainly(self, topic: str, transactions: Sequence[Messages]) -> None:
        producer = Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "transactional.id": topic,
                "partitioner": "murmur2_random",
                "compression.type": "lz4",
            }
        )
        producer.init_transactions(_TIMEOUT_S)
        for messages in transactions:
            producer.begin_transaction()
            for key, value in messages:
                producer.produce(topic, value, key)
            producer.commit_transaction(_TIMEOUT_S)

    def messages_of_first(self) -> list[Messages]:
        """Return the records of the first pass, by transaction of the source.

        :raises TailraceError: `INTERNAL` if any is missing.
        """
        consumer = Consumer(
            {"bootstrap.servers": self._bootstrap, "group.id": "bench", "isolation.level": "read_committed"}
        )
        places = [
            TopicPartition("ours-1.public.orders", number, OFFSET_BEGINNING)
            for number in range(topics.PARTITIONS)
        ]
        consumer.assign(places)
        found: dict[int, list[tuple[bytes, bytes]]] = {}
        left, deadline = self._rows, time.monotonic() + _TIMEOUT_S
        while left and time.monotonic() < deadline:
            for message in consumer.consume(1000, 1.0):
                if (error := message.error()) is not None:
                    raise TailraceError(Kind.INTERNAL, f"read what was written: {KafkaError.str(error)}")
                key, value = message.key(), message.value()
                assert key is not None
                assert value is not None
                found.setdefault(json.loads(value)["source"]["txId"], []).append((key, value))
                left -= 1
        consumer.close()
        if left:
            raise TailraceError(Kind.INTERNAL, f"read what was written: {left} records are missing")
        return list(found.values())
