"""Whether a cluster lets us in: an error at once, in its own words, instead of after a time-out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException

from tailrace.backoff import Backoff
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.client.failures import error_of

_Client = TypeVar("_Client")

#: The name of a topic and of a group that nobody has.
_NOBODY = "tailrace-is-anybody-there"
#: For one answer, longer each time: in between it is heard what keeps the cluster from answering.
_WAIT_S = 0.25
_WAIT_S_MAX = 10.0
#: Another broker may let in whom one has refused.
_SECOND_CHANCE_S = 2.0

_REFUSALS = frozenset(
    {KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL}  # noqa: SLF001
)


def made(kind: Callable[[dict[str, Any]], _Client], settings: Mapping[str, Any]) -> _Client:
    """Return a client of these settings.

    :raises TailraceError: `SINK_MISCONFIGURED` for settings that it does not take.
    """
    try:
        return kind(dict(settings))
    except KafkaException as error:
        raise TailraceError(
            Kind.SINK_MISCONFIGURED,
            f"make a client of Kafka: {error_of(error).str()}",
            "correct `options`; they are those of librdkafka, described in its CONFIGURATION.md",
            {"bootstrap_servers": str(settings.get("bootstrap.servers", ""))},
        ) from None


def require_reachable(settings: Mapping[str, Any], timeout_s: float) -> int:
    """Wait until a broker answers, whichever; return how many there are.

    What is asked is how a topic lies that nobody has: the answer is short, and nothing is made by it. A
    question about the cluster itself goes to the controller alone, which may be the one that stands still.

    :param settings: of an admin client.
    :raises TailraceError: `SINK_REFUSED` if credentials or certificates are refused, by us or by it;
        `SINK_MISCONFIGURED`; `SINK_WRITE_FAILED` if it does not answer in time, with why.
    """
    heard: list[KafkaError] = []
    client = made(Consumer, {**settings, "group.id": _NOBODY, "error_cb": heard.append})
    deadline = time.monotonic() + timeout_s
    refused_s: float | None = None
    backoff = Backoff(first_s=_WAIT_S, longest_s=_WAIT_S_MAX)
    try:
        while True:
            left_s = deadline - time.monotonic()
            try:
                return len(client.list_topics(_NOBODY, min(backoff.wait_s, max(0.1, left_s))).brokers)
            except KafkaException as error:
                failure = error
            client.poll(0)  # hears what went wrong
            refusal = next((error for error in heard if error.code() in _REFUSALS), None)
            if refusal is not None:
                refused_s = refused_s or time.monotonic()
                over = left_s <= 0 or time.monotonic() >= refused_s + _SECOND_CHANCE_S
                if over or _are_all_down(heard):
                    raise _refused(refusal, settings)
                continue
            del heard[:-10]
            if left_s <= 0:
                raise _silent(heard, settings, timeout_s) from failure
            backoff = backoff.failed()
    finally:
        client.close()


def _are_all_down(heard: list[KafkaError]) -> bool:
    return any(error.code() == KafkaError._ALL_BROKERS_DOWN for error in heard)  # noqa: SLF001


def _refused(error: KafkaError, settings: Mapping[str, Any]) -> TailraceError:
    is_tls = error.code() == KafkaError._SSL  # noqa: SLF001
    hint = (
        "see that ssl.ca.location names the authority that signed the brokers' certificates, and that "
        "bootstrap_servers has the names that these are for"
        if is_tls
        else "see security.protocol, sasl.mechanism, sasl.username and sasl.password in `options`"
    )
    return TailraceError(
        Kind.SINK_REFUSED,
        f"connect to Kafka: {error.str()}",
        hint,
        {"bootstrap_servers": str(settings["bootstrap.servers"])},
    )


def _silent(heard: list[KafkaError], settings: Mapping[str, Any], timeout_s: float) -> TailraceError:
    told = [error for error in heard if error.code() != KafkaError._ALL_BROKERS_DOWN]  # noqa: SLF001
    words = told[-1].str() if told else "it did not say a word"
    return TailraceError(
        Kind.SINK_WRITE_FAILED,
        f"connect to Kafka: no answer within {timeout_s:.0f} s: {words}",
        "see whether the brokers run and can be reached from here, and that security.protocol is theirs",
        {"bootstrap_servers": str(settings["bootstrap.servers"])},
    )
