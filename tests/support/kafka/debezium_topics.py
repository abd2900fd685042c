"""Topics as Debezium writes them for PostgreSQL: changes with `transaction` blocks, and transactions."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic  # type: ignore[attr-defined]

from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.reading import Message

TIME_MS = 1_700_000_000_000


@dataclass
class JoinTopics:
    """Two data topics and their transaction topic, with random content of a transactional producer.

    `expected` has for each key the numbers of its changes with their transaction, in order.
    """

    kafka: EmbeddedKafka
    name: str
    seed: int
    partitions: int = 3
    schemas: bool = False
    keys_are_json: bool = False
    expected: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.data = (f"{self.name}.public.a", f"{self.name}.public.b")
        self.transactions = f"{self.name}.transaction"
        self._admin = AdminClient({"bootstrap.servers": self.kafka.bootstrap, "log_level": 0})
        topics = [NewTopic(topic, self.partitions, 1) for topic in self.data]
        for made in self._admin.create_topics([*topics, NewTopic(self.transactions, 1, 1)]).values():
            made.result(60)
        self._connect()
        self._number, self._lsn = 0, 1000

    def settings(self, **more: Any) -> dict[str, Any]:
        """The join's options."""
        return {
            "bootstrap_servers": self.kafka.bootstrap,
            "data": list(self.data),
            "transactions": self.transactions,
            **more,
        }

    def row_of(self, message: Message) -> tuple[str, tuple[int, str]]:
        """Return the key and the change of a joined message."""
        assert message.key is not None
        of = json.loads(message.headers.get("transaction", "{}"))
        return message.key.decode(), (message.document["after"]["number"], of.get("id", ""))

    def _connect(self) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": self.kafka.bootstrap,
                "transactional.id": self.name,
                "partitioner": "murmur2_random",
                "topic.metadata.refresh.interval.ms": 500,  # partitions are added
                "log_level": 0,
            }
        )
        self._producer.init_transactions(60)

    def grow(self, partitions: int) -> None:
        """Add partitions to the first data topic; from here on the producer writes to them as well."""
        for made in self._admin.create_partitions([NewPartitions(self.data[0], partitions)]).values():
            made.result(60)
        self._connect()

    def snapshot(self, rows: int) -> None:
        """Write snapshot rows, which belong to no transaction."""
        self._producer.begin_transaction()
        for _ in range(rows):
            self._change("", 0, 0, 0)
        self._producer.commit_transaction(60)

    def write(self, transactions: int, rows_max: int = 20) -> None:
        """Commit transactions of the source, several in one Kafka transaction; abort some of those first."""
        left = transactions
        while left:
            count = min(left, self.random.randint(1, 8))
            state = self.random.getstate(), self._number, self._lsn
            if self.random.random() < 0.2:
                self._batch(count, rows_max, keep=False)
                # An abort before the broker knows of the transaction fails: INVALID_TXN_STATE.
                self._producer.flush(60)
                self._producer.abort_transaction(60)
                _, self._number, self._lsn = state
            self._batch(count, rows_max, keep=True)
            self._producer.commit_transaction(60)
            left -= count

    def _batch(self, count: int, rows_max: int, *, keep: bool) -> None:
        self._producer.begin_transaction()
        for _ in range(count):
            rows = self.random.randint(0, rows_max)
            before, number = self._lsn, 700 + self._lsn % 10_007
            end = before + 10 * (rows + 1)
            begun = f"{number}:{before + 5}"
            self._send(self.transactions, begun, {"status": "BEGIN", "id": begun, "ts_ms": TIME_MS})
            for order in range(1, rows + 1):
                self._change(f"{number}:{before + 10 * order}", order, before, end if keep else 0)
            ended = f"{number}:{end}"
            self._send(
                self.transactions,
                ended,
                {"status": "END", "id": ended, "event_count": rows, "ts_ms": TIME_MS + end,
                 "data_collections": []},
            )  # fmt: skip
            if keep:
                self.counts[ended] = rows
            self._lsn = end

    def _change(self, transaction: str, order: int, before: int, end: int) -> None:
        self._number += 1
        key = str(self.random.randrange(12))
        topic = self.data[int(key) % 2]
        block = {"id": transaction, "total_order": order, "data_collection_order": order}
        event = {
            "before": None,
            "after": {"id": key, "number": self._number, "text": "a\nb"},
            "source": {
                "schema": "public",
                "table": topic.rpartition(".")[2],
                "sequence": json.dumps([str(before), str(before + order)], separators=(",", ":")),
                "lsn": before + order,
            },
            "transaction": block if transaction else None,
            "op": "c" if transaction else "r",
        }
        self._send(topic, key, event)
        if end or not transaction:
            self.expected[key].append(
                (self._number, f"{transaction.split(':', maxsplit=1)[0]}:{end}" if transaction else "")
            )

    def _send(self, topic: str, key: str, event: dict[str, Any]) -> None:
        document = {"schema": {"type": "struct"}, "payload": event} if self.schemas else event
        name = json.dumps({"id": key}) if self.keys_are_json else key
        self._producer.produce(topic, json.dumps(document).encode(), name.encode())
        self._producer.poll(0)
