"""Reads a topic's committed records."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from tests.support.wait import wait_until

QUIET = {"log_level": 0}


@dataclass(frozen=True, slots=True)
class Message:
    """A record as it is in its topic."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, str]

    @property
    def document(self) -> Any:
        """The value, parsed as JSON."""
        return None if self.value is None else json.loads(self.value)

    @property
    def key_document(self) -> Any:
        return None if self.key is None else json.loads(self.key)


def read_topic(bootstrap: str, topic: str, isolation: str = "read_committed") -> list[Message]:
    """Return every record of the topic, those of each partition in order.

    Waits for commits under way: a commit is answered before its marker is in every partition.
    """
    client = {"bootstrap.servers": bootstrap, **QUIET}
    looking = Consumer({**client, "group.id": "look", "isolation.level": "read_uncommitted"})
    numbers = sorted(looking.list_topics(topic, 60).topics[topic].partitions)
    places = [TopicPartition(topic, number, OFFSET_BEGINNING) for number in numbers]
    ends = {place.partition: looking.get_watermark_offsets(place, 60)[1] for place in places}
    looking.close()
    reading = {"group.id": "read", "isolation.level": isolation, "enable.partition.eof": True}
    consumer = Consumer({**client, **reading, "auto.offset.reset": "error"})
    found: list[Message] = []

    def at_the_end() -> bool:
        return all(
            place.offset >= ends[place.partition]
            for place in consumer.position(places)
            if ends[place.partition]
        )

    def all_read() -> bool:
        while (message := consumer.poll(0.2)) is not None:
            if (error := message.error()) is None:
                headers = {name: held.decode() for name, held in message.headers() or []}
                read = message.partition(), message.offset(), message.key(), message.value(), headers
                found.append(Message(*cast(Any, read)))
                continue
            assert error.code() == KafkaError._PARTITION_EOF, error
            if at_the_end():
                return True
        return at_the_end()

    try:
        consumer.assign(places)
        wait_until(all_read, 60, f"the end of {topic}")
    finally:
        consumer.close()
    return found
