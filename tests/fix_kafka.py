"""A real Kafka broker for the session, started when it is first asked for; a fresh name per test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tailrace.embedded.kafka import EmbeddedKafka, find_jars

_names = itertools.count(1)


@pytest.fixture(scope="session")
def kafka() -> Iterator[EmbeddedKafka]:
    """One broker that tests share; it is not to be killed."""
    with EmbeddedKafka(find_jars(), proxied=True) as cluster:
        yield cluster


@pytest.fixture
def topic_name() -> str:
    """A name that no other test of the session uses."""
    return f"topic-{next(_names)}"
