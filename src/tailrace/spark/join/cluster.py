"""The driver's requests to a Kafka cluster, to plan micro-batches: offsets, never messages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from tailrace.config.kafka_clients import client_settings
from tailrace.errors import Kind, TailraceError
from tailrace.join.flow import require_one_partition
from tailrace.join.messages import ANSWER_S, offsets_of, progress_failure, topic_missing
from tailrace.join.planning import (
    ClusterState,
    Ends,
    Place,
    Progress,
    SettledTransactions,
    Settling,
    decoded_progress,
)
from tailrace.kafka.client import settings as client_options
from tailrace.kafka.client.failures import error_of
from tailrace.kafka.client.requests import AdminClients, answer, made, require_reachable
from tailrace.kafka.client.rights import is_denial
from tailrace.spark.join.options import JoinReadOptions

_Found = TypeVar("_Found")

#: Longest wait of a read with a fixed end for the commit of all rows of its transactions, in seconds.
SETTLED_S = 30.0
_AGAIN_S = 0.05


def consumer_settings(options: JoinReadOptions, group: str) -> dict[str, Any]:
    """Return the settings of a consumer that reads committed records.

    :raises TailraceError: `SECRET_MISSING`.
    """
    return client_options.consumer(_common(options), "read_committed") | {"group.id": group}


def admin_settings(options: JoinReadOptions) -> dict[str, Any]:
    """Return the settings of an admin client.

    :raises TailraceError: `SECRET_MISSING`.
    """
    return client_options.admin(_common(options))


def _common(options: JoinReadOptions) -> dict[str, Any]:
    settings = client_settings(options.options)
    return client_options.client(options.bootstrap_servers, settings, round(ANSWER_S * 1000))


class JoinCluster:
    """The driver's connections to a cluster. One thread.

    :raises TailraceError: `SINK_REFUSED`, `SINK_WRITE_FAILED`, as for every client of Kafka; as `state`.
    """

    def __init__(self, options: JoinReadOptions) -> None:
        self._options = options
        settings = admin_settings(options)
        require_reachable(settings, ANSWER_S)
        self._admin = AdminClients(settings)
        self._consumers: dict[str, Consumer] = {}
        #: Identifiers by topic, when the connection began.
        self.topics = self._topics()[0]

    def state(self) -> ClusterState:
        """Return the first and last offsets of the topics.

        :raises TailraceError: `TABLE_MISSING`, `CONFIG_INVALID`, `SOURCE_PRIVILEGE_MISSING`,
            `SOURCE_UNREACHABLE`.
        """
        transactions = [(self._options.transactions, 0)]
        closed = self._ends(transactions, _LATEST, IsolationLevel.READ_COMMITTED)
        topics, places = self._topics()
        first = self._ends([*transactions, *places], _EARLIEST, IsolationLevel.READ_UNCOMMITTED)
        written = self._ends(places, _LATEST, IsolationLevel.READ_UNCOMMITTED)
        committed = self._ends(places, _LATEST, IsolationLevel.READ_COMMITTED)
        (own,) = transactions
        return ClusterState(
            Ends(first[own], closed[own], closed[own]),
            topics,
            {place: Ends(first[place], committed[place], written[place]) for place in places},
        )

    def settled_state(self, settling: Settling) -> tuple[ClusterState, SettledTransactions | None]:
        """Wait until all rows of the transactions that now exist are committed; return the state then.

        If an open transaction of Kafka outlasts the wait, the state has what was settled before.
        """
        until_s = time.monotonic() + SETTLED_S
        wanted = (state := self.state()).transactions.committed
        while (found := settling.look(state)) is None or found.transactions < wanted:
            if time.monotonic() >= until_s:
                break
            time.sleep(_AGAIN_S)
            state = self.state()
        return state, found

    def await_committed(self, ends: Mapping[Place, int]) -> None:
        """Wait until everything before these offsets is committed or aborted.

        :raises TailraceError: `SOURCE_UNREACHABLE` if a transaction of Kafka stays open.
        """
        until_s = time.monotonic() + SETTLED_S
        while ends:
            found = self._ends([*ends], _LATEST, IsolationLevel.READ_COMMITTED)
            ends = {place: end for place, end in ends.items() if found[place] < end}
            if ends and time.monotonic() >= until_s:
                (topic, partition), offset = min(ends.items())
                raise TailraceError(
                    Kind.SOURCE_UNREACHABLE,
                    f"read topic {topic}: a transaction of Kafka is still open after {SETTLED_S:.0f} s",
                    "try again: a producer commits it, or the cluster aborts it after its "
                    "transaction.timeout.ms; or set smaller `endingOffsets`",
                    {"topic": topic, "partition": partition, "offset": offset},
                )
            time.sleep(_AGAIN_S if ends else 0)

    def progress(self, group: str, places: Sequence[Place]) -> dict[Place, Progress]:
        """Return the progress that readers have stored in a consumer group, by partition.

        :raises TailraceError: `SOURCE_PRIVILEGE_MISSING`, `SOURCE_UNREACHABLE`.
        """
        if group not in self._consumers:
            self._consumers[group] = made(Consumer, consumer_settings(self._options, group))
        try:
            kept = self._consumers[group].committed([TopicPartition(*place) for place in places], ANSWER_S)
        except KafkaException as error:
            raise progress_failure(error_of(error), places[0][0]) from None
        found = {}
        for each in kept:
            if each.error is None and each.metadata:
                progress = decoded_progress(_json(each.metadata))
                if progress is not None and progress.position.data == each.offset:
                    found[each.topic, each.partition] = progress
        return found

    def close(self) -> None:
        """Close the connections."""
        for consumer in self._consumers.values():
            consumer.close()
        self._consumers.clear()

    def _topics(self) -> tuple[dict[str, str], list[Place]]:
        names = [*self._options.data, self._options.transactions]

        def ask(admin: AdminClient, timeout_s: float) -> dict[str, Any]:
            asked = admin.describe_topics(TopicCollection(names), request_timeout=timeout_s)
            return {name: _described(name, found, timeout_s) for name, found in asked.items()}

        described = self._asked(lambda: self._admin.ask(ANSWER_S, ask), ", ".join(names))
        counts = {name: len(found.partitions) for name, found in described.items()}
        require_one_partition(self._options.transactions, counts[self._options.transactions])
        identifiers = {name: _identifier(found.topic_id) for name, found in described.items()}
        return identifiers, [(name, number) for name in self._options.data for number in range(counts[name])]

    def _ends(self, places: Sequence[Place], spec: Callable[[], Any], isolation: Any) -> dict[Place, int]:
        return self._asked(lambda: offsets_of(self._admin, places, spec, isolation), places[0][0])

    def _asked(self, question: Callable[[], _Found], topic: str) -> _Found:
        try:
            return question()
        except KafkaException as error:
            raise _failure(error_of(error), topic) from None


_UNKNOWN = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})  # noqa: SLF001

_LATEST: Callable[[], Any] = OffsetSpec.latest
_EARLIEST: Callable[[], Any] = OffsetSpec.earliest


def _described(topic: str, asked: Future[Any], timeout_s: float) -> Any:
    try:
        return answer(asked, timeout_s)
    except KafkaException as error:
        if error_of(error).code() in _UNKNOWN:
            raise _failure(error_of(error), topic) from None  # without another attempt
        raise


def _identifier(found: Any) -> str:
    halves = found.get_most_significant_bits(), found.get_least_significant_bits()
    return "".join(f"{half & (1 << 64) - 1:016x}" for half in halves)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _failure(error: KafkaError, topic: str) -> TailraceError:
    if error.code() in _UNKNOWN:
        return topic_missing(topic)
    context: dict[str, Any] = {"topic": topic}
    if is_denial(error):
        return TailraceError(
            Kind.SOURCE_PRIVILEGE_MISSING,
            f"read topic {topic}: {error.str()}",
            "allow READ and DESCRIBE on the topic",
            context,
        )
    return TailraceError(
        Kind.SOURCE_UNREACHABLE,
        f"ask Kafka about topic {topic}: {error.str()}",
        "check that the brokers run and can be reached from here, and the options `kafka.*`",
        context,
    )
