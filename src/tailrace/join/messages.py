"""Reads messages of several Kafka partitions with one consumer, for the join."""

from __future__ import annotations

import functools
import itertools
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from tailrace.errors import Kind, TailraceError
from tailrace.join.extraction import MESSAGES
from tailrace.kafka.client.failures import error_of, may_pass, persist
from tailrace.kafka.client.requests import AdminClients, answer, made
from tailrace.kafka.client.rights import is_denial

#: Topic and number of a partition.
Place = tuple[str, int]

#: The column of a message's headers, if they are read.
HEADERS_FIELD = pa.field("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])))

_HEADER = ("key", "value")
#: The time of a timestamp, which the client returns with its kind.
_TIME = itemgetter(1)

#: Limits of a read, in messages and bytes: a partition's messages of one read are written in one transaction,
#: for whose commit the writer waits. The last batch of `_TAKEN_MAX` messages may exceed the limit of bytes.
#: `_TAKEN_MAX` limits the number of message objects at a time: Python's garbage collector would visit more
#: of them several times.
_READ_MAX = 65_536
_READ_BYTES_MAX = 32 << 20
_TAKEN_MAX = 500
#: Limits of the client's read-ahead: kilobytes of all partitions together, and messages of one partition. A
#: partition that has reached a limit is fetched again soon (the client's default is a second later). Brokers'
#: responses are compressed, so their limits are lower: 2 MiB of a partition, 8 of all.
_READ_AHEAD_KBYTES = 16 << 10
READ_AHEAD = {
    "queued.max.messages.kbytes": _READ_AHEAD_KBYTES,
    "queued.min.messages": 20_000,
    "fetch.queue.backoff.ms": 10,
    "fetch.max.bytes": 8 << 20,
    "fetch.message.max.bytes": 2 << 20,
    "fetch.wait.max.ms": 50,
}
#: Age up to which the client's errors are reported, in seconds: its attempts to connect are more frequent.
_ERRORS_S = 30.0
#: Timeout of requests to brokers, in seconds.
ANSWER_S = 30.0

#: Errors of the request for the coordinator of the group, which the client sends even if it does not use it.
_OF_GROUPS = frozenset({KafkaError.GROUP_AUTHORIZATION_FAILED})
_GONE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class Read:
    """The result of a read.

    :param messages: by partition, its messages, with the columns of `MESSAGES`.
    :param ends: for each partition whose end was reached, the offset of the next message.
    """

    messages: Mapping[Place, pa.RecordBatch]
    ends: Mapping[Place, int]


class MessageReader:
    """A reader of committed records of some partitions; without a group, so without rebalances. One thread.

    :param settings: settings of the consumer, except for those that are set here.
    :param admin: settings of an admin client, for `written_end`.
    :param with_headers: whether messages also have the column `headers`.
    :param with_times: whether the column `timestamp_ms` has the messages' times; otherwise it is null.
    :param keeps_progress: whether the consumer's group is used; otherwise no right to the group is needed.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        admin: Mapping[str, Any],
        *,
        with_headers: bool = False,
        with_times: bool = True,
        keeps_progress: bool = False,
    ) -> None:
        self._with_headers, self._with_times = with_headers, with_times
        self._passes_over = frozenset() if keeps_progress else _OF_GROUPS
        self._group = settings["group.id"]
        self._errors: dict[str, tuple[float, str]] = {}  # by name: time of the last one, and the message
        client = {**settings, **READ_AHEAD, "error_cb": self._failed}
        self._consumer: Consumer = made(Consumer, client)
        self._admin = AdminClients(admin)
        self._positions: dict[Place, int] = {}

    def partitions_of(self, topics: Sequence[str]) -> dict[str, int]:
        """Return the number of partitions of each topic.

        :raises TailraceError: `TABLE_MISSING` for a topic that does not exist; `SOURCE_UNREACHABLE`.
        """
        found = {}
        for topic in topics:
            ask = functools.partial(self._consumer.list_topics, topic, ANSWER_S)
            metadata = self._asked(ask, topic).topics[topic]
            if metadata.error is not None or not metadata.partitions:
                raise topic_missing(topic)
            found[topic] = len(metadata.partitions)
        return found

    def cluster(self) -> str:
        """Return the id of the cluster.

        :raises TailraceError: `SOURCE_UNREACHABLE`.
        """
        return str(self._asked(lambda: self._consumer.list_topics(timeout=ANSWER_S), "").cluster_id)

    def begin(self, positions: Mapping[Place, int]) -> None:
        """Start to read these partitions, each from an offset, in addition to the others."""
        self._positions |= positions
        self._consumer.incremental_assign(
            [TopicPartition(*place, offset) for place, offset in positions.items()]
        )

    def seek(self, place: Place, offset: int) -> None:
        """Read a partition from an offset on, again if it was read before."""
        if place in self._positions:
            self._consumer.incremental_unassign([TopicPartition(*place)])
        self.begin({place: offset})

    def pause(self, place: Place) -> None:
        """Stop reading a partition until `resume`."""
        self._consumer.pause([TopicPartition(*place)])

    def resume(self, place: Place) -> None:
        """Continue to read a paused partition."""
        self._consumer.resume([TopicPartition(*place)])

    def read(self, timeout_s: float) -> Read:
        """Return the available messages; wait at most `timeout_s` for the first one.

        :raises TailraceError: `LOG_RANGE_GONE` if an offset does not exist any more; errors of the cluster.
        """
        waited = self._consumer.poll(timeout_s)
        taken = [] if waited is None else [waited]
        parts: dict[Place, _Columns] = {}
        ends: dict[Place, int] = {}
        count = size = 0
        while taken:
            self._errors.clear()
            size += self._sort(taken, parts, ends)
            count += len(taken)
            is_full = count >= _READ_MAX or size >= _READ_BYTES_MAX
            taken = [] if is_full else self._consumer.consume(min(_TAKEN_MAX, _READ_MAX - count), 0)
        found = {place: columns.batch() for place, columns in parts.items()}
        for place, columns in parts.items():
            self._positions[place] = columns.offsets[-1] + 1
        self._positions |= ends
        return Read(found, ends)

    def _sort(self, taken: list[Message], parts: dict[Place, _Columns], ends: dict[Place, int]) -> int:
        # Adds messages to the columns of their partitions; returns their size in bytes.
        size = 0
        # Consecutive messages of one partition together; each error separately.
        for first, last in _runs(taken):
            message = taken[first]
            place = (message.topic() or "", message.partition() or 0)
            if (error := message.error()) is None:
                if place not in parts:
                    parts[place] = _Columns(self._with_headers, self._with_times)
                size += parts[place].add(taken[first:last])
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
                ends[place] = message.offset() or 0
            elif error.code() not in self._passes_over and not may_pass(error):
                raise self._failure(error, place)
        return size

    def end(self, place: Place) -> int:
        """Ask the broker for the offset after the last committed message of a partition."""
        _first, last = self._asked(
            lambda: self._consumer.get_watermark_offsets(TopicPartition(*place), ANSWER_S), place[0]
        )
        return int(last)

    def written_end(self, place: Place) -> int:
        """Ask the broker for the offset after the last message of a partition, committed or not."""
        ask = functools.partial(
            offsets_of, self._admin, [place], OffsetSpec.latest, IsolationLevel.READ_UNCOMMITTED
        )
        return int(self._asked(ask, place[0])[place])

    def first(self, place: Place) -> int:
        """Ask the broker for the offset of a partition's first message."""
        first, _last = self._asked(
            lambda: self._consumer.get_watermark_offsets(TopicPartition(*place), ANSWER_S), place[0]
        )
        return int(first)

    def lag(self, place: Place) -> int:
        """Return the number of offsets after the last one read, as of the broker's last response."""
        _first, last = self._consumer.get_watermark_offsets(TopicPartition(*place), cached=True)
        return max(0, int(last) - self._positions[place])

    def position(self, place: Place) -> int:
        """Return the offset that is read next; at the end of the partition, the end's offset."""
        return self._positions[place]

    def close(self) -> None:
        """Close the connections."""
        self._consumer.close()

    @property
    def errors(self) -> Sequence[str]:
        """The client's recent errors, while it can't read. Any thread."""
        since_s = time.monotonic() - _ERRORS_S
        return [said for at_s, said in list(self._errors.values()) if at_s >= since_s]

    def keep_progress(self, place: Place, offset: int, metadata: str) -> None:
        """Store an offset of a partition, with metadata, in the consumer's group.

        :raises TailraceError: `SOURCE_PRIVILEGE_MISSING`, `SOURCE_UNREACHABLE`.
        """
        topic, partition = place
        wanted = [TopicPartition(topic, partition, offset, metadata)]
        try:
            persist(ANSWER_S, lambda _left_s: _committed(self._consumer, wanted))
        except KafkaException as error:
            raise progress_failure(error_of(error), topic) from None

    def _failed(self, error: KafkaError) -> None:
        if error.code() in self._passes_over:
            return
        self._errors[error.name()] = time.monotonic(), error.str()

    def _asked(self, ask: Callable[[], Any], topic: str) -> Any:
        try:
            return ask()
        except KafkaException as error:
            said = error_of(error).str()
        words = "; ".join([said, *self.errors])
        raise TailraceError(
            Kind.SOURCE_UNREACHABLE,
            f"ask Kafka about topic {topic}: {words}",
            "see whether the brokers run and can be reached from here, and what `options` say of security",
            {"topic": topic},
        )

    def _failure(self, error: KafkaError, place: Place) -> TailraceError:
        topic, partition = place
        context = {"topic": topic, "partition": partition, "offset": self._positions.get(place, 0)}
        if error.code() in _GONE:
            return TailraceError(
                Kind.LOG_RANGE_GONE,
                f"read topic {topic}: the offset where the join goes on is not there (any more)",
                "records were removed by the topic's retention, or the topic was created again: raise "
                "retention.ms; to begin at what is there, give the engine another name, `source: kafka-join` "
                "another log.path and other targets, or Spark's query another checkpoint and another target",
                context,
            )
        is_refused = is_denial(error) or error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED
        return TailraceError(
            Kind.SOURCE_PRIVILEGE_MISSING if is_refused else Kind.SOURCE_QUERY_FAILED,
            f"read topic {topic}: {error.str()}" if topic else f"read topics of Kafka: {error.str()}",
            f"allow READ and DESCRIBE on the topic, and READ on the group `{self._group}`"
            if is_refused
            else "see the broker's log, then start again: the join goes on where it stopped",
            context,
        )


def _runs(messages: list[Message]) -> Iterator[tuple[int, int]]:
    # Yields first and last, exclusive, of consecutive messages of one partition; for each error separately.
    whose = Message.topic, Message.partition
    # Mostly there is one partition: tested in C, as this is done for every message.
    if not any(map(Message.error, messages)) and all(len(set(map(of, messages))) == 1 for of in whose):
        yield 0, len(messages)
        return
    errors = map(id, map(Message.error, messages))
    first = 0
    for _, run in itertools.groupby(zip(*(map(of, messages) for of in whose), errors, strict=True)):
        last = first + sum(1 for _ in run)
        yield first, last
        first = last


def _committed(consumer: Consumer, wanted: list[TopicPartition]) -> None:
    for each in consumer.commit(offsets=wanted, asynchronous=False) or []:
        if each.error is not None:
            raise KafkaException(each.error)


def offsets_of(
    admin: AdminClients, places: Sequence[Place], spec: Callable[[], Any], isolation: IsolationLevel
) -> dict[Place, int]:
    """Ask the brokers for the offset of each partition that `spec` names: its first or its end.

    :raises KafkaException: what they answer instead.
    """
    wanted = {TopicPartition(*place): spec() for place in places}

    def ask(client: AdminClient, timeout_s: float) -> dict[Place, int]:
        asked = client.list_offsets(wanted, isolation_level=isolation, request_timeout=timeout_s)
        return {
            (place.topic, place.partition): int(answer(found, timeout_s).offset)
            for place, found in asked.items()
        }

    return admin.ask(ANSWER_S, ask)


def topic_missing(topic: str) -> TailraceError:
    """Return the error for a topic that the cluster does not show."""
    return TailraceError(
        Kind.TABLE_MISSING,
        f"read topic {topic}: it does not exist, or this principal may not see it",
        "correct `data` and `transactions`, or allow READ and DESCRIBE on the topic",
        {"topic": topic},
    )


def progress_failure(error: KafkaError, topic: str) -> TailraceError:
    """Return the error for progress that can't be stored or read."""
    if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED or is_denial(error):
        return TailraceError(
            Kind.SOURCE_PRIVILEGE_MISSING,
            f"keep the progress of a join: {error.str()}",
            "allow READ on the topic, and on the groups whose names begin as `groupIdPrefix` says",
            {"topic": topic},
        )
    return TailraceError(
        Kind.SOURCE_UNREACHABLE,
        f"keep the progress of a join: {error.str()}",
        "see whether the brokers run, the coordinator of the query's group among them",
        {"topic": topic},
    )


class _Columns:
    # The columns of one partition's messages, in order. They become Arrow arrays once, at the end of a read:
    # Arrow releases the interpreter's lock at each call, and then waits until the sending thread releases it.
    # Headers, which are many objects each, are converted with each part.
    def __init__(self, with_headers: bool, with_times: bool) -> None:
        self._with_headers, self._with_times = with_headers, with_times
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._headers: list[pa.Array] = []
        self._times_ms = array("q")
        self.offsets = array("q")

    def add(self, messages: list[Message]) -> int:
        """Add messages; return their size in bytes."""
        keys, values = (list(map(of, messages)) for of in (Message.key, Message.value))
        self._keys += keys
        self._values += values
        self.offsets.extend(map(Message.offset, messages))  # type: ignore[arg-type]
        if self._with_times:
            self._times_ms.extend(map(_TIME, map(Message.timestamp, messages)))
        size = sum(map(len, filter(None, keys))) + sum(map(len, filter(None, values)))
        if self._with_headers:
            self._headers.append(_headers_of(messages))
            size += self._headers[-1].nbytes
        return size

    def batch(self) -> pa.RecordBatch:
        """Return all messages as a record batch."""
        keys, values = (pa.array(found, pa.binary()) for found in (self._keys, self._values))
        offsets = pa.array(np.frombuffer(self.offsets, np.int64))
        times_ms = pa.nulls(len(offsets), pa.int64())
        if self._with_times:
            times_ms = pa.array(np.frombuffer(self._times_ms, np.int64))
        found = pa.RecordBatch.from_arrays([keys, values, offsets, times_ms], schema=MESSAGES)
        if not self._with_headers:
            return found
        return found.append_column(HEADERS_FIELD, pa.concat_arrays(self._headers))


def _headers_of(messages: list[Message]) -> pa.Array:
    headers: list[Any] = [
        given and [dict(zip(_HEADER, pair, strict=True)) for pair in given]
        for given in map(Message.headers, messages)
    ]
    return pa.array(headers, HEADERS_FIELD.type)
