"""The capture of joined topics in this process: the log after stops, with small queues."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tailrace
from tailrace.cli.main import app
from tailrace.config.sections import LogConfig
from tailrace.errors import Kind, TailraceError
from tailrace.join import capture as capture_module
from tailrace.join import messages as messages_module
from tailrace.join.capture import KafkaJoinCapture
from tailrace.join.connector import reader_of
from tailrace.join.messages import MessageReader
from tailrace.join.options import KafkaJoinSection
from tailrace.join.source import KafkaJoinSource, newest
from tailrace.testing.conformance import check_source
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.converters.registry import FakeRegistry
from tests.support.join.pair import end_of
from tests.support.join.topics_in_memory import TopicsInMemory
from tests.support.join.work import Work
from tests.support.kafka.debezium_topics import JoinTopics
from tests.support.kafka.orders import run
from tests.support.kafka.pipelines import pipeline
from tests.support.kafka.reading import read_topic
from tests.support.postgres import Database
from tests.support.wait import wait_until

WAIT_S = 60
#: The place of a change in its transaction, whichever topic it came by.
PLACE = ("commit_lsn", "ordinal")


def topics_of(kafka: EmbeddedKafka, name: str, seed: int, **more: Any) -> JoinTopics:
    return JoinTopics(kafka, name, seed, keys_are_json=True, **more)


def section_of(topics: JoinTopics, **more: Any) -> KafkaJoinSection:
    return KafkaJoinSection(type="kafka-join", **topics.settings(**more))


class Running:
    """A capture in a thread."""

    def __init__(
        self,
        section: KafkaJoinSection,
        path: Path,
        readers: Callable[[KafkaJoinSection], MessageReader] = reader_of,
    ) -> None:
        self._reader_of = readers
        self.capture = KafkaJoinCapture(section, path, LogConfig(path=path), readers)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.capture.run()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error

    def stop(self) -> None:
        self.capture.stop()
        self._thread.join(WAIT_S)
        if self.error is not None:
            raise self.error

    def until_caught_up(self, section: KafkaJoinSection) -> None:
        reader = self._reader_of(section)
        end = newest(section, reader)
        reader.close()
        try:
            wait_until(
                lambda: self.error is not None or self.capture.caught_up(end), WAIT_S, f"position {end}"
            )
        except AssertionError as error:
            raise AssertionError(self.capture.progress()) from error
        finally:
            self.stop()


def logged(path: Path) -> dict[str, list[tuple[int, str]]]:
    """Return the log's changes as `JoinTopics.expected` has them; check that transactions are in order."""
    shown = CliRunner().invoke(app, ["log", "show", str(path), "--json"])
    assert shown.exit_code == 0, shown.output
    found: dict[str, list[tuple[int, str]]] = defaultdict(list)
    last = 0
    for line in shown.stdout.splitlines():
        change = json.loads(line)
        row, source, commit = change["after"], change["source"], change["position"]["commit_lsn"]
        assert commit >= last or change["op"] == "r"
        last = max(last, commit)
        of = "" if change["op"] == "r" else f"{source['txId']}:{commit}"
        found[row["id"]].append((int(row["number"]), of))
    return found


def test_a_transaction_is_in_the_log_once_after_stops_and_with_small_queues(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int
) -> None:
    topics = topics_of(kafka, topic_name, join_seed)
    topics.snapshot(20)
    for turn in range(5):
        topics.write(15, 30)
        section = section_of(topics, queue_records_max=(3, 10, 100_000)[turn % 3])
        running = Running(section, tmp_path / "log")
        if turn % 2:
            time.sleep(topics.random.uniform(0.0, 1.0))
            running.stop()
        else:
            running.until_caught_up(section)
            assert logged(tmp_path / "log") == topics.expected, join_seed
    assert running.capture.progress().source_end == running.capture.progress().durable.position


@pytest.mark.parametrize("limit", [{}, {"queue_records_max": 10}, {"queue_bytes_max": 4000}], ids=str)
def test_a_transaction_read_in_several_parts_is_complete_after_stops(
    kafka: EmbeddedKafka,
    topic_name: str,
    tmp_path: Path,
    join_seed: int,
    limit: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages_module, "_READ_MAX", 3)
    topics = topics_of(kafka, topic_name, join_seed)
    section = section_of(topics, **limit)
    for _ in range(2):
        topics.write(8, 30)
        stopped = Running(section, tmp_path / "log")
        time.sleep(topics.random.uniform(0.0, 1.0))
        stopped.stop()
        Running(section, tmp_path / "log").until_caught_up(section)
        assert logged(tmp_path / "log") == topics.expected, join_seed


def test_rows_of_added_partitions_are_part_of_their_transactions(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int
) -> None:
    topics = topics_of(kafka, topic_name, join_seed, partitions=1)
    topics.write(10)
    section = section_of(topics)
    running = Running(section, tmp_path / "log")
    wait_until(lambda: running.capture.progress().rows > 0 or running.error, WAIT_S, "the first rows")
    topics.grow(4)
    topics.write(30)
    running.until_caught_up(section)
    found = logged(tmp_path / "log")
    assert {key: sorted(rows) for key, rows in found.items()} == {
        key: sorted(rows) for key, rows in topics.expected.items()
    }, join_seed


def test_transactions_without_rows_are_progress(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int
) -> None:
    topics = topics_of(kafka, topic_name, join_seed)
    topics.write(3)
    section = section_of(topics)
    for _ in range(3):
        topics.write(2, rows_max=0)
        Running(section, tmp_path / "log").until_caught_up(section)
    assert logged(tmp_path / "log") == topics.expected, join_seed


def test_transactions_are_complete_without_the_topics_that_are_not_read(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int
) -> None:
    topics = topics_of(kafka, topic_name, join_seed)
    topics.write(30)
    section = section_of(topics, data=[topics.data[0]])
    Running(section, tmp_path / "log").until_caught_up(section)
    expected = {key: rows for key, rows in topics.expected.items() if int(key) % 2 == 0}
    assert logged(tmp_path / "log") == expected, join_seed


def test_the_last_transaction_is_logged_once_it_is_known_to_be_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other changes are in a topic that is not read, and no transaction follows it."""
    monkeypatch.setattr(capture_module, "_LOOK_S", 0.01)
    topics = TopicsInMemory(read_max=5)
    for order in range(1, 31):
        topics.change(1, order, 1000)
    topics.end(1, 2000, 50)
    section = KafkaJoinSection(type="kafka-join", **topics.settings(queue_records_max=10))
    Running(section, tmp_path / "log", topics.reader).until_caught_up(section)
    assert logged(tmp_path / "log") == {"1": [(order, "1:2000") for order in range(1, 31)]}


@pytest.mark.parametrize("partitions", [2, 3], ids=["one has none", "all have some"])
def test_a_transaction_in_parts_keeps_the_order_of_its_changes_over_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, join_seed: int, partitions: int
) -> None:
    """Otherwise a truncation could remove rows that were written after it to another partition."""
    monkeypatch.setattr(capture_module, "_LOOK_S", 0.01)
    topics, chance = TopicsInMemory(partitions=3, read_max=4, in_turn=True), random.Random(join_seed)
    for order in range(1, 61):
        topics.change(1, order, 1000, partition=chance.randrange(partitions))
    topics.end(1, 2000, 60)
    section = KafkaJoinSection(type="kafka-join", **topics.settings(queue_records_max=5))
    Running(section, tmp_path / "log", topics.reader).until_caught_up(section)
    assert logged(tmp_path / "log") == {"1": [(order, "1:2000") for order in range(1, 61)]}, join_seed


@pytest.mark.parametrize("first", ["transaction", "snapshot", "progress"])
@pytest.mark.parametrize("waits", [False, True])
def test_a_partition_without_rows_in_the_log_continues_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, waits: bool
) -> None:
    """Retention had removed its first record before the first start."""
    monkeypatch.setattr(capture_module, "_LOOK_S", 0.01)
    topics = TopicsInMemory(partitions=2)
    topics.change(1, 1, 100, partition=1)
    topics.end(1, 200, 1)
    topics.remove((topics.data, 1))
    topics.remove((topics.transactions, 0))
    if first == "snapshot":
        topics.send(topics.data, {"op": "r", "source": {"table": "t"}, "after": {"id": "1", "number": 1}})
    if first == "transaction":
        topics.change(2, 1, 200)
    topics.end(2, 300, int(first == "transaction"))
    if waits:
        topics.change(3, 1, 300, partition=1)  # its END comes later
    section = KafkaJoinSection(type="kafka-join", **topics.settings())
    Running(section, tmp_path / "log", topics.reader).until_caught_up(section)
    if not waits:
        topics.change(3, 1, 300, partition=1)
    topics.end(3, 400, 1)
    Running(section, tmp_path / "log", topics.reader).until_caught_up(section)
    before = {"transaction": [(1, "2:300")], "snapshot": [(1, "")], "progress": []}[first]
    assert logged(tmp_path / "log") == {"1": [*before, (1, "3:400")]}


@pytest.mark.parametrize("had_rows", [False, True])
def test_a_partition_without_rows_for_long_needs_no_removed_transactions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, had_rows: bool
) -> None:
    """Also if every run is too short to record how far such partitions are."""
    monkeypatch.setattr(capture_module, "_LOOK_S", 0.01)
    topics = TopicsInMemory(partitions=2)
    section = KafkaJoinSection(type="kafka-join", **topics.settings())
    for number in range(1, 5):
        topics.change(number, 1, number * 100, partition=int(number == 1 and had_rows))
        topics.end(number, number * 100 + 100, 1)
        Running(section, tmp_path / "log", topics.reader).until_caught_up(section)
    topics.remove((topics.transactions, 0), kept=1)
    topics.change(5, 1, 500, partition=1)
    topics.end(5, 600, 1)
    Running(section, tmp_path / "log", topics.reader).until_caught_up(section)
    expected = [(1, f"{number}:{number * 100 + 100}") for number in range(1, 6)]
    assert logged(tmp_path / "log") == {"1": expected}


def test_the_contract_of_sources_is_kept(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int
) -> None:
    topics = topics_of(kafka, topic_name, join_seed)
    topics.write(1)

    def total() -> int:
        return sum(map(len, topics.expected.values()))

    def commit() -> int:
        before = total()
        while total() == before:
            topics.write(1)
        return total() - before

    commit()
    check_source(KafkaJoinSource(), section_of(topics), tmp_path / "log", commit)


def test_a_handler_learns_when_a_transaction_is_complete_over_all_partitions(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int
) -> None:
    topics = topics_of(kafka, topic_name, join_seed)
    topics.write(40)
    wanted = {int(name.split(":")[1]): count for name, count in topics.counts.items() if count}
    caught_up = [
        f'tailrace_join_{name}{{engine="{topics.name}",source="",task="0"}} 0.0'
        for name in ("data_lag", "transactions_lag", "rows_queued", "paused", "pauses_total")
    ]
    whole: dict[int, int] = {}
    waiting: list[int] = []

    def take(batch: Any) -> None:
        for record, is_end in zip(batch, batch.transaction_ends, strict=True):
            waiting.append(record.source["commit_lsn"])
            if is_end:
                assert len(set(waiting)) == 1
                whole[waiting[0]] = len(waiting)
                waiting.clear()

    engine = tailrace.Engine(
        {
            "name": topics.name,
            "source": {"type": "kafka-join", **topics.settings()},
            "log": {"path": str(tmp_path / "log")},
            "engine": {"offset_storage": {"type": "memory"}, "metrics_port": 0},
        },
        on_batch=take,
    )
    engine.start()
    try:
        wait_until(lambda: len(whole) >= len(wanted) or engine.error, WAIT_S, "all transactions")
        if not engine.error:
            # They are updated once a second.
            wait_until(
                lambda: all(line in engine.metrics.text() for line in caught_up), WAIT_S, "the numbers"
            )
    finally:
        engine.close()
    assert engine.error is None
    assert whole == wanted, join_seed


@pytest.mark.slow
def test_topics_in_avro_and_in_json_give_the_same_log(
    pg: Database, kafka: EmbeddedKafka, tmp_path: Path, join_seed: int
) -> None:
    work = Work(pg, join_seed)
    work.do(5)
    with FakeRegistry() as registry:
        file = pipeline(
            tmp_path, pg, kafka, provide_transaction_metadata=True,
            converter={"type": "json", "schemas_enable": True},
        )  # fmt: skip
        document = json.loads(file.read_text())
        (sink,) = document["sinks"]
        avro = {
            "name": "avro", "group": "avro", "offsets_topic": f"{pg.name}-avro-offsets",
            "topic_prefix": f"{pg.name}-avro",
            "converter": {"type": "avro", "registry_url": registry.url},
        }  # fmt: skip
        file.write_text(json.dumps({**document, "sinks": [sink, {**sink, **avro}]}))
        for _ in range(2):
            run("run", file, "--until-caught-up")
            work.do(20)
        run("run", file, "--until-caught-up")
        found = []
        for prefix, more in (
            (pg.name, {}),
            (f"{pg.name}-avro", {"registry": {"registry_url": registry.url}}),
        ):
            section = {
                "type": "kafka-join", "bootstrap_servers": kafka.bootstrap,
                "data": [f"{prefix}.public.{table}" for table in ("orders", "items")],
                "transactions": f"{prefix}.transaction", **more,
            }  # fmt: skip
            checked = tmp_path / f"{prefix}.yaml"
            checked.write_text(
                json.dumps({"name": prefix, "source": section, "log": {"path": f"./{prefix}"},
                            "sinks": [{"type": "jsonl", "path": "./lines"}]})
            )  # fmt: skip
            assert "ready" in run("check", checked)
            parsed = KafkaJoinSection.model_validate(section)
            Running(parsed, tmp_path / prefix).until_caught_up(parsed)
            shown = run("log", "show", tmp_path / prefix, "--json").splitlines()
            # Snapshot rows are in the order in which their partitions were read.
            found.append([
                {name: change[name] for name in ("op", "before", "after")}
                | {name: change["position"][name] for name in PLACE if change["op"] != "r"}
                for change in map(json.loads, shown)
            ])  # fmt: skip
        # A registry that is not the topics' is detected before anything runs.
        checked.write_text(checked.read_text().replace(f"{pg.name}-avro.public", f"{pg.name}.public"))
        assert "not Avro" in run("check", checked, status=1)
    key = {"r": 0}
    in_order = [sorted(each, key=lambda change: (key.get(change["op"], 1), str(change))) for each in found]
    assert in_order[0] == in_order[1], join_seed
    assert len(found[0]) > 25


def test_an_invalid_document_stops_the_capture_with_its_place(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path
) -> None:
    topics = topics_of(kafka, topic_name, 1)
    topics.write(3)
    topics._producer.begin_transaction()
    topics._send(topics.data[0], "1", {"op": "r", "source": {"table": "a"}, "after": "no row"})
    topics._producer.commit_transaction(60)
    running = Running(section_of(topics), tmp_path / "log")
    wait_until(lambda: running.error, WAIT_S, "the error")
    with pytest.raises(TailraceError, match="has no row") as caught:
        running.stop()
    assert caught.value.kind is Kind.DECODE_FAILED
    assert caught.value.context["topic"] == topics.data[0]
    messages = read_topic(kafka.bootstrap, topics.data[0])
    (wrong,) = (each.offset for each in messages if b"no row" in (each.value or b""))
    assert caught.value.context["offset"] == wrong


@pytest.mark.parametrize("rows", [1, 0])
def test_a_time_in_another_unit_stops_the_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(capture_module, "_LOOK_S", 0.01)
    topics = TopicsInMemory()
    for order in range(rows):
        topics.change(1, 1 + order, 1000)
    end = end_of(1, 2000, rows) | {"ts_ms": time.time_ns()}
    topics.messages[topics.transactions, 0].append(json.dumps(end).encode())
    running = Running(
        KafkaJoinSection(type="kafka-join", **topics.settings()), tmp_path / "log", topics.reader
    )
    wait_until(lambda: running.error, WAIT_S, "the error")
    with pytest.raises(TailraceError, match="not in milliseconds") as caught:
        running.stop()
    assert (caught.value.kind, caught.value.context) == (Kind.JOIN_VIOLATED, {"offset": 0})
    # As the hint says.
    without = {
        "data": {"key": "left(value.transaction.id, 1)", "order": "value.transaction.total_order"},
        "transactions": {"key": "left(value.id, 1)", "count": "value.event_count"},
    }
    section = KafkaJoinSection(type="kafka-join", **topics.settings(expressions=without))
    Running(section, tmp_path / "log", topics.reader).until_caught_up(section)
    assert sum(map(len, logged(tmp_path / "log").values())) == rows
