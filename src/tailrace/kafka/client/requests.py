"""Requests to a cluster, each repeated while there is time, to any broker that answers.

A broker that stands still with its connections open refuses nothing, closes nothing and answers nothing.
The client would wait for it to the end, and most of its questions go to one broker only: a leader, or the
controller that it learnt of when it began. So none gets all the time that there is, and the next is
asked by a new client, which learns who has that broker's place.

Whether the cluster lets us in at all is asked first (`require_reachable`): a refusal is an error at once, in
the cluster's own words, instead of after a time-out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

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

_Found = TypeVar("_Found")

#: The part of the time that one attempt gets, and the least of it: a busy cluster may take seconds.
_SHARE = 4
_LEAST_S = 5.0


class AdminClients:
    """A client for requests; a new one is made after a request that failed. One thread at a time.

    :param settings: of an admin client.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)
        self._client: AdminClient | None = None

    def ask(self, timeout_s: float, question: Callable[[AdminClient, float], _Found]) -> _Found:
        """Return the answer, asking again while that may help.

        :param question: asks a client, within so many seconds; may be asked any number of times.
        :raises KafkaException: what the last attempt met.
        """
        at_once_s = max(_LEAST_S, timeout_s / _SHARE)

        def may_help(error: KafkaError) -> bool:
            if not (has_timed_out(error) or may_pass(error)):
                return False
            self._client = None  # what it knows of the cluster may be what is wrong
            return True

        return persist(timeout_s, lambda left_s: question(self._made(), min(left_s, at_once_s)), may_help)

    def _made(self) -> AdminClient:
        if self._client is None:
            self._client = AdminClient(self.settings)
        return self._client


def answer(asked: Future[_Found], timeout_s: float) -> _Found:
    """Return what an admin client was answered.

    :raises KafkaException: what the cluster refused, or that it did not answer in time.
    """
    try:
        return asked.result(timeout_s)
    except TimeoutError:
        # Of the future, which may be quicker than the client.
        late = KafkaError(KafkaError._TIMED_OUT, f"no answer within {timeout_s:.0f} s")  # noqa: SLF001
        raise KafkaException(late) from None


def topic_creation(topic: NewTopic, *, only_check: bool) -> Callable[[AdminClient, float], None]:
    """Return the request to make a topic; `only_check`: to say whether that could be done."""

    def ask(admin: AdminClient, timeout_s: float) -> None:
        asked = admin.create_topics([topic], validate_only=only_check, request_timeout=timeout_s)
        answer(asked[topic.topic], timeout_s)

    return ask


def topic_settings(topic: str) -> Callable[[AdminClient, float], Mapping[str, Any]]:
    """Return the question what a topic's settings are; each is answered with an object with `value`."""
    resource = ConfigResource(ResourceType.TOPIC, topic)

    def ask(admin: AdminClient, timeout_s: float) -> Mapping[str, Any]:
        return answer(admin.describe_configs([resource], request_timeout=timeout_s)[resource], timeout_s)

    return ask


_Client = TypeVar("_Client")

#: What the client says, in curl's words, where the place that gives tokens (OIDC) can't be reached. Its own
#: code for that is the one of refused credentials.
_NO_ANSWER = re.compile(
    r"acquire SASL OAUTHBEARER token: (Failed to connect|Could not (connect|resolve)|Connection timed out|"
    r"Operation timed out|Resolving timed out|Recv failure|Send failure|Empty reply)"
)

#: What an option was given, where the client says that it takes no such value.
_GIVEN = re.compile(r'(Invalid value )(?:".*" )?(for configuration property "[^"]*")(?:: .*)?', re.DOTALL)

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
        bootstrap = str(settings.get("bootstrap.servers", ""))
        # What an option was given may be a password under a wrong name.
        raise unfit_options(_GIVEN.sub(r"\1\2", error_of(error).str()), bootstrap) from None


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
            client.poll(0)  # has error_cb called with what went wrong
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
        "bootstrap_servers has the names that these are for"
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
        "see whether the brokers run and can be reached from here, and that security.protocol is theirs",
        {"bootstrap_servers": str(settings["bootstrap.servers"])},
    )
