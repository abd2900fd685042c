"""The embedded cluster is a real one: transactions, fencing, a killed broker."""

from __future__ import annotations

import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tailrace_servers.kafka import EmbeddedKafka, find_jars
from tests.support.wait import wait_until

QUIET = {"log_level": 0}


def _create(cluster: EmbeddedKafka, topic: str, copies: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, **QUIET})
    admin.create_topics([NewTopic(topic, 1, copies)])[topic].result(60)


def _producer(cluster: EmbeddedKafka, transactional_id: str) -> Producer:
    producer = Producer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "transactional.id": transactional_id,
            "linger.ms": 1,
            **QUIET,
        }
    )
    producer.init_transactions(60)
    return producer


def _committed(cluster: EmbeddedKafka, topic: str, count: int) -> list[str]:
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": f"read-{topic}",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            **QUIET,
        }
    )
    found: list[str] = []

    def enough() -> bool:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            found.append(message.value().decode())
        return len(found) >= count

    try:
        consumer.subscribe([topic])
        wait_until(enough, 60, f"{count} messages of {topic}")
    finally:
        consumer.close()
    return found


def test_a_producer_fences_the_one_before_it(kafka: EmbeddedKafka, topic_name: str) -> None:
    _create(kafka, topic_name)
    first = _producer(kafka, topic_name)
    first.begin_transaction()
    first.produce(topic_name, "of the first")
    first.flush(30)
    second = _producer(kafka, topic_name)
    with pytest.raises(KafkaException) as refused:
        first.commit_transaction(30)
    assert refused.value.args[0].fatal()
    second.begin_transaction()
    second.produce(topic_name, "of the second")
    second.commit_transaction(30)
    assert _committed(kafka, topic_name, 1) == ["of the second"]


@pytest.mark.ci
def test_committed_records_survive_a_killed_broker(topic_name: str) -> None:
    with EmbeddedKafka(find_jars(), nodes=3) as cluster:
        _create(cluster, topic_name, copies=3)
        producer = _producer(cluster, topic_name)
        for number in range(2):
            producer.begin_transaction()
            producer.produce(topic_name, str(number))
            producer.commit_transaction(60)
            if number == 0:
                cluster.kill(1)
        cluster.start_node(1)
        assert _committed(cluster, topic_name, 2) == ["0", "1"]
