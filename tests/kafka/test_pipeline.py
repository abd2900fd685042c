"""`tailrace run` into Kafka: what a reader of committed records sees, after kills at each step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fix_postgres import Database
from kafka.reading import read_topic
from tailrace.embedded.kafka import EmbeddedKafka

TIMEOUT_S = 240
KILLS = ["kafka.after_begin@1", "kafka.before_commit@1", "kafka.after_commit@1"]


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


def _file(directory: Path, pg: Database, kafka: EmbeddedKafka, *, atomic: bool) -> Path:
    file = directory / "pipeline.yaml"
    file.write_text(
        f"name: {pg.name}\n"
        f"source: {{type: postgresql, dsn: '{pg.dsn}', tables: ['public.*']}}\n"
        "log: {path: ./log}\n"
        "sinks:\n"
        f"  - {{type: kafka, bootstrap_servers: '{kafka.bootstrap}', topic_prefix: {pg.name},\n"
        f"     group: {pg.name}, offsets_topic: {pg.name}-offsets,\n"
        f"     atomic_source_offset_commit: {str(atomic).lower()},\n"
        "     converter: {type: json, schemas_enable: false}, batch_rows_max: 50,\n"
        "     topics: [{tables: ['public.orders'], partitions: 3}]}\n"
    )
    return file


def _events(kafka: EmbeddedKafka, topic: str) -> list[tuple[Any, Any]]:
    """Return (key, value) of all committed records, those of each partition in order."""
    return [(message.key_document, message.document) for message in read_topic(kafka.bootstrap, topic)]


def _changes(events: list[tuple[Any, Any]]) -> Counter[tuple[str, int, str]]:
    """Count (operation, id, what) of each change; tombstones are none."""
    found: Counter[tuple[str, int, str]] = Counter()
    for _, value in events:
        if value is not None:
            row = value["after"] or value["before"]
            found[value["op"], row["id"], str(row.get("what"))] += 1
    return found


def _folded(events: list[tuple[Any, Any]]) -> dict[int, str]:
    rows: dict[int, str] = {}
    for key, value in events:
        if value is None or value["after"] is None:
            rows.pop(key["id"], None)
        else:
            rows[key["id"]] = value["after"]["what"]
    return rows


@pytest.fixture
def orders(pg: Database) -> Database:
    pg.execute("create table orders (id int primary key, what text)")
    pg.execute("insert into orders select n, 'first ' || n from generate_series(1, 100) n")
    return pg


@pytest.mark.any_postgres("what Kafka gets is what is in the log")
@pytest.mark.slow
def test_each_change_once_whatever_step_is_killed(
    orders: Database, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    file = _file(tmp_path, orders, kafka, atomic=True)
    expected: Counter[tuple[str, int, str]] = Counter(("r", n, f"first {n}") for n in range(1, 101))
    _run(file)
    for turn, kill in enumerate(KILLS):
        first = 1000 * (turn + 1)
        for at in range(first, first + 120, 40):
            orders.execute(f"insert into orders select n, 'new' from generate_series({at}, {at + 39}) n")
            expected.update(("c", n, "new") for n in range(at, at + 40))
        orders.execute(f"update orders set what = 'turn {turn}' where id <= 30")
        expected.update(("u", n, f"turn {turn}") for n in range(1, 31))
        _run(file, kill.replace("@", "=kill@"), status=-signal.SIGKILL)
    orders.execute("delete from orders where id between 91 and 100")
    expected.update(("d", n, "None") for n in range(91, 101))
    _run(file)
    events = _events(kafka, f"{orders.name}.public.orders")
    assert _changes(events) == expected
    assert _folded(events) == dict(orders.query("select id, what from orders"))


@pytest.mark.any_postgres("what Kafka gets is what is in the log")
@pytest.mark.slow
def test_without_transactions_nothing_is_lost_and_the_switch_may_be_turned(
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


@pytest.mark.any_postgres("what Kafka gets is what is in the log")
def test_status_tells_the_position(orders: Database, kafka: EmbeddedKafka, tmp_path: Path) -> None:
    file = _file(tmp_path, orders, kafka, atomic=True)
    _run(file)
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "status", str(file), "--json"],
        capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    (sink,) = json.loads(done.stdout)["sinks"]
    assert (sink["type"], sink["lag_bytes"]) == ("kafka", 0)
    assert sink["position"] > 0
