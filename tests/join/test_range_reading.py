"""Ranges read from a real Kafka without Spark: bounded queues, progress, required permissions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.join import messages as messages_module
from tailrace.join.merge import Position
from tailrace.join.planning import BatchLimits
from tailrace.join.range_join import JoinRange, RangeJoin, ranges_of
from tailrace.spark.join import reading as reading_module
from tailrace.spark.join.options import JoinReadOptions
from tailrace.spark.join.planner import JoinPlanner
from tailrace.spark.join.reading import joined_rows
from tailrace_servers.kafka import SASL, EmbeddedKafka
from tests.support.join.spark_stream import options_of
from tests.support.kafka.debezium_topics import JoinTopics
from tests.support.kafka_cluster import Principal


def ranges(options: JoinReadOptions) -> list[JoinRange]:
    with closing(JoinPlanner(options)) as planner:
        return ranges_of(planner.whole_range())


def rows_of(wanted: JoinRange, options: JoinReadOptions, group: str = "", **how: Any) -> Iterator[dict]:
    for batch in joined_rows(wanted, options, group or "nobody", **{"keep_progress": False, **how}):
        yield from batch.to_pylist()


def test_a_side_that_is_far_ahead_is_paused(
    kafka: EmbeddedKafka, topic_name: str, join_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_module, "_READ_MAX", 100)
    topics = JoinTopics(kafka, topic_name, join_seed, partitions=1)
    topics.write(600, 20)
    options = JoinReadOptions.parse(options_of(topics, queueRecordsMax="50"))
    most = {"data": 0, "transactions": 0}
    sound = RangeJoin.take

    def watched(join: RangeJoin) -> Any:
        most["data"] = max(most["data"], join.data_queued)
        most["transactions"] = max(most["transactions"], join.transactions_queued)
        return sound(join)

    monkeypatch.setattr(RangeJoin, "take", watched)
    for wanted in ranges(options):
        whole = [(row["offset"], row["transaction_id"]) for row in rows_of(wanted, options)]
        assert len(whole) > 2000, join_seed
        # Its first row belongs to the last transactions: all earlier ones are read first.
        late = replace(wanted, position=Position(whole[-200][0], 0), begin=whole[-200][0])
        rest = [(row["offset"], row["transaction_id"]) for row in rows_of(late, options)]
        assert rest == whole[-200:], join_seed
    assert 50 <= most["data"] <= 50 + 2 * 101, most
    assert most["transactions"] <= 50 + 2 * 101, most


def test_rows_that_are_read_again_after_lost_progress_are_skipped(
    kafka: EmbeddedKafka, topic_name: str, join_seed: int
) -> None:
    topics, found = JoinTopics(kafka, topic_name, join_seed), []
    options = JoinReadOptions.parse(options_of(topics))
    topics.write(30)
    with closing(JoinPlanner(options)) as planner:
        group = f"lost-{topic_name}"
        plan = planner.first(group)
        for step in range(60):
            following = planner.next(plan, BatchLimits(offsets=100))
            if following.ends_as(plan):
                break
            plan = following
            for wanted in ranges_of(plan):
                rows = list(rows_of(wanted, options, group, keep_progress=bool(step % 3)))
                found += [(wanted.place, row["offset"]) for row in rows]
    expected = [
        (wanted.place, row["offset"]) for wanted in ranges(options) for row in rows_of(wanted, options)
    ]
    assert sorted(found) == sorted(expected), join_seed


def test_a_missing_permission_is_named_and_granting_it_helps(
    kafka: EmbeddedKafka, topic_name: str, principal: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = JoinTopics(kafka, topic_name, 5)
    topics.write(10)
    monkeypatch.setenv("JOIN_PASSWORD", principal.password)
    client = {**principal.options(), "sasl.password": "${env:JOIN_PASSWORD}"}
    options = JoinReadOptions.parse(
        {
            **options_of(topics),
            "bootstrapServers": kafka.bootstrap_at(SASL),
            **{f"kafka.{name}": str(value) for name, value in client.items()},
        }
    )
    with pytest.raises(TailraceError) as caught:
        ranges(options)
    assert caught.value.kind in (Kind.SOURCE_PRIVILEGE_MISSING, Kind.TABLE_MISSING)
    for topic in (*topics.data, topics.transactions):
        principal.allow("topic", topic, "READ")
    group = f"join-{topic_name}"
    wanted = ranges(options)[0]
    with pytest.raises(TailraceError, match=f"group `{group}`") as caught:
        list(rows_of(wanted, options, group, keep_progress=True))
    assert caught.value.kind is Kind.SOURCE_PRIVILEGE_MISSING
    principal.allow("group", group, "READ")
    assert list(rows_of(wanted, options, group, keep_progress=True))


def test_the_wait_for_messages_has_a_timeout(
    kafka: EmbeddedKafka, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "_STALLED_S", 1.0)
    topics = JoinTopics(kafka, topic_name, 6)
    topics.write(10)
    options = JoinReadOptions.parse(options_of(topics))
    wanted = ranges(options)[0]
    with pytest.raises(TailraceError, match="no message arrived") as caught:
        list(rows_of(replace(wanted, end=wanted.end + 100), options))
    assert caught.value.kind is Kind.SOURCE_UNREACHABLE
