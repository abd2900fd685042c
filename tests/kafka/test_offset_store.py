"""An engine's offsets in a topic: the contract of stores, and which of two stores may write."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

from tailrace import Engine, failpoints
from tailrace.config.engine_options import OffsetStorage
from tailrace.engine.offsets.stores import store_for
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.offsets.store import KafkaOffsetStore
from tailrace.kafka.offsets.topic import source_key, task_in
from tailrace.kafka.producer.partitioner import partition_of
from tailrace.kafka.producer.writer import AtomicWriter
from tailrace.testing import LinesSource, conformance
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.reading import read_topic
from tests.support.wait import wait_until

HERE = {"server": "a"}


def storage(kafka: EmbeddedKafka, topic: str, **more: Any) -> OffsetStorage:
    return OffsetStorage.model_validate(
        {"type": "kafka", "bootstrap_servers": kafka.bootstrap, "topic": f"{topic}-offsets", **more}
    )


@pytest.mark.parametrize("atomic", [False, True])
def test_the_contract_of_stores_is_kept(kafka: EmbeddedKafka, topic_name: str, atomic: bool) -> None:
    section = storage(kafka, topic_name)
    conformance.check_offset_store(lambda: store_for(section, "shop", atomic=atomic))
    # Other stores in the same topic are not affected, and one that was not started can read it.
    assert KafkaOffsetStore(section, "other", atomic=False).read([HERE]) == {}
    assert KafkaOffsetStore(section, "shop", atomic=atomic).read([HERE]) == {0: {"line": 1}}


def test_the_newer_of_two_stores_takes_over_and_the_older_can_never_write_again(
    kafka: EmbeddedKafka, topic_name: str
) -> None:
    section = storage(kafka, topic_name)
    old, new = (KafkaOffsetStore(section, "shop", atomic=True) for _ in range(2))
    old.start()
    old.write([(HERE, {"line": 1})], 30)
    new.start()
    assert new.read([HERE]) == {0: {"line": 1}}
    new.write([(HERE, {"line": 2})], 30)
    for _ in range(2):
        with pytest.raises(TailraceError) as refused:
            old.write([(HERE, {"line": 5})], 30)
        assert refused.value.kind is Kind.OFFSETS_PREEMPTED
    new.write([(HERE, {"line": 3})], 30)
    old.stop()
    new.stop()
    assert KafkaOffsetStore(section, "shop", atomic=True).read([HERE]) == {0: {"line": 3}}
    # The record of the owner is no offset of a pipeline of that name, nor of a source.
    keys = {message.key for message in read_topic(kafka.bootstrap, section.topic)}
    assert source_key("tailrace-shop", {"task": "offsets"}) in keys
    assert [task_in(key or b"", "tailrace", "shop") for key in keys] == [None, None]
    with pytest.raises(TailraceError) as misused:
        new.write([({"task": "offsets"}, {"line": 1})], 30)
    assert misused.value.kind is Kind.ENGINE_MISUSED


def test_a_store_that_was_paused_in_a_commit_goes_on_unless_another_has_written(
    kafka: EmbeddedKafka, topic_name: str
) -> None:
    options = {"transaction.timeout.ms": "3000", "message.timeout.ms": "3000"}
    section = storage(kafka, topic_name).model_copy(update={"options": options})
    old, new = (KafkaOffsetStore(section, "shop", atomic=True) for _ in range(2))

    def pause_in_a_commit() -> Kind:
        failpoints.arm("kafka.before_commit=sleep:7000")
        try:
            with pytest.raises(TailraceError) as failed:
                old.write([(HERE, {"line": 5})], 30)
        finally:
            failpoints.arm("")
        return failed.value.kind

    old.start()
    old.write([(HERE, {"line": 1})], 30)
    assert pause_in_a_commit() is Kind.OFFSETS_UNWRITABLE
    old.write([(HERE, {"line": 5})], 30)
    assert pause_in_a_commit() is Kind.OFFSETS_UNWRITABLE
    new.start()
    assert new.read([HERE]) == {0: {"line": 5}}
    new.write([(HERE, {"line": 6})], 30)
    with pytest.raises(TailraceError) as refused:
        old.write([(HERE, {"line": 7})], 30)
    assert refused.value.kind is Kind.OFFSETS_PREEMPTED
    old.stop()
    new.stop()


def test_a_preempted_engine_stops_and_reports_it(kafka: EmbeddedKafka, topic_name: str) -> None:
    options = {
        "offset_storage": storage(kafka, topic_name).model_dump(mode="json", exclude_unset=True),
        "offset_commit": {"policy": "always", "timeout_ms": 30_000},
        "atomic_source_offset_commit": True,
    }
    got: list[list[int]] = [[], []]
    sources = [LinesSource(50, ends=False), LinesSource(50, ends=False)]

    def engine(number: int) -> Engine:
        return Engine(
            connector=sources[number],
            name="shop",
            on_record=lambda record: got[number].append(record.after["number"]),
            options=options,
        )

    first = engine(0)
    first.start()
    wait_until(lambda: sources[0].committed["0-0"][-1:] == [50], 60, "the first engine's last commit")
    with engine(1):
        sources[0].append(10)
        sources[1].append(10)
        wait_until(lambda: len(got[1]) >= 10, 60, "the records of the second")
        with pytest.raises(TailraceError) as ended:
            first.wait(60)
    assert ended.value.kind is Kind.OFFSETS_PREEMPTED
    assert got[1][-10:] == list(range(51, 61))


@pytest.mark.parametrize("atomic", [False, True])
def test_an_offset_is_found_after_partitions_were_added_to_its_topic(
    kafka: EmbeddedKafka, topic_name: str, atomic: bool
) -> None:
    section = storage(kafka, topic_name)
    places = [{"server": str(number)} for number in range(5)]
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    for line, partitions in enumerate((25, 31, 47)):
        if line:
            admin.create_partitions([NewPartitions(section.topic, partitions)])[section.topic].result(60)
            wait_until(
                lambda count=partitions: (  # type: ignore[misc]
                    len(admin.list_topics(section.topic, 60).topics[section.topic].partitions) == count
                ),
                60,
                "the partitions",
            )
        store = KafkaOffsetStore(section, "shop", atomic=atomic)
        store.start()
        if line:
            assert store.read(places) == {number: {"line": line} for number in range(5)}
        store.write([(place, {"line": line + 1}) for place in places], 30)
        store.stop()


@pytest.mark.parametrize("atomic", [False, True])
def test_a_topic_that_is_deleted_while_an_engine_runs_is_created_again_with_its_next_offsets(
    kafka: EmbeddedKafka, topic_name: str, atomic: bool
) -> None:
    section = storage(kafka, topic_name)
    store = KafkaOffsetStore(section, "shop", atomic=atomic)
    store.start()
    store.write([(HERE, {"line": 1})], 30)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    admin.delete_topics([section.topic])[section.topic].result(60)

    def is_written() -> bool:
        with contextlib.suppress(TailraceError):  # while the deletion is under way
            store.write([(HERE, {"line": 2})], 3)
            return True
        return False

    wait_until(is_written, 60, "a commit")
    assert store.read([HERE]) == {0: {"line": 2}}
    store.write([(HERE, {"line": 3})], 30)
    store.stop()
    assert KafkaOffsetStore(section, "shop", atomic=atomic).read([HERE]) == {0: {"line": 3}}


def test_an_unanswered_commit_that_succeeded_is_not_taken_for_another_engines(
    kafka: EmbeddedKafka, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KafkaOffsetStore(storage(kafka, topic_name), "shop", atomic=True)
    store.start()
    store.write([(HERE, {"line": 1})], 30)
    commit_all = AtomicWriter.commit_all

    def unanswered(writer: AtomicWriter, *args: Any) -> None:
        commit_all(writer, *args)
        raise TailraceError(Kind.SINK_WRITE_FAILED, "commit a transaction: no answer")

    def refused(*_: Any) -> None:
        raise TailraceError(Kind.SINK_WRITE_FAILED, "commit a transaction: refused")

    for line, fails in ((2, unanswered), (3, refused)):
        monkeypatch.setattr(AtomicWriter, "commit_all", fails)
        with pytest.raises(TailraceError) as failed:
            store.write([(HERE, {"line": line})], 30)
        assert failed.value.kind is Kind.OFFSETS_UNWRITABLE
    monkeypatch.setattr(AtomicWriter, "commit_all", commit_all)
    store.write([(HERE, {"line": 4})], 30)
    assert store.read([HERE]) == {0: {"line": 4}}
    store.stop()


def test_a_start_ends_open_transactions_of_members_that_a_crashed_start_left(
    kafka: EmbeddedKafka, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head can't be read before that transaction has ended, and no other engine ends it."""
    monkeypatch.setattr("tailrace.kafka.offsets.store.START_S", 8.0)
    section = storage(kafka, topic_name)
    first, second, third = (KafkaOffsetStore(section, "shop", atomic=True, tasks=1) for _ in range(3))
    first.start()
    first.stop()
    member = {"bootstrap.servers": kafka.bootstrap, "transactional.id": "tailrace-shop-offsets:0"}
    killed = Producer({**member, "log_level": 0})
    killed.init_transactions()
    killed.begin_transaction()
    killed.produce(
        section.topic, b"{}", b"[]", partition_of(source_key("tailrace-shop", {"task": "offsets"}), 25)
    )
    killed.flush()
    failpoints.arm("kafka.after_head=error")
    try:
        with pytest.raises(failpoints.FailpointError):
            second.start()
    finally:
        failpoints.arm("")
    third.start()
    third.write([(HERE, {"line": 1})], 30)
    third.stop()
    assert KafkaOffsetStore(section, "shop", atomic=True).read([HERE]) == {0: {"line": 1}}
