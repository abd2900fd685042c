"""`tailrace offsets` on a log made by hand and a real broker: what it shows, sets, resets and refuses."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from tailrace.changelog.lock import take_lock
from tailrace.config.engine_options import OffsetStorage
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.offsets.store import KafkaOffsetStore
from tailrace.kafka.producer.writer import AtomicWriter
from tailrace.pipeline.log.consumer import partition_of
from tailrace.pipeline.run import Run
from tailrace.ranges.batches import offset_of
from tailrace_servers.kafka import EmbeddedKafka, find_jars
from tests.support.kafka.orders import Orders, run
from tests.support.orders_log import LogOfOrders
from tests.support.pipeline.staged import running
from tests.support.wait import wait_until


@pytest.fixture
def orders(tmp_path: Path, kafka: EmbeddedKafka, topic_name: str) -> Orders:
    return Orders(tmp_path, kafka, topic_name)


def test_offsets_are_shown_set_in_both_directions_and_reset(orders: Orders) -> None:
    nothing = orders.shown()
    assert nothing["log_offset"] is None
    assert "nothing committed" in run("offsets", "show", orders.file)
    assert orders.replay() == [1, 2, 3, 4, 5, 6, 7]
    shown = orders.shown()
    assert (shown["sink"], shown["task"], shown["log_offset"]) == ("out", "0", orders.ends[-1])
    assert (shown["lag_bytes"], shown["is_of_this_log"], shown["log_id"]) == (0, True, orders.log_id)
    assert shown["committed_us"] > 1_700_000_000_000_000
    assert shown.keys() == nothing.keys()

    # Backwards: later changes come again.
    done = json.loads(run("offsets", "set", orders.file, "--to", orders.ends[1], "--yes", "--json"))
    assert (done["effect"], done["before"], done["after"]) == ("repeats", orders.ends[-1], orders.ends[1])
    assert done["changes"] == 4
    assert orders.shown()["log_offset"] == orders.ends[1]
    assert orders.replay() == [1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]

    # Reset: everything comes again, except for what is then skipped by `set`.
    told = run("offsets", "reset", orders.file, "--yes")
    assert "about 7 changes from the log's start on are written to the topics a second time" in told
    assert orders.shown()["log_offset"] is None
    refused = run("offsets", "set", orders.file, "--to", orders.ends[2], "--yes", status=2)
    assert "about 6 changes" in refused
    assert "would never be written" in refused
    assert "--skip-changes" in refused
    assert orders.shown()["log_offset"] is None
    run("offsets", "set", orders.file, "--to", orders.ends[2], "--yes", "--skip-changes")
    assert orders.replay()[11:] == [7]


@pytest.mark.follows("log_range_invalid")
def test_an_offset_is_set_only_to_a_boundary_of_this_log(orders: Orders) -> None:
    inside = orders.ends[2] - 1
    told = run("offsets", "set", orders.file, "--to", inside, "--yes", status=1)
    assert "log_range_invalid" in told
    found = re.search(r"the transaction begins at (\d+): set it to that", told)
    assert found is not None, told
    run("offsets", "set", orders.file, "--to", found[1], "--yes", "--skip-changes")
    assert orders.shown()["log_offset"] == orders.ends[1]
    beyond = run("offsets", "set", orders.file, "--to", orders.ends[-1] + 1, "--yes", status=1)
    assert "log_range_invalid" in beyond
    assert "read --to" in run("offsets", "set", orders.file, "--to", "soon", "--yes", status=2)
    run("offsets", "set", orders.file, "--to", "2026-01-01T00:00:03Z", "--yes", "--skip-changes")
    assert orders.shown()["log_offset"] == orders.ends[1]
    for before in ("0/1", "2020-01-01"):
        told = run("offsets", "set", orders.file, "--to", before, "--yes")
        assert "the log has nothing before this point: the sink continues at the log's start" in told
    run("offsets", "set", orders.file, "--to", orders.ends[1], "--yes", "--skip-changes")
    # There is nobody to answer a question.
    assert "--yes" in run("offsets", "reset", orders.file, status=2)
    assert "--yes" in run("offsets", "reset", orders.file, "--json", status=2)
    assert orders.shown()["log_offset"] == orders.ends[1]


def test_nothing_is_changed_while_the_pipeline_runs_and_a_process_elsewhere_is_fenced(orders: Orders) -> None:
    held = take_lock(orders.task_path)
    try:
        for command in (("set", orders.file, "--to", orders.ends[0]), ("reset", orders.file)):
            told = run("offsets", *command, "--yes", status=1)
            assert "log_locked" in told
            assert "the pipeline is running" in told
    finally:
        os.close(held)
    account = orders.account
    offsets = account.offsets()
    offsets.require(create=True)
    elsewhere = account.writer(offsets)
    elsewhere.open()
    run("offsets", "set", orders.file, "--to", orders.ends[0], "--yes", "--skip-changes")
    with pytest.raises(TailraceError) as refused:
        elsewhere.commit({"log_id": orders.log_id, "log_offset": orders.ends[3]})
    assert refused.value.kind is Kind.SINK_PREEMPTED
    elsewhere.close()
    assert orders.shown()["log_offset"] == orders.ends[0]


def test_an_offset_of_another_log_is_shown_as_such_and_can_be_reset(orders: Orders) -> None:
    account = orders.account
    offsets = account.offsets()
    offsets.require(create=True)
    other = account.writer(offsets)
    other.open()
    other.commit({"log_id": "another", "log_offset": 5})
    other.close()
    shown = orders.shown()
    assert (shown["is_of_this_log"], shown["log_id"], shown["log_offset"]) == (False, "another", 5)
    assert "of another log" in run("offsets", "show", orders.file)
    second = {"type": "kafka", "name": "second", "group": "g", "bootstrap_servers": orders.kafka.bootstrap}
    orders.file.write_text(orders.file.read_text().rstrip().removesuffix("]") + f", {json.dumps(second)}]\n")
    told = " ".join(run("replay", orders.file, "--sink", "out", status=1).split())
    assert "sink_foreign" in told
    command = re.search(r"`tailrace (offsets reset .+?)`", told)
    assert command is not None, told
    words = [str(orders.file) if word == "FILE" else word for word in command[1].split()]
    done = json.loads(run(*words, "--yes", "--json"))
    assert (done["effect"], done["changes"]) == ("unknown", None)
    assert orders.replay() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("atomic", [False, True])
def test_an_engines_own_offset_in_a_topic_is_set_and_reset(
    tmp_path: Path, kafka: EmbeddedKafka, topic_name: str, atomic: bool
) -> None:
    topic = {"type": "kafka", "bootstrap_servers": kafka.bootstrap, "topic": f"{topic_name}-engines"}
    options = {"offset_storage": topic, "atomic_source_offset_commit": atomic}
    orders = Orders(tmp_path, kafka, topic_name, engine=options)
    (pipeline,) = orders.config.pipelines
    store = KafkaOffsetStore(OffsetStorage.model_validate(topic), orders.name, atomic=atomic)
    store.start()
    store.write([(partition_of(pipeline), offset_of(orders.log_id, orders.ends[-1]))], 60)

    def of_engine() -> int | None:
        shown = json.loads(run("offsets", "show", orders.file, "--json"))["offsets"]
        found = [entry["log_offset"] for entry in shown if "engine" in entry]
        return found[0] if found else None

    assert of_engine() == orders.ends[-1]
    for command in (("set", orders.file, "--to", orders.ends[0]), ("reset", orders.file)):
        assert "--yes" in run("offsets", *command, "--engine", status=2)
        assert "two" in run("offsets", *command, "--engine", "--sink", "out", "--yes", status=2)
        held = take_lock(orders.task_path)
        assert "log_locked" in run("offsets", *command, "--engine", "--yes", status=1)
        os.close(held)
    assert of_engine() == orders.ends[-1]
    set_back = ("offsets", "set", orders.file, "--to", orders.ends[1], "--engine", "--yes", "--json")
    done = json.loads(run(*set_back))
    assert (done["engine"], done["effect"], done["changes"]) == (orders.name, "repeats", 4)
    assert (done["before"], done["after"], of_engine()) == (orders.ends[-1], orders.ends[1], orders.ends[1])
    if atomic:  # an engine elsewhere can no longer write after it
        with pytest.raises(TailraceError) as refused:
            store.write([(partition_of(pipeline), offset_of(orders.log_id, orders.ends[2]))], 60)
        assert refused.value.kind is Kind.OFFSETS_PREEMPTED
    store.stop()
    inside = run("offsets", "set", orders.file, "--to", orders.ends[2] - 1, "--engine", "--yes", status=1)
    assert "log_range_invalid" in inside
    skipping = run("offsets", "set", orders.file, "--to", orders.ends[2], "--engine", "--yes", status=2)
    assert "about 3 changes" in skipping
    assert "would never be passed to the handler" in skipping
    assert "are passed to the handler again" in run("offsets", "reset", orders.file, "--engine", "--yes")
    assert of_engine() is None
    assert orders.shown()["log_offset"] is None  # the sink's offset, which did not change


def test_an_engines_offset_that_is_not_in_kafka_is_not_changed(orders: Orders) -> None:
    told = run("offsets", "reset", orders.file, "--engine", "--yes", status=2)
    assert "not kept in Kafka (engine.offset_storage: log)" in told


def test_pipelines_share_an_offsets_topic_or_get_their_own_compacted_one(
    tmp_path: Path, kafka: EmbeddedKafka, topic_name: str
) -> None:
    shared = f"{topic_name}-shared"
    names = [
        (f"{topic_name}-a", shared),
        (f"{topic_name}-b", shared),
        (f"{topic_name}-c", f"{topic_name}-own"),
    ]
    pipelines = []
    for name, topic in names:
        (tmp_path / name).mkdir()
        pipelines.append(Orders(tmp_path / name, kafka, name, offsets_topic=topic))
    for each in pipelines:
        assert each.replay() == [1, 2, 3, 4, 5, 6, 7]
    run("offsets", "reset", pipelines[0].file, "--yes")
    assert [each.shown()["log_offset"] for each in pipelines] == [None, *[pipelines[0].ends[-1]] * 2]
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    for topic in {topic for _, topic in names}:
        resource = ConfigResource(ResourceType.TOPIC, topic)
        settings = admin.describe_configs([resource])[resource].result(60)
        assert settings["cleanup.policy"].value == "compact"
        assert len(admin.list_topics(topic, timeout=60).topics[topic].partitions) == 25
    alter = ConfigResource(ResourceType.TOPIC, shared)
    alter.add_incremental_config(
        ConfigEntry("cleanup.policy", "delete", incremental_operation=AlterConfigOpType.SET)
    )
    admin.incremental_alter_configs([alter])[alter].result(60)
    # From then on neither a sink nor a command writes there.
    for command in (
        ("replay", pipelines[1].file, "--sink", "out"),
        ("offsets", "reset", pipelines[1].file, "--yes"),
    ):
        told = run(*command, status=1)
        assert "sink_misconfigured" in told
        assert f"--entity-name {shared} --add-config cleanup.policy=compact" in told


def test_an_uncommitted_offset_counts_only_with_read_uncommitted(
    tmp_path: Path, kafka: EmbeddedKafka, topic_name: str
) -> None:
    careful = Orders(tmp_path, kafka, topic_name)
    account = careful.account
    offsets = account.offsets()
    offsets.require(create=True)
    died = account.writer(offsets)
    assert isinstance(died, AtomicWriter)
    died.open()
    died.commit({"log_id": careful.log_id, "log_offset": careful.ends[0]})
    died._begin()
    died._send_offsets({account.key: {"log_id": careful.log_id, "log_offset": careful.ends[2]}})
    died._producer.flush(60)
    died.close()  # aborts the transaction
    assert careful.shown()["log_offset"] == careful.ends[0]
    text = careful.file.read_text()
    careful.file.write_text(
        text.replace('"name": "out"', '"name": "out", "consumer_isolation_level": "read_uncommitted"')
    )
    assert careful.shown()["log_offset"] == careful.ends[2]
    assert careful.replay() == [7]  # what lies between is lost, as the docs say


@pytest.mark.slow
def test_an_unreachable_cluster_is_reported_in_the_entry(tmp_path: Path) -> None:
    log = LogOfOrders(tmp_path / "log")
    log.insert(1)
    log.close()
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        "name: shop\nsource: {type: postgresql, dbname: shop}\nlog: {path: ./log}\n"
        "sinks: [{type: kafka, bootstrap_servers: '127.0.0.1:1', offset_flush_timeout_ms: 1000}]\n"
    )
    (entry,) = json.loads(run("offsets", "show", file, "--json"))["offsets"]
    assert entry["error"]["kind"] == "sink_write_failed"
    assert "can't be read" in run("offsets", "show", file)


def test_missing_topics_and_topics_that_cannot_be_created_are_reported(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path
) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    offsets = NewTopic(f"{topic_name}-offsets", 1, 1, config={"cleanup.policy": "compact"})
    admin.create_topics([offsets])[offsets.topic].result(60)
    rule = {"tables": ["*.*"], "settings": {"no.such.setting": "1"}}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("does not exist", {"create_topics": False}),
        ("correct `topics`", {"topics": [rule]}),
    ]
    for at, (told, sink) in enumerate(cases):
        directory = tmp_path / str(at)
        directory.mkdir()
        orders = Orders(directory, kafka, topic_name, **sink)
        said = run("replay", orders.file, "--sink", "out", status=1)
        assert "sink_misconfigured" in said
        assert told in said
        assert orders.shown()["log_offset"] is None


@pytest.mark.slow
def test_a_broker_may_create_topics_automatically(topic_name: str, tmp_path: Path) -> None:
    with EmbeddedKafka(find_jars(), settings={"auto.create.topics.enable": "true"}) as kafka:
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
        offsets = NewTopic(f"{topic_name}-offsets", 1, 1, config={"cleanup.policy": "compact"})
        admin.create_topics([offsets])[offsets.topic].result(60)
        orders = Orders(tmp_path, kafka, topic_name, create_topics=False)
        assert orders.replay() == [1, 2, 3, 4, 5, 6, 7]


def test_a_replay_of_a_running_pipelines_sink_is_refused(orders: Orders) -> None:
    engine = Run(orders.config)
    life = running(engine)

    def is_at(offset: int) -> bool:
        sinks = [sink for source in engine.view().sources for sink in source.sinks]
        return [sink.position for sink in sinks] == [offset]

    wait_until(lambda: is_at(orders.ends[-1]), 60, "the sink")
    wait_until(lambda: '"running"' in run("status", orders.file, "--json"), 60, "the status")
    told = run("replay", orders.file, "--sink", "out", status=1)
    assert "sink_locked" in told
    assert "the pipeline is running, and writes it" in told
    log = LogOfOrders(orders.directory / "log")
    log.number = len(orders.ends)
    end = log.insert(8)
    log.close()
    wait_until(lambda: is_at(end), 60, "the next change")
    engine.stop()
    assert life.join(20)
    assert life.error is None
    assert orders.replay() == [1, 2, 3, 4, 5, 6, 7, 8]
