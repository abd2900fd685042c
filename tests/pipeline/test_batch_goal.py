"""Where batches end, and so Kafka transactions: by rows, by time, by the source's transactions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.changelog import format as codec
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.model import Pacing
from tailrace.pipeline.batch_size import BatchGoal
from tailrace.pipeline.sink_worker import SinkWorker
from tailrace.pipeline.spark_host import SparkHost
from tailrace.sinks.contract import SinkCommit
from tests.support.orders_log import LogOfOrders
from tests.support.wait import wait_until


class Ranges:
    """A sink that records its ranges."""

    name, type = "out", "kafka"

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        self._spans = spans

    def open(self, log: Any, pipeline: str) -> None:
        pass

    def position(self, task: str) -> int | None:
        return self._spans[-1][1] if self._spans else None

    reach = position

    def write(self, spark: Any, log: Path, span: Any, splits: Any) -> SinkCommit:
        self._spans.append((span.start, span.end))
        return SinkCommit(span)

    def close(self) -> None:
        pass


def feed_of(log: LogOfOrders, spans: list[tuple[int, int]], **settings: Any) -> SinkWorker:
    settings = {"type": "kafka", "name": "out", "bootstrap_servers": "127.0.0.1:1", **settings}
    config = KafkaSinkConfig.model_validate(settings)
    return SinkWorker(config, "shop", log.directory.path, lambda: Ranges(spans), SparkHost(None))  # type: ignore[arg-type]


@pytest.fixture
def orders(tmp_path: Path) -> Iterator[LogOfOrders]:
    log = LogOfOrders(tmp_path / "log")
    yield log
    log.close()


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({}, [5]),
        ({"transaction_boundary": "transaction"}, [5]),  # the sink itself ends one within a batch
        ({"transaction_boundary": "records", "batch_rows_max": 25}, [1, 3, 5]),
        ({"transaction_boundary": "records", "batch_rows_max": 3}, [0, 1, 2, 3, 4, 5]),
        ({"transaction_boundary": "interval"}, [5]),
    ],
)
def test_a_backlog_is_divided_as_configured(
    orders: LogOfOrders, settings: dict[str, Any], ends: list[int]
) -> None:
    boundaries = [orders.insert(*range(10)) for _ in range(6)]
    spans: list[tuple[int, int]] = []
    feed = feed_of(orders, spans, **settings)
    feed.finish_at(boundaries[-1])
    feed.run()
    assert [end for _, end in spans] == [boundaries[number] for number in ends]


def test_on_spark_each_transaction_is_a_batch() -> None:
    given = {"type": "kafka", "bootstrap_servers": "127.0.0.1:1", "transaction_boundary": "transaction"}
    assert KafkaSinkConfig.model_validate({**given, "runs_on": "spark"}).pacing.rows_max == 1
    assert KafkaSinkConfig.model_validate(given).pacing.interval_s == 0


def test_transactions_within_an_interval_are_one_batch_and_the_end_does_not_wait(orders: LogOfOrders) -> None:
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


def test_with_a_time_limit_batches_get_the_size_that_is_written_in_time() -> None:
    first = goal = BatchGoal.first(Pacing(1_000_000, 1 << 29, 1.0, within_s=1.0))
    for _ in range(12):
        goal = goal.after(goal.rows, 1, goal.rows / 80_000)  # so many rows a second
    assert 76_000 <= goal.rows <= 84_000
    assert goal.after(100, 100, 0.5) == goal, "a batch that was not full tells nothing"
    assert goal.after(100, 100, 9.0).rows < goal.rows, "unless it took too long"
    for _ in range(12):
        goal = goal.after(goal.rows, 1, 50.0)
    assert (goal.rows, goal.bytes) == (1_000, 64 << 10)
    assert BatchGoal.first(Pacing(500, 1 << 20, 1.0)).after(500, 1 << 20, 9.0).rows == 500

    goal = first
    for _ in range(12):
        goal = goal.after(10, goal.bytes, goal.bytes / 1_000_000)  # wide rows
    assert 900_000 <= goal.bytes <= 1_100_000
    assert first.after_failure(0.5) == first, "a batch that fails at once was not too large"
    for _ in range(12):
        first = first.after_failure(60.0)
    assert (first.rows, first.bytes) == (1, 1), "down to a single transaction"


def test_the_cost_of_a_batch_does_not_grow_with_the_log(
    orders: LogOfOrders, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = 0

    def counting(*arguments: Any) -> Any:
        nonlocal looked_at
        looked_at += 1
        return decode(*arguments)

    decode = codec.decode_block_header
    monkeypatch.setattr(codec, "decode_block_header", counting)
    transactions = 300
    ends = [orders.insert(number) for number in range(transactions)]  # a block for each
    spans: list[tuple[int, int]] = []
    feed = feed_of(orders, spans, transaction_boundary="records", batch_rows_max=1)
    feed.finish_at(ends[-1])
    feed.run()
    assert [end for _, end in spans] == ends
    assert looked_at < 20 * transactions
