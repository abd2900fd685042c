"""Fixtures of the tests of joins."""

from __future__ import annotations

import os
import random

import pytest

from tailrace_servers.kafka import EmbeddedKafka
from tests.support.join.pair import Pair


@pytest.fixture
def join_seed() -> int:
    """A new seed for each run; `TAILRACE_SEEDS=7` sets it. Failures show it."""
    given = os.environ.get("TAILRACE_SEEDS", "").split(",")[0]
    return int(given) if given else random.randrange(1_000_000)


@pytest.fixture
def pair(kafka: EmbeddedKafka, topic_name: str) -> Pair:
    """A data topic with one partition, and its transaction topic; both empty."""
    return Pair(kafka, topic_name)
