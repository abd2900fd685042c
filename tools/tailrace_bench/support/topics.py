"""A Kafka cluster for the benchmarks, and functions for its topics."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from confluent_kafka import OFFSET_END, Consumer, IsolationLevel, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined]

from tailrace.errors import Kind, TailraceError
from tailrace_servers.kafka import SERVER_JVM, EmbeddedKafka, find_jars

PARTITIONS = 4
_TIMEOUT_S = 60.0
_WARM, _WARM_MESSAGES, _WARM_CHUNK = "warm-up", 400_000, 20_000

#: Settings of a broker that keeps up with a producer; those for tests save too much.
SETTINGS = {
    "num.network.threads": "3",
    "num.io.threads": "8",
    "socket.send.buffer.bytes": "1048576",
    "socket.receive.buffer.bytes": "1048576",
    "log.segment.bytes": str(1 << 30),
}


@contextmanager
def cluster() -> Iterator[EmbeddedKafka]:
    """Start one broker in a temporary directory."""
    with EmbeddedKafka(find_jars(), settings=SETTINGS, jvm=SERVER_JVM) as kafka:
        yield kafka


def sink(bootstrap: str, prefix: str, *, atomic: bool) -> dict[str, Any]:
    """Return the section of a sink of Debezium's JSON without schemas, with four partitions per topic."""
    return {
        "type": "kafka",
        "name": "kafka",
        "bootstrap_servers": bootstrap,
        "topic_prefix": prefix,
        "group": "bench",
        "atomic_source_offset_commit": atomic,
        "converter": {"type": "json", "schemas_enable": False},
        "topics": [{"tables": ["public.*"], "partitions": PARTITIONS}],
    }


def require_rows(bootstrap: str, topic: str, rows: int) -> None:
    """Require that a topic has at least `rows` offsets, which include the ends of transactions.

    :raises TailraceError: `INTERNAL` if it has fewer.
    """
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    places = [TopicPartition(topic, number) for number in range(PARTITIONS)]
    newest = {place: OffsetSpec.latest() for place in places}  # type: ignore[no-untyped-call]
    asked = admin.list_offsets(
        # The ends of the last transactions may not be written to all partitions yet.
        newest,
        isolation_level=IsolationLevel.READ_UNCOMMITTED,
        request_timeout=_TIMEOUT_S,
    )
    found = sum(asked[place].result(_TIMEOUT_S).offset for place in places)
    if found < rows:
        raise TailraceError(Kind.INTERNAL, f"write to Kafka: {found} records of {rows} are in {topic}")


@contextmanager
def reader(bootstrap: str, topic: str) -> Iterator[Consumer]:
    """Yield a consumer that reads a topic's later committed records."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "bench", "isolation.level": "read_committed"}
    )
    consumer.assign([TopicPartition(topic, number, OFFSET_END) for number in range(PARTITIONS)])
    try:
        yield consumer
    finally:
        consumer.close()


def take_away(bootstrap: str, topic: str, rows: int) -> None:
    """Check the number of a topic's records as `require_rows` does, and delete the topic."""
    require_rows(bootstrap, topic, rows)
    remove(bootstrap, topic)


def remove(bootstrap: str, topic: str) -> None:
    """Delete a topic that is not needed any more: its records take as much space as the log."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    admin.delete_topics([topic])[topic].result(_TIMEOUT_S)


def create(bootstrap: str, topic: str, partitions: int = PARTITIONS) -> None:
    """Create a topic, by default with the sink's number of partitions."""
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(_TIMEOUT_S)


def warm_up(bootstrap: str) -> None:
    """Write to a separate topic until the broker's code is compiled, which must not be measured."""
    create(bootstrap, _WARM)
    producer = Producer(
        {"bootstrap.servers": bootstrap, "acks": "all", "compression.type": "lz4", "linger.ms": 20}
    )
    for _ in range(_WARM_MESSAGES // _WARM_CHUNK):
        producer.produce_batch(_WARM, [{"value": os.urandom(64) * 10} for _ in range(_WARM_CHUNK)])
        producer.flush(_TIMEOUT_S)
    remove(bootstrap, _WARM)
