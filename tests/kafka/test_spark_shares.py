"""Several producers on a real broker: each change once, in order of each key, whatever fails.

Here tasks run in this process; in `test_spark_sink` they run on Spark.
"""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tailrace import failpoints
from tailrace.errors import Kind, TailraceError
from tailrace.sinks.kafka import offsets, shares
from tailrace.sinks.kafka.shares import ShareJob, ShareWritten, write_share
from tailrace.sinks.kafka.sink import KafkaSink, offset_at, recorded_kafka_position
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.shares_rig import (
    Content,
    alone,
    content,
    fill,
    open_until_killed,
    opened,
    places,
    sink_of,
    splits_of,
    unordered,
    with_two,
    write,
)
from tests.support.sinks.rig import InProcess
from tests.support.spark.wire import HandmadeLog


@pytest.fixture
def log(tmp_path: Path) -> Iterator[HandmadeLog]:
    with HandmadeLog(tmp_path / "log") as written:
        yield written


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


class Kept(InProcess):
    """Keeps the job, as an executor gets it."""

    jobs: list[ShareJob]

    def parallelize(self, work: Any, slices: int) -> Any:
        self.jobs = []
        made = super().parallelize(work, slices)
        keep = self.jobs.append

        class Found:
            def mapPartitions(self, function: Any) -> Any:  # noqa: N802 — Spark's name
                keep(pickle.loads(pickle.dumps(function.args[0].args[0])))  # noqa: S301 - our own
                return made.mapPartitions(function)

        return Found()


def test_the_number_of_producers_changes_and_each_change_comes_once(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog
) -> None:
    ends = fill(log, 6)
    rows = 0
    for producers, end in ((2, ends[1]), (3, ends[3]), (0, ends[4]), (1, ends[5])):
        sink = opened(sink_of(kafka, topic_name, producers), log)
        rows += write(sink, log, end).rows
        assert write(sink, log, end).rows == 0
        assert sink.position("0") == sink.reach("0") == end
        sink.close()
        config = sink_of(kafka, topic_name, producers)._config
        assert recorded_kafka_position(config, "shop", log.directory.identity) == end
    assert rows >= 6 * 14
    found, expected = unordered(content(kafka, topic_name)), alone(kafka, topic_name, log, ends[5])
    # Once a record without a key was missing for no known reason: this shows where they are.
    assert found == expected, places(kafka, topic_name)


#: What fails in each run, and its number of producers; 0: in process.
LIVES = (
    (2, "kafka.after_head=error"),  # the first layout is written, and nothing else
    (2, "kafka.before_commit=error@3"),  # lease, the first share, but not the second
    (3, "kafka.after_fence=error@2"),
    (3, "kafka.before_commit=error@3"),  # lease, more of the first share
    (0, "kafka.after_commit=error@2"),  # lease, more of the first share, in process
    (2, "kafka.in_share=error@2"),
    (3, "kafka.before_commit=error@4"),  # lease, both shares
    (3, "kafka.before_commit=error@2"),  # lease
    (3, "kafka.after_head=error@2"),  # lease, the new layout
)


@pytest.mark.parametrize("atomic", [True, False], ids=["exactly once", "at least once"])
@pytest.mark.slow
def test_a_change_of_the_number_of_producers_may_fail_anywhere(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog, atomic: bool
) -> None:
    ends = fill(log, len(LIVES) + 2)
    failed = 0
    for (producers, failure), end in zip(LIVES, ends, strict=False):
        sink = sink_of(kafka, topic_name, producers, atomic_source_offset_commit=atomic)
        failpoints.arm(failure)
        try:
            opened(sink, log)
            write(sink, log, end)
        except (failpoints.FailpointError, TailraceError):
            failed += 1
        failpoints.arm("")
        sink.close()
    assert failed == (len(LIVES) if atomic else 4)  # without transactions fewer failpoints are reached
    for producers, end in ((3, ends[-2]), (0, ends[-1])):
        sink = opened(sink_of(kafka, topic_name, producers, atomic_source_offset_commit=atomic), log)
        write(sink, log, end)
        sink.close()
    found, expected = unordered(content(kafka, topic_name)), alone(kafka, topic_name, log, ends[-1])
    if not atomic:
        found, expected = _sets(found), _sets(expected)
    for topic, of_key in expected.items():
        assert {key: values for key, values in found[topic].items() if of_key.get(key) != values} == {}
        assert found[topic].keys() == of_key.keys()


def _sets(found: Content) -> Content:
    return {
        topic: {key: sorted(set(values), key=str) for key, values in of_key.items()}
        for topic, of_key in found.items()
    }


def test_jobs_of_a_preempted_engine_commit_nothing_and_report_it(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog
) -> None:
    ends = fill(log, 6)
    old, spark = opened(sink_of(kafka, topic_name, 2), log), Kept()
    write(old, log, ends[0], spark)
    (job,) = spark.jobs
    new = opened(sink_of(kafka, topic_name, 2), log)
    with pytest.raises(TailraceError) as refused:
        write_share(replace(job, end=ends[1]), 0)
    assert refused.value.kind is Kind.SINK_PREEMPTED
    with pytest.raises(TailraceError) as refused:
        write(old, log, ends[2])
    assert refused.value.kind is Kind.SINK_PREEMPTED
    write(new, log, ends[5])
    for sink in (old, new):
        sink.close()
    assert unordered(content(kafka, topic_name)) == alone(kafka, topic_name, log, ends[5])


def test_an_offset_set_by_command_applies_to_all_producers_and_stops_running_jobs(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog
) -> None:
    ends = fill(log, 3)
    sink, spark = opened(sink_of(kafka, topic_name, 2), log), Kept()
    write(sink, log, ends[2], spark)
    (job,) = spark.jobs
    config, log_id = sink_of(kafka, topic_name, 2)._config, log.directory.identity.log_id
    (found,) = offsets.committed(config, "shop")
    assert (found.task, found.log_offset) == ("0", ends[2])
    offsets.commit_from_outside(config, "shop", ["0"], offset_at(log_id, ends[0]))
    assert recorded_kafka_position(config, "shop", log.directory.identity) == ends[0]
    with pytest.raises(TailraceError) as refused:
        write_share(job, 1)
    assert refused.value.kind is Kind.SINK_PREEMPTED
    sink.close()
    again = opened(sink_of(kafka, topic_name, 2), log)
    assert again.position("0") == again.reach("0") == ends[0]
    again.close()


@pytest.mark.parametrize(
    ("point", "takes"),
    [
        ("kafka.after_head", "the next engine"),
        ("kafka.after_head", "an offset that is set"),
        ("kafka.after_fence", "the next engine"),
    ],
)
def test_open_transactions_of_members_from_before_a_head_are_ended_by_the_next_owner(
    kafka: EmbeddedKafka,
    topic_name: str,
    log: HandmadeLog,
    processes: type[BaseProcess],
    point: str,
    takes: str,
) -> None:
    """A driver killed between its head and the members leaves a head that can't be read yet."""
    ends = fill(log, 3)
    make_offsets_topic(kafka, topic_name)
    write_with_two(kafka, topic_name, log, ends[0]).close()
    member = left_open(kafka, topic_name, 1)
    driver = processes(target=open_until_killed, args=(kafka.bootstrap, topic_name, log.path, point))
    driver.start()
    driver.join(60)
    assert driver.exitcode == -signal.SIGKILL
    reached = ends[0]
    if takes == "an offset that is set":
        reached = ends[1]
        set_to = offset_at(log.directory.identity.log_id, reached)
        offsets.commit_from_outside(with_two(kafka, topic_name)._config, "shop", ["0"], set_to)
    sink = opened(with_two(kafka, topic_name), log)
    assert sink.position("0") == sink.reach("0") == reached
    write(sink, log, ends[2])
    sink.close()
    with pytest.raises(KafkaException):  # it was fenced
        member.commit_transaction(10)


def test_a_members_offset_is_read_after_an_earlier_open_transaction_of_another_is_ended(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog
) -> None:
    ends = fill(log, 2)
    make_offsets_topic(kafka, topic_name)
    spark = Kept()
    write_with_two(kafka, topic_name, log, ends[0], spark).close()
    (job,) = spark.jobs
    member = left_open(kafka, topic_name, 1)
    write_share(replace(job, end=ends[1], splits=splits_of(log, ends[0], ends[1])), 0)
    sink = opened(with_two(kafka, topic_name), log)
    assert (sink.position("0"), sink.reach("0")) == (ends[0], ends[1])
    write(sink, log, ends[1])
    sink.close()
    del member
    assert unordered(content(kafka, topic_name)) == alone(kafka, topic_name, log, ends[1])


def make_offsets_topic(kafka: EmbeddedKafka, name: str) -> None:
    """Create it with one partition, so that all offsets are in it."""
    topic = NewTopic(f"{name}-offsets", 1, 1, config={"cleanup.policy": "compact"})
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([topic])[topic.topic].result(60)


def write_with_two(
    kafka: EmbeddedKafka, name: str, log: HandmadeLog, end: int, spark: Any = None
) -> KafkaSink:
    sink = opened(with_two(kafka, name), log)
    write(sink, log, end, spark)
    return sink


def left_open(kafka: EmbeddedKafka, name: str, number: int) -> Producer:
    """Return a member's producer with an open transaction in the only partition of the offsets."""
    settings = {"bootstrap.servers": kafka.bootstrap, "transactional.id": f"{name}-shop-0:{number}"}
    producer = Producer({**settings, "log_level": 0})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(f"{name}-offsets", b"{}", b"another's", 0)
    producer.flush()
    return producer


def test_of_two_attempts_at_a_share_one_writes_and_the_other_waits(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "PATIENCE_S", (30.0, 30.0))
    (end,) = fill(log, 1)
    sink, spark = opened(sink_of(kafka, topic_name, 2), log), Kept()
    failpoints.arm("kafka.in_share=error")  # the first share is not written, the second is
    with pytest.raises(TailraceError):
        write(sink, log, end, spark)
    (job,) = spark.jobs
    failpoints.arm("kafka.before_commit=sleep:4000")  # the first that gets here is overtaken
    found: list[ShareWritten] = []
    attempts = [threading.Thread(target=lambda: found.append(write_share(job, 0))) for _ in range(2)]
    for attempt in attempts:
        attempt.start()
    for attempt in attempts:
        attempt.join(120)
    assert sorted(each.rows > 0 for each in found) == [False, True]
    sink.close()
    assert unordered(content(kafka, topic_name)) == alone(kafka, topic_name, log, end)


def test_a_changed_key_is_in_order_under_both_keys(
    kafka: EmbeddedKafka, topic_name: str, log: HandmadeLog
) -> None:
    (end,) = fill(log, 1)
    sink = opened(sink_of(kafka, topic_name, 3), log)
    write(sink, log, end)
    sink.close()
    orders = content(kafka, topic_name)["public.orders"]
    assert [value and value[0] for value in orders['{"id":0}']] == ["c", "u", "d", None]
    assert [value and value[0] for value in orders['{"id":9}']] == ["c"]
