"""Follows the hints of errors of Kafka sinks and of offsets in Kafka, as they are printed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tailrace import Engine
from tailrace.errors import Kind, TailraceError
from tailrace.sources.postgres.slot.way_out import with_way_out
from tailrace.testing import LinesSource
from tailrace.transforms import factory
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.orders import Orders, run, written
from tests.support.kafka.shares_rig import NOTES, ORDERS, opened, records, sink_of, write
from tests.support.kafka_cluster import alter
from tests.support.orders_log import LogOfOrders
from tests.support.spark.wire import HandmadeLog, insert, truncate
from tests.support.wait import wait_until

ALL = [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture
def make(tmp_path: Path, kafka: EmbeddedKafka, topic_name: str) -> Callable[..., Orders]:
    """Return a function that writes the file with other settings of the sink, over the same log."""

    def made(directory: str = "here", **sink: Any) -> Orders:
        path = tmp_path / directory
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return Orders(path, kafka, topic_name, **sink)

    return made


def refused(kind: str, orders: Orders) -> str:
    """Bring the sink to the log's end, which fails; return the printed error in one line."""
    said = " ".join(run("replay", orders.file, "--sink", "out", status=1).split())
    assert kind in said
    return said


# ---------------------------------------------------------------------- topics


@pytest.mark.follows("slot_missing")
def test_a_new_log_continues_in_the_topics_of_the_lost_one(make: Callable[..., Orders]) -> None:
    orders = make()
    assert orders.replay() == ALL
    (pipeline,) = orders.config.pipelines
    hint = with_way_out(TailraceError(Kind.SLOT_MISSING, "look at the slot"), pipeline).hint
    steps = re.findall(r"\(\d\) (.+?)(?= \(\d\) |$)", hint)
    for step in steps[:-1]:
        program, *words = [str(orders.file) if word == "FILE" else word for word in shlex.split(step)]
        if program == "tailrace":
            run(*words)
        else:
            subprocess.run([program, *words], check=True)
    assert steps[-1].startswith("start the pipeline again")
    log = LogOfOrders(orders.directory / "log")
    log.insert(8)
    log.close()
    assert orders.replay() == [*ALL, 8]


@pytest.mark.follows("sink_misconfigured")
def test_a_topic_that_does_not_exist_is_created(make: Callable[..., Orders]) -> None:
    make().account.offsets().require(create=True)
    orders = make(create_topics=False)
    said = refused("sink_misconfigured", orders)
    assert "set create_topics: true" in said, said
    assert make(create_topics=True).replay() == ALL


@pytest.mark.follows("sink_misconfigured")
def test_settings_of_topics_are_corrected(make: Callable[..., Orders]) -> None:
    rule = {"tables": ["*.*"], "settings": {"no.such.setting": "1"}}
    assert "correct `topics` of the sink" in refused("sink_misconfigured", make(topics=[rule]))
    assert make(topics=[{**rule, "settings": {"retention.ms": "7200000"}}]).replay() == ALL


@pytest.mark.follows("sink_misconfigured")
def test_a_topic_whose_name_collides_with_another_is_renamed(
    make: Callable[..., Orders], kafka: EmbeddedKafka
) -> None:
    orders = make()
    other = f"{orders.name}_public.orders"
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    admin.create_topics([NewTopic(other, 1, 1)])[other].result(60)
    said = refused("sink_misconfigured", orders)
    assert "differs only by '.' or '_': give the records another topic, with `routes`" in said
    orders = make(routes=[{"tables": ["public.orders"], "topic": "{prefix}.others"}])
    run("replay", orders.file, "--sink", "out")
    assert written(kafka, f"{orders.name}.others") == ALL


@pytest.mark.follows("sink_misconfigured")
def test_a_compacted_topic_accepts_no_records_without_a_key(
    tmp_path: Path, kafka: EmbeddedKafka, topic_name: str
) -> None:
    rule = {"tables": ["*.*"], "settings": {"cleanup.policy": "compact"}}
    with HandmadeLog(tmp_path / "log") as log:
        end = log.commit(NOTES, insert(2, 1, "one"), insert(2, 2, "two"))
        sink = opened(sink_of(kafka, topic_name, 0, topics=[rule]), log)
        with pytest.raises(TailraceError) as caught:
            write(sink, log, end)
        sink.close()
        assert caught.value.kind is Kind.SINK_MISCONFIGURED
        assert "or change the topic's cleanup.policy" in caught.value.hint
        topic = f"{topic_name}.public.notes"
        assert caught.value.context["topic"] == topic
        alter(kafka, topic, "cleanup.policy", "delete")
        sink = opened(sink_of(kafka, topic_name, 0), log)
        write(sink, log, end)
        sink.close()
    assert [key for key, _ in records(kafka, topic)] == [None, None]


@pytest.mark.follows("sink_misconfigured")
def test_a_truncate_is_dropped_before_a_compacted_topic(
    tmp_path: Path, kafka: EmbeddedKafka, topic_name: str
) -> None:
    rule = {"tables": ["*.*"], "settings": {"cleanup.policy": "compact"}}
    with HandmadeLog(tmp_path / "log") as log:
        end = log.commit(ORDERS, insert(1, 1, "one"), truncate(1), insert(1, 2, "two"))
        sink = opened(sink_of(kafka, topic_name, 0, topics=[rule]), log)
        with pytest.raises(TailraceError) as caught:
            write(sink, log, end)
        sink.close()
        assert caught.value.kind is Kind.SINK_MISCONFIGURED
        step = re.search(r"(\{type: filter.*?\})", caught.value.hint)
        assert step is not None, caught.value.hint
        chain = factory.build([yaml.safe_load(step[1])])
        sink = opened(sink_of(kafka, topic_name, 0, chain=chain), log)
        write(sink, log, end)
        sink.close()
    assert [key for key, _ in records(kafka, f"{topic_name}.public.orders")] == [b'{"id":1}', b'{"id":2}']


@pytest.mark.follows("sink_misconfigured")
def test_an_offsets_topic_that_is_not_compacted_is_altered(
    make: Callable[..., Orders], kafka: EmbeddedKafka
) -> None:
    orders = make()
    orders.account.offsets().require(create=True)
    alter(kafka, f"{orders.name}-offsets", "cleanup.policy", "delete")
    said = refused("sink_misconfigured", orders)
    found = re.search(r"--entity-name (\S+) --add-config (\S+?)=(\w+)", said)
    assert found is not None, said
    alter(kafka, *found.groups())
    assert orders.replay() == ALL


@pytest.mark.follows("sink_record_too_large")
@pytest.mark.parametrize("way", ["limit raised", "dead letters"])
def test_a_record_larger_than_its_topics_limit(
    make: Callable[..., Orders], kafka: EmbeddedKafka, way: str
) -> None:
    topics = [{"tables": ["*.*"], "settings": {"max.message.bytes": "200"}}]
    orders = make(topics=topics)
    said = refused("sink_record_too_large", orders)
    assert "raise max.message.bytes of the topic and message.max.bytes in `options`" in said, said
    if way == "limit raised":
        alter(kafka, orders.topic, "max.message.bytes", "1000000")
        assert orders.replay() == ALL
    else:
        assert "set dead_letter_topic" in said
        orders = make(topics=topics, dead_letter_topic=f"{orders.name}-graves")
        run("replay", orders.file, "--sink", "out")
        assert orders.shown()["log_offset"] == orders.ends[-1]


# ---------------------------------------------------------------------- two at once


@pytest.mark.follows("sink_preempted")
@pytest.mark.parametrize("way", ["stopped", "another group"])
def test_the_same_pipeline_runs_twice(make: Callable[..., Orders], way: str) -> None:
    orders = make()
    offsets = orders.account.offsets()
    offsets.require(create=True)
    first, second = (orders.account.writer(offsets) for _ in range(2))
    first.open()
    second.open()
    with pytest.raises(TailraceError) as raised:
        first.commit({"log_id": orders.log_id, "log_offset": orders.ends[0]})
    assert raised.value.kind is Kind.SINK_PREEMPTED
    assert "stop one of them, or give it another name or `group`" in raised.value.hint
    first.close()
    if way == "stopped":
        second.close()
        assert orders.replay() == ALL
    else:
        assert make("there", group="another").replay() == ALL
        second.commit({"log_id": orders.log_id, "log_offset": orders.ends[0]})  # still possible
        second.close()


@pytest.mark.follows("offsets_preempted")
@pytest.mark.parametrize("other", [{"name": "another"}, {"group": "another"}])
def test_two_engines_of_one_name(kafka: EmbeddedKafka, topic_name: str, other: dict[str, str]) -> None:
    def engine(source: LinesSource, got: list[int], name: str = "shop", **storage: str) -> Engine:
        kept = {"type": "kafka", "bootstrap_servers": kafka.bootstrap, "topic": f"{topic_name}-offsets"}
        options = {
            "offset_storage": {**kept, **storage},
            "offset_commit": {"policy": "always", "timeout_ms": 30_000},
            "atomic_source_offset_commit": True,
        }

        def handle(record: Any) -> None:
            got.append(record.after["number"])

        return Engine(connector=source, name=name, on_record=handle, options=options)

    got: list[list[int]] = [[], [], []]
    sources = [LinesSource(20, ends=False), LinesSource(20, ends=False), LinesSource(20)]
    first = engine(sources[0], got[0])
    first.start()
    wait_until(lambda: sources[0].committed["0-0"][-1:] == [20], 60, "the first engine's commit")
    with engine(sources[1], got[1]):
        for source in sources[:2]:
            source.append(10)
        wait_until(lambda: len(got[1]) >= 10, 60, "the records of the second")
        with pytest.raises(TailraceError) as ended:
            first.wait(60)
        assert ended.value.kind is Kind.OFFSETS_PREEMPTED
        assert ended.value.hint == "stop one of them, or give it another name, or another `group`"
        engine(sources[2], got[2], **other).run()
        sources[1].append(10)
        wait_until(lambda: sources[1].committed["0-0"][-1:] == [40], 60, "the second engine's commit")
    assert got[2] == list(range(1, 21))


# ---------------------------------------------------------------------- an older log


@pytest.mark.follows("sink_ahead_of_log")
@pytest.mark.parametrize("way", ["newer log restored", "offset taken back"])
def test_a_log_restored_from_an_older_copy(make: Callable[..., Orders], way: str) -> None:
    orders = make()
    log, older, newer = (orders.directory / name for name in ("log", "older", "newer"))
    shutil.copytree(log, older)
    writing = LogOfOrders(log)
    writing.number = len(orders.ends)
    writing.insert(8)
    writing.close()
    assert orders.replay() == [*ALL, 8]
    log.rename(newer)
    older.rename(log)
    said = refused("sink_ahead_of_log", orders)
    assert "restore the newer log, or" in said
    if way == "newer log restored":
        shutil.rmtree(log)
        newer.rename(log)
        assert orders.replay() == [*ALL, 8]
    else:
        found = re.search(r"`tailrace (offsets reset FILE .*?)`", said)
        assert found is not None, said
        words = [str(orders.file) if word == "FILE" else word for word in shlex.split(found[1])]
        run(*words, "--yes")
        assert orders.replay() == [*ALL, 8, *ALL]
