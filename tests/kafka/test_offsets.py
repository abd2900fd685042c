"""`tailrace offsets` on a log made by hand and a real broker: what it shows, sets, takes back and refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

from fix_orders_log import LogOfOrders
from fix_wait import wait_until
from tailrace import config
from tailrace.changelog.lock import take_lock
from tailrace.cli.main import app
from tailrace.config import EngineConfig
from tailrace.embedded.kafka import EmbeddedKafka
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.account import Account
from tailrace.sinks.kafka import account_of


def run(*arguments: object, status: int = 0) -> str:
    done = typer.testing.CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == status, done.output + done.stderr
    return done.stdout if status == 0 else done.stdout + done.stderr


def written(kafka: EmbeddedKafka, topic: str) -> list[int]:
    """Return the ids of the orders in a topic of one partition, in their order."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": "read",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "log_level": 0,
        }
    )
    found: list[int] = []

    def all_read() -> bool:
        message = consumer.poll(0.2)
        if message is not None and (error := message.error()) is not None:
            assert error.code() == KafkaError._PARTITION_EOF, error
            return True
        if message is not None:
            found.append(json.loads(message.value() or b"")["after"]["id"])
        return False

    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        wait_until(all_read, 60, f"the end of {topic}")
    finally:
        consumer.close()
    return found


class Orders:
    """A pipeline whose log holds four transactions, and its file."""

    def __init__(self, directory: Path, kafka: EmbeddedKafka, name: str) -> None:
        self.kafka, self.name = kafka, name
        self.file = directory / "pipeline.yaml"
        self.file.write_text(
            f"name: {name}\n"
            "source: {type: postgresql, host: 127.0.0.1, port: 1, dbname: shop, user: nobody}\n"
            "log: {path: ./log}\n"
            f"sinks: [{{type: kafka, name: out, bootstrap_servers: '{kafka.bootstrap}',\n"
            f"  offsets_topic: {name}-offsets, atomic_source_offset_commit: true,\n"
            "  converter: {type: json, schemas_enable: false}}]\n"
        )
        log = LogOfOrders(directory / "log")
        self.ends = [log.insert(1, 2), log.insert(3), log.insert(4, 5, 6), log.insert(7)]
        log.close()
        self.log_id = log.directory.identity.log_id
        self.task_path = log.directory.task_path("0")

    @property
    def topic(self) -> str:
        return f"{self.name}.public.orders"

    @property
    def config(self) -> EngineConfig:
        return config.load_engine(self.file)

    @property
    def account(self) -> Account:
        sink: Any = self.config.sinks[0]
        return account_of(sink, self.name)

    def shown(self) -> dict[str, Any]:
        (entry,) = json.loads(run("offsets", "show", self.file, "--json"))["offsets"]
        assert entry["error"] is None
        return entry  # type: ignore[no-any-return]

    def replay(self) -> list[int]:
        """Bring the sink to the log's end; return what its topic has then."""
        run("replay", self.file, "--sink", "out")
        return written(self.kafka, self.topic)


@pytest.fixture
def orders(tmp_path: Path, kafka: EmbeddedKafka, topic_name: str) -> Orders:
    return Orders(tmp_path, kafka, topic_name)


def test_offsets_are_shown_set_to_either_side_and_taken_back(orders: Orders) -> None:
    assert orders.shown()["log_offset"] is None
    assert "nothing committed" in run("offsets", "show", orders.file)
    assert orders.replay() == [1, 2, 3, 4, 5, 6, 7]
    shown = orders.shown()
    assert (shown["sink"], shown["task"], shown["log_offset"]) == ("out", "0", orders.ends[-1])
    assert (shown["lag_bytes"], shown["is_of_this_log"], shown["log_id"]) == (0, True, orders.log_id)
    assert shown["committed_us"] > 1_700_000_000_000_000

    # Back: what comes after it comes again.
    done = json.loads(run("offsets", "set", orders.file, "--to", orders.ends[1], "--yes", "--json"))
    assert (done["effect"], done["before"], done["after"]) == ("repeats", orders.ends[-1], orders.ends[1])
    assert done["changes"] == 4
    assert orders.shown()["log_offset"] == orders.ends[1]
    assert orders.replay() == [1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]

    # Taken back: everything comes again, but for what is then skipped by consent.
    told = run("offsets", "reset", orders.file, "--yes")
    assert "about 7 changes from the log's start on come again" in told
    assert orders.shown()["log_offset"] is None
    refused = run("offsets", "set", orders.file, "--to", orders.ends[2], "--yes", status=2)
    assert "about 6 changes" in refused
    assert "would never be written" in refused
    assert "--skip-changes" in refused
    assert orders.shown()["log_offset"] is None
    run("offsets", "set", orders.file, "--to", orders.ends[2], "--yes", "--skip-changes")
    assert orders.replay()[11:] == [7]


def test_only_a_place_between_transactions_of_this_log_is_taken(orders: Orders) -> None:
    inside = orders.ends[2] - 1
    told = run("offsets", "set", orders.file, "--to", inside, "--yes", status=1)
    assert "log_range_invalid" in told
    assert f"begins at {orders.ends[1]}" in told
    beyond = run("offsets", "set", orders.file, "--to", orders.ends[-1] + 1, "--yes", status=1)
    assert "log_range_invalid" in beyond
    assert "read --to" in run("offsets", "set", orders.file, "--to", "soon", "--yes", status=2)
    run("offsets", "set", orders.file, "--to", "2026-01-01T00:00:03Z", "--yes", "--skip-changes")
    assert orders.shown()["log_offset"] == orders.ends[1]
    # Nobody is there to be asked.
    assert "--yes" in run("offsets", "reset", orders.file, status=2)
    assert "--yes" in run("offsets", "reset", orders.file, "--json", status=2)
    assert orders.shown()["log_offset"] == orders.ends[1]


def test_nothing_is_changed_while_the_pipeline_runs_and_one_elsewhere_is_fenced(orders: Orders) -> None:
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


def test_an_offset_of_another_log_is_told_as_such_and_can_be_replaced(orders: Orders) -> None:
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
    told = run("replay", orders.file, "--sink", "out", status=1)
    assert "sink_foreign" in told
    assert "tailrace offsets reset" in told
    done = json.loads(run("offsets", "reset", orders.file, "--yes", "--json"))
    assert (done["effect"], done["changes"]) == ("unknown", None)
    assert orders.replay() == [1, 2, 3, 4, 5, 6, 7]


def test_a_cluster_that_can_not_be_reached_is_told_in_the_entry(tmp_path: Path) -> None:
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
