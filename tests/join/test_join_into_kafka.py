"""The join from Kafka into Kafka: each change once, with its transaction, under kills."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tailrace_servers.kafka import EmbeddedKafka
from tests.support.debezium import require_debezium
from tests.support.join.chain import DebeziumChain, SinkChain
from tests.support.kafka.debezium_topics import JoinTopics
from tests.support.kafka.join_process import PLANTED
from tests.support.kafka.reading import read_topic
from tests.support.postgres import Database
from tests.support.wait import wait_until

ROOT = Path(__file__).resolve().parents[2]
KILLS = 8
WAIT_S = 120
KILL_S = 40
PLANTED_S = 15

Topics = JoinTopics | SinkChain | DebeziumChain

#: Failpoints at which a process may be killed.
POINTS = (
    "engine.after_poll",
    "engine.before_commit",
    "engine.after_commit",
    "kafka.after_begin",
    "kafka.in_batch",
    "kafka.before_offset",
    "kafka.before_commit",
    "kafka.after_commit",
)


def joining(
    topics: Topics, tasks: int, *, failpoints: str = "", planted: str = "", batch_records_max: int = 65_536
) -> subprocess.Popen[bytes]:
    given = {
        "settings": topics.settings(),
        "name": f"{topics.name}-join",
        "tasks": tasks,
        "planted": planted,
        "batch_records_max": batch_records_max,
    }
    command = [sys.executable, "-m", "tests.support.kafka.join_process", json.dumps(given)]
    environment = {**os.environ, "TAILRACE_FAILPOINTS": failpoints}
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def killed_at(topics: Topics, point: str, count: int, tasks: int, **how: Any) -> int | None:
    """Run a process until it is killed at a failpoint; return its status, None if it did not reach it."""
    process = joining(topics, tasks, failpoints=f"{point}=kill@{count}", **how)
    try:
        process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
        return None
    return process.returncode


def finished(topics: Topics, planted: str = "", wait_s: float = WAIT_S) -> None:
    """Run a process until everything, or too much, is joined; it may end by itself."""
    process = joining(topics, 2, planted=planted)
    total = sum(map(len, topics.expected.values()))
    try:
        wait_until(
            lambda: process.poll() is not None or sum(map(len, found(topics).values())) >= total,
            wait_s, f"{total} changes",
        )  # fmt: skip
    except (AssertionError, TimeoutError):
        if not planted:
            raise
    finally:
        process.kill()
        process.wait(10)


def found(topics: Topics) -> dict[str, list[Any]]:
    """Return the changes in the joined topics as `topics.expected` has them; each key is in one partition."""
    rows: dict[str, list[Any]] = defaultdict(list)
    places: dict[tuple[str, bytes | None], int] = {}
    for topic in topics.data:
        try:
            messages = read_topic(topics.kafka.bootstrap, f"{topic}-joined")
        except (IndexError, KeyError):
            continue  # not created yet
        for message in messages:
            assert places.setdefault((topic, message.key), message.partition) == message.partition
            if (change := topics.row_of(message)) is not None:
                rows[change[0]].append(change[1])
    return rows


@pytest.mark.ci
def test_each_change_is_joined_once_despite_kills_and_changed_numbers_of_tasks(
    kafka: EmbeddedKafka, topic_name: str, join_seed: int
) -> None:
    topics, chance = JoinTopics(kafka, topic_name, join_seed), random.Random(join_seed)
    topics.snapshot(20)
    for _ in range(KILLS):
        topics.write(20)
        process = joining(topics, chance.randint(1, 4))
        time.sleep(chance.uniform(2.0, 6.0))
        process.kill()
        process.wait(10)
    topics.write(20)
    finished(topics)
    assert found(topics) == topics.expected, join_seed


def kills_and_tasks(topics: Topics, kills: int, changes: int, seed: int, batch_records_max: int = 50) -> None:
    """Kill at each failpoint in turn; `changes` times, change the number of tasks or add partitions."""
    chance, tasks, partitions = random.Random(seed), 1, 3
    killed: Counter[str] = Counter()
    admin = AdminClient({"bootstrap.servers": topics.kafka.bootstrap, "log_level": 0})
    for made in admin.create_topics([NewTopic(f"{topic}-joined", 3, 1) for topic in topics.data]).values():
        made.result(60)
    topics.snapshot(10)
    for turn in range(kills):
        change = turn * changes // kills
        if change != (turn - 1) * changes // kills:
            if change % 4 == 3 and not isinstance(topics, DebeziumChain):
                partitions += 1
                topics.grow(partitions)
            else:
                tasks = chance.choice([number for number in range(1, 5) if number != tasks])
        topics.write(chance.randint(3, 10))
        point = POINTS[turn % len(POINTS)]
        count = chance.randint(1, 3)
        status = killed_at(topics, point, count, tasks, batch_records_max=batch_records_max)
        assert status in (None, -signal.SIGKILL), (seed, point, status)
        killed[point] += status is not None
    topics.write(5)
    if isinstance(topics, SinkChain):
        topics.calm()
    finished(topics)
    rows = found(topics)
    assert {key: sorted(map(repr, held)) for key, held in rows.items()} == {
        key: sorted(map(repr, held)) for key, held in topics.expected.items()
    }, (seed, killed)
    # Where a key has moved to another partition, the two are not ordered.
    assert partitions > 3 or rows == topics.expected, (seed, killed)
    # The others did not reach their failpoint in time.
    assert sum(killed.values()) >= kills // 2, (seed, killed)


@pytest.mark.ci
def test_each_change_is_joined_once_after_a_kill_at_each_failpoint(
    kafka: EmbeddedKafka, topic_name: str, join_seed: int
) -> None:
    kills_and_tasks(JoinTopics(kafka, topic_name, join_seed), len(POINTS), 4, join_seed)


@pytest.mark.ci
def test_topics_of_our_own_sink_are_joined_once_with_kills_of_both(
    pg: Database, kafka: EmbeddedKafka, tmp_path: Path, join_seed: int
) -> None:
    with closing(SinkChain(pg, kafka, join_seed, tmp_path)) as topics:
        kills_and_tasks(topics, len(POINTS), 4, join_seed)


@pytest.mark.ci
def test_topics_of_debeziums_engine_are_joined_once_despite_kills(
    pg: Database, kafka: EmbeddedKafka, tmp_path: Path, join_seed: int
) -> None:
    require_debezium()
    topics = DebeziumChain(pg, kafka, join_seed, tmp_path, 100)
    kills_and_tasks(topics, len(POINTS), 4, join_seed, 10)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_each_change_is_joined_once_despite_a_hundred_kills_and_twenty_changes_of_tasks(
    kafka: EmbeddedKafka, topic_name: str, join_seed: int
) -> None:
    kills_and_tasks(JoinTopics(kafka, topic_name, join_seed), 100, 20, join_seed)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_topics_of_our_own_sink_are_joined_once_despite_a_hundred_kills_and_twenty_changes_of_tasks(
    pg: Database, kafka: EmbeddedKafka, tmp_path: Path, join_seed: int
) -> None:
    with closing(SinkChain(pg, kafka, join_seed, tmp_path)) as topics:
        kills_and_tasks(topics, 100, 20, join_seed)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_topics_of_debeziums_engine_are_joined_once_despite_a_hundred_kills_and_twenty_changes_of_tasks(
    pg: Database, kafka: EmbeddedKafka, tmp_path: Path, join_seed: int
) -> None:
    require_debezium()
    topics = DebeziumChain(pg, kafka, join_seed, tmp_path, 1500)
    kills_and_tasks(topics, 100, 20, join_seed, 20)


@pytest.mark.ci
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found_in_the_joined_topics(kafka: EmbeddedKafka, topic_name: str, bug: str) -> None:
    topics = JoinTopics(kafka, topic_name, 5)
    for _ in range(3):
        topics.write(20)
        killed_at(topics, "engine.after_commit", 1, 2, planted=bug)
    finished(topics, bug, PLANTED_S)
    assert found(topics) != topics.expected
