"""One side of a join waits for the other, over a real Kafka: nothing is lost, and no group rebalances."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from confluent_kafka import Producer, TopicPartition

from tailrace.join import connector as connector_module
from tailrace.join import messages as messages_module
from tailrace.join.connector import KafkaJoinTask
from tailrace.join.extraction import DebeziumJson
from tailrace.join.options import KafkaJoinOptions
from tests.support.join.pair import WAIT_S, Pair, Taken, joining, transactions_kept
from tests.support.join.topics_in_memory import TopicsInMemory
from tests.support.wait import wait_until

#: The shortest session timeout that brokers accept for a member of a group.
SESSION_MS = 6000


def numbers_of(engine: Any) -> dict[str, float]:
    """Return the join's metrics by name."""
    lines = [line for line in engine.metrics.text().splitlines() if line.startswith("tailrace_join_")]
    return {line.split("{")[0].removeprefix("tailrace_join_"): float(line.split()[-1]) for line in lines}


def numbers_once_paused(engine: Any) -> dict[str, float]:
    """Wait until one side is paused; return the metrics of that moment."""
    found = wait_until(
        lambda: (numbers := numbers_of(engine)).get("paused") == 1 and numbers, WAIT_S, "the pause"
    )
    assert found
    return found


def groups_of(pair: Pair) -> set[str]:
    found = pair.admin.list_consumer_groups(request_timeout=30).result(60)
    return {group.group_id for group in found.valid}


@pytest.mark.slow
def test_changes_wait_for_a_late_end_without_a_rebalance(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_module, "_READ_MAX", 5)
    before = groups_of(pair)
    for order in range(1, 51):
        pair.change(1, order, 1000)
    with joining(pair, queue_records_max=10) as (engine, taken):
        full = numbers_once_paused(engine)
        assert 10 <= full["rows_queued"] <= 10 + 2 * 6
        # Longer than the session timeout of a group.
        until_s = time.monotonic() + SESSION_MS / 1000 + 2
        wait_until(lambda: engine.error or taken.rows or time.monotonic() > until_s, WAIT_S, "some seconds")
        assert engine.error is None
        assert taken.rows == []
        assert numbers_of(engine)["rows_queued"] == full["rows_queued"]
        assert numbers_of(engine)["pauses_total"] == 1
        assert groups_of(pair) <= before
        pair.end(1, 2000, 50)
        wait_until(lambda: len(taken.rows) >= 50 or engine.error, WAIT_S, "the changes")
        assert engine.error is None
    assert taken.rows == [(order, "1:2000") for order in range(1, 51)]


def test_a_queue_may_be_full_by_bytes_before_it_is_by_records(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_module, "_READ_MAX", 5)
    for order in range(1, 101):
        pair.change(1, order, 1000)
    with joining(pair, queue_bytes_max=4000) as (engine, taken):
        full = numbers_once_paused(engine)
        # What one read brings beyond the limit is kept.
        assert 4000 <= full["bytes_queued"] < 4000 + 2 * 6 * 400
        assert full["rows_queued"] < 60
        pair.end(1, 2000, 100)
        wait_until(lambda: len(taken.rows) >= 100 or engine.error, WAIT_S, "the changes")
        assert engine.error is None
    assert taken.rows == [(order, "1:2000") for order in range(1, 101)]


@pytest.mark.parametrize("aborted", [False, True])
def test_an_end_waits_for_its_uncommitted_changes(pair: Pair, aborted: bool) -> None:
    writer = Producer({"bootstrap.servers": pair.bootstrap, "transactional.id": pair.data, "log_level": 0})
    writer.init_transactions(60)
    writer.begin_transaction()
    event = {
        "op": "c", "after": {"id": "1"},
        "source": {"table": "t", "schema": "public", "sequence": '["100","101"]'},
        "transaction": {"id": "1:101", "total_order": 1},
    }  # fmt: skip
    writer.produce(pair.data, json.dumps(event).encode(), b"1", 0)
    assert not writer.flush(60)
    pair.end(1, 200, 1)
    pair.end(2, 300, 0)
    with joining(pair) as (engine, taken):
        wait_until(lambda: numbers_of(engine).get("transactions_queued") == 2, WAIT_S, "both ENDs")
        # The join looks at the ends of partitions several times: one of them would pass a transaction without
        # rows.
        until_s = time.monotonic() + 3
        wait_until(lambda: engine.error or time.monotonic() > until_s, WAIT_S, "some seconds")
        assert numbers_of(engine)["transactions_queued"] == 2
        (writer.abort_transaction if aborted else writer.commit_transaction)(60)
        pair.change(3, 1, 300)
        pair.end(3, 400, 1)
        wait_until(lambda: (1, "3:400") in taken.rows or engine.error, WAIT_S, "the last change")
        assert engine.error is None
    assert taken.rows == [(1, "3:400")] if aborted else [(1, "1:200"), (1, "3:400")]


def test_the_position_of_a_partition_without_rows_follows_the_transactions(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a restart would need transactions that retention has removed."""
    monkeypatch.setattr(connector_module, "_PASS_S", 0.1)
    pair.add_partition(2)
    # So that the partition has an offset, after the first transaction; it must move on from there.
    pair.end(9, 50, 0)
    pair.change(1, 2, 100, partition=1)
    for number in range(1, 6):
        pair.change(number, 1, 100 * number)
        pair.end(number, 100 * number + 100, 2 if number == 1 else 1)
    with joining(pair, tmp_path / "offsets") as (engine, taken):
        wait_until(lambda: len(taken.rows) == 6 or engine.error, WAIT_S, "the changes")
        wait_until(
            lambda: transactions_kept(tmp_path / "offsets", "1") >= 5 or engine.error, WAIT_S, "its offset"
        )
        assert engine.error is None
    for done in pair.admin.delete_records([TopicPartition(pair.transactions, 0, 6)]).values():
        done.result(60)
    pair.change(6, 1, 600, partition=1)
    pair.end(6, 700, 1)
    with joining(pair, tmp_path / "offsets") as (engine, taken):
        wait_until(lambda: taken.rows or engine.error, WAIT_S, "the change in the other partition")
        assert engine.error is None
    assert taken.rows == [(1, "6:700")]


def test_a_transaction_over_two_partitions_ends_although_no_other_follows(pair: Pair, tmp_path: Path) -> None:
    """Otherwise a commit policy that waits for its end waits until something else is changed."""
    pair.add_partition(2)
    for order in range(1, 5):
        pair.change(1, order, 1000, partition=order % 2)
    pair.end(1, 2000, 4)
    store = tmp_path / "offsets"
    with joining(pair, store, policy="transaction") as (engine, _):
        wait_until(
            lambda: all(transactions_kept(store, each) >= 0 for each in "01") or engine.error, WAIT_S,
            "the offsets after it",
        )  # fmt: skip
        assert engine.error is None


def beside_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> TopicsInMemory:
    """Return topics with 50 changes in a partition; each read also finds snapshot rows in another."""
    topics = TopicsInMemory(partitions=2, read_max=5)
    monkeypatch.setattr(connector_module, "reader_of", topics.reader)
    row = {"op": "r", "source": {"table": "t"}, "after": {"id": "1"}}
    topics.on_read = lambda: [topics.send(topics.data, row) for _ in range(3)]
    for number in range(1, 51):
        topics.change(number, 1, 100 * number, partition=1)
        topics.end(number, 100 * number + 100, 1)
    return topics


def test_snapshot_rows_that_keep_coming_in_one_partition_do_not_block_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topics = beside_a_snapshot(monkeypatch)
    with joining(topics, queue_records_max=10) as (engine, taken):
        wait_until(lambda: (1, "50:5100") in taken.rows or engine.error, WAIT_S, "the last change")
        assert engine.error is None
    changes = [(1, f"{number}:{100 * number + 100}") for number in range(1, 51)]
    assert [each for each in taken.rows if each[0]] == changes


def test_an_offset_without_a_record_is_not_after_records_that_are_not_polled_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topics = beside_a_snapshot(monkeypatch)
    written: dict[str, int] = {}
    context = Mock(settings={"task": 0, "tasks": 1}, batch_records_max=1)
    context.stopping.is_set.return_value = False
    context.offsets.read.return_value = {}
    options = KafkaJoinOptions.model_validate(topics.settings(queue_records_max=10))
    task = KafkaJoinTask(options, DebeziumJson())
    task.start(context)
    polled = {"0": 0, "1": 0}
    while polled["1"] < 50:
        batch = task.poll(1.0)
        assert batch is not None
        name = batch.partition["partition"]
        if batch.polled:
            assert batch.offsets[0]["data"] > written.get(name, 0)
            polled[name] += 1
        else:
            assert batch.end is not None
            written[name] = batch.end["data"]


def test_headers_say_whether_a_transaction_is_complete_in_a_partition(pair: Pair) -> None:
    pair.add_partition(2)
    for order, partition in ((1, 0), (2, 1), (3, 0), (4, 0)):
        pair.change(1, order, 1000, partition=partition)
    pair.end(1, 2000, 4)
    pair.change(2, 1, 2000, partition=1)
    pair.end(2, 3000, 1)
    facts: list[dict[str, Any]] = []

    class Facts(Taken):
        def batch(self, batch: Any) -> None:
            facts.extend(record.headers["transaction"] for record in batch)

    with joining(pair, taken=Facts()) as (engine, _):
        wait_until(lambda: len(facts) >= 5 or engine.error, WAIT_S, "the changes")
        assert engine.error is None
    *by_order, other = sorted(facts, key=lambda each: (each["position"], each["total_order"]))
    assert [each["total_order"] for each in by_order] == [1, 2, 3, 4]
    assert [each["partition_order"] for each in by_order] == [1, 1, 2, 3]
    assert {each["event_count"] for each in by_order} == {4}
    # A transaction over two partitions may have more in each: an order as high as the count says nothing, as
    # Tailrace's sink numbers dropped changes, too.
    assert not any(each["partition_complete"] for each in by_order[::2])
    assert not by_order[3]["partition_complete"]
    assert other["partition_complete"]
