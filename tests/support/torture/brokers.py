"""Faults of a Kafka cluster while a pipeline writes to it."""

from __future__ import annotations

import time
from collections.abc import Callable

from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient

from tailrace_servers.kafka import EmbeddedKafka
from tests.support.torture.harness import Fault, Life, Round
from tests.support.wait import wait_until

NODES = 3

#: Settings of a cluster that may lose a node and go on without losing what it acknowledged.
SETTINGS = {
    "default.replication.factor": str(NODES),
    "min.insync.replicas": "2",
    "transaction.state.log.num.partitions": "3",
}

_TRANSACTIONS = "__transaction_state"
_ASK_TIMEOUT_S = 60.0
#: Passed after each commit.
_COMMITTED = "kafka.after_commit"
#: A commit may have been answered already when a broker is stopped.
_UNDER_WAY = 1
_BEGINS_S = 180.0


def kill_node(cluster: EmbeddedKafka, latest_s: float) -> Fault:
    """SIGKILL one broker after another while the pipeline writes, and start each again."""

    def strike(round_: Round) -> bool:
        return _survived(round_, cluster, latest_s, lambda: round_.random.randint(1, NODES))

    return Fault("kill -9 of a broker", strike, transactions=None)


def move_coordinator(cluster: EmbeddedKafka, latest_s: float) -> Fault:
    """SIGKILL the broker that coordinates the transactions, and the one that it has moved to."""

    def strike(round_: Round) -> bool:
        return _survived(round_, cluster, latest_s, lambda: _coordinator(cluster, round_))

    return Fault("kill -9 of the coordinator", strike, transactions=None)


def kill_both(cluster: EmbeddedKafka, latest_s: float) -> Fault:
    """SIGKILL the coordinator, and the pipeline a moment later."""

    def strike(round_: Round) -> bool:
        life = _begun(round_, latest_s)
        node = _coordinator(cluster, round_)
        cluster.kill(node)
        time.sleep(round_.random.uniform(0, 2))
        assert not life.is_over, f"did not survive a killed broker:\n{life.last_words()}"
        life.kill()
        cluster.start_node(node)
        return True

    return Fault("kill -9 of the coordinator and the engine", strike, transactions=None)


def still_coordinator(cluster: EmbeddedKafka, latest_s: float) -> Fault:
    """SIGSTOP the broker that coordinates the transactions; SIGCONT it once the pipeline goes on."""

    def strike(round_: Round) -> bool:
        life = _begun(round_, latest_s)
        node = _coordinator(cluster, round_)
        cluster.pause(node)
        try:
            before = round_.hits()[_COMMITTED]
            wait_until(
                lambda: life.is_over or round_.hits()[_COMMITTED] > before + _UNDER_WAY,
                _BEGINS_S, "commits without the broker that stands still",
            )  # fmt: skip
        finally:
            cluster.resume(node)
        time.sleep(round_.random.uniform(0.1, latest_s / 2))
        assert not life.is_over, f"did not survive a broker that stood still:\n{life.last_words()}"
        round_.finish(life)
        return True

    return Fault("the coordinator stands still", strike, transactions=None)


def still_for_a_start(cluster: EmbeddedKafka, latest_s: float) -> Fault:
    """SIGKILL the engine, SIGSTOP the coordinator; SIGCONT it once the next process has begun without it."""

    def strike(round_: Round) -> bool:
        _begun(round_, latest_s).kill()
        node = _coordinator(cluster, round_)
        cluster.pause(node)
        try:
            life = _begun(round_, 0)
        finally:
            cluster.resume(node)
        assert not life.is_over, f"did not begin without a broker that stands still:\n{life.last_words()}"
        round_.finish(life)
        return True

    return Fault("the coordinator stands still for a start", strike, transactions=None)


def _survived(round_: Round, cluster: EmbeddedKafka, latest_s: float, choose: Callable[[], int]) -> bool:
    life = _begun(round_, latest_s)
    for _ in range(2):
        node = choose()
        cluster.kill(node)
        time.sleep(round_.random.uniform(0.1, 3))
        cluster.start_node(node)
        time.sleep(round_.random.uniform(0.1, latest_s / 2))
    assert not life.is_over, f"did not survive a killed broker:\n{life.last_words()}"
    round_.finish(life)
    return True


def _begun(round_: Round, latest_s: float) -> Life:
    # A cluster without any writes yet has no coordinators.
    before = round_.hits()[_COMMITTED]
    life = round_.live(until_caught_up=False)
    wait_until(
        lambda: life.is_over or round_.hits()[_COMMITTED] > before, _BEGINS_S, "the life's first commit"
    )
    time.sleep(round_.random.uniform(0, latest_s))
    return life


def _coordinator(cluster: EmbeddedKafka, round_: Round) -> int:
    # The Java hash of the transactional id, modulo the number of partitions, gives its partition; the
    # coordinator is the partition's leader.
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
    asked = admin.describe_topics(TopicCollection([_TRANSACTIONS]), request_timeout=_ASK_TIMEOUT_S)
    partitions = asked[_TRANSACTIONS].result(_ASK_TIMEOUT_S).partitions
    of_ours = partitions[_java_hash(transactional_id(round_)) % len(partitions)]
    return int(of_ours.leader.id) if of_ours.leader is not None else round_.random.randint(1, NODES)


def transactional_id(round_: Round) -> str:
    """Return the transactional id of a round's sink."""
    assert round_.topics is not None
    return f"{round_.topics.name}-{round_.pipeline}-0"


def _java_hash(text: str) -> int:
    found = 0
    for character in text:
        found = (found * 31 + ord(character)) & 0xFFFFFFFF
    return found & 0x7FFFFFFF
