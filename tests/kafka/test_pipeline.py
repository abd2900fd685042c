"""`tailrace run` into Kafka: what a reader of committed records sees, after kills at each step."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tailrace import Engine
from tailrace.config import load_engine
from tailrace.pipeline.connector import PipelineConnector
from tailrace_bench.support import debezium
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.debezium import require_debezium
from tests.support.kafka.folding import _changes, _folded
from tests.support.kafka.reading import read_topic
from tests.support.postgres import Database
from tests.support.wait import wait_until

TIMEOUT_S = 240
KILLS = ["kafka.after_begin", "kafka.before_commit", "kafka.after_commit"]


def _run(file: Path, failpoints: str = "", *, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "run", str(file), "--until-caught-up"],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env={**os.environ, "TAILRACE_FAILPOINTS": failpoints},
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr


def _file(
    directory: Path, pg: Database, kafka: EmbeddedKafka, *, atomic: bool, boundary: str = "poll"
) -> Path:
    file = directory / "pipeline.yaml"
    file.write_text(
        f"name: {pg.name}\n"
        f"source: {{type: postgresql, dsn: '{pg.dsn}', tables: ['public.*']}}\n"
        "log: {path: ./log}\n"
        "sinks:\n"
        f"  - {{type: kafka, bootstrap_servers: '{kafka.bootstrap}', topic_prefix: {pg.name},\n"
        f"     group: {pg.name}, offsets_topic: {pg.name}-offsets,\n"
        f"     atomic_source_offset_commit: {str(atomic).lower()},\n"
        f"     transaction_boundary: {boundary},\n"
        "     converter: {type: json, schemas_enable: false}, batch_rows_max: 50,\n"
        "     topics: [{tables: ['public.orders'], partitions: 3}]}\n"
    )
    return file


def _events(kafka: EmbeddedKafka, topic: str) -> list[tuple[Any, Any]]:
    """Return (key, value) of all committed records, those of each partition in order."""
    return [(message.key_document, message.document) for message in read_topic(kafka.bootstrap, topic)]


@pytest.fixture
def orders(pg: Database) -> Database:
    pg.execute("create table orders (id int primary key, what text)")
    pg.execute("insert into orders select n, 'first ' || n from generate_series(1, 100) n")
    return pg


@pytest.mark.ci
@pytest.mark.parametrize(("boundary", "count"), [("poll", 1), ("transaction", 4)])
def test_each_change_is_written_once_after_kills_at_any_step(
    orders: Database, kafka: EmbeddedKafka, tmp_path: Path, boundary: str, count: int
) -> None:
    file = _file(tmp_path, orders, kafka, atomic=True, boundary=boundary)
    expected: Counter[tuple[str, int, str]] = Counter(("r", n, f"first {n}") for n in range(1, 101))
    _run(file)
    for turn, kill in enumerate(KILLS):
        first = 1000 * (turn + 1)
        for at in range(first, first + 120, 10):
            orders.execute(f"insert into orders select n, 'new' from generate_series({at}, {at + 9}) n")
            expected.update(("c", n, "new") for n in range(at, at + 10))
        orders.execute(f"update orders set what = 'turn {turn}' where id <= 30")
        expected.update(("u", n, f"turn {turn}") for n in range(1, 31))
        _run(file, f"{kill}=kill@{count}", status=-signal.SIGKILL)
    orders.execute("delete from orders where id between 91 and 100")
    expected.update(("d", n, "None") for n in range(91, 101))
    _run(file)
    events = _events(kafka, f"{orders.name}.public.orders")
    assert _changes(events) == expected
    assert _folded(events) == dict(orders.query("select id, what from orders"))


@pytest.mark.slow
def test_without_transactions_nothing_is_lost_and_they_may_be_turned_on_later(
    orders: Database, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    file = _file(tmp_path, orders, kafka, atomic=False)
    _run(file, "kafka.before_offset=kill@1", status=-signal.SIGKILL)
    _run(file)
    orders.execute("update orders set what = 'second' where id <= 10")
    _run(_file(tmp_path, orders, kafka, atomic=True))
    orders.execute("update orders set what = 'third' where id <= 10")
    _run(_file(tmp_path, orders, kafka, atomic=False))
    events = _events(kafka, f"{orders.name}.public.orders")
    changes = _changes(events)
    assert {change for change in changes if change[0] == "r"} == {
        ("r", n, f"first {n}") for n in range(1, 101)
    }
    assert {changes["u", n, what] for n in range(1, 11) for what in ("second", "third")} == {1}
    assert _folded(events) == dict(orders.query("select id, what from orders"))


def test_status_shows_the_position(orders: Database, kafka: EmbeddedKafka, tmp_path: Path) -> None:
    file = _file(tmp_path, orders, kafka, atomic=True)
    _run(file)
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "status", str(file), "--json"],
        capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    (sink,) = json.loads(done.stdout)["sinks"]
    assert (sink["type"], sink["lag_bytes"]) == ("kafka", 0)
    assert sink["position"] > 0


def test_the_metrics_count_what_a_sink_has_written(
    orders: Database, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    config = load_engine(_file(tmp_path, orders, kafka, atomic=True))
    engine = Engine(config, connector=PipelineConnector(), settings=config.as_settings())

    def number(name: str) -> float | None:
        found = re.search(rf"^tailrace_sink_{name}{{.*}} ([0-9.]+)$", engine.metrics.text(), re.MULTILINE)
        return None if found is None else float(found[1])

    with engine:
        wait_until(lambda: number("rows_total") == 100, TIMEOUT_S, "the rows in the metrics")
        wait_until(lambda: number("lag_bytes") == 0, TIMEOUT_S, "a sink without a lag")
        assert number("running") == 1
        assert (number("batches_total") or 0) >= 1
        assert (number("log_bytes_total") or 0) > 100
        orders.execute("insert into orders values (5000, 'y')")
        wait_until(lambda: number("rows_total") == 101, TIMEOUT_S, "one more")
    assert number("running") == 0


@pytest.mark.timeout(600)
@pytest.mark.ci
def test_a_pipeline_takes_over_from_debezium_without_a_gap(
    orders: Database, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    require_debezium()
    topic, theirs = f"{orders.name}.public.orders", f"debezium_{orders.name}"
    orders.execute("create publication dbz_publication for all tables")
    orders.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", [theirs])
    file = _file(tmp_path, orders, kafka, atomic=True)
    given = yaml.safe_load(file.read_text())
    given["source"] |= {"snapshot": "never", "slot": f"ours_{orders.name}"}
    file.write_text(json.dumps(given))

    def insert(first: int) -> None:
        for at in range(first, first + 60, 3):
            orders.execute(f"insert into orders select n, 'new' from generate_series({at}, {at + 2}) n")

    # Capture begins without sinks; Debezium then stops within a transaction.
    without = tmp_path / "without.yaml"
    without.write_text(json.dumps({**given, "sinks": []}))
    _run(without)
    insert(1000)
    peer = {
        "topic.prefix": orders.name,
        "database.dbname": orders.name,
        "publication.name": "dbz_publication",
        "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "offset.storage.file.filename": str(tmp_path / "debezium.dat"),
        "offset.flush.interval.ms": "0",
        "max.batch.size": "10",
        "max.queue.size": "20",
    }
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([NewTopic(topic, 3, 1)])[topic].result(60)
    producer = {"bootstrap.servers": kafka.bootstrap}
    debezium.receive(orders.server, theirs, 32, "kafka", 1, tmp_path, producer, peer)
    insert(2000)
    before = {value["after"]["id"] for _, value in _events(kafka, topic)}
    slot = "select active, confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s"
    wait_until(lambda: not orders.query(slot, [theirs])[0][0], 60, "Debezium's end")
    [(_, lsn)] = orders.query(slot, [theirs])
    _run(without)
    done = ["offsets", "set", str(file), "--to", lsn, "--skip-changes", "--yes"]
    subprocess.run([sys.executable, "-m", "tailrace", *done], check=True, timeout=TIMEOUT_S)
    _run(file)
    found = Counter(value["after"]["id"] for _, value in _events(kafka, topic))
    assert set(found) == {*range(1000, 1060), *range(2000, 2060)}
    again = {number for number, count in found.items() if count > 1}
    # Debezium acknowledged what it had written but for its last batches.
    assert again < before, lsn
