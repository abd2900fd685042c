"""Sends messages to a producer, many in one call, with a limit on messages in flight."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import length_hint
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from tailrace import failpoints
from tailrace.converters.headers import header_texts
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.client.failures import answered, error_of, failure_of
from tailrace.kafka.client.rights import TO_WRITE, denied, is_denial
from tailrace.kafka.offsets.compacted_read import ORIGIN
from tailrace.kafka.offsets.topic import OffsetsTopic
from tailrace.kafka.producer.partitioner import BY_KEY
from tailrace.records.events import Converted, bytes_of

#: Limits of messages and bytes in flight.
MESSAGES_MAX = 200_000
BYTES_MAX = 64 << 20
#: Messages handed to the client in one call: few enough that their bytes are in the processor's cache when
#: the client copies them.
CHUNK = 1_000

_POLL_S = 0.05
#: Interval between checks for deliveries in `flush`, in seconds.
_LOOK_S = 0.5
#: Longest wait for the report of a record that was refused, in seconds.
_REPORT_S = 2.0
#: Arguments of `produce` before the headers: the report's other name, and the time (0: now).
_BEFORE_HEADERS = (repeat(None), repeat(0))
_PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001

Partitions = npt.NDArray[np.int32] | None


@dataclass(frozen=True, slots=True)
class SendProgress:
    """The progress of a batch.

    :param records: records handed over.
    :param bytes: their approximate size.
    :param delivered: how many of them are delivered, at least.
    :param seconds: time since the batch was begun.
    :param idle_s: time since a delivery was last noticed.
    """

    records: int
    bytes: int
    delivered: int
    seconds: float
    idle_s: float


class Sender:
    """A sender of messages, in order, for one producer; keeps the error of the first message that failed.

    :param settings: the producer's; used in errors about missing rights.
    :param timeout_s: longest wait without a delivery, for room or in `flush`.
    """

    def __init__(self, producer: Producer, settings: Mapping[str, Any], timeout_s: float) -> None:
        self._producer = producer
        self._settings = settings
        self._timeout_s = timeout_s
        self._sent = 0
        self._under_way: deque[tuple[int, int]] = deque()  # per chunk: messages sent up to its end, its bytes
        self._under_way_bytes = 0
        self._error: KafkaError | None = None
        self._refused_in = ""  # topic of the message with that error
        self._done = 0  # messages delivered, as of the last check
        self._failed = 0  # messages of the batch that were reported as not delivered
        self._moved_s = time.monotonic()  # when a delivery was last noticed
        self._bytes = 0
        #: Topics that records were handed over for.
        self.topics: dict[str, None] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a new batch, for `progress`, once all earlier messages are delivered or given up."""
        self._done, self._failed = self._sent, 0
        self._began_s = self._moved_s = time.monotonic()
        self._before = self._sent, self._bytes
        self._offsets = 0  # messages since then that are offsets

    @property
    def progress(self) -> SendProgress:
        """The progress of the batch, as of the last check for deliveries."""
        (sent, size), now = self._before, time.monotonic()
        records = self._sent - sent - self._offsets
        delivered = min(self._done - sent, records)
        return SendProgress(records, self._bytes - size, delivered, now - self._began_s, now - self._moved_s)

    def failure(self, attempted: str) -> TailraceError | None:
        """Return the error of the first message that was not delivered; None: there was none."""
        if self._error is None:
            return None
        if is_denial(self._error):
            return denied(self._settings, attempted, "topic", self._refused_in, TO_WRITE)
        return failure_of(self._error, attempted, topic=self._refused_in)

    def send(self, topic: str, events: Converted, partitions: Partitions = None) -> None:
        """Hand events over in order, waiting for room.

        :param partitions: of each event; None: by its key.
        :raises TailraceError: the error of the first event that the client refuses (with its `row` in the
            context), or of an earlier one not delivered; `SINK_WRITE_FAILED` if there is no room in time.
        """
        self.topics[topic] = None
        try:
            self._hand_over(topic, events, partitions)
        except KafkaException as error:  # a fatal one, which any call of the client may raise
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
            self._produce(topic, at, bytes_of(events.part(at, at + CHUNK)), values, others)
            failpoints.hit("kafka.in_batch")
            self.raise_if_failed()

    def send_offset(self, topic: OffsetsTopic, key: bytes, value: bytes | None) -> None:
        """Hand one offset over, and tombstones for older ones of its key in other partitions.

        :raises KafkaException: if the client refuses it; later errors are raised by `flush`.
        """
        origin: list[tuple[str, str | bytes | None]] = [ORIGIN]
        places = [(value, topic.partition(key)), *((None, at) for at in topic.left_behind(key))]
        for held, partition in places:
            self._sent += 1
            self._offsets += 1
            self._producer.produce(
                topic.name, held, key, partition, on_delivery=self._delivered, headers=origin
            )

    def _produce(self, topic: str, at: int, size: int, values: Sequence[Any], others: Sequence[Any]) -> None:
        # Calls `produce` for each message, looping in C: the client's batch call needs dictionaries.
        self._wait_for_room(size)
        done, self._moved_s = 0, time.monotonic()
        while done < len(values):
            left = iter(values[done:])
            rest = [_from(other, done) for other in others]
            try:
                deque(map(self._producer.produce, repeat(topic), left, *rest), maxlen=0)
                done = len(values)
            except (KafkaException, BufferError) as error:
                if error_of(error).code() == KafkaError._STATE:  # noqa: SLF001
                    self._wait_for_failure()
                self.raise_if_failed()  # an earlier message's error is the cause
                done = len(values) - length_hint(left) - 1
                if error_of(error).code() != KafkaError._QUEUE_FULL and not isinstance(  # noqa: SLF001
                    error, BufferError
                ):
                    found = error_of(error)
                    raise failure_of(found, "send a record", topic=topic, row=at + done) from error
                # The client's own queue is full: it takes more after deliveries.
                if self._is_idle():
                    raise _no_room("hand records over", self._timeout_s) from error
                self._poll(_POLL_S)
                self._note_delivered(len(self._producer) - done)
        self._note(len(values), size)

    def _wait_for_failure(self) -> None:
        # The client takes no more records of a failed transaction before it reports the one that failed.
        until_s = time.monotonic() + _REPORT_S
        while self._error is None and len(self._producer) and time.monotonic() < until_s:
            self._poll(_POLL_S)

    def _note(self, messages: int, size: int) -> None:
        self._sent += messages
        self._bytes += size
        self._under_way.append((self._sent, size))
        self._under_way_bytes += size

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all is delivered, for `timeout_s`; None: `self._timeout_s` after each delivery.

        :raises TailraceError: as `failure`; `SINK_WRITE_FAILED` after the timeout.
        """
        try:
            left = self._flushed(timeout_s) if timeout_s else self._flush_while_it_moves()
        except KafkaException as error:  # a fatal one, of the producer and not of a message
            self.raise_if_failed()
            raise failure_of(error_of(error), "deliver records") from error
        self.raise_if_failed()
        if left:
            raise _no_room(f"deliver {left} messages", timeout_s or self._timeout_s)

    def has_moved(self) -> bool:
        """Return whether anything was delivered since the last check."""
        before = self._moved_s
        self._note_delivered(len(self._producer))
        return self._moved_s > before

    def _flush_while_it_moves(self) -> int:
        self._moved_s = time.monotonic()
        while left := self._flushed(_LOOK_S):
            self._note_delivered(left)
            self.raise_if_failed()
            if self._is_idle():
                return left
        self._note_delivered(0)
        return 0

    # Methods without the client in their frames: an error's traceback would keep it alive.

    def _flushed(self, timeout_s: float) -> int:
        return answered(lambda: self._producer.flush(timeout_s))

    def _poll(self, timeout_s: float) -> None:
        answered(lambda: self._producer.poll(timeout_s))

    def _note_delivered(self, left: int) -> None:
        done = self._sent - left - self._failed
        if done > self._done:
            self._done, self._moved_s = done, time.monotonic()

    def _is_idle(self) -> bool:
        return time.monotonic() > self._moved_s + self._timeout_s

    def raise_if_failed(self) -> None:
        """Raise the error of the first message that was not delivered.

        :raises TailraceError: as `failure`.
        """
        if (failure := self.failure("send records")) is not None:
            raise failure

    def close(self) -> None:
        """Discard messages in flight, and release the producer."""
        self._producer.purge()
        # After a fatal error, the client raises it again here; the writer already has it.
        with contextlib.suppress(KafkaException):
            self._flushed(0)
        # A client ends with its last reference. An error's traceback may keep this object for long, or for
        # ever: if the client raises a fatal error while that error is handled, it leaks a reference to it.
        del self._producer

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        self._failed += error is not None
        # Messages are purged only after an error, which is raised at the commit.
        if error is not None and self._error is None and error.code() not in _PURGED:
            self._error, self._refused_in = error, message.topic() or ""

    def _wait_for_room(self, size: int) -> None:
        self._poll(0)
        if self._has_room(size):
            return
        self._moved_s = time.monotonic()
        while not self._has_room(size):
            self.raise_if_failed()
            if self._is_idle():
                raise _no_room("hand records over", self._timeout_s)
            self._poll(_POLL_S)

    def _has_room(self, size: int) -> bool:
        left = len(self._producer)
        self._note_delivered(left)
        while self._under_way and self._under_way[0][0] <= self._sent - left:
            self._under_way_bytes -= self._under_way.popleft()[1]
        fits = self._under_way_bytes + size <= BYTES_MAX
        return not self._under_way or (left < MESSAGES_MAX and fits)


def _from(other: Sequence[Any] | repeat[Any] | Callable[[int], Iterator[Any]], place: int) -> Iterable[Any]:
    # The arguments for the messages from `place` on.
    if callable(other):
        return other(place)
    return other[place:] if isinstance(other, Sequence) else other


def _no_room(attempted: str, timeout_s: float) -> TailraceError:
    return TailraceError(
        Kind.SINK_WRITE_FAILED,
        f"{attempted}: the cluster took none within {timeout_s:.0f} s",
        "see whether the cluster can be reached; offset_flush_timeout_ms sets this timeout",
    )


def _objects(values: pa.Array | Sequence[Any] | None, at: int, count: int) -> Sequence[Any]:
    """Return one chunk of `values` as objects that the client accepts: texts, bytes or None."""
    end = min(at + CHUNK, count)
    if values is None:
        return [None] * (end - at)
    part = values[at:end]
    if not isinstance(part, pa.Array):
        return part
    if not pa.types.is_binary(part.type):
        part = part.cast(pa.large_binary())  # otherwise the client would encode each text again
    return part.to_pylist()  # type: ignore[no-any-return]


def _headers(events: Converted) -> pa.StructArray | None:
    found = events.headers
    if found is None or found.null_count == len(found):
        return None
    return None if all(child.null_count == len(child) for child in found.flatten()) else found


def _on_the_wire(headers: pa.StructArray) -> Callable[[int], Iterator[list[tuple[str, bytes]]]]:
    """Return a function that yields each message's headers, from a given place on.

    One by one: thousands of live lists would make the garbage collector traverse all objects.
    Most values repeat, such as those of a transaction: equal values share one pair.
    """
    columns = [
        _pairs(field.name, values) for field, values in zip(headers.type, headers.flatten(), strict=True)
    ]
    has_gaps = any(values.null_count for values in headers.flatten())

    def rows(first: int) -> Iterator[list[tuple[str, bytes]]]:
        found = zip(*(itertools.islice(column, first, None) for column in columns), strict=True)
        if has_gaps:
            return ([pair for pair in row if pair is not None] for row in found)
        return map(list, found)

    return rows


def _pairs(name: str, values: pa.Array) -> list[tuple[str, bytes] | None]:
    # The header of each message; None for a message without it.
    kind = values.type
    if (pa.types.is_integer(kind) or pa.types.is_boolean(kind)) and not values.null_count:
        # Without Arrow's functions, which release the interpreter's lock and then wait for it.
        numbers = values.to_numpy(zero_copy_only=False).tolist()
        known = {number: (name, str(number).lower().encode()) for number in set(numbers)}
        return list(map(known.__getitem__, numbers))
    if pa.types.is_large_binary(kind) or pa.types.is_binary(kind):
        texts = values.to_pylist()  # such as JSON: no two are equal
        if not values.null_count:
            return list(zip(repeat(name), texts, strict=False))
        return [None if text is None else (name, text) for text in texts]
    encoded = values.dictionary_encode()
    texts = header_texts(encoded.dictionary).cast(pa.large_binary()).to_pylist()
    pairs = [*((name, text) for text in texts), None]
    return [pairs[place] for place in encoded.indices.fill_null(len(texts)).to_numpy().tolist()]
