"""Where batches end, and so the transactions of Kafka: by rows, by time, by the source's transactions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fix_orders_log import LogOfOrders
from fix_wait import wait_until
from tailrace.config.kafka import KafkaSink
from tailrace.config.sinks import Pacing
from tailrace.pipeline.batch_goal import BatchGoal
from tailrace.pipeline.feed import Feed
from tailrace.pipeline.spark_host import SparkHost
from tailrace.sinks.contract import SinkCommit


class Ranges:
    """A sink that keeps the ranges that it is given."""

    name, type = "out", "kafka"

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        self._spans = spans

    def open(self, log: Any, pipeline: str) -> None:
        pass

    def position(self, task: str) -> int | None:
        return self._spans[-1][1] if self._spans else None

    reach = position

    def write(self, spark: Any, log: Path, span: Any, pieces: Any) -> SinkCommit:
        self._spans.append((span.start, span.end))
        return SinkCommit(span)

    def close(self) -> None:
        pass


def feed_of(log: LogOfOrders, spans: list[tuple[int, int]], **settings: Any) -> Feed:
    settings = {"type": "kafka", "name": "out", "bootstrap_servers": "127.0.0.1:1", **settings}
    config = KafkaSink.model_validate(settings)
    return Feed(config, "shop", log.directory.path, lambda: Ranges(spans), SparkHost(None))  # type: ignore[arg-type]


@pytest.fixture
def orders(tmp_path: Path) -> Iterator[LogOfOrders]:
    log = LogOfOrders(tmp_path / "log")
    yield log
    log.close()


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({}, [5]),
        ({"transaction_boundary": "transaction"}, [0, 1, 2, 3, 4, 5]),
        ({"transaction_boundary": "records", "transaction_records": 25}, [1, 3, 5]),
        ({"transaction_boundary": "records", "transaction_records": 3}, [0, 1, 2, 3, 4, 5]),
        ({"transaction_boundary": "interval"}, [5]),
    ],
)
def test_a_backlog_is_cut_where_it_is_said(
    orders: LogOfOrders, settings: dict[str, Any], ends: list[int]
) -> None:
    boundaries = [orders.insert(*range(10)) for _ in range(6)]
    spans: list[tuple[int, int]] = []
    feed = feed_of(orders, spans, **settings)
    feed.finish_at(boundaries[-1])
    feed.run()
    assert [end for _, end in spans] == [boundaries[number] for number in ends]


def test_what_comes_within_an_interval_is_one_and_the_end_waits_for_none(orders: LogOfOrders) -> None:
    spans: list[tuple[int, int]] = []
    first = orders.insert(1)
    feed = feed_of(orders, spans, transaction_boundary="interval", offset_flush_interval_ms=3_600_000)
    running = threading.Thread(target=feed.run)
    running.start()
    wait_until(lambda: spans, 60, "the first batch")
    orders.insert(2)
    last = orders.insert(3)
    feed.finish_at(last)
    running.join(30)
    assert not running.is_alive()
    assert spans == [(0, first), (first, last)]


def test_with_a_time_to_keep_to_batches_become_what_is_written_in_it() -> None:
    goal = BatchGoal.first(Pacing(1_000_000, 1 << 20, 1.0, within_s=1.0))
    for _ in range(12):
        goal = goal.after(goal.rows, goal.rows / 80_000)  # so many rows a second
    assert 76_000 <= goal.rows <= 84_000
    assert goal.after(100, 0.5) == goal, "a batch that was not full says nothing"
    for _ in range(12):
        goal = goal.after(goal.rows, 50.0)
    assert goal.rows == 1_000
    assert BatchGoal.first(Pacing(500, 1 << 20, 1.0)).after(500, 9.0).rows == 500
