"""The join as a source of `tailrace run`: topics of a first pipeline are written into every target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tailrace import Engine
from tailrace.converters.debezium import JsonConverter
from tailrace.converters.with_registry import AvroConverter
from tailrace.join import source as source_module
from tailrace.join.options import KafkaJoinSection
from tailrace.join.source import KafkaJoinCheck
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.converters.customers import groups_of
from tests.support.converters.registry import FakeRegistry
from tests.support.join.topics_in_memory import TopicsInMemory
from tests.support.join.work import Work
from tests.support.kafka.debezium_topics import JoinTopics
from tests.support.kafka.orders import run
from tests.support.kafka.pipelines import pipeline
from tests.support.kafka.reading import read_topic
from tests.support.postgres import Database
from tests.support.wait import wait_until

TIMEOUT_S = 240
KILLS = (
    "capture.before_append=kill@2",
    "capture.after_append=kill@2",
    "log.before_fsync=kill@3",
    "log.after_fsync=kill@2",
    "sink.before_commit=kill@1",
)


def joined(directory: Path, pg: Database, kafka: EmbeddedKafka, *sinks: str, **source: Any) -> Path:
    """Write the second pipeline's file."""
    section = {
        "type": "kafka-join",
        "bootstrap_servers": kafka.bootstrap,
        "data": [f"{pg.name}.public.orders", f"{pg.name}.public.items"],
        "transactions": f"{pg.name}.transaction",
        **source,
    }
    file = directory / "joined.yaml"
    lines = "\n".join(f"  - {sink}" for sink in sinks)
    rest = f"log: {{path: ./joined.log}}\nspark: {{start: when_needed}}\nsinks:\n{lines}\n"
    file.write_text(f"name: {pg.name}-joined\nsource: {json.dumps(section)}\n{rest}")
    return file


def tailrace(*arguments: object, failpoints: str = "", status: int | None = 0) -> str:
    """Run a command."""
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={**os.environ, "TAILRACE_FAILPOINTS": failpoints},
    )
    assert status is None or done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def mirrored(at: Path, table: str) -> list[dict[str, Any]]:
    """Return the rows of a mirror."""
    rows = DeltaTable(str(at / "mirror" / f"public.{table}")).to_pyarrow_table().to_pylist()
    return [{name: value for name, value in row.items() if name != "_position"} for row in rows]


def in_order(rows: list[dict[str, Any]], *key: str) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: [row[name] for name in key])


@pytest.mark.ci
def test_each_joined_change_is_in_every_target_once_after_kills_anywhere(
    pg: Database, kafka: EmbeddedKafka, tmp_path: Path, join_seed: int
) -> None:
    work = Work(pg, join_seed)
    work.do(3)
    first = pipeline(
        tmp_path, pg, kafka, provide_transaction_metadata=True, topics=[{"tables": ["*.*"], "partitions": 3}],
        converter={"type": "json", "schemas_enable": True},
    )  # fmt: skip
    for _ in range(2):
        run("run", first, "--until-caught-up")
        work.do(3)
    run("run", first, "--until-caught-up")
    file = joined(
        tmp_path, pg, kafka, "{type: jsonl, path: ./lines}", "{type: delta, path: ./mirror, mode: mirror}",
        "{type: parquet, path: ./parquet}",
        f"{{type: kafka, bootstrap_servers: '{kafka.bootstrap}', topic_prefix: again-{pg.name},"
        f" group: g, offsets_topic: {pg.name}-more}}",
    )  # fmt: skip
    assert "ready" in tailrace("check", file)
    for kill in KILLS:
        work.do(12)
        run("run", first, "--until-caught-up")
        tailrace("run", file, "--until-caught-up", failpoints=kill, status=None)
    work.do(5)
    run("run", first, "--until-caught-up")
    tailrace("run", file, "--until-caught-up")

    for table, key in (("orders", ("id",)), ("items", ("a", "b"))):
        query = f"select to_jsonb(x) from {table} x"
        expected = [json.loads(row) if isinstance(row, str) else row for (row,) in pg.query(query)]
        found = json.loads(json.dumps(mirrored(tmp_path, table), default=str))
        assert [[row[name] for name in key] for row in in_order(found, *key)] == [
            [row[name] for name in key] for row in in_order(expected, *key)
        ], join_seed
        for ours, theirs in zip(in_order(found, *key), in_order(expected, *key), strict=True):
            for name in ("number", "note", "flag", "small", "what", "day", "u"):
                assert ours.get(name) == theirs.get(name), (join_seed, ours, theirs)
            if "price" in theirs:
                assert float(ours["price"]) == theirs["price"], join_seed
    sent: Counter[str] = Counter()
    again: Counter[str] = Counter()
    for table in ("orders", "items"):
        for message in read_topic(kafka.bootstrap, f"{pg.name}.public.{table}"):
            document = message.document
            if document:
                sent[document.get("payload", document)["op"]] += 1
        for message in read_topic(kafka.bootstrap, f"again-{pg.name}.public.{table}"):
            if message.document:
                again[message.document.get("payload", message.document)["op"]] += 1
    lines = [
        json.loads(line)
        for path in sorted((tmp_path / "lines").glob("*/*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert Counter(line["op"] for line in lines) == sent == again, join_seed
    by_commit = {
        line["source"]["txId"]: line["position"]["commit_lsn"] for line in lines if line["op"] != "r"
    }
    assert len(set(by_commit.values())) == len(by_commit)
    status = json.loads(tailrace("status", file, "--json"))
    assert status["tasks"][0]["source_lag_bytes"] == 0
    assert "sound" in tailrace("log", "verify", tmp_path / "joined.log")


def test_status_shows_the_lag_of_both_sides_and_the_queues(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, join_seed: int
) -> None:
    topics = JoinTopics(kafka, topic_name, join_seed, keys_are_json=True)
    topics.write(20)
    file = tmp_path / "joined.yaml"
    source = {"type": "kafka-join", **topics.settings()}
    sinks = [{"type": "jsonl", "path": "./lines"}]
    rest = {"log": {"path": "./log"}, "spark": {"start": "when_needed"}, "sinks": sinks}
    file.write_text(json.dumps({"name": "j", "source": source, **rest}))
    process = subprocess.Popen(
        [sys.executable, "-m", "tailrace", "run", str(file)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def told() -> dict[str, Any]:
        (task,) = json.loads(tailrace("status", file, "--json", status=None))["tasks"]
        return task["slot"] if task.get("rows") else {}

    try:
        found = wait_until(told, TIMEOUT_S, "numbers of both sides")
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)
    assert found.keys() == {
        "data_lag", "transactions_lag", "rows_queued", "bytes_queued", "transactions_queued",
        "paused", "pauses",
    }  # fmt: skip
    assert (found["paused"], found["pauses"]) == (0, 0)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"id": 1, "number": 2}, "its first message names no transaction"),
        (b"this is no JSON", "its messages are not JSON"),
        ({"op": "c", "transaction": {"id": "1:101"}}, None),
    ],
    ids=["flattened", "no JSON", "sound"],
)
def test_check_looks_at_each_data_topic_whichever_is_read_first(
    monkeypatch: pytest.MonkeyPatch, document: Any, said: str | None
) -> None:
    topics = TopicsInMemory(partitions=2, in_turn=True)
    monkeypatch.setattr(source_module, "reader_of", topics.reader)
    topics.change(1, 1, 100, partition=1)
    topics.end(1, 200, 1)
    topics.partitions["second"] = 1
    topics.send("second", document)
    data = [topics.data, "second"]
    check = KafkaJoinCheck(KafkaJoinSection(type="kafka-join", **topics.settings(data=data)))
    assert not list(check.connect())
    found = [finding.message for finding in check.findings()]
    assert found == ([] if said is None else [f"topic second: {said}"])
    check.close()


@pytest.mark.parametrize("form", ["json", "avro"])
@pytest.mark.parametrize(("keys", "is_refused"), [("same", False), ("other", True), ("text", True)])
def test_check_looks_at_the_form_of_keys(form: str, keys: str, is_refused: bool) -> None:
    [group] = groups_of("read")
    with FakeRegistry() as registry:
        by_registry = AvroConverter(registry_url=registry.url).convert(group)
        as_json = JsonConverter(schemas_enable=True).convert(group)
        events, other = (by_registry, as_json) if form == "avro" else (as_json, by_registry)
        key, of_other, value = (each[0].as_py() for each in (events.keys, other.keys, events.values))
        given = {"same": key, "other": of_other, "text": b"1"}[keys]
        more = {"registry": {"registry_url": registry.url}} if form == "avro" else {}
        section = KafkaJoinSection.model_validate(
            {"bootstrap_servers": "b:1", "data": ["t"], "transactions": "ends", **more}
        )
        found = [finding.message for finding in source_module._of_message(section, "t", given, value)]
    assert ["keys are not objects" in one for one in found] == [True] * is_refused


def test_a_changed_key_with_an_unchanged_value_comes_as_an_update(
    pg: Database, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    """Tailrace writes it as a delete and a create, here to two partitions, and the create lacks the value."""
    pg.execute("create table orders (id int primary key, note text)")
    pg.execute("alter table orders alter note set storage external")
    topics = [{"tables": ["*.*"], "partitions": 2}]
    first = pipeline(tmp_path, pg, kafka, provide_transaction_metadata=True, topics=topics)
    for change in (
        "select 1",
        "insert into orders select n, repeat(n::text, 4000) from generate_series(1, 8) n",
        "update orders set id = id + 10",
    ):
        pg.execute(change)
        with Engine(first, settings={"until_caught_up": True}) as engine:
            engine.run()
    found: list[tuple[Any, ...]] = []
    section = {
        "type": "kafka-join", "bootstrap_servers": kafka.bootstrap, "data": [f"{pg.name}.public.orders"],
        "transactions": f"{pg.name}.transaction",
    }  # fmt: skip
    Engine(
        {"name": "joined", "source": section, "log": {"path": str(tmp_path / "joined.log")}},
        on_record=lambda record: found.append(
            (record.op, (record.before or {}).get("id"), record.after["id"], *record.unchanged)
        ),
        settings={"until_caught_up": True},
    ).run()
    assert found[:8] == [("c", None, str(n)) for n in range(1, 9)]
    assert found[8:] == [("u", str(n), str(n + 10), "note") for n in range(1, 9)]
