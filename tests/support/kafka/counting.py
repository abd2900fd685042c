"""Reads the numbers in a topic, and checks that each is there once."""

from __future__ import annotations

from collections import defaultdict

from tailrace.kafka.producer.partitioner import partition_of
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.once import KEYS
from tests.support.kafka.reading import read_topic

PARTITIONS = 3


def read_numbers(
    kafka: EmbeddedKafka, topic: str, isolation: str = "read_committed"
) -> list[tuple[int, str, int]]:
    """Return (partition, key, value) of every record in the topic."""
    return [
        (message.partition, (message.key or b"").decode(), int(message.value or b"0"))
        for message in read_topic(kafka.bootstrap, topic, isolation)
    ]


def require_each_once(records: list[tuple[int, str, int]], last: int) -> None:
    """Require each number up to `last` once, with each key's numbers in order in the key's partition."""
    by_key: dict[str, list[int]] = defaultdict(list)
    places: dict[str, set[int]] = defaultdict(set)
    for partition, key, value in records:
        by_key[key].append(value)
        places[key].add(partition)
    for number in range(KEYS):
        key = str(number)
        expected = [value for value in range(1, last + 1) if value % KEYS == number]
        assert by_key[key] == expected, f"key {key}"
        assert places[key] == {partition_of(key.encode(), PARTITIONS)}, "as Java's clients do"
