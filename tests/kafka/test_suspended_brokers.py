"""A stopped broker with its connections open: nothing is refused or closed, and nothing is answered."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import structlog
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tailrace.errors import Kind, Policy, TailraceError
from tailrace.kafka.client import settings as client
from tailrace.kafka.client.requests import AdminClients, require_reachable
from tailrace.kafka.producer.writer import Writer
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.counting import PARTITIONS, read_numbers, require_each_once
from tests.support.kafka.once import numbers, reached, writer

BATCH = 20
#: Timeout of a commit; the broker is stopped until that is over and the failure is reported.
SHORT_S = 2.0
LONG_S = 60.0
FAR_S = 150.0


@contextmanager
def still(kafka: EmbeddedKafka) -> Iterator[None]:
    """Stop the broker while the context is open."""
    kafka.pause(1)
    try:
        yield
    finally:
        kafka.resume(1)


class Doing:
    """A step, in its own thread."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self._error: TailraceError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._step()
        except TailraceError as error:
            self._error = error

    def is_under_way_after(self, seconds: float) -> bool:
        """Return whether the step takes longer than so much time."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def end(self) -> TailraceError | None:
        """Return the error with which it ended."""
        assert not self.is_under_way_after(FAR_S), "no deadline was kept"
        return self._error


def opened(kafka: EmbeddedKafka, topic: str, timeout_s: float) -> tuple[Writer, int]:
    out = writer(kafka.bootstrap, topic, timeout_s=timeout_s)
    try:
        return out, reached(out.open())
    except BaseException:
        out.close()
        raise


def opened_at_last(kafka: EmbeddedKafka, topic: str, timeout_s: float) -> tuple[Writer, int]:
    """Return a writer with short timeouts; try again if they are too short to begin on a busy machine."""
    deadline = time.monotonic() + FAR_S
    while True:
        try:
            return opened(kafka, topic, timeout_s)
        except TailraceError as error:
            if error.policy is not Policy.RETRY or time.monotonic() > deadline:
                raise


@pytest.fixture
def topic(kafka: EmbeddedKafka, topic_name: str) -> str:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    admin.create_topics([NewTopic(topic_name, PARTITIONS, 1)])[topic_name].result(60)
    return topic_name


def given_up(step: Callable[[], object]) -> None:
    error = Doing(step).end()
    assert error is not None
    assert error.policy is Policy.RETRY, error
    assert error.kind in (Kind.SINK_WRITE_FAILED, Kind.OFFSETS_UNREADABLE), error


def test_with_a_stopped_broker_each_step_succeeds_later_or_fails_in_time_and_each_record_is_there_once(
    kafka: EmbeddedKafka, topic: str
) -> None:
    # For less than the timeout of a commit: it succeeds, with the same producer.
    out, last = opened(kafka, topic, LONG_S)
    out.send(topic, numbers(last + 1, BATCH))
    with still(kafka):
        commit = Doing(lambda: out.commit({"number": BATCH}))
        assert commit.is_under_way_after(1)
    assert commit.end() is None
    out.close()

    # For longer: it fails while the broker is stopped, with records on their way or only the commit.
    for sent_before in (False, True):
        out, last = opened_at_last(kafka, topic, SHORT_S)
        if sent_before:
            out.send(topic, numbers(last + 1, BATCH))
        with still(kafka):
            if not sent_before:
                out.send(topic, numbers(last + 1, BATCH))
            given_up(partial(out.commit, {"number": last + BATCH}))
            out.close()
            if sent_before:  # and no producer can begin
                given_up(lambda: opened(kafka, topic, SHORT_S))
        # Whatever became of the transaction: the next producer finds out.
        out, last = opened(kafka, topic, LONG_S)
        require_each_once(read_numbers(kafka, topic), last)
        out.send(topic, numbers(last + 1, BATCH))
        out.commit({"number": last + BATCH})
        out.close()
        require_each_once(read_numbers(kafka, topic), last + BATCH)


def test_a_broker_that_never_answers_is_reported_in_time_or_replaced_by_another(
    kafka: EmbeddedKafka,
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # the system accepts connections, as for a stopped process
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        def settings(bootstrap: str) -> dict[str, object]:
            return client.admin(client.client(bootstrap, {}, 1000))

        given_up(lambda: require_reachable(settings(address), 1))
        assert (
            Doing(lambda: require_reachable(settings(f"{address},{kafka.bootstrap}"), LONG_S)).end() is None
        )


def test_an_unanswered_request_is_repeated_by_a_new_client() -> None:
    asked: list[AdminClient] = []

    def question(code: int) -> Callable[[AdminClient, float], int]:
        def ask(admin: AdminClient, timeout_s: float) -> int:
            assert timeout_s <= LONG_S / 4
            asked.append(admin)
            if len(asked) == 1:
                raise KafkaException(KafkaError(code))
            return len(asked)

        return ask

    clients = AdminClients({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    # A client's outdated knowledge of the cluster may be why it gets no answer.
    for code in (KafkaError._TIMED_OUT, KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.UNKNOWN_LEADER_EPOCH):
        asked.clear()
        assert clients.ask(LONG_S, question(code)) == 2
        assert asked[0] is not asked[1]
    # And an error that needs a person is reported at once.
    asked.clear()
    with pytest.raises(KafkaException):
        clients.ask(LONG_S, question(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    assert len(asked) == 1


def test_the_timeout_of_a_request_leaves_time_for_another_broker() -> None:
    def waits(timeout_ms: int, **options: str) -> int:
        found = client.producer(client.client("k:1", options, timeout_ms), timeout_ms, "some-id")
        assert client.consumer(client.client("k:1", options, timeout_ms), "read_committed")
        return int(found["socket.timeout.ms"])

    assert waits(60_000) == 20_000
    assert waits(3_000) == 10_000
    assert waits(60_000, **{"socket.timeout.ms": "45000"}) == 45_000
    # librdkafka allows no more than the transaction's time, less a little.
    assert waits(600_000, **{"transaction.timeout.ms": "60000"}) == 59_900


def test_a_request_that_is_not_answered_is_logged_before_its_deadline() -> None:
    clients = AdminClients({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    outcomes = [KafkaError._TIMED_OUT, KafkaError.UNKNOWN_TOPIC_OR_PART, None]  # the second one is frequent

    def ask(_admin: AdminClient, _timeout_s: float) -> str:
        if (code := outcomes.pop(0)) is not None:
            raise KafkaException(KafkaError(code))
        return "answered"

    with structlog.testing.capture_logs() as said:
        assert clients.ask(LONG_S, ask) == "answered"
    [warning] = (line for line in said if "does not answer" in line["event"])
    assert warning["bootstrap_servers"] == "127.0.0.1:1"
