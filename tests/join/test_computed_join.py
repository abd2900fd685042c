"""Joins by expressions of topics that Debezium did not write: over a real Kafka, in each form of the join."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

import tailrace
from tailrace.errors import Kind, TailraceError
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.orders import run
from tests.support.wait import wait_until

WAIT_S = 120
EXPRESSIONS = {
    "data": {"key": "lower(value.shop) || '/' || value.no", "order": "value.line"},
    "transactions": {
        "key": "case when value.type = 'order' then value.id end",
        "order": "message.offset + 1",
        "count": "value.lines",
        "time_ms": "value.at::bigint * 1000",
    },
}
#: Of a line: its order, its place in the order, the order's number of lines, and its time.
Joined = tuple[str, int, int, int]


class Orders:
    """Lines of orders in a topic with partitions, and the orders, among other messages, in another topic."""

    def __init__(self, kafka: EmbeddedKafka, name: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.lines, self.orders = f"{name}.lines", f"{name}.orders"
        self.settings = {
            "bootstrap_servers": kafka.bootstrap, "data": [self.lines], "transactions": self.orders,
            "expressions": EXPRESSIONS,
        }  # fmt: skip
        self.expected: dict[int, Joined] = {}
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
        made = admin.create_topics([NewTopic(self.lines, 3, 1), NewTopic(self.orders, 1, 1)])
        for each in made.values():
            each.result(60)
        self._producer = Producer({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
        self._number = 0

    def write(self, orders: int) -> None:
        for _ in range(orders):
            self._number += 1
            shop, count = self.random.choice("AB"), self.random.randint(0, 5)
            name, at = f"{shop.lower()}/{self._number}", 1_700_000_000 + self._number
            sent: list[tuple[str, Any]] = [
                (self.lines, {"shop": shop, "no": self._number, "line": line}) for line in range(1, count + 1)
            ]
            order = (self.orders, {"type": "order", "id": name, "lines": count, "at": at})
            sent.insert(self.random.choice([0, count]), order)
            sent.insert(0, (self.orders, {"type": "audit", "id": name, "lines": "none"}))
            for topic, document in sent:
                if topic == self.lines:
                    number = len(self.expected)
                    self.expected[number] = (name, document["line"], count, at * 1000)
                    document |= {
                        "op": "c", "before": None, "after": {"id": number},
                        "source": {"schema": "shop", "table": "lines"},
                    }  # fmt: skip
                    key = json.dumps({"id": number})
                else:
                    key = name
                self._producer.produce(topic, json.dumps(document).encode(), key.encode())
        self._producer.flush(60)


@pytest.fixture
def orders(kafka: EmbeddedKafka, topic_name: str, join_seed: int) -> Orders:
    return Orders(kafka, topic_name, join_seed)


def test_each_line_comes_once_with_its_order(orders: Orders, tmp_path: Path, join_seed: int) -> None:
    found: list[tuple[int, Joined]] = []

    def take(batch: Any) -> None:
        for record in batch:
            number, of = json.loads(record.value)["after"]["id"], record.headers["transaction"]
            found.append((number, (of["id"], of["total_order"], of["event_count"], of["ts_ms"])))

    for turn in range(3):
        orders.write(30)
        engine = tailrace.Engine(
            connector="kafka-join", settings=orders.settings | {"queue_records_max": (1, 7, 1000)[turn]},
            name="computed", tasks_max=turn + 1, on_batch=take,
            options={"offset_storage": {"type": "file", "path": str(tmp_path / "offsets")}},
        )  # fmt: skip
        with engine:
            wait_until(lambda: len(found) >= len(orders.expected) or engine.error, WAIT_S, "all lines")  # noqa: B023
        assert engine.error is None
        assert sorted(found) == sorted(orders.expected.items()), join_seed


def test_tailrace_run_writes_complete_orders_that_expressions_join(
    orders: Orders, tmp_path: Path, join_seed: int
) -> None:
    file = tmp_path / "joined.yaml"
    file.write_text(json.dumps({
        "name": "computed", "source": {"type": "kafka-join", **orders.settings},
        "log": {"path": "./log"}, "sinks": [{"type": "jsonl", "path": "./lines"}],
    }))  # fmt: skip
    for _ in range(2):
        orders.write(30)
        assert "ready" in run("check", file)
        run("run", file, "--until-caught-up")
    lines = [
        json.loads(line)
        for path in sorted((tmp_path / "lines").rglob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    by_commit: dict[int, list[int]] = {}
    for line in lines:
        by_commit.setdefault(line["position"]["commit_lsn"], []).append(int(line["after"]["id"]))
    expected: dict[str, list[int]] = {}
    for number, (name, *_) in orders.expected.items():
        expected.setdefault(name, []).append(number)
    # An order's commit is the offset of its message: they rise together, and each order is complete.
    assert [sorted(by_commit[each]) for each in sorted(by_commit)] == list(expected.values()), join_seed


def test_spark_joins_by_expressions(spark: Any, orders: Orders, join_seed: int) -> None:
    orders.write(40)
    options = {
        "bootstrapServers": orders.settings["bootstrap_servers"], "data": orders.lines,
        "transactions": orders.orders, "expressions": json.dumps(EXPRESSIONS),
    }  # fmt: skip
    rows = spark.read.format("tailrace-join").options(**options).load().collect()
    found = {
        json.loads(row.value)["after"]["id"]: (
            row.transaction_id, row.total_order, row.transaction_event_count
        )
        for row in rows
    }  # fmt: skip
    assert len(rows) == len(found)
    assert found == {number: joined[:3] for number, joined in orders.expected.items()}, join_seed


def test_an_error_of_an_expression_stops_the_join_with_the_messages_place(
    orders: Orders, tmp_path: Path
) -> None:
    orders.write(10)
    wrong = {**EXPRESSIONS, "data": {"key": "value.no", "order": "value.shop::int"}}
    engine = tailrace.Engine(
        connector="kafka-join", settings=orders.settings | {"expressions": wrong}, name="computed",
        on_batch=lambda _: None, options={"offset_storage": {"type": "memory"}, "errors_retries_max": 0},
    )  # fmt: skip
    with pytest.raises(TailraceError) as caught:
        engine.run()
    assert caught.value.kind is Kind.JOIN_VIOLATED
    assert "expressions.data.order of messages: at character 11 of the expression" in caught.value.message
    assert caught.value.context["topic"] == orders.lines
    assert "offset_first" in caught.value.context
