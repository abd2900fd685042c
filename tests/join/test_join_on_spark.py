"""Joined topics captured in a task of Spark whose process is killed: each change is in Kafka once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tailrace.pipeline.remote.channel import Channel, Report
from tailrace_servers.kafka import SASL, EmbeddedKafka
from tests.support.kafka.debezium_topics import JoinTopics
from tests.support.kafka.reading import Message, read_topic
from tests.support.kafka_cluster import Principal
from tests.support.wait import wait_until

#: Workers that start on a loaded machine take up to a minute to load their modules.
LATE_S = 240.0
KILLS = 5
#: As the fixture `principal` has it; it must be in no log, plan, offset or status.
CANARY = "c4n4ry-S3cret"


def file_of(topics: JoinTopics, principal: Principal, directory: Path) -> Path:
    """Write a pipeline that joins as a user who may read only these topics, into Kafka exactly once."""
    for topic in (*topics.data, topics.transactions):
        principal.allow("topic", topic, "READ")
    (events := directory / "spark-events").mkdir()
    content = {
        "name": topics.name,
        "source": {
            "type": "kafka-join", "reconnect_delay_s": 0.1, "reconnect_delay_s_max": 0.5,
            **topics.settings(
                bootstrap_servers=topics.kafka.bootstrap_at(SASL),
                options=principal.options(SASL, password="${env:CANARY}"),
            ),
        },
        "log": {"path": "./log"},
        "engine": {"tasks_on": "spark"},
        # What Spark's user interface and its history show: settings, plans, jobs, tasks, failures.
        "spark": {"master": "local[3]", "conf": {
            "spark.eventLog.enabled": "true", "spark.eventLog.compress": "false",
            "spark.eventLog.dir": f"file://{events}",
        }},
        "sinks": [{
            "type": "kafka", "bootstrap_servers": topics.kafka.bootstrap,
            "topic_prefix": f"{topics.name}.out", "group": topics.name,
            "offsets_topic": f"{topics.name}-offsets",
            "atomic_source_offset_commit": True, "provide_transaction_metadata": True,
            "converter": {"type": "json", "schemas_enable": False},
        }],
    }  # fmt: skip
    file = directory / "joined.yaml"
    file.write_text(json.dumps(content))
    return file


class Written:
    """What the pipeline has written to Kafka: changes by key, and transactions that have ended."""

    def __init__(self, topics: JoinTopics) -> None:
        self.rows: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self.ends: Counter[tuple[str, int]] = Counter()
        # First the changes: more is written meanwhile, and each one's END is there by then.
        changes = [
            message.document for table in "ab" for message in self._messages(topics, f"public.{table}")
        ]
        for message in self._messages(topics, "transaction"):
            if message.document["status"] == "END":
                self.ends[message.document["id"], message.document["event_count"]] += 1
        commits = {name.split(":")[0]: name for name, _ in self.ends}
        for change in changes:
            of = change["transaction"]
            name = commits[of["id"].split(":")[0]] if of else ""
            self.rows[change["after"]["id"]].append((int(change["after"]["number"]), name))

    @staticmethod
    def _messages(topics: JoinTopics, name: str) -> list[Message]:
        try:
            return read_topic(topics.kafka.bootstrap, f"{topics.name}.out.{name}")
        except (IndexError, KeyError):
            return []  # not created yet


@pytest.mark.ci
@pytest.mark.timeout(900)
def test_each_change_is_in_kafka_once_after_its_executor_was_killed_again_and_again(
    kafka: EmbeddedKafka, topic_name: str, principal: Principal, tmp_path: Path, join_seed: int
) -> None:
    topics, chance = JoinTopics(kafka, topic_name, join_seed, keys_are_json=True), random.Random(join_seed)
    topics.snapshot(20)
    topics.write(30)
    file, channel, killed = file_of(topics, principal, tmp_path), Channel(tmp_path / "log"), set[int]()
    said = tmp_path / "said"

    def there() -> Report | None:
        # A task that was not killed yet and captures.
        assert process.poll() is None, said.read_text()[-3000:]
        report = channel.report()
        if report is None or int(report.process.split()[1]) in killed:
            return None
        return report if report.capture["phase"] == "streaming" else None

    environment = {**os.environ, "CANARY": CANARY}
    command = [sys.executable, "-m", "tailrace", "--verbose", "run", str(file)]
    with said.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        try:
            for _ in range(KILLS):
                report = wait_until(there, LATE_S, "a task that captures")
                assert report is not None
                pid = int(report.process.split()[1])
                assert pid != process.pid
                topics.write(chance.randint(5, 40))
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
                topics.write(chance.randint(1, 10))
            wait_until(there, LATE_S, "a task that captures")
            total = sum(map(len, topics.expected.values()))
            wait_until(
                lambda: sum(map(len, Written(topics).rows.values())) >= total, LATE_S, f"{total} changes"
            )
            status = subprocess.run(
                [sys.executable, "-m", "tailrace", "status", str(file), "--json"],
                capture_output=True, text=True, check=True, timeout=LATE_S, env=environment,
            ).stdout  # fmt: skip
        finally:
            process.terminate()
            process.wait(LATE_S)
    found = Written(topics)
    assert found.rows == topics.expected, join_seed
    assert found.ends == {(name, count): 1 for name, count in topics.counts.items() if count}, join_seed
    (task,) = json.loads(status)["tasks"]
    assert task["state"] == "streaming"
    # The executor's metrics of the queues arrive, too.
    assert (task["slot"]["rows_queued"], task["slot"]["paused"]) == (0, 0)
    assert CANARY not in status
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
