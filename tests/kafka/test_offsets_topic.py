"""The topic of offsets on a real broker: changed by others, shared with others, and read once."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from tailrace.errors import Kind, TailraceError
from tailrace.kafka.offsets import compacted_read
from tailrace.kafka.offsets.topic import OffsetsTopic, source_key
from tailrace.kafka.producer.partitioner import partition_of
from tailrace.pipeline.preflight.kafka import cluster_findings, topic_findings
from tailrace_servers.kafka import EmbeddedKafka, find_jars
from tests.support.kafka.once import writer
from tests.support.kafka.orders import Orders, run, written
from tests.support.kafka.reading import read_topic
from tests.support.kafka.shares_rig import alone, content, fill, opened, sink_of, unordered, write
from tests.support.orders_log import LogOfOrders
from tests.support.spark.wire import HandmadeLog
from tests.support.wait import wait_until

ALL = [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture
def orders(tmp_path: Path, kafka: EmbeddedKafka, topic_name: str) -> Orders:
    return Orders(tmp_path, kafka, topic_name)


@pytest.fixture
def admin(kafka: EmbeddedKafka) -> AdminClient:
    return AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})


def grow(admin: AdminClient, topic: str, *keys: bytes, among: int = 25, but: int = -1) -> int:
    """Add partitions until each of `keys` has another partition, but not `but`; return their number then."""
    count = among + 1
    while any(partition_of(key, count) in (partition_of(key, among), but) for key in keys):
        count += 1
    admin.create_partitions([NewPartitions(topic, count)])[topic].result(60)
    wait_until(lambda: len(admin.list_topics(topic, 60).topics[topic].partitions) == count, 60, "partitions")
    return count


def delete(admin: AdminClient, topic: str) -> None:
    admin.delete_topics([topic])[topic].result(60)
    wait_until(lambda: topic not in admin.list_topics(timeout=60).topics, 60, f"the end of {topic}")


@pytest.mark.parametrize("atomic", [True, False])
def test_an_offset_is_found_and_moved_after_partitions_were_added(
    tmp_path: Path, kafka: EmbeddedKafka, topic_name: str, admin: AdminClient, atomic: bool
) -> None:
    orders = Orders(tmp_path, kafka, topic_name, atomic_source_offset_commit=atomic)
    key, topic = orders.account.key, f"{topic_name}-offsets"
    assert orders.replay() == ALL
    count = 25
    for _ in range(3):
        count = grow(admin, topic, key, among=count)
        assert orders.shown()["log_offset"] == orders.ends[-1]
        assert orders.replay() == ALL
        # An offset set by command is moved to its proper partition, and no other one is left.
        run("offsets", "set", orders.file, "--to", orders.ends[-1], "--yes")
        held = {message.partition: message.value for message in read_topic(kafka.bootstrap, topic)}
        assert [partition for partition, value in held.items() if value] == [partition_of(key, count)]
    run("offsets", "reset", orders.file, "--yes")
    assert orders.shown()["log_offset"] is None
    assert orders.replay() == ALL * 2


def test_several_producers_find_their_offsets_after_partitions_were_added(
    kafka: EmbeddedKafka, topic_name: str, admin: AdminClient, tmp_path: Path
) -> None:
    with HandmadeLog(tmp_path / "log") as log:
        ends = fill(log, 4)
        sink = opened(sink_of(kafka, topic_name, 3), log)
        write(sink, log, ends[1])
        open_ = sink._open
        assert open_ is not None
        account = open_._account
        keys = [account.key, *map(account.member_key, range(3))]
        count = grow(admin, account.offsets_topic, *keys)
        write(sink, log, ends[2])  # while it runs
        sink.close()
        grow(admin, account.offsets_topic, *keys, among=count)
        sink = opened(sink_of(kafka, topic_name, 3), log)
        assert sink.position("0") == ends[2]
        write(sink, log, ends[3])
        sink.close()
        assert unordered(content(kafka, topic_name)) == alone(kafka, topic_name, log, ends[3])


def hinted(told: str, command: str) -> list[str]:
    """Return the arguments of the command in an error's hint."""
    (found,) = set(re.findall(rf"`tailrace (offsets {command} [^`]*)`", " ".join(told.split())))
    return shlex.split(found)


@pytest.mark.follows("sink_damaged", "offsets_unreadable")
@pytest.mark.parametrize(("way_out", "then"), [("set", ALL), ("reset", ALL * 2)])
def test_a_topic_that_another_program_writes_to_is_replaced_by_another_one(
    orders: Orders, kafka: EmbeddedKafka, topic_name: str, way_out: str, then: list[int]
) -> None:
    assert orders.replay() == ALL
    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap, "log_level": 0, "partitioner": "murmur2_random"}
    )
    producer.produce(
        f"{topic_name}-offsets", b"no JSON", orders.account.key, headers={"tailrace.offset": "1"}
    )
    producer.flush(60)
    told = run("replay", orders.file, "--sink", "out", status=1)
    assert "offsets_unreadable" in told
    assert "give offsets_topic a name of its own" in " ".join(told.split())
    orders.file.write_text(orders.file.read_text().replace(f"{topic_name}-offsets", f"{topic_name}-own"))
    # The new topic does not have the position: a command sets it.
    told = run("replay", orders.file, "--sink", "out", status=1)
    assert "sink_damaged" in told
    follow = [str(orders.file) if word == "FILE" else word for word in hinted(told, way_out)]
    run(*follow, "--yes")
    assert orders.replay() == then
    assert orders.replay() == then


@pytest.mark.follows("sink_damaged")
@pytest.mark.parametrize(("way_out", "then"), [("set", ALL), ("reset", ALL * 2)])
def test_a_lost_offset_stops_the_sink_until_a_command_sets_it(
    orders: Orders, admin: AdminClient, topic_name: str, way_out: str, then: list[int]
) -> None:
    assert orders.replay() == ALL
    delete(admin, f"{topic_name}-offsets")
    for _ in range(2):  # it does not recover by itself
        told = run("replay", orders.file, "--sink", "out", status=1)
        assert "sink_damaged" in told
        assert f"the log knows that {orders.ends[-1]} was committed" in told
    follow = [str(orders.file) if word == "FILE" else word for word in hinted(told, way_out)]
    run(*follow, "--yes")
    assert orders.replay() == then
    assert orders.replay() == then


@pytest.mark.follows("sink_damaged")
def test_sinks_whose_names_were_exchanged_stop_and_continue_when_the_names_are_restored(
    orders: Orders, kafka: EmbeddedKafka
) -> None:
    held = yaml.safe_load(orders.file.read_text())
    [sink] = held["sinks"]
    late, out = ({**sink, "name": name, "group": name, "topic_prefix": name + orders.name} for name in "ab")

    def replay(name: str, status: int, *sinks: dict[str, Any]) -> str:
        orders.file.write_text(yaml.safe_dump({**held, "sinks": list(sinks)}))
        return " ".join(run("replay", orders.file, "--sink", name, status=status).split())

    replay("a", 0, late, out)
    log = LogOfOrders(orders.directory / "log")
    log.number = len(orders.ends)
    log.insert(8)
    log.close()
    replay("b", 0, late, out)
    for name in "ab":
        told = replay(name, 1, {**late, "name": "b"}, {**out, "name": "a"})
        assert f"the sink of this name had group '{name}'" in told
    for name in "ab":
        replay(name, 0, late, out)
        assert written(kafka, f"{name}{orders.name}.public.orders") == [*ALL, 8]


@pytest.mark.follows("sink_damaged")
def test_a_kafka_sink_does_not_continue_for_a_sink_of_files_of_its_name(
    orders: Orders, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    held = yaml.safe_load(orders.file.read_text())
    [sink] = held["sinks"]
    files = {"type": "jsonl", "name": sink["name"], "path": str(tmp_path / "lines")}
    orders.file.write_text(yaml.safe_dump({**held, "sinks": [files]}))
    run("replay", orders.file, "--sink", sink["name"])
    orders.file.write_text(yaml.safe_dump(held))
    told = " ".join(run("replay", orders.file, "--sink", sink["name"], status=1).split())
    assert "the sink of this name had type 'jsonl': give this one another name" in told
    orders.file.write_text(yaml.safe_dump({**held, "sinks": [{**sink, "name": "another"}]}))
    run("replay", orders.file, "--sink", "another")
    assert written(kafka, f"{orders.name}.public.orders") == ALL


def test_an_offset_that_went_back_stops_the_sink_unless_a_command_set_it(
    orders: Orders, kafka: EmbeddedKafka
) -> None:
    assert orders.replay() == ALL
    account = orders.account
    offsets = account.offsets()
    offsets.require(create=False)
    other = account.writer(offsets)
    other.open()
    other.commit({"log_id": orders.log_id, "log_offset": orders.ends[0]})
    other.close()
    assert "sink_damaged" in run("replay", orders.file, "--sink", "out", status=1)
    run("offsets", "set", orders.file, "--to", orders.ends[0], "--yes")
    assert orders.replay() == [*ALL, 3, 4, 5, 6, 7]


@pytest.mark.follows("offsets_unreadable")
@pytest.mark.parametrize(("way_out", "then"), [("set", ALL), ("reset", ALL * 2)])
def test_two_offsets_of_unknown_order_stop_the_pipeline(
    orders: Orders, kafka: EmbeddedKafka, admin: AdminClient, topic_name: str, way_out: str, then: list[int]
) -> None:
    assert orders.replay() == ALL
    key, topic = orders.account.key, f"{topic_name}-offsets"
    elsewhere = (partition_of(key, 25) + 1) % 25
    value = next(m.value for m in read_topic(kafka.bootstrap, topic) if m.key == key)
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    producer.produce(topic, value, key, elsewhere)
    producer.flush(60)
    grow(admin, topic, key, but=elsewhere)
    told = run("replay", orders.file, "--sink", "out", status=1)
    assert "offsets_unreadable" in told
    follow = [{"FILE": str(orders.file), "NAME": "out", "…": str(orders.ends[-1])}.get(word, word)
              for word in hinted(told, way_out)]  # fmt: skip
    assert "--sink" in follow
    run(*follow, "--yes")
    assert orders.replay() == then
    assert orders.replay() == then


@pytest.mark.ci
def test_the_topic_is_created_for_three_brokers_and_unsuitable_settings_are_reported(tmp_path: Path) -> None:
    with EmbeddedKafka(find_jars(), nodes=3) as cluster:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
        poor = NewTopic("poor", 1, 1, config={"cleanup.policy": "compact"})
        admin.create_topics([poor])["poor"].result(60)
        for name, expected in (("good", []), ("poor", ["kept on 1 of 3 brokers", "has segments of"])):
            (tmp_path / name).mkdir()
            orders = Orders(tmp_path / name, cluster, f"pipeline-{name}", offsets_topic=name)
            (pipeline,) = orders.config.pipelines
            sink: Any = pipeline.sinks[0]
            assert list(cluster_findings(sink, pipeline)) == [] or name == "poor"
            assert orders.replay() == ALL
            told = [f"{found.message} {found.repair}" for found in cluster_findings(sink, pipeline)]
            assert [True for part, one in zip(expected, told, strict=True) if part in one] == [True] * len(
                told
            )
        partitions = admin.list_topics("good", 60).topics["good"].partitions.values()
        assert [len(partition.replicas) for partition in partitions] == [3] * 25
        resource = ConfigResource(ResourceType.TOPIC, "good")
        settings = admin.describe_configs([resource])[resource].result(60)
        assert settings["cleanup.policy"].value == "compact"
        assert int(settings["segment.bytes"].value) <= 1 << 26
        assert settings["min.insync.replicas"].value == "2"


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """The spans of the topic that are read."""
    found: list[range] = []
    read = compacted_read.newest_of

    def noted(settings: Any, topic: str, spans: Any, *others: Any) -> Any:
        found.extend(span for span in spans.values() if span)
        return read(settings, topic, spans, *others)

    monkeypatch.setattr("tailrace.kafka.offsets.topic.newest_of", noted)
    return found


def test_no_record_of_the_topic_is_read_twice_at_a_start(orders: Orders, places: list[range]) -> None:
    assert orders.replay() == ALL
    del places[:]
    assert orders.replay() == ALL
    read = [place for span in places for place in span]
    assert read
    assert sorted(set(read)) == sorted(read)


def test_no_task_reads_what_the_driver_has_read(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[tuple[int, range]] = []
    read = OffsetsTopic._take_in

    def noted(self: OffsetsTopic, given: Any, isolation: str) -> None:
        spans.extend((number, span) for number, span in given.items() if span)
        read(self, given, isolation)

    with HandmadeLog(tmp_path / "log") as log:
        ends = fill(log, 30)
        sink = opened(sink_of(kafka, topic_name, 2), log)
        for end in ends[:-1]:
            write(sink, log, end)
        monkeypatch.setattr(OffsetsTopic, "_take_in", noted)
        write(sink, log, ends[-1])
        sink.close()
    assert spans
    assert max(len(span) for _, span in spans) < 10  # of some sixty records and as many transaction markers


def test_an_open_transaction_of_another_pipeline_does_not_block_a_start(
    kafka: EmbeddedKafka, topic_name: str
) -> None:
    shared = f"{topic_name}-shared"
    name, other = _in_one_partition(topic_name)
    first = writer(kafka.bootstrap, name, offsets_topic=shared)
    first.open()
    first.commit({"number": 1})
    first.close()
    theirs = writer(kafka.bootstrap, other, offsets_topic=shared)
    theirs.open()
    theirs._begin()  # type: ignore[attr-defined]
    theirs._send_offsets({theirs._task.key: {"number": 7}})  # type: ignore[attr-defined]
    theirs._sender.flush()  # type: ignore[attr-defined]
    # It ends within a minute, and the start does not wait for it.
    mine = writer(kafka.bootstrap, name, offsets_topic=shared, timeout_s=10.0)
    assert mine.open() == {"number": 1}
    # But an offset after its begin can't be distinguished from an uncommitted one.
    mine.commit({"number": 2})
    mine.close()
    again = writer(kafka.bootstrap, name, offsets_topic=shared, timeout_s=2.0)
    with pytest.raises(TailraceError) as held_up:
        again.open()
    again.close()
    assert held_up.value.kind is Kind.SINK_WRITE_FAILED  # which is retried
    assert "transaction" in held_up.value.message
    theirs.close()
    last = writer(kafka.bootstrap, name, offsets_topic=shared)
    assert last.open() == {"number": 2}
    last.close()


def _in_one_partition(topic_name: str) -> tuple[str, str]:
    """Return two names whose offsets are in one partition."""
    first = f"{topic_name}-a"
    home = partition_of(source_key(f"test-{first}", {"task": "0"}), 25)
    names = (f"{topic_name}-b{number}" for number in range(10_000))
    return first, next(
        name for name in names if partition_of(source_key(f"test-{name}", {"task": "0"}), 25) == home
    )


def test_a_foreign_record_with_the_key_of_an_offset_is_ignored(
    orders: Orders, kafka: EmbeddedKafka, topic_name: str
) -> None:
    assert orders.replay() == ALL
    producer = Producer(
        {"bootstrap.servers": kafka.bootstrap, "log_level": 0, "partitioner": "murmur2_random"}
    )
    for value in (b'{"log_id":"%s","log_offset":0}' % orders.log_id.encode(), b"anything", None):
        producer.produce(f"{topic_name}-offsets", value, orders.account.key)
        producer.flush(60)
        assert orders.shown()["log_offset"] == orders.ends[-1]
        assert orders.replay() == ALL


def test_every_offset_record_has_the_marking_header(
    orders: Orders, kafka: EmbeddedKafka, topic_name: str
) -> None:
    orders.replay()
    run("offsets", "reset", orders.file, "--yes")
    found = read_topic(kafka.bootstrap, f"{topic_name}-offsets")
    assert found
    assert {tuple(message.headers.items()) for message in found} == {(("tailrace.offset", "1"),)}


@pytest.mark.parametrize(
    "sink",
    [
        {"routes": [{"tables": ["*.*"], "topic": "{prefix}-offsets"}]},
        {"routes": [{"tables": ["other.*"], "topic": "{prefix}-engines"}]},
        {"routes": [{"tables": ["public.*"], "topic": "{prefix}-second"}]},
        {"routes": [{"tables": ["*.*"], "topic": "__consumer_offsets"}]},
        {"transformations": [{"type": "route", "regex": "never", "replacement": "NAME-offsets"}]},
        {"dead_letter_topic": "NAME-offsets"},
        {"provide_transaction_metadata": True, "transaction_topic": "NAME-offsets"},
        {"heartbeat_interval_ms": 1000, "heartbeat_topic_prefix": "a", "offsets_topic": "a.NAME"},
        {"schema_changes_topic": "NAME-offsets"},
    ],
)
def test_a_file_that_sends_records_into_a_topic_of_offsets_is_refused_before_anything_is_written(
    tmp_path: Path, kafka: EmbeddedKafka, topic_name: str, sink: dict[str, Any]
) -> None:
    sink = json.loads(json.dumps(sink).replace("NAME", topic_name))
    storage = {"type": "kafka", "bootstrap_servers": kafka.bootstrap, "topic": f"{topic_name}-engines"}
    orders = Orders(tmp_path, kafka, topic_name, engine={"offset_storage": storage}, **sink)
    second = {"type": "kafka", "name": "second", "group": "g", "bootstrap_servers": kafka.bootstrap}
    section = json.dumps({**second, "offsets_topic": f"{topic_name}-second"})
    orders.file.write_text(orders.file.read_text().rstrip().removesuffix("]") + f", {section}]\n")
    (pipeline,) = orders.config.pipelines
    chosen: Any = pipeline.sinks[0]
    (found,) = topic_findings(chosen, pipeline, [])
    assert found.kind is Kind.SINK_MISCONFIGURED
    told = run("replay", orders.file, "--sink", "out", status=1)
    assert "sink_misconfigured" in told
    assert "it holds offsets" in told
    shown = json.loads(run("offsets", "show", orders.file, "--json"))["offsets"]
    assert {entry["log_offset"] for entry in shown} == {None}


def test_a_row_that_chooses_the_topic_of_offsets_is_refused_with_its_place(
    tmp_path: Path, kafka: EmbeddedKafka, topic_name: str
) -> None:
    by_content = {"type": "route", "topic": f"case when after.id = 3 then '{topic_name}-offsets' end"}
    orders = Orders(
        tmp_path, kafka, topic_name, transformations=[by_content], transaction_boundary="transaction"
    )
    told = run("replay", orders.file, "--sink", "out", status=1)
    assert "it holds offsets" in told
    assert "table=public.orders" in told
    assert "log_offset=" in told
    assert orders.shown()["log_offset"] == orders.ends[0]
    # As the hint says: route such rows to another topic.
    aside = {"type": "route", "regex": f"{topic_name}-offsets", "replacement": f"{topic_name}.aside"}
    text = orders.file.read_text()
    orders.file.write_text(
        text.replace(json.dumps(by_content), f"{json.dumps(by_content)}, {json.dumps(aside)}")
    )
    assert orders.replay() == [1, 2, 4, 5, 6, 7]
    assert written(kafka, f"{topic_name}.aside") == [3]
