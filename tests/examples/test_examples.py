"""The examples work unchanged."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailrace import config
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.capture.captured import capturing
from tests.support.kafka.debezium_topics import JoinTopics
from tests.support.kafka.reading import read_topic
from tests.support.postgres import Database
from tests.support.wait import wait_until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

#: Users' jobs run in another directory, with only what Spark itself needs in the environment, and a setting
#: that lets Java start quickly.
KEPT = ("PATH", "HOME", "JAVA_HOME", "SPARK_SUBMIT_OPTS")

#: Lines in each file that the Kafka example reads.
LINES = 35_000
#: Failpoints at which it is killed: at the start, or at work.
STARTING = ("kafka.after_head", "kafka.after_fence")
POINTS = (
    "engine.after_poll", "engine.before_commit", "engine.after_commit", "kafka.after_begin",
    "kafka.in_batch", "kafka.before_offset", "kafka.before_commit", "kafka.after_commit",
)  # fmt: skip


def test_the_pipeline_file_is_valid_and_fifteen_lines_long() -> None:
    text = (EXAMPLES / "pipeline.yaml").read_text()
    assert len([line for line in text.splitlines() if not line.startswith("#")]) == 15
    loaded = config.load(EXAMPLES / "pipeline.yaml")
    assert [sink.path.name for sink in loaded.sinks] == ["current", "history"]


def test_the_file_of_joined_topics_is_valid() -> None:
    loaded = config.load(EXAMPLES / "joined_topics.yaml")
    assert loaded.source.address.endswith("shop.public.orders, shop.public.customers")


def test_the_file_of_a_keyspace_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VTGATE_PASSWORD", raising=False)  # resolved where it is used, not here
    loaded = config.load(EXAMPLES / "vitess.yaml")
    assert [sink.path.name for sink in loaded.sinks] == ["current", "history"]


@pytest.mark.timeout(600)
@pytest.mark.ci
def test_the_example_of_a_spark_job_reads_the_log(pg: Database, tmp_path: Path) -> None:
    pg.execute("create table marker (id int primary key)")
    pg.execute("insert into marker select generate_series(1, 20)")
    with capturing(pg.dsn, tmp_path / "log") as running:
        running.wait_for("streaming")
        pg.execute("insert into marker select generate_series(21, 60)")
        running.catch_up(pg.query, 60)
    job = [sys.executable, str(EXAMPLES / "read_log_with_spark.py"), str(tmp_path / "log"), "public.marker"]
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    done = subprocess.run(
        job, capture_output=True, text=True, check=False, timeout=400, cwd=tmp_path,
        env={**kept, "PYSPARK_PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    counted = {}
    for line in done.stdout.split("Batch:")[-1].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1].isdigit():
            counted[cells[0]] = int(cells[1])
    assert counted == {"r": 20, "c": 40}


@pytest.mark.timeout(600)
def test_the_example_of_an_engine_prints_commits_and_continues_where_it_stopped(
    pg: Database, tmp_path: Path
) -> None:
    pg.execute("create table orders(id int primary key, what text)")
    pg.execute("insert into orders values (1, 'before')")
    seen = []
    for number in (2, 3):
        command = [sys.executable, str(EXAMPLES / "embedded_engine.py"), pg.dsn, str(tmp_path / "log")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
            assert engine.stdout is not None
            pg.execute("insert into orders values (%s, 'after')", [number])
            while not seen or seen[-1]["after"]["id"] != number:
                seen.append(json.loads(engine.stdout.readline()))
            engine.send_signal(signal.SIGINT)
            assert engine.wait(60) == 0
    assert [value["after"]["id"] for value in seen] == [1, 2, 3]
    assert (seen[0]["op"], seen[-1]["op"]) == ("r", "c")


@pytest.mark.timeout(700)
@pytest.mark.slow
def test_the_example_of_an_engine_on_spark_writes_the_changes_of_each_row(
    pg: Database, tmp_path: Path
) -> None:
    folder = tmp_path / "stories"
    folder.mkdir()
    pg.execute("create table orders(id int primary key, what text)")
    pg.execute("insert into orders values (1, 'before'), (2, 'before')")
    command = [
        sys.executable,
        str(EXAMPLES / "engine_on_spark.py"),
        pg.dsn,
        str(tmp_path / "log"),
        str(folder),
    ]
    stories = {folder / "public.orders.1": "ruud", folder / "public.orders.2": "ruu"}

    def lines(path: Path) -> list[str]:
        return path.read_text().splitlines() if path.exists() else []

    with subprocess.Popen(command) as engine:
        wait_until(lambda: all(lines(path) for path in stories), 400, "the snapshot")
        pg.execute("update orders set what = 'first'")
        pg.execute("update orders set what = 'second'")
        pg.execute("delete from orders where id = 1")
        wait_until(
            lambda: all(len(lines(path)) >= len(ops) for path, ops in stories.items()), 120, "the changes"
        )
        engine.send_signal(signal.SIGINT)
        assert engine.wait(60) == 0
    for path, ops in stories.items():
        told = lines(path)
        assert "".join(line[0] for line in told) == ops
        assert "first" in told[1]
        assert "second" in told[2]


@pytest.mark.timeout(900)
@pytest.mark.ci
def test_the_example_of_a_custom_source_is_in_kafka_once_despite_kills(
    kafka: EmbeddedKafka, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    random_ = random.Random(seed := secrets.randbits(32))
    folder = tmp_path / "inbox"
    folder.mkdir()
    for number in range(4):
        texts = (f"{line:06}" for line in range(LINES))
        (folder / f"{number}.txt").write_text("\n".join(texts))
    program = [sys.executable, str(EXAMPLES / "engine_into_kafka.py"), str(folder), kafka.bootstrap]
    # A process is paused in a transaction while others replace it, again and again.
    zombie = subprocess.Popen([*program, "4"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    request.addfinalizer(zombie.kill)
    assert zombie.stdout is not None
    zombie.stdout.readline()
    zombie.send_signal(signal.SIGSTOP)
    kills = 0
    armed = [f"{point}=kill@1" for point in STARTING]
    armed += [f"{point}=kill@{random_.randint(1, 5)}" for point in POINTS]
    armed += [""] * 2
    random_.shuffle(armed)
    for point in armed:
        tasks, kept = str(random_.randint(1, 4)), {**os.environ, "TAILRACE_FAILPOINTS": point}
        with subprocess.Popen([*program, tasks], env=kept, stdout=subprocess.PIPE) as life:
            if not point:
                assert life.stdout is not None
                life.stdout.readline()
                time.sleep(random_.random() * 0.3)
                life.kill()
            kills += life.wait(120) == -signal.SIGKILL
    zombie.send_signal(signal.SIGCONT)
    assert "offsets_preempted" in zombie.communicate(timeout=120)[1]
    assert zombie.returncode == 1
    assert subprocess.run([*program, "2"], check=False, timeout=300).returncode == 0
    by_file: dict[str, list[str]] = {}
    for message in read_topic(kafka.bootstrap, "lines"):
        by_file.setdefault(message.key_document, []).append(message.document["text"])
    assert kills >= 9, seed
    for number in range(4):
        assert by_file[f"{number}.txt"] == [f"{line:06}" for line in range(LINES)], seed


@pytest.mark.timeout(900)
@pytest.mark.ci
def test_the_example_of_joined_topics_on_spark_gets_complete_transactions(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path
) -> None:
    topics = JoinTopics(kafka, topic_name, secrets.randbits(32))
    out = tmp_path / "out"
    for _ in range(2):
        topics.write(60)
        job = [
            sys.executable, str(EXAMPLES / "whole_transactions.py"), kafka.bootstrap, ",".join(topics.data),
            topics.transactions, str(tmp_path / "checkpoint"), str(out),
        ]  # fmt: skip
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        done = subprocess.run(
            job, capture_output=True, text=True, check=False, timeout=400, cwd=tmp_path,
            env={**kept, "PYSPARK_PYTHON": sys.executable},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for file in out.rglob("*.json") for line in file.read_text().splitlines()]
    found = {line["transaction_id"]: line["changes"] for line in lines}
    assert len(found) == len(lines), topics.seed
    assert found == {name: count for name, count in topics.counts.items() if count}, topics.seed
    assert all(line["changes"] == line["transaction_event_count"] for line in lines), topics.seed
