"""A small torture run of the Kafka sink; and the harness finds planted bugs.

`python -m tests.support.torture.kafka` does the same two hundred times, on three brokers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tailrace_servers.kafka import EmbeddedKafka, find_jars
from tests.support.kafka_proxy import Fault, KafkaProxy
from tests.support.postgres import Database
from tests.support.torture import brokers
from tests.support.torture.harness import Round, kill_at
from tests.support.torture.kafka import POINTS
from tests.support.torture.topics import Topics

pytestmark = [pytest.mark.torture, pytest.mark.timeout(900)]

INVALID_TXN_STATE = 48


@pytest.fixture(scope="module")
def cluster() -> Iterator[EmbeddedKafka]:
    """Three brokers, of which one may be killed."""
    with EmbeddedKafka(find_jars(), nodes=brokers.NODES, settings=brokers.SETTINGS) as cluster:
        yield cluster


@pytest.fixture
def make_round(pg: Database, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Round]:
    def make(bootstrap: str, launcher: str | None = None, **options: object) -> Round:
        topics = Topics(bootstrap, pg.name, **options)  # type: ignore[arg-type]
        round_ = Round(tmp_path, pg, ["kafka"], seed=7, launcher=launcher, topics=topics, pause_s=0.1)
        request.addfinalizer(round_.close)
        round_.write_file()
        return round_

    return make


def test_kills_at_each_failpoint_and_of_brokers_leave_each_change_once(
    cluster: EmbeddedKafka, make_round: Callable[..., Round]
) -> None:
    round_ = make_round(cluster.bootstrap, replication=brokers.NODES)
    faults = [
        kill_at(point, 1 + turn % 3, until_caught_up=False) for turn, point in enumerate(sorted(POINTS))
    ]
    faults += [
        brokers.kill_node(cluster, 4),
        brokers.move_coordinator(cluster, 4),
        brokers.kill_both(cluster, 4),
        brokers.still_coordinator(cluster, 4),
        brokers.still_for_a_start(cluster, 4),
    ]
    for fault in faults:
        assert round_.undergo(fault), fault.name
        assert round_.disagreements() == [], fault.name
    assert round_.judge() == []
    assert round_.disagreements() == []
    assert round_.hits().keys() >= POINTS


def test_an_offset_written_outside_the_transaction_is_caught(
    kafka: EmbeddedKafka, make_round: Callable[..., Round]
) -> None:
    round_ = make_round(kafka.bootstrap, "kafka_offset_outside")
    assert round_.undergo(kill_at("kafka.before_commit", 2, until_caught_up=False))
    assert any("is missing" in problem for problem in round_.disagreements(settle_s=5))
    assert round_.judge() != []


@pytest.mark.parametrize("isolation", ["read_uncommitted", "read_committed"])
def test_reading_uncommitted_offsets_is_caught(
    kafka: EmbeddedKafka, make_round: Callable[..., Round], isolation: str
) -> None:
    round_ = make_round(kafka.bootstrap, "kafka_offset_flushed", isolation=isolation)
    for _ in range(2):
        assert round_.undergo(kill_at("kafka.before_commit", 2, until_caught_up=False))
    assert bool(round_.judge()) is (isolation == "read_uncommitted")


def test_ignoring_a_failed_commit_is_caught(
    kafka_proxy: KafkaProxy, make_round: Callable[..., Round]
) -> None:
    round_ = make_round(kafka_proxy.bootstrap, "kafka_commit_ignored")
    assert round_.undergo(kill_at("kafka.after_commit", 2, until_caught_up=False))
    failed = kafka_proxy.plan(Fault("EndTxn", "refuse", INVALID_TXN_STATE))
    assert round_.undergo(kill_at("kafka.after_commit", 3, until_caught_up=False))
    assert failed.struck.is_set()
    assert any("is missing" in problem for problem in round_.disagreements(settle_s=5))
    assert round_.judge() != []
