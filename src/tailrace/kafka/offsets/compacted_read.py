"""Reads a span of an offsets topic, and returns the newest record of each wanted key."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import structlog
from confluent_kafka import (
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from tailrace.errors import Kind, TailraceError

log = structlog.get_logger(__name__)

_POLL_S = 0.5
#: Largest number of messages taken from the client in one call.
_TAKEN_MAX = 10_000

#: The header of every offset record. A data record can have the key of an offset, but header names never
#: come from data.
ORIGIN = ("tailrace.offset", b"1")

#: Errors that a reader ignores: it uses no consumer group, although its settings must name one.
_NO_MATTER = frozenset(
    {KafkaError._PARTITION_EOF, KafkaError.GROUP_AUTHORIZATION_FAILED}  # noqa: SLF001
)


@dataclass(frozen=True, slots=True)
class CompactedRead:
    """The newest record of a key.

    :param value: None: a tombstone.
    :param offset: of the record, in its partition.
    :param time_us: when it was written, since 1970; None: the topic has no timestamps.
    :param has_origin: whether it has the header `ORIGIN`. Offsets of versions without that header are valid
        until there is one with it.
    """

    value: bytes | None
    partition: int
    offset: int
    time_us: int | None
    has_origin: bool = True


#: By partition, then by key.
ByPartition = dict[int, dict[bytes, CompactedRead]]


def newest_of(
    settings: Mapping[str, Any],
    topic: str,
    spans: Mapping[int, range],
    wanted: Callable[[bytes], bool],
    timeout_s: float,
) -> ByPartition:
    """Return the newest record of each wanted key in each partition of `spans`.

    :param settings: of a consumer.
    :param spans: by partition, the record offsets to read. The client needs the first one: it would wait half
        a second before it asked the broker for it.
    :raises KafkaException: what the cluster refuses.
    :raises TailraceError: `SINK_WRITE_FAILED` if an end was not reached in time.
    """
    waiting = {partition for partition, span in spans.items() if span}
    found: ByPartition = {partition: {} for partition in spans}
    if not waiting:
        return found
    deadline = time.monotonic() + timeout_s
    consumer = Consumer(dict(settings))
    try:
        consumer.assign([TopicPartition(topic, number, spans[number].start) for number in sorted(waiting)])
        while waiting:
            first = consumer.poll(_POLL_S)
            if first is not None:
                for message in (first, *consumer.consume(_TAKEN_MAX, 0)):
                    _take(message, wanted, spans, found)
            places = consumer.position([TopicPartition(topic, number) for number in waiting])
            waiting -= {place.partition for place in places if place.offset >= spans[place.partition].stop}
            if waiting and time.monotonic() >= deadline:
                raise _not_reached(topic, min(waiting), spans, timeout_s)
    finally:
        consumer.close()
    return found


def newer(known: CompactedRead | None, found: CompactedRead) -> CompactedRead:
    """Return the valid one of two records of a key; `found` is the later one, `known` may be None."""
    return known if known is not None and known.has_origin and not found.has_origin else found


def _take(
    message: Message, wanted: Callable[[bytes], bool], spans: Mapping[int, range], found: ByPartition
) -> None:
    if (error := message.error()) is not None:
        if error.code() not in _NO_MATTER:
            raise KafkaException(error)
        return
    key, partition, offset = message.key(), message.partition() or 0, message.offset() or 0
    if key is None or not wanted(key) or offset not in spans[partition]:
        return
    kind, time_ms = message.timestamp()
    record = CompactedRead(
        message.value(),
        partition,
        offset,
        None if kind == TIMESTAMP_NOT_AVAILABLE else time_ms * 1000,
        ORIGIN in (message.headers() or ()),
    )
    counts = newer(found[partition].get(key), record)
    if counts is not record:
        log.warning("ignored a record with an offset's key", partition=partition, offset=offset)
    found[partition][key] = counts


def _not_reached(topic: str, partition: int, spans: Mapping[int, range], timeout_s: float) -> TailraceError:
    return TailraceError(
        Kind.SINK_WRITE_FAILED,
        f"read offsets: offset {spans[partition].stop} of partition {partition} was not reached within "
        f"{timeout_s:.0f} s",
        "see whether the partition's leader runs and can be reached from here",
        {"topic": topic},
    )
