"""A data topic and its transaction topic that a test writes message by message, and a join of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic  # type: ignore[attr-defined]

import tailrace
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.wait import wait_until

WAIT_S = 60


def change_of(xid: int, order: int, after: int, key: str = "1") -> dict[str, Any]:
    """Return a change of a transaction that comes after the commit at `after`."""
    return {
        "op": "c",
        "after": {"id": key, "number": order},
        "source": {"table": "t", "schema": "public", "sequence": f'["{after}","{after + order}"]'},
        "transaction": {"id": f"{xid}:{after + order}", "total_order": order},
    }


def end_of(xid: int, commit: int, count: int) -> dict[str, Any]:
    """Return the end of a transaction."""
    return {"status": "END", "id": f"{xid}:{commit}", "event_count": count, "ts_ms": 5}


class Joined(Protocol):
    """Topics that can be joined."""

    def settings(self, **more: Any) -> dict[str, Any]:
        """Return the join's options."""
        ...


class Pair:
    """A data topic and its transaction topic, written message by message."""

    def __init__(self, kafka: EmbeddedKafka, name: str, config: dict[str, str] | None = None) -> None:
        self.bootstrap, self.data, self.transactions = kafka.bootstrap, f"{name}.data", f"{name}.transaction"
        self.admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
        topics = [
            NewTopic(self.data, 1, 1, config=config or {}),
            NewTopic(self.transactions, 1, 1),
        ]
        for made in self.admin.create_topics(topics).values():
            made.result(60)
        self._producer = Producer({"bootstrap.servers": kafka.bootstrap, "log_level": 0})

    def add_partition(self, count: int) -> None:
        """Raise the data topic's number of partitions, and wait until the brokers show them."""
        for made in self.admin.create_partitions([NewPartitions(self.data, count)]).values():
            made.result(60)

        def shown() -> bool:
            return len(self.admin.list_topics(self.data, 60).topics[self.data].partitions) == count

        wait_until(shown, WAIT_S, "the partition")

    def change(self, xid: int, order: int, after: int, key: str | None = "1", partition: int = 0) -> None:
        """Write a change of a transaction that comes after the commit at `after`."""
        self.send(self.data, key, change_of(xid, order, after, key or ""), partition)

    def end(self, xid: int, commit: int, count: int) -> None:
        """Write the end of a transaction."""
        self.send(self.transactions, f"{xid}:{commit}", end_of(xid, commit, count))

    def send(self, topic: str, key: str | None, document: Any, partition: int = 0) -> None:
        """Write a message and wait for it."""
        value = document if document is None or isinstance(document, bytes) else json.dumps(document).encode()
        name = None if key is None else json.dumps({"id": key}).encode()
        self._producer.produce(topic, value, name, partition)
        assert not self._producer.flush(60)

    def settings(self, **more: Any) -> dict[str, Any]:
        """The join's options."""
        return {
            "bootstrap_servers": self.bootstrap,
            "data": [self.data],
            "transactions": self.transactions,
            **more,
        }


class Taken:
    """A handler that records the places of changes in their transactions."""

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, str | None]] = []

    def batch(self, batch: Any) -> None:
        """Record a batch."""
        for record in batch:
            of = record.headers.get("transaction", {})
            self.rows.append((of.get("total_order"), of.get("id")))


def transactions_kept(store: Path, partition: str) -> int:
    """Return the offset in the transaction topic that the offset store has for a partition; -1: none yet."""
    if not store.exists():
        return -1
    kept = json.loads(store.read_text())["content"]["engines"].get("join", [])
    found = [each["offset"] for each in kept if each["partition"]["partition"] == partition]
    return int(found[0]["transactions"]) if found else -1


@contextmanager
def joining(
    pair: Joined, store: Path | None = None, taken: Taken | None = None, policy: str = "always", **more: Any
) -> Iterator[tuple[Any, Taken]]:
    """Run the join."""
    taken = taken or Taken()
    offsets = {"type": "memory"} if store is None else {"type": "file", "path": str(store)}
    engine = tailrace.Engine(
        connector="kafka-join", name="join", settings=pair.settings(**more), on_batch=taken.batch,
        options={"offset_storage": offsets, "offset_commit": {"policy": policy, "interval_ms": 100}},
    )  # fmt: skip
    try:
        engine.start()
        yield engine, taken
    finally:
        engine.close()
