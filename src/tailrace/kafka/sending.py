"""Messages into a producer, many at a call, with a bound on what is under way."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import length_hint
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from tailrace import failpoints
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.failures import error_of, failure_of
from tailrace.kafka.offsets import OffsetsTopic
from tailrace.kafka.partitioning import BY_KEY
from tailrace.records.events import Converted

#: Most messages and bytes that are under way.
MESSAGES_MAX = 200_000
BYTES_MAX = 64 << 20
#: Messages handed over at a call.
CHUNK = 10_000

_POLL_S = 0.05
#: What the client takes before headers: the report by its other name, and the time, which is now.
_BEFORE_HEADERS = (repeat(None), repeat(0))
_PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001

Partitions = npt.NDArray[np.int32] | None


class Sender:
    """Sends, in order, for one producer; keeps the first error that any message met.

    :param timeout_s: longest to wait for room, or for the end of what is under way.
    """

    def __init__(self, producer: Producer, timeout_s: float) -> None:
        self._producer = producer
        self._timeout_s = timeout_s
        self._sent = 0
        self._under_way: deque[tuple[int, int]] = deque()  # messages sent until then, bytes of the chunk
        self._under_way_bytes = 0
        self._error: KafkaError | None = None
        self._refused_in = ""  # the topic of the message that met it

    @property
    def met(self) -> dict[str, str]:
        """Of the first message that could not be delivered its topic, for errors; empty: all were."""
        return {"topic": self._refused_in} if self._refused_in else {}

    def send(self, topic: str, events: Converted, partitions: Partitions = None) -> None:
        """Hand events over in order, waiting for room.

        :param partitions: where each goes; None: by its key.
        :raises TailraceError: what the first of them met that was refused at once (its `row` in the
            context), or an earlier one later; `SINK_WRITE_FAILED` if there is no room in time.
        """
        try:
            self._hand_over(topic, events, partitions)
        except KafkaException as error:  # a fatal one, which the client raises wherever it is called
            self.raise_if_failed()
            raise failure_of(error_of(error), "send records", topic=topic) from error

    def _hand_over(self, topic: str, events: Converted, partitions: Partitions) -> None:
        headers = _headers(events)
        for at in range(0, len(events), CHUNK):
            keys, values = _objects(events.keys, at, len(events)), _objects(events.values, at, len(events))
            places = repeat(BY_KEY) if partitions is None else partitions[at : at + CHUNK].tolist()
            others = [keys, places, repeat(self._delivered)]
            if headers is not None:
                others += [*_BEFORE_HEADERS, _on_the_wire(headers[at : at + CHUNK])]
            self._produce(topic, at, values, others)
            failpoints.hit("kafka.in_batch")
            self.raise_if_failed()

    def send_offset(self, topic: OffsetsTopic, key: bytes, value: bytes | None) -> None:
        """Hand one offset over.

        :raises KafkaException: if it is refused at once; what it meets later, `flush` raises.
        """
        self._producer.produce(topic.name, value, key, topic.partition(key), on_delivery=self._delivered)

    def _produce(self, topic: str, at: int, values: Sequence[Any], others: Sequence[Iterable[Any]]) -> None:
        # By `produce` for each message, looped over in C: the client's call for many wants dictionaries.
        size = sum(map(len, filter(None, values)))
        self._wait_for_room(size)
        left = iter(values)
        try:
            deque(map(self._producer.produce, repeat(topic), left, *others), maxlen=0)
        except (KafkaException, BufferError) as error:
            self.raise_if_failed()  # what a message met before is why
            row = at + len(values) - length_hint(left) - 1
            raise failure_of(error_of(error), "send a record", topic=topic, row=row) from error
        self._note(len(values), size)

    def _note(self, messages: int, size: int) -> None:
        self._sent += messages
        self._under_way.append((self._sent, size))
        self._under_way_bytes += size

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything is delivered.

        :raises TailraceError: what a message met; `SINK_WRITE_FAILED` after the timeout.
        """
        timeout_s = timeout_s or self._timeout_s
        try:
            left = self._producer.flush(timeout_s)
        except KafkaException as error:  # a fatal one, met by the producer and not by a message
            self.raise_if_failed()
            raise failure_of(error_of(error), "deliver records") from error
        self.raise_if_failed()
        if left:
            raise _no_room(f"deliver {left} messages", timeout_s)

    def raise_if_failed(self) -> None:
        """Raise what a message met, with its topic.

        :raises TailraceError: see `failures.failure_of`.
        """
        if self._error is not None:
            raise failure_of(self._error, "send records", **self.met)

    def close(self) -> None:
        """Give up what is under way, and let go of the producer."""
        self._producer.purge()
        # One that has met a fatal error raises it here once more; whoever ended this life knows it.
        with contextlib.suppress(KafkaException):
            self._producer.flush(0)
        # A client ends when nobody has it, and the trace of an error may have this object for long: for ever
        # where the client raised a fatal error while that one was handled, of which it loses a reference.
        del self._producer

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        # What is purged is so after an error, which is told when the transaction is to be committed.
        if error is not None and self._error is None and error.code() not in _PURGED:
            self._error, self._refused_in = error, message.topic() or ""

    def _wait_for_room(self, size: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        self._producer.poll(0)
        while not self._has_room(size):
            if time.monotonic() > deadline:
                raise _no_room("hand records over", self._timeout_s)
            self._producer.poll(_POLL_S)

    def _has_room(self, size: int) -> bool:
        left = len(self._producer)
        while self._under_way and self._under_way[0][0] <= self._sent - left:
            self._under_way_bytes -= self._under_way.popleft()[1]
        fits = self._under_way_bytes + size <= BYTES_MAX
        return not self._under_way or (left < MESSAGES_MAX and fits)


def _no_room(attempted: str, timeout_s: float) -> TailraceError:
    return TailraceError(
        Kind.SINK_WRITE_FAILED,
        f"{attempted}: the cluster did not take them within {timeout_s:.0f} s",
        "see whether the cluster is reachable and fast enough; offset_flush_timeout_ms is how long is waited",
    )


def _objects(values: pa.Array | Sequence[Any] | None, at: int, count: int) -> Sequence[Any]:
    """Return a chunk as objects that the client takes: texts, bytes or None."""
    end = min(at + CHUNK, count)
    if values is None:
        return [None] * (end - at)
    part = values[at:end]
    if not isinstance(part, pa.Array):
        return part
    # As bytes: the client would encode each text again.
    return part.cast(pa.large_binary()).to_pylist()  # type: ignore[no-any-return]


def _headers(events: Converted) -> pa.StructArray | None:
    found = events.headers
    if found is None or found.null_count == len(found):
        return None
    return None if all(child.null_count == len(child) for child in found.flatten()) else found


def _on_the_wire(headers: pa.StructArray) -> list[list[tuple[str, Any]]]:
    return [
        [(name, held) for name, held in (named or {}).items() if held is not None]
        for named in headers.to_pylist()
    ]
