"""Changes in the cluster while a sink writes: added partitions, revoked rights."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    NewPartitions,
    NewTopic,
)

from tailrace.config.kafka import KafkaSinkConfig
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.client import topics
from tailrace.kafka.producer.writer import Writer
from tailrace.sinks.kafka.sink import account_of
from tailrace_servers.kafka import SASL, EmbeddedKafka
from tests.support.kafka.once import numbers, writer
from tests.support.kafka.reading import read_topic
from tests.support.kafka.shares_rig import ORDERS, opened, sink_of, write
from tests.support.kafka_cluster import Principal
from tests.support.spark.wire import HandmadeLog, insert
from tests.support.wait import wait_until

KEYS = 40


@pytest.fixture
def admin(kafka: EmbeddedKafka) -> AdminClient:
    return AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})


@pytest.mark.parametrize("producers", [0, 2])
def test_partitions_added_while_a_sink_writes_move_no_key(
    kafka: EmbeddedKafka,
    topic_name: str,
    tmp_path: Path,
    admin: AdminClient,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    producers: int,
) -> None:
    monkeypatch.setattr(topics, "_LOOK_AGAIN_S", 0.0)
    topic = f"{topic_name}.public.orders"
    with HandmadeLog(tmp_path / "log") as log:
        ends = [
            log.commit(*([ORDERS] if turn == 0 else []), *[insert(1, n, f"turn {turn}") for n in range(KEYS)])
            for turn in range(3)
        ]
        # So that the client learns of new partitions at once.
        options = {"topic.metadata.refresh.interval.ms": "100", "metadata.max.age.ms": "1000"}
        sink = opened(sink_of(kafka, topic_name, producers, options=options), log)
        write(sink, log, ends[0])
        admin.create_partitions([NewPartitions(topic, 7)])[topic].result(60)
        wait_until(lambda: len(admin.list_topics(topic, 60).topics[topic].partitions) == 7, 60, "partitions")
        capfd.readouterr()
        write(sink, log, ends[1])
        open_ = sink._open
        assert open_ is not None
        producer = getattr(open_._writer, "_producer", None)
        if producer is not None:
            wait_until(lambda: len(producer.list_topics(topic, 10).topics[topic].partitions) == 7, 60, "it")
        write(sink, log, ends[2])
        told = "".join(capfd.readouterr())
        sink.close()
    places: dict[bytes | None, set[int]] = {}
    for message in read_topic(kafka.bootstrap, topic):
        places.setdefault(message.key, set()).add(message.partition)
    assert len(places) == KEYS
    assert {len(found) for found in places.values()} == {1}
    assert "has other partitions than when it was first written to" in told


def test_transactional_ids_of_several_producers_differ_from_those_of_other_pipelines() -> None:
    config = KafkaSinkConfig.model_validate({"type": "kafka", "bootstrap_servers": "127.0.0.1:1"})
    names = ["X", "X-0", "X-0-0", "X.0"]
    ids = []
    for name in names:
        account = account_of(config.model_copy(update={"atomic_source_offset_commit": True}), name)
        offsets = account.offsets()
        lives = [account.writer(offsets), *[account.member(offsets, number) for number in range(2)]]
        ids += [life._task.settings["transactional.id"] for life in lives]  # type: ignore[attr-defined]
        for life in lives:
            life.close()
    assert len(set(ids)) == len(ids)


def test_all_open_transactions_of_several_members_in_one_partition_are_ended(
    kafka: EmbeddedKafka, topic_name: str, admin: AdminClient
) -> None:
    offsets_topic = f"{topic_name}-offsets"
    made = NewTopic(offsets_topic, 1, 1, config={"cleanup.policy": "compact"})
    admin.create_topics([made])[offsets_topic].result(60)
    config = KafkaSinkConfig.model_validate(
        {
            "type": "kafka", "bootstrap_servers": kafka.bootstrap, "offsets_topic": offsets_topic,
            "atomic_source_offset_commit": True,
        }
    )  # fmt: skip
    account = account_of(config, topic_name)
    offsets = account.offsets(15.0)  # shorter than the transactions
    offsets.require(create=False)
    left: list[Any] = [account.member(offsets, number) for number in (1, 0)]
    for number, member in enumerate(left):
        member.open()
        member._begin()
        member._send_offsets({member._task.key: {"number": number}})
        member._sender.flush()
    account_of(config, topic_name).fence_members(offsets, {"producers": 2})
    again = [account.member(offsets, number) for number in range(2)]
    assert [member.open() for member in again] == [None, None]
    for member in (*left, *again):
        member.close()


@pytest.mark.parametrize("lost", ["records", "offsets"])
@pytest.mark.parametrize("atomic", [True, False])
def test_a_right_revoked_while_a_sink_writes_is_reported_with_topic_and_command(
    kafka: EmbeddedKafka, topic_name: str, admin: AdminClient, principal: Principal, atomic: bool, lost: str
) -> None:
    offsets = f"{topic_name}-offsets"
    for name, settings in ((topic_name, {}), (offsets, {"cleanup.policy": "compact"})):
        admin.create_topics([NewTopic(name, 1, 1, config=settings)])[name].result(60)
    for operation in ("READ", "WRITE", "DESCRIBE_CONFIGS"):
        principal.allow("topic", offsets, operation)
    principal.allow("topic", topic_name, "WRITE")
    principal.allow("transactional-id", f"test-{topic_name}-0", "WRITE")
    out = writer(kafka.bootstrap_at(SASL), topic_name, atomic=atomic, options=principal.options())
    out.open()
    out.send(topic_name, numbers(1, 10))
    out.commit({"number": 10})
    topic = topic_name if lost == "records" else offsets
    principal.revoke("topic", topic, "WRITE")
    with pytest.raises(TailraceError) as refused:
        _next_batch(out, topic_name)
    out.close()
    error = refused.value
    assert error.kind is Kind.SINK_REFUSED, error
    assert f"{topic!r}" in error.message
    command = shlex.split(error.hint)
    assert command[0] == "kafka-acls.sh"
    assert command[command.index("--topic") + 1] == topic
    assert command[command.index("--operation") + 1] == "Write"


def _next_batch(out: Writer, topic: str) -> None:
    out.send(topic, numbers(11, 10))
    out.commit({"number": 20})


def test_the_error_of_a_failed_commit_has_the_cause_of_the_undelivered_record(
    kafka: EmbeddedKafka, topic_name: str
) -> None:
    out = writer(kafka.bootstrap, topic_name)
    out.open()
    out.send(f"{topic_name}-missing", numbers(1, 1))
    with pytest.raises(TailraceError) as failed:
        out.commit({"number": 1})
    out.close()
    assert failed.value.context["topic"] == f"{topic_name}-missing"
    assert "UNKNOWN_TOPIC" in failed.value.message
    assert failed.value.hint.startswith("create the topic")
