"""Requests to a cluster, each repeated while there is time, to any broker that answers.

A broker that stands still with its connections open refuses nothing, closes nothing and answers nothing.
The client would wait for it to the end, and most of its questions go to one broker only: a leader, or the
controller that it learnt of when it began. So none gets all the time that there is, and the next is
asked by a new client, which learns who has that broker's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from tailrace.kafka.client.failures import has_timed_out, may_pass, persist

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
