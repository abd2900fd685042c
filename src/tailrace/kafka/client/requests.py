"""Requests to a cluster, each retried until its deadline, to any broker that answers.

A hung broker with open connections neither refuses nor answers a request, and closes no connection. The
client would wait for it until the deadline, and most requests go to one broker only: a leader, or the
controller that the client found at its start. So no attempt gets all of the time, and the next one
uses a new client, which finds the hung broker's successor.

First, `require_reachable` checks whether the cluster accepts the credentials: a refusal is an error at once,
in the cluster's own words, instead of a timeout.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from tailrace.backoff import Backoff
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.client.failures import error_of, has_timed_out, may_pass, persist, unfit_options

log = structlog.get_logger(__name__)

_Found = TypeVar("_Found")

#: An attempt gets this fraction (1/n) of the time, and at least the minimum: a busy cluster may take seconds.
_SHARE = 4
_LEAST_S = 5.0


class AdminClients:
    """An admin client for requests, replaced by a new one after a failed request. One thread at a time.

    :param settings: of an admin client.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        self._client: AdminClient | None = None

    def ask(self, timeout_s: float, question: Callable[[AdminClient, float], _Found]) -> _Found:
        """Return the answer to a request, retrying it while that may help.

        :param question: sends the request with a client and a timeout in seconds; may be called repeatedly.
        :raises KafkaException: the error of the last attempt.
        """
        at_once_s = max(_LEAST_S, timeout_s / _SHARE)

        def may_help(error: KafkaError) -> bool:
            if not (has_timed_out(error) or may_pass(error)):
                return False
            self._client = None  # its metadata of the cluster may be outdated
            if has_timed_out(error):
                log.warning(
                    "a Kafka broker does not answer; it is asked again, or another one",
                    bootstrap_servers=self.settings["bootstrap.servers"],
                    error=error.str(),
                )
            return True

        return persist(timeout_s, lambda left_s: question(self._made(), min(left_s, at_once_s)), may_help)

    def _made(self) -> AdminClient:
        if self._client is None:
            self._client = AdminClient(self.settings)
        return self._client


def answer(asked: Future[_Found], timeout_s: float) -> _Found:
    """Return the answer to an admin client's request.

    :raises KafkaException: if the cluster refused the request, or did not answer in time.
    """
    try:
        return asked.result(timeout_s)
    except TimeoutError:
        # The future's timeout may be over before the client's.
        late = KafkaError(KafkaError._TIMED_OUT, f"no answer within {timeout_s:.0f} s")  # noqa: SLF001
        raise KafkaException(late) from None


def topic_creation(topic: NewTopic, *, only_check: bool) -> Callable[[AdminClient, float], None]:
    """Return the request that creates a topic; `only_check`: that only checks whether it can be created."""

    def ask(admin: AdminClient, timeout_s: float) -> None:
        asked = admin.create_topics([topic], validate_only=only_check, request_timeout=timeout_s)
        answer(asked[topic.topic], timeout_s)

    return ask


def topic_settings(topic: str) -> Callable[[AdminClient, float], Mapping[str, Any]]:
    """Return the request for a topic's settings, by name; each is an object with `value`."""
    resource = ConfigResource(ResourceType.TOPIC, topic)

    def ask(admin: AdminClient, timeout_s: float) -> Mapping[str, Any]:
        return answer(admin.describe_configs([resource], request_timeout=timeout_s)[resource], timeout_s)

    return ask


_Client = TypeVar("_Client")

#: The client's message, which curl words, if the token endpoint (OIDC) can't be reached. Its error code is
#: the same as for refused credentials.
_NO_ANSWER = re.compile(
    r"acquire SASL OAUTHBEARER token: (Failed to connect|Could not (connect|resolve)|Connection timed out|"
    r"Operation timed out|Resolving timed out|Recv failure|Send failure|Empty reply)"
)

#: The value of an option in the client's message that it is invalid.
_GIVEN = re.compile(r'(Invalid value )(?:".*" )?(for configuration property "[^"]*")(?:: .*)?', re.DOTALL)

#: Name of a topic and of a group that do not exist.
_NOBODY = "tailrace-is-anybody-there"
#: Wait for one answer, in seconds, growing; between waits the client reports why the cluster does not answer.
_WAIT_S = 0.25
_WAIT_S_MAX = 10.0
#: Time after a refusal in which another broker may accept the credentials, in seconds.
_SECOND_CHANCE_S = 2.0

_REFUSALS = frozenset(
    {KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL}  # noqa: SLF001
)


def made(kind: Callable[[dict[str, Any]], _Client], settings: Mapping[str, Any]) -> _Client:
    """Return a client with these settings.

    :raises TailraceError: `SINK_MISCONFIGURED` for settings that the client does not accept.
    """
    try:
        return kind(dict(settings))
    except KafkaException as error:
        bootstrap = str(settings.get("bootstrap.servers", ""))
        # The option's value may be a password under a wrong name.
        raise unfit_options(_GIVEN.sub(r"\1\2", error_of(error).str()), bootstrap) from None


def require_reachable(settings: Mapping[str, Any], timeout_s: float) -> int:
    """Wait until any broker answers; return the number of brokers.

    The request asks for the metadata of a topic that does not exist: the answer is short, and no topic is
    created. A request about the cluster itself would go to the controller alone, which may hang.

    :param settings: of an admin client.
    :raises TailraceError: `SINK_REFUSED` if the client or the cluster refuses credentials or certificates;
        `SINK_MISCONFIGURED`; `SINK_WRITE_FAILED` if the cluster does not answer in time, with the reason.
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
            client.poll(0)  # calls error_cb with errors
            refusal = next(filter(_is_refusal, heard), None)
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


def _is_refusal(error: KafkaError) -> bool:
    return error.code() in _REFUSALS and not _NO_ANSWER.search(error.str())


def _are_all_down(heard: list[KafkaError]) -> bool:
    return any(error.code() == KafkaError._ALL_BROKERS_DOWN for error in heard)  # noqa: SLF001


def _refused(error: KafkaError, settings: Mapping[str, Any]) -> TailraceError:
    is_tls = error.code() == KafkaError._SSL  # noqa: SLF001
    hint = (
        "see that ssl.ca.location names the authority that signed the brokers' certificates, and that "
        "bootstrap_servers has the host names in these certificates"
        if is_tls
        else "see security.protocol, sasl.mechanism, sasl.username and sasl.password, or "
        "sasl.oauthbearer.*, in `options`"
    )
    return TailraceError(
        Kind.SINK_REFUSED,
        f"connect to Kafka: {error.str()}",
        hint,
        {"bootstrap_servers": str(settings["bootstrap.servers"])},
    )


def _silent(heard: list[KafkaError], settings: Mapping[str, Any], timeout_s: float) -> TailraceError:
    reasons = [error for error in heard if error.code() != KafkaError._ALL_BROKERS_DOWN]  # noqa: SLF001
    words = reasons[-1].str() if reasons else "no error was reported"
    return TailraceError(
        Kind.SINK_WRITE_FAILED,
        f"connect to Kafka: no answer within {timeout_s:.0f} s: {words}",
        "see whether the brokers run and can be reached from here, and whether security.protocol is correct",
        {"bootstrap_servers": str(settings["bootstrap.servers"])},
    )
