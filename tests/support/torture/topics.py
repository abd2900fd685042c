"""Reads the topics of a Kafka sink with librdkafka's own consumer, committed records only.

Records become `sinks.Change`, so that the validator checks them as it does files. A change is identified by
its commit and its place in the transaction, which the events contain; nothing of the product is imported.
"""

from __future__ import annotations

import base64
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.support.torture import validator
from tests.support.torture.ledger import TABLES, source_rows
from tests.support.torture.sinks import Change

_NOT_SENT = "__debezium_unavailable_value"
_READ_TIMEOUT_S = 120.0
_ADMIN_TIMEOUT_S = 60.0
#: Topics that are written to all the time have no end: after this time, the end is where it was then.
_ENDLESS_S = 2.0
#: So long the markers of a committed transaction may take to reach all partitions.
SETTLE_S = 60.0
_POLL_S = 0.5
#: More changes than a transaction has.
_SPREAD = 1 << 32

#: Identity of a change: (commit LSN, ordinal); of a snapshot row: (table, key).
Identity = tuple[Any, ...]


@dataclass(frozen=True)
class Topics:
    """The topics of one round's sink, and the section of the pipeline file that writes them.

    :param replication: copies of each partition.
    """

    bootstrap: str
    name: str
    partitions: int = 3
    replication: int = 1
    atomic: bool = True
    isolation: str = "read_committed"

    @property
    def offsets_topic(self) -> str:
        """The topic of the offset."""
        return f"{self.name}-offsets"

    def section(self) -> dict[str, Any]:
        """Return the sink's section of the pipeline file."""
        return {
            "type": "kafka",
            "bootstrap_servers": self.bootstrap,
            "topic_prefix": self.name,
            "group": self.name,
            "offsets_topic": self.offsets_topic,
            "atomic_source_offset_commit": self.atomic,
            "consumer_isolation_level": self.isolation,
            "converter": {"type": "json", "schemas_enable": False, "provide_transaction_metadata": True},
            "topics": [
                {
                    "tables": ["public.*"],
                    "partitions": self.partitions,
                    "replication_factor": self.replication,
                }
            ],
            "interval_ms": 50,
        }

    def changes(self) -> list[Change]:
        """Return every committed change, those of a partition in order.

        :raises AssertionError: if a row changed its key, and one of the two records is missing or repeated.
        """
        return list(_changes(self._read([f"{self.name}.public.{table}" for table in TABLES])))

    def offset(self) -> int | None:
        """Return the log offset that was committed last; None: there is none."""
        newest: Message | None = None
        for message in self._read([self.offsets_topic]):
            newest = message
        if newest is None:
            return None
        assert len({message.key() for message in self._read([self.offsets_topic])}) == 1
        return int(json.loads(newest.value() or b"")["log_offset"])

    def remove(self) -> None:
        """Delete the topics: restarted brokers would read through everything that they have."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        known = admin.list_topics(timeout=_ADMIN_TIMEOUT_S).topics
        ours = [topic for topic in known if topic == self.offsets_topic or topic.startswith(f"{self.name}.")]
        for gone in admin.delete_topics(ours, operation_timeout=_ADMIN_TIMEOUT_S).values():
            gone.result(2 * _ADMIN_TIMEOUT_S)

    def problems(self, dsn: str) -> list[str]:
        """Return the problems of the topics, with source and pipeline at rest."""
        return validator.history_problems(self.changes(), source_rows(dsn))

    def disagreements(self, places: Mapping[Identity, int], settle_s: float = SETTLE_S) -> list[str]:
        """Return the differences between records and offset, while there are no writes.

        :param places: the log offset of every change.
        """
        deadline = time.monotonic() + settle_s
        while True:
            offset, found = self.offset() or 0, {identity(change) for change in self.changes()}
            missing = [each for each, place in places.items() if place < offset and each not in found]
            beyond = [each for each in found if places.get(each, offset) >= offset]
            if not missing and not beyond:
                return []
            if time.monotonic() > deadline:
                return [
                    *(f"the offset says {offset}, and {each} is missing" for each in missing[:3]),
                    *(f"the offset says {offset}, and {each} is there" for each in beyond[:3]),
                ]
            time.sleep(_POLL_S)

    def _read(self, topics: list[str]) -> list[Message]:
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": "torture",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "log_level": 0,
            }
        )
        try:
            known = consumer.list_topics(timeout=60).topics
            places = [
                TopicPartition(topic, partition, OFFSET_BEGINNING)
                for topic in topics
                if topic in known
                for partition in known[topic].partitions
            ]
            return _to_the_end(consumer, places)
        finally:
            consumer.close()


def identity(change: Change) -> Identity:
    """Return the identity of a change, which the log has as well."""
    return (change.table, change.key) if change.op == "r" else (change.commit_lsn, change.ordinal)


def _to_the_end(consumer: Consumer, places: list[TopicPartition]) -> list[Message]:
    found: list[Message] = []
    if not places:
        return found
    waiting = {(place.topic, place.partition) for place in places}
    consumer.assign(places)
    began = time.monotonic()
    ends: dict[tuple[Any, Any], int] = {}
    while waiting:
        assert time.monotonic() < began + _READ_TIMEOUT_S, f"{len(waiting)} partitions could not be read"
        if not ends and time.monotonic() > began + _ENDLESS_S:
            ends = {each: _end(consumer, TopicPartition(*each)) for each in waiting}
        for message in consumer.consume(1_000, 0.2):
            error = message.error()
            if error is None:
                found.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                waiting.discard((message.topic(), message.partition()))
        if ends:
            now = consumer.position([TopicPartition(*each) for each in waiting])
            waiting -= {(at.topic, at.partition) for at in now if at.offset >= ends[at.topic, at.partition]}
    return sorted(found, key=lambda message: (message.topic(), message.partition(), message.offset()))


def _end(consumer: Consumer, place: TopicPartition) -> int:
    deadline = time.monotonic() + _ADMIN_TIMEOUT_S
    while True:
        try:
            return int(consumer.get_watermark_offsets(place, 10)[1])
        except KafkaException:  # its leader may just have been killed
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _changes(messages: list[Message]) -> Iterator[Change]:
    read: Counter[int] = Counter()
    left: Counter[tuple[int, int]] = Counter()
    for message in messages:
        if message.value() is None:
            continue  # a tombstone
        event = json.loads(message.value() or b"")
        moved = {name for name, _ in message.headers() or ()}
        commit_lsn = int(json.loads(event["source"]["sequence"])[0])
        if event["transaction"] is None:
            assert event["op"] == "r", event["op"]
            ordinal = read[commit_lsn]
            read[commit_lsn] += 1
        else:
            ordinal = event["transaction"]["total_order"] - 1
        if "__debezium.newkey" in moved:
            left[commit_lsn, ordinal] += 1
            continue  # the other record is the update
        op = event["op"]
        if "__debezium.oldkey" in moved:
            left[commit_lsn, ordinal] -= 1
            op = "u"
        yield _change(event, op, commit_lsn, ordinal, f"{message.topic()}/{message.partition()}")
    halves = [place for place, count in left.items() if count]
    assert not halves, f"of the change of a key only one half is there, or one is there twice: {halves[:3]}"


def _change(event: dict[str, Any], op: str, commit_lsn: int, ordinal: int, place: str) -> Change:
    values = event["before" if op == "d" else "after"] or {}
    values = {name: value for name, value in values.items() if value != _NOT_SENT}
    if isinstance(values.get("price"), str):
        # Kafka Connect's Decimal: the unscaled number, big-endian; the column has two decimal places.
        unscaled = int.from_bytes(base64.b64decode(values["price"]), "big", signed=True)
        values["price"] = Decimal(unscaled).scaleb(-2)
    return Change(
        table=event["source"]["table"],
        op=op,
        values=values,
        commit_lsn=commit_lsn,
        ordinal=ordinal,
        log_offset=commit_lsn * _SPREAD + ordinal,
        file=place,
    )
