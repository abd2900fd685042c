"""Translates the client's errors to events of a transaction and to `TailraceError`s."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException

from tailrace.errors import Kind, TailraceError
from tailrace.kafka.producer.transaction import ProducerEvent

_Found = TypeVar("_Found")

_AGAIN_S = 0.1

_FENCED = frozenset(
    {KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH}  # noqa: SLF001
)
_TIMED_OUT = frozenset(
    {KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT, KafkaError._MSG_TIMED_OUT}  # noqa: SLF001
)
#: Errors that pass: outdated metadata, a change of leaders. In the client, retriable in transactions only.
_PASSING = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError._TRANSPORT,  # noqa: SLF001
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
    }
)
#: Key in an error's context, set if the broker, not the sink, found a record or batch too large.
REFUSED_BY = "refused_by"

#: Key in an error's context: the time limit, in seconds, of a batch that exceeded it during deliveries.
LIMIT_S = "limit_s"
#: Key in an error's context, set if the cluster does not allow the requested transaction timeout.
REFUSED_LIMIT = "transaction_timeout"

#: Errors of topics that can't be created with the settings wanted.
_UNFIT = frozenset({KafkaError.INVALID_CONFIG, KafkaError.INVALID_PARTITIONS, KafkaError.POLICY_VIOLATION})
_KEY_WANTED = (
    "a compacted topic takes only records with a key: drop a TRUNCATE, which has none, by the transformation "
    "{type: filter, where: op != 't'}; name columns that identify the rows of a table without a key in "
    "source.message_keys; or change the topic's cleanup.policy (a broker that validates schemas says so, too)"
)
#: Hints for errors that only the user can correct.
_MISCONFIGURED = {
    **dict.fromkeys(_UNFIT, "correct `topics` of the sink"),
    KafkaError.TOPIC_EXCEPTION: "the name is not allowed, or another topic's differs only by '.' or '_': "
    "give the records another topic, with `routes`, a transformation or the option that names it",
    KafkaError.INVALID_RECORD: _KEY_WANTED,
    KafkaError._INVALID_DIFFERENT_RECORD: _KEY_WANTED,  # noqa: SLF001
}
#: Hints for errors that the next attempt may not have.
_RETRIED = {
    **dict.fromkeys(
        _TIMED_OUT,
        "see whether the brokers run and can be reached, whether the topics still exist, and whether enough "
        "of their replicas are in sync",
    ),
    KafkaError._UNKNOWN_PARTITION: "the topic was created again, with fewer partitions: the next attempt "  # noqa: SLF001
    "counts them",
    KafkaError.INVALID_PRODUCER_ID_MAPPING: "the cluster has forgotten the producer, which was idle for "
    "longer than transactional.id.expiration.ms, or lost its state: the next attempt registers it again",
}
_DENIED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "the principal needs WRITE (and DESCRIBE) on the topic",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "the principal needs WRITE and DESCRIBE on it",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "the principal needs CREATE on the cluster, or on the topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "the principal needs READ on the group",
}


def error_of(error: object) -> KafkaError:
    """Return the client's error, which may be in its exception."""
    found = error.args[0] if isinstance(error, KafkaException) and error.args else error
    return found if isinstance(found, KafkaError) else KafkaError(KafkaError._FAIL, str(error))  # noqa: SLF001


def event_of(error: KafkaError, *, committing: bool = False) -> ProducerEvent:
    """Return the event of a transaction that an error stands for."""
    if error.code() in _FENCED:
        return ProducerEvent.FENCED
    if error.txn_requires_abort():
        return ProducerEvent.REFUSED
    if committing and (error.retriable() or error.code() in _TIMED_OUT):
        return ProducerEvent.UNKNOWN
    return ProducerEvent.BROKEN if error.fatal() or committing else ProducerEvent.REFUSED


def failure_of(error: KafkaError, attempted: str, **context: object) -> TailraceError:
    """Return the client's error as the error of what was attempted.

    Its kind determines the policy: errors that only the user can correct are not retried.
    """
    code = error.code()
    found = f"{attempted}: {error.name()}: {error.str()}"
    if code in _FENCED:
        return preempted(attempted, **context)
    if code in _DENIED:
        return TailraceError(Kind.SINK_REFUSED, found, _DENIED[code], context)
    if code in (KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED):  # noqa: SLF001
        return TailraceError(
            Kind.SINK_REFUSED, found, "check security.protocol and sasl.* in `options`", context
        )
    if code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
        return TailraceError(
            Kind.SINK_MISCONFIGURED,
            found,
            "lower transaction.timeout.ms in `options`, or raise transaction.max.timeout.ms of the brokers",
            {**context, REFUSED_LIMIT: "refused"},
        )
    if code in (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_MSG_SIZE):
        return TailraceError(
            Kind.SINK_RECORD_TOO_LARGE,
            found,
            "raise max.message.bytes of the topic (and message.max.bytes in `options`), or lower batch.size "
            "in `options` to it: the broker compares whole batches; or, for a sink, set dead_letter_topic",
            {**context, REFUSED_BY: "broker"},
        )
    if code in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):  # noqa: SLF001
        return TailraceError(
            Kind.SINK_WRITE_FAILED,
            found,
            "create the topic; with create_topics: true, the next attempt creates it",
            context,
        )
    if code in _MISCONFIGURED:
        return TailraceError(Kind.SINK_MISCONFIGURED, found, _MISCONFIGURED[code], context)
    if code == KafkaError.INVALID_REPLICATION_FACTOR:
        return TailraceError(
            Kind.SINK_WRITE_FAILED,
            found,
            "see that enough brokers run, or correct replication_factor in `topics` of the sink",
            context,
        )
    hint = _RETRIED.get(code, "see whether the cluster can be reached")
    return TailraceError(Kind.SINK_WRITE_FAILED, found, hint, context)


def unfit_options(found: str, bootstrap: str) -> TailraceError:
    """Return the error of options that the client does not accept."""
    return TailraceError(
        Kind.SINK_MISCONFIGURED,
        f"create a Kafka client: {found}",
        "correct `options` (in Spark `kafka.*`); they are those of librdkafka, described in its "
        "CONFIGURATION.md",
        {"bootstrap_servers": bootstrap},
    )


def preempted(attempted: str, **context: object) -> TailraceError:
    """Return the error of a producer whose transactional id another producer has taken."""
    return TailraceError(
        Kind.SINK_PREEMPTED,
        f"{attempted}: another producer with this transactional id has started; this one stops",
        "the same pipeline runs somewhere else: stop one of them, or give it another name or `group`",
        context,
    )


def has_timed_out(error: KafkaError) -> bool:
    """Return whether an error is a timeout."""
    return error.code() in _TIMED_OUT


def is_unfit(error: KafkaError) -> bool:
    """Return whether an error says that a topic can't be created with the settings wanted."""
    return error.code() in _UNFIT


def may_pass(error: KafkaError) -> bool:
    """Return whether a retry may help."""
    return error.retriable() or error.code() in _PASSING


def persist(
    timeout_s: float, act: Callable[[float], _Found], may_help: Callable[[KafkaError], bool] = may_pass
) -> _Found:
    """Call `act` with the seconds left, at least 0.1, and retry it after an error until the timeout.

    :param may_help: returns whether a retry may help after this error.
    :raises KafkaException: the last one.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return act(max(0.1, deadline - time.monotonic()))
        except KafkaException as error:
            found = error_of(error)
            if not may_help(found) or found.fatal() or time.monotonic() >= deadline:
                raise
            time.sleep(_AGAIN_S)


def answered(act: Callable[[], _Found]) -> _Found:
    """Call a method of the client that may report deliveries, as those of transactions do.

    If a fatal error occurs while the client reports deliveries, it raises a `SystemError`. The fatal error is
    the cause, the cause of the cause if there are several reports, or lost. An abort raises it again.
    :raises KafkaException: the client's error.
    """
    try:
        return act()
    except SystemError as error:
        cause: BaseException | None = error
        while isinstance(cause, SystemError):
            cause = cause.__cause__ or cause.__context__
        if isinstance(cause, KafkaException):
            raise cause from None
        raise KafkaException(KafkaError(KafkaError._FAIL, "the client failed")) from None  # noqa: SLF001
