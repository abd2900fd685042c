"""Each error that a broker may answer a transactional producer with, once; answers that are late, lost or
wrong.

A `writer` is driven as a feed drives its sink: after a retriable error another producer tries again, after
others a person must act. Whatever happened, a reader of committed records then sees each record once, in the
order of its key, and the offset agrees.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from tailrace.errors import Kind, Policy, TailraceError
from tailrace.kafka.producer.writer import Writer
from tailrace_servers.kafka import EmbeddedKafka
from tests.support.kafka.counting import read_numbers, require_each_once
from tests.support.kafka.once import numbers, reached, writer
from tests.support.kafka_proxy import Fault, How, KafkaProxy

BATCH = 20
LIVES_MAX = 4
#: Timeout of a commit that is not answered.
TIMEOUT_S = 30.0

#: What becomes of a batch: the client copes, another producer does, or a person must act.
COPES, ANEW = "copes", "anew"
Outcome = str | Kind

CODES = {
    "UNKNOWN_SERVER_ERROR": -1,
    "INVALID_RECORD": 87,
    "CORRUPT_MESSAGE": 2,
    "UNKNOWN_TOPIC_OR_PARTITION": 3,
    "LEADER_NOT_AVAILABLE": 5,
    "NOT_LEADER_OR_FOLLOWER": 6,
    "REQUEST_TIMED_OUT": 7,
    "MESSAGE_TOO_LARGE": 10,
    "COORDINATOR_LOAD_IN_PROGRESS": 14,
    "COORDINATOR_NOT_AVAILABLE": 15,
    "NOT_COORDINATOR": 16,
    "NOT_ENOUGH_REPLICAS": 19,
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND": 20,
    "TOPIC_AUTHORIZATION_FAILED": 29,
    "CLUSTER_AUTHORIZATION_FAILED": 31,
    "OUT_OF_ORDER_SEQUENCE_NUMBER": 45,
    "DUPLICATE_SEQUENCE_NUMBER": 46,
    "INVALID_PRODUCER_EPOCH": 47,
    "INVALID_TXN_STATE": 48,
    "INVALID_PRODUCER_ID_MAPPING": 49,
    "INVALID_TRANSACTION_TIMEOUT": 50,
    "CONCURRENT_TRANSACTIONS": 51,
    "TRANSACTION_COORDINATOR_FENCED": 52,
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": 53,
    "OPERATION_NOT_ATTEMPTED": 55,
    "KAFKA_STORAGE_ERROR": 56,
    "UNKNOWN_PRODUCER_ID": 59,
    "PRODUCER_FENCED": 90,
    "TRANSACTION_ABORTABLE": 120,
}

#: The errors that each request may be answered with, and what is then done.
ERRORS: dict[str, dict[str, Outcome]] = {
    "FindCoordinator": {
        "COORDINATOR_NOT_AVAILABLE": COPES,
        "COORDINATOR_LOAD_IN_PROGRESS": COPES,
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": Kind.SINK_REFUSED,
    },
    "InitProducerId": {
        "COORDINATOR_NOT_AVAILABLE": COPES,
        "NOT_COORDINATOR": COPES,
        "COORDINATOR_LOAD_IN_PROGRESS": COPES,
        "CONCURRENT_TRANSACTIONS": COPES,
        "REQUEST_TIMED_OUT": COPES,
        "UNKNOWN_SERVER_ERROR": COPES,
        "INVALID_PRODUCER_EPOCH": Kind.SINK_PREEMPTED,
        "PRODUCER_FENCED": Kind.SINK_PREEMPTED,
        "INVALID_TRANSACTION_TIMEOUT": Kind.SINK_MISCONFIGURED,
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": Kind.SINK_REFUSED,
        "CLUSTER_AUTHORIZATION_FAILED": Kind.SINK_REFUSED,
    },
    "AddPartitionsToTxn": {
        "COORDINATOR_NOT_AVAILABLE": COPES,
        "NOT_COORDINATOR": COPES,
        "COORDINATOR_LOAD_IN_PROGRESS": COPES,
        "CONCURRENT_TRANSACTIONS": COPES,
        "UNKNOWN_TOPIC_OR_PARTITION": COPES,
        "REQUEST_TIMED_OUT": ANEW,
        "OPERATION_NOT_ATTEMPTED": ANEW,
        "INVALID_TXN_STATE": ANEW,
        "INVALID_PRODUCER_ID_MAPPING": ANEW,
        "TRANSACTION_COORDINATOR_FENCED": ANEW,
        "TRANSACTION_ABORTABLE": ANEW,
        "UNKNOWN_SERVER_ERROR": ANEW,
        "INVALID_PRODUCER_EPOCH": Kind.SINK_PREEMPTED,
        "PRODUCER_FENCED": Kind.SINK_PREEMPTED,
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": Kind.SINK_REFUSED,
        "TOPIC_AUTHORIZATION_FAILED": Kind.SINK_REFUSED,
    },
    "Produce": {
        "NOT_LEADER_OR_FOLLOWER": COPES,
        "LEADER_NOT_AVAILABLE": COPES,
        "UNKNOWN_TOPIC_OR_PARTITION": COPES,
        "REQUEST_TIMED_OUT": COPES,
        "NOT_ENOUGH_REPLICAS": COPES,
        "NOT_ENOUGH_REPLICAS_AFTER_APPEND": COPES,
        "KAFKA_STORAGE_ERROR": COPES,
        "CORRUPT_MESSAGE": COPES,
        "OUT_OF_ORDER_SEQUENCE_NUMBER": ANEW,
        "UNKNOWN_PRODUCER_ID": ANEW,
        "INVALID_TXN_STATE": ANEW,
        "INVALID_PRODUCER_ID_MAPPING": ANEW,
        "TRANSACTION_ABORTABLE": ANEW,
        "UNKNOWN_SERVER_ERROR": ANEW,
        "INVALID_RECORD": Kind.SINK_MISCONFIGURED,
        "INVALID_PRODUCER_EPOCH": Kind.SINK_PREEMPTED,
        "PRODUCER_FENCED": Kind.SINK_PREEMPTED,
        "MESSAGE_TOO_LARGE": Kind.SINK_RECORD_TOO_LARGE,
        "TOPIC_AUTHORIZATION_FAILED": Kind.SINK_REFUSED,
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": Kind.SINK_REFUSED,
    },
    "EndTxn": {
        "COORDINATOR_NOT_AVAILABLE": COPES,
        "NOT_COORDINATOR": COPES,
        "COORDINATOR_LOAD_IN_PROGRESS": COPES,
        "CONCURRENT_TRANSACTIONS": COPES,
        "REQUEST_TIMED_OUT": ANEW,
        "INVALID_TXN_STATE": ANEW,
        "INVALID_PRODUCER_ID_MAPPING": ANEW,
        "TRANSACTION_COORDINATOR_FENCED": ANEW,
        "TRANSACTION_ABORTABLE": ANEW,
        "UNKNOWN_PRODUCER_ID": ANEW,
        "UNKNOWN_SERVER_ERROR": ANEW,
        "INVALID_PRODUCER_EPOCH": Kind.SINK_PREEMPTED,
        "PRODUCER_FENCED": Kind.SINK_PREEMPTED,
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": Kind.SINK_REFUSED,
    },
}

#: Errors with which the broker answers although it has executed the request.
UNTRUE = {
    "Produce": ("NOT_ENOUGH_REPLICAS_AFTER_APPEND", "REQUEST_TIMED_OUT", "OUT_OF_ORDER_SEQUENCE_NUMBER"),
    "EndTxn": (
        "NOT_COORDINATOR",
        "CONCURRENT_TRANSACTIONS",
        "REQUEST_TIMED_OUT",
        "INVALID_TXN_STATE",
        "TRANSACTION_ABORTABLE",
        "UNKNOWN_SERVER_ERROR",
        "PRODUCER_FENCED",
    ),
    "AddPartitionsToTxn": ("NOT_COORDINATOR", "UNKNOWN_SERVER_ERROR"),
    "InitProducerId": ("NOT_COORDINATOR", "UNKNOWN_SERVER_ERROR"),
}


@pytest.fixture
def shop(kafka: EmbeddedKafka, kafka_proxy: KafkaProxy, topic_name: str) -> Iterator[Shop]:
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap, "log_level": 0})
    admin.create_topics([NewTopic(topic_name, 3, 1)])[topic_name].result(60)
    found = Shop(kafka, kafka_proxy, topic_name)
    yield found
    found.close()


class Shop:
    """A topic that is written through the proxy, batch by batch, by one producer after another."""

    def __init__(self, kafka: EmbeddedKafka, proxy: KafkaProxy, topic: str) -> None:
        self.topic = topic
        self.proxy = proxy
        self.done = 0
        self.lives = 0
        self._kafka = kafka
        self._writer: Writer | None = None

    def batch(self, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Write one batch to the topic; return what became of it. Afterwards it is in the topic."""
        goal, lives = self.done + BATCH, self.lives
        while self.done < goal:
            try:
                self._attempt(goal, timeout_s)
            except TailraceError as error:
                self.close()
                if error.policy is Policy.STOP:
                    self.proxy.forget()  # a person resolves it and starts again
                    self._attempt(goal, timeout_s)
                    return error.kind
                if self.lives >= lives + LIVES_MAX:
                    raise
        return COPES if self.lives == lives else ANEW

    def _attempt(self, goal: int, timeout_s: float) -> None:
        if self._writer is None:
            self.lives += 1
            self._writer = writer(self.proxy.bootstrap, self.topic, timeout_s=timeout_s)
            self.done = reached(self._writer.open())
        if self.done < goal:
            self._writer.send(self.topic, numbers(self.done + 1, goal - self.done))
            self._writer.commit({"number": goal})
            self.done = goal

    def close(self) -> None:
        """Close the producer, as a feed does after a failure; all of it must be gone then."""
        if self._writer is not None:
            left = _producers() - 1
            self._writer.close()
            self._writer = None
            assert _producers() <= left, "its threads and connections are left"

    def check(self) -> None:
        """Compare the committed records with the expected ones."""
        require_each_once(read_numbers(self._kafka, self.topic), self.done)


def _producers() -> int:
    return list(map(type, gc.get_objects())).count(Producer)


def _strike(shop: Shop, fault: Fault) -> Outcome:
    # A producer begins with these requests, and needs them only then.
    begins = fault.name in ("FindCoordinator", "InitProducerId")
    if begins:
        shop.close()
    shop.proxy.plan(fault)
    lives, began_s = shop.lives, time.monotonic()
    outcome = shop.batch()
    assert fault.struck.is_set(), f"{fault.name} was never asked"
    if fault.how in ("refuse", "belie"):
        assert time.monotonic() - began_s < TIMEOUT_S, (
            "the error was answered, but the client waited nevertheless"
        )
    if shop.lives > lives:
        shop.check()
    return COPES if begins and outcome == ANEW and shop.lives == lives + 1 else outcome


@pytest.mark.parametrize("request_name", ERRORS)
@pytest.mark.ci
def test_each_error_once(shop: Shop, request_name: str) -> None:
    shop.batch()
    expected, found = ERRORS[request_name], {}
    for error in expected:
        found[error] = _strike(shop, Fault(request_name, "refuse", CODES[error]))
    assert found == expected
    shop.check()


@pytest.mark.parametrize("request_name", UNTRUE)
def test_a_request_that_was_executed_but_answered_with_an_error_takes_effect_once(
    shop: Shop, request_name: str
) -> None:
    shop.batch()
    for error in UNTRUE[request_name]:
        _strike(shop, Fault(request_name, "belie", CODES[error]))
    shop.check()


@pytest.mark.parametrize("how", ["lose", "swallow"])
def test_lost_answers_and_requests(shop: Shop, how: How) -> None:
    shop.batch()
    for name in ("EndTxn", "Produce", "AddPartitionsToTxn", "InitProducerId"):
        assert _strike(shop, Fault(name, how)) == COPES, name
    shop.check()


@pytest.mark.parametrize("name", ["EndTxn", "Produce", "AddPartitionsToTxn"])
def test_a_late_answer_is_waited_for_or_its_result_is_looked_up(shop: Shop, name: str) -> None:
    shop.batch()
    # Within the timeout of a commit: waited for.
    late = shop.proxy.plan(Fault(name, "hold"))
    thread = threading.Thread(target=lambda: late.struck.wait(60) and late.release())
    thread.start()
    assert shop.batch() == COPES
    thread.join()
    shop.check()
    # Not within it: the next producer finds out what became of it.
    shop.close()
    later = shop.proxy.plan(Fault(name, "hold"))
    assert shop.batch(timeout_s=3.0) == ANEW
    later.release()
    shop.check()


def test_a_start_waits_no_longer_than_a_commit_may_take(shop: Shop) -> None:
    shop.batch()
    shop.close()
    held = shop.proxy.plan(Fault("InitProducerId", "hold"))
    with pytest.raises(TailraceError) as ended:
        writer(shop.proxy.bootstrap, shop.topic, timeout_s=3.0).open()
    assert held.struck.is_set()  # still held: nothing else has ended the wait
    assert (ended.value.kind, ended.value.policy) == (Kind.SINK_WRITE_FAILED, Policy.RETRY)
    held.release()
    assert shop.batch() in (COPES, ANEW)
    shop.check()


def test_each_error_code_is_that_of_the_protocol() -> None:
    known = {KafkaError(code).name(): code for code in CODES.values()}
    assert len(known) == len(CODES)
