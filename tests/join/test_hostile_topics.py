"""Topics that break the join's assumptions: each is joined as the docs say, or refused with its name."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]

from tailrace.errors import Kind, TailraceError
from tailrace.join import connector as connector_module
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.join.pair import WAIT_S, Pair, Taken, joining, transactions_kept
from tests.support.kafka.orders import run
from tests.support.kafka.reading import read_topic
from tests.support.wait import wait_until


def failure(pair: Pair, **more: Any) -> tuple[TailraceError, Taken]:
    """Run the join until it fails."""
    taken = Taken()
    try:
        with joining(pair, taken=taken, **more) as (engine, _):
            wait_until(lambda: engine.error is not None, WAIT_S, "the error")
            return engine.error, taken
    except TailraceError as error:  # at the start already
        return error, taken


def test_tombstones_and_rows_without_keys_are_joined_in_order(pair: Pair) -> None:
    pair.change(7, 1, 100)
    pair.send(pair.data, "1", None)
    pair.change(7, 2, 100, key=None)
    pair.end(7, 200, 2)
    with joining(pair) as (engine, taken):
        wait_until(lambda: len(taken.rows) == 3 or engine.error, WAIT_S, "the rows")
        assert engine.error is None
    assert taken.rows == [(1, "7:200"), (None, None), (2, "7:200")]


def test_messages_repeated_after_a_producers_crash_are_refused_and_no_wrong_row_is_returned(
    pair: Pair,
) -> None:
    # A_1, A_C, B_1, and again A_1, A_C, B_1, B_C, as a producer without exactly-once writes them.
    pair.change(1, 1, 100)
    pair.end(1, 200, 1)
    pair.change(2, 1, 200)
    pair.change(1, 1, 100)
    pair.end(1, 200, 1)
    pair.change(2, 1, 200)
    pair.end(2, 300, 1)
    error, taken = failure(pair)
    assert error.kind is Kind.JOIN_VIOLATED
    assert error.context["rule"] in ("data_out_of_order", "transactions_out_of_order")
    assert {"data_offset", "transaction_offset"} <= error.context.keys()
    assert taken.rows in ([(1, "1:200")], [(1, "1:200"), (1, "2:300")])


def test_an_end_written_before_its_changes_is_refused(pair: Pair) -> None:
    pair.end(1, 200, 1)
    pair.change(2, 1, 200)
    pair.end(2, 300, 1)
    with joining(pair) as (engine, taken):
        wait_until(lambda: taken.rows, WAIT_S, "the second transaction")
        pair.change(1, 1, 100)
        wait_until(lambda: engine.error is not None, WAIT_S, "the error")
        assert engine.error.kind is Kind.JOIN_VIOLATED
        assert engine.error.context["rule"] == "data_out_of_order"
    assert taken.rows == [(1, "2:300")]


def test_an_end_that_retention_removed_is_reported(pair: Pair) -> None:
    for number in range(1, 4):
        pair.change(number, 1, 100 * number)
        pair.end(number, 100 * number + 100, 1)
    deleted = pair.admin.delete_records([TopicPartition(pair.transactions, 0, 2)])
    for done in deleted.values():
        done.result(60)
    error, taken = failure(pair)
    assert (error.kind, error.context["rule"]) == (Kind.JOIN_VIOLATED, "transaction_missing")
    assert taken.rows == []


def test_removed_offsets_are_not_skipped(pair: Pair, tmp_path: Path) -> None:
    pair.change(1, 1, 100)
    pair.end(1, 200, 1)
    with joining(pair, tmp_path / "offsets") as (engine, taken):
        wait_until(
            lambda: sum(task.committed for task in engine.view().tasks) == 1 or engine.error, WAIT_S, "a row"
        )
    assert taken.rows == [(1, "1:200")]
    for number in range(2, 5):
        pair.change(number, 1, 100 * number)
        pair.end(number, 100 * number + 100, 1)
    for done in pair.admin.delete_records([TopicPartition(pair.data, 0, 3)]).values():
        done.result(60)
    error, taken = failure(pair, store=tmp_path / "offsets")
    assert error.kind is Kind.LOG_RANGE_GONE
    # Where its log continues does not depend on a pipeline's name.
    assert error.hint is not None
    assert "another log.path" in error.hint
    assert taken.rows == []


def test_the_first_transaction_is_not_skipped_if_it_was_removed(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committed offset is 0, which must not be taken for none."""
    monkeypatch.setattr(connector_module, "_PASS_S", 1e9)
    pair.change(1, 1, 100)
    pair.end(1, 200, 2)
    with joining(pair, tmp_path / "offsets") as (engine, taken):
        wait_until(
            lambda: sum(task.committed for task in engine.view().tasks) == 1 or engine.error, WAIT_S, "a row"
        )
    assert taken.rows == [(1, "1:200")]
    pair.end(2, 300, 0)
    for done in pair.admin.delete_records([TopicPartition(pair.transactions, 0, 1)]).values():
        done.result(60)
    pair.change(1, 2, 100)
    error, taken = failure(pair, store=tmp_path / "offsets")
    assert (error.kind, error.context["topic"]) == (Kind.LOG_RANGE_GONE, pair.transactions)
    assert taken.rows == []


def test_rows_removed_before_the_first_start_are_no_gap_at_the_next(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector_module, "_PASS_S", 0.1)
    for number in range(1, 4):
        pair.change(number, 1, 100 * number)
        pair.end(number, 100 * number + 100, 1)
    for topic, before in ((pair.data, 3), (pair.transactions, 2)):
        for done in pair.admin.delete_records([TopicPartition(topic, 0, before)]).values():
            done.result(60)
    with joining(pair, tmp_path / "offsets") as (engine, taken):
        wait_until(
            lambda: transactions_kept(tmp_path / "offsets", "0") == 3 or engine.error, WAIT_S, "an offset"
        )
        assert engine.error is None
    pair.change(4, 1, 400)
    pair.end(4, 500, 1)
    with joining(pair, tmp_path / "offsets") as (engine, taken):
        wait_until(lambda: taken.rows or engine.error, WAIT_S, "the row that came since")
        assert engine.error is None
    assert taken.rows == [(1, "4:500")]


def test_a_compacted_topic_lacks_changes_but_all_have_the_right_transaction(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path
) -> None:
    quick = {"cleanup.policy": "compact", "segment.ms": "50", "min.cleanable.dirty.ratio": "0.01",
             "max.compaction.lag.ms": "50", "segment.bytes": "1048576"}  # fmt: skip
    pair = Pair(kafka, topic_name, quick)
    for number in range(1, 41):
        if number == 30:
            time.sleep(0.1)  # the cleaner ignores the active segment: the next messages begin another one
        for order in (1, 2):
            pair.change(number, order, 100 * number, key=str(order * number % 7))
        pair.end(number, 100 * number + 100, 2)

    def kept() -> list[Any]:
        return [message.document["transaction"] for message in read_topic(pair.bootstrap, pair.data)]

    wait_until(lambda: len(kept()) < 40, 120, "compaction")
    with joining(pair) as (engine, taken):
        wait_until(lambda: (40 in _numbers(taken)) or engine.error, WAIT_S, "the last transaction")
        assert engine.error is None
    assert len(taken.rows) < 80
    for place, transaction in taken.rows:
        number, commit = map(int, (transaction or "0:0").split(":"))
        assert place in (1, 2)
        assert commit == 100 * number + 100
    _complete_in_tailrace_run(pair, tmp_path, {40})


def _numbers(taken: Taken) -> set[int]:
    return {int((transaction or "0").split(":")[0]) for _, transaction in taken.rows}


def _complete_in_tailrace_run(pair: Pair, directory: Path, wanted: set[int]) -> None:
    # `tailrace run` ends as well, with transactions that lack changes.
    file = directory / "joined.yaml"
    source = {"type": "kafka-join", **pair.settings()}
    sinks = [{"type": "jsonl", "path": "./lines"}]
    rest = {"log": {"path": "./log"}, "spark": {"start": "when_needed"}, "sinks": sinks}
    file.write_text(json.dumps({"name": "j", "source": source, **rest}))
    run("run", file, "--until-caught-up")
    shown = [json.loads(line) for line in run("log", "show", directory / "log", "--json").splitlines()]
    assert wanted <= {change["source"]["txId"] for change in shown}


def _flattened(pair: Pair) -> None:
    pair.send(pair.data, "1", {"id": 1, "number": 2})


def _exchanged(pair: Pair) -> None:
    pair.change(1, 1, 100)
    pair.end(1, 200, 1)
    pair.data, pair.transactions = pair.transactions, pair.data


@pytest.mark.parametrize("written", [_flattened, _exchanged])
def test_a_message_that_is_no_change_is_refused_with_its_place(
    pair: Pair, written: Callable[[Pair], None]
) -> None:
    written(pair)
    error, taken = failure(pair)
    assert error.kind is Kind.JOIN_VIOLATED
    assert (error.context["topic"], error.context["partition"], error.context["offset"]) == (pair.data, 0, 0)
    assert taken.rows == []


def test_a_transaction_topic_with_two_partitions_is_refused_at_the_start_and_while_running(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector_module, "_LOOK_S", 0.2)
    pair.change(1, 1, 100)
    pair.end(1, 200, 1)
    with joining(pair) as (engine, taken):
        wait_until(lambda: taken.rows, WAIT_S, "a row")
        for made in pair.admin.create_partitions([NewPartitions(pair.transactions, 2)]).values():
            made.result(60)
        wait_until(lambda: engine.error is not None, WAIT_S, "the error")
        assert engine.error.kind is Kind.CONFIG_INVALID
        assert "2 partitions" in engine.error.message
    with pytest.raises(TailraceError, match="2 partitions"), joining(pair):
        pass
    file = tmp_path / "joined.yaml"
    source = {"type": "kafka-join", **pair.settings()}
    sinks = [{"type": "jsonl", "path": "./lines"}]
    file.write_text(json.dumps({"name": "j", "source": source, "log": {"path": "./log"}, "sinks": sinks}))
    assert "2 partitions" in run("check", file, status=2)
