"""Whether a cluster lets us in: told at once, with its own words, instead of after a silence."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from tailrace.errors import Kind, TailraceError
from tailrace.kafka.failures import error_of

_Client = TypeVar("_Client")

_POLL_S = 0.05
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


def require_reachable(settings: Mapping[str, Any], timeout_s: float) -> None:
    """Wait until the cluster answers.

    :raises TailraceError: `SINK_REFUSED` if credentials or certificates are refused, by us or by it;
        `SINK_MISCONFIGURED`; `SINK_WRITE_FAILED` if it does not answer in time, with why.
    """
    heard: list[KafkaError] = []
    admin = made(AdminClient, {**settings, "error_cb": heard.append})
    deadline = time.monotonic() + timeout_s
    asked = admin.describe_cluster(request_timeout=timeout_s)
    refused_s: float | None = None
    while not asked.done() and time.monotonic() < deadline:
        admin.poll(_POLL_S)
        refusal = next((error for error in heard if error.code() in _REFUSALS), None)
        if refusal is None:
            del heard[:-10]
            continue
        refused_s = refused_s or time.monotonic()
        if time.monotonic() >= refused_s + _SECOND_CHANCE_S or _are_all_down(heard):
            raise _refused(refusal, settings)
    try:
        asked.result(0.1)
    except (KafkaException, TimeoutError) as error:
        raise _silent(heard, settings, timeout_s) from error


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
