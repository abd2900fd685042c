"""The join from Kafka into Kafka: each change once, with its transaction, under kills."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.debezium_topics import JoinTopics
from tests.support.kafka.join_process import PLANTED
from tests.support.kafka.reading import read_topic
from tests.support.wait import wait_until

ROOT = Path(__file__).resolve().parents[2]
KILLS = 8
WAIT_S = 120
KILL_S = 12
PLANTED_S = 15


#: Where a process may be killed.
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
    topics: JoinTopics, tasks: int, *, failpoints: str = "", planted: str = ""
) -> subprocess.Popen[bytes]:
    given = {
        "settings": topics.settings(),
        "name": f"{topics.name}-join",
        "tasks": tasks,
        "planted": planted,
    }
    command = [sys.executable, "-m", "tests.support.kafka.join_process", json.dumps(given)]
    environment = {**os.environ, "TAILRACE_FAILPOINTS": failpoints}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)


def killed_at(topics: JoinTopics, point: str, count: int, tasks: int, planted: str = "") -> None:
    """Have a process run until it is killed at a point, or has nothing to do there."""
    process = joining(topics, tasks, failpoints=f"{point}=kill@{count}", planted=planted)
    try:
        process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)


def finished(topics: JoinTopics, planted: str = "", wait_s: float = WAIT_S) -> None:
    """Have a process run until everything is joined, or too much; it may end by itself."""
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


def found(topics: JoinTopics) -> dict[str, list[tuple[int, str]]]:
    """Return the changes in the joined topics as `topics.expected` has them."""
    rows: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for topic in topics.data:
        try:
            messages = read_topic(topics.kafka.bootstrap, f"{topic}-joined")
        except (IndexError, KeyError):
            continue  # not made yet
        for message in messages:
            assert message.key is not None
            number = message.document["after"]["number"]
            rows[message.key.decode()].append((number, message.headers.get("transaction_id", "")))
    return rows


@pytest.mark.slow
def test_through_kills_and_other_numbers_of_tasks_each_change_is_there_once(
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


def kills_and_tasks(topics: JoinTopics, kills: int, changes: int, seed: int) -> None:
    """Kill at points by turns; the number of tasks changes so often, and once a topic has more partitions."""
    chance, tasks = random.Random(seed), 1
    topics.snapshot(10)
    for turn in range(kills):
        if turn * changes // kills != (turn - 1) * changes // kills:
            tasks = chance.choice([number for number in range(1, 5) if number != tasks])
        topics.write(chance.randint(3, 10))
        killed_at(topics, POINTS[turn % len(POINTS)], chance.randint(1, 3), tasks)
    topics.write(5)
    finished(topics)
    assert found(topics) == topics.expected, seed


@pytest.mark.slow
def test_a_kill_at_each_point_leaves_each_change_there_once(
    kafka: EmbeddedKafka, topic_name: str, join_seed: int
) -> None:
    kills_and_tasks(JoinTopics(kafka, topic_name, join_seed), len(POINTS), 4, join_seed)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_a_hundred_kills_and_twenty_changes_of_tasks_leave_each_change_there_once(
    kafka: EmbeddedKafka, topic_name: str, join_seed: int
) -> None:
    kills_and_tasks(JoinTopics(kafka, topic_name, join_seed), 100, 20, join_seed)


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found_in_what_was_joined(kafka: EmbeddedKafka, topic_name: str, bug: str) -> None:
    topics = JoinTopics(kafka, topic_name, 5)
    for _ in range(3):
        topics.write(20)
        killed_at(topics, "engine.after_commit", 1, 2, bug)
    finished(topics, bug, PLANTED_S)
    assert found(topics) != topics.expected
