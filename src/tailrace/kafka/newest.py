"""A topic read to its very end: the newest record of each key that is wanted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import (
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from tailrace.errors import Kind, TailraceError

_POLL_S = 0.5

#: What a reader may meet and go on: it belongs to no group, whatever its settings must say.
_NO_MATTER = frozenset(
    {KafkaError._PARTITION_EOF, KafkaError.GROUP_AUTHORIZATION_FAILED}  # noqa: SLF001
)


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest record of a key.

    :param value: None: it was taken back.
    :param offset: of the record, in its partition.
    :param time_us: when it was written, since 1970; None: the topic does not say.
    """

    value: bytes | None
    partition: int
    offset: int
    time_us: int | None


def newest_of(
    settings: Mapping[str, Any],
    topic: str,
    spans: Mapping[int, range],
    wanted: Callable[[bytes], bool],
    timeout_s: float,
) -> dict[bytes, Newest]:
    """Return, by key, the newest record of each wanted key in some partitions.

    :param settings: of a consumer.
    :param spans: by partition, where its records begin and end; all of it is read. The client is told where
        to begin: it would wait half a second before it asked for that itself.
    :raises KafkaException: what the cluster refuses.
    :raises TailraceError: `OFFSETS_UNREADABLE` if an end was not reached in time.
    """
    waiting = {partition for partition, span in spans.items() if span}
    found: dict[bytes, Newest] = {}
    if not waiting:
        return found
    deadline = time.monotonic() + timeout_s
    consumer = Consumer(dict(settings))
    try:
        consumer.assign([TopicPartition(topic, number, spans[number].start) for number in sorted(waiting)])
        while waiting:
            message = consumer.poll(_POLL_S)
            if message is not None:
                _take(message, wanted, found)
            places = consumer.position([TopicPartition(topic, number) for number in waiting])
            waiting -= {place.partition for place in places if place.offset >= spans[place.partition].stop}
            if waiting and time.monotonic() >= deadline:
                raise _not_reached(topic, min(waiting), spans, timeout_s)
    finally:
        consumer.close()
    return found


def _take(message: Message, wanted: Callable[[bytes], bool], found: dict[bytes, Newest]) -> None:
    if (error := message.error()) is not None:
        if error.code() not in _NO_MATTER:
            raise KafkaException(error)
        return
    key = message.key()
    if key is None or not wanted(key):
        return
    kind, time_ms = message.timestamp()
    found[key] = Newest(
        message.value(),
        message.partition() or 0,
        message.offset() or 0,
        None if kind == TIMESTAMP_NOT_AVAILABLE else time_ms * 1000,
    )


def _not_reached(topic: str, partition: int, spans: Mapping[int, range], timeout_s: float) -> TailraceError:
    return TailraceError(
        Kind.OFFSETS_UNREADABLE,
        f"read offsets: the end of partition {partition}, {spans[partition].stop}, was not reached within "
        f"{timeout_s:.0f} s",
        "a transaction that was begun there has not ended: it does within its transaction.timeout.ms; or the "
        "partition's leader does not answer. Then start again",
        {"topic": topic},
    )
