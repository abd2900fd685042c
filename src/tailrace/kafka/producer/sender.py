"""Messages into a producer, many at a call, with a bound on what is under way."""

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
from tailrace.records.events import Converted

#: Most messages and bytes that are under way.
MESSAGES_MAX = 200_000
BYTES_MAX = 64 << 20
#: Messages handed over at a call: so few that their bytes are in the processor's cache when the client copies
#: them.
CHUNK = 1_000

_POLL_S = 0.05
#: Between looks at what is delivered, while all of it is waited for.
_LOOK_S = 0.5
#: What the client takes before headers: the report by its other name, and the time, which is now.
_BEFORE_HEADERS = (repeat(None), repeat(0))
_PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001

Partitions = npt.NDArray[np.int32] | None


@dataclass(frozen=True, slots=True)
class SendProgress:
    """How far a batch is.

    :param records: handed over, and `bytes` of their values.
    :param delivered: of these records; a few more may be.
    :param seconds: since the batch was begun.
    :param idle_s: since a delivery was last noticed.
    """

    records: int
    bytes: int
    delivered: int
    seconds: float
    idle_s: float


class Sender:
    """Sends, in order, for one producer; keeps the first error that any message met.

    :param settings: of the producer; an error about a missing right names them.
    :param timeout_s: longest to wait for room, or for the end of all, while nothing is delivered.
    """

    def __init__(self, producer: Producer, settings: Mapping[str, Any], timeout_s: float) -> None:
        self._producer = producer
        self._settings = settings
        self._timeout_s = timeout_s
        self._sent = 0
        self._under_way: deque[tuple[int, int]] = deque()  # messages sent until then, bytes of the chunk
        self._under_way_bytes = 0
        self._error: KafkaError | None = None
        self._refused_in = ""  # the topic of the message that met it
        self._done = 0  # messages that are delivered, when it was last looked
        self._moved_s = time.monotonic()  # when it was seen that some were
        self._bytes = 0
        #: Topics that something was handed over for.
        self.topics: dict[str, None] = {}
        self.begin()

    def begin(self) -> None:
        """Have `progress` count a new batch from here on."""
        self._began_s = self._moved_s = time.monotonic()
        self._before = self._sent, self._bytes, self._done
        self._offsets = 0  # of what was sent since

    @property
    def progress(self) -> SendProgress:
        """How far the batch was when what is under way was last waited for."""
        (sent, size, done), now = self._before, time.monotonic()
        records = self._sent - sent - self._offsets
        delivered = min(self._done - done, records)
        return SendProgress(records, self._bytes - size, delivered, now - self._began_s, now - self._moved_s)

    def failure(self, attempted: str) -> TailraceError | None:
        """Return what the first message met that could not be delivered, as an error of `attempted`."""
        if self._error is None:
            return None
        if is_denial(self._error):
            return denied(self._settings, attempted, "topic", self._refused_in, TO_WRITE)
        return failure_of(self._error, attempted, topic=self._refused_in)

    def send(self, topic: str, events: Converted, partitions: Partitions = None) -> None:
        """Hand events over in order, waiting for room.

        :param partitions: where each goes; None: by its key.
        :raises TailraceError: what the first of them met that was refused at once (its `row` in the
            context), or an earlier one later; `SINK_WRITE_FAILED` if there is no room in time.
        """
        self.topics[topic] = None
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
        """Hand one offset over, and what takes older ones of other partitions back.

        :raises KafkaException: if it is refused at once; what it meets later, `flush` raises.
        """
        origin: list[tuple[str, str | bytes | None]] = [ORIGIN]
        places = [(value, topic.partition(key)), *((None, at) for at in topic.left_behind(key))]
        for held, partition in places:
            self._sent += 1
            self._offsets += 1
            self._producer.produce(
                topic.name, held, key, partition, on_delivery=self._delivered, headers=origin
            )

    def _produce(self, topic: str, at: int, values: Sequence[Any], others: Sequence[Any]) -> None:
        # By `produce` for each message, looped over in C: the client's call for many wants dictionaries.
        size = sum(map(len, filter(None, values)))
        self._wait_for_room(size)
        done, self._moved_s = 0, time.monotonic()
        while done < len(values):
            left = iter(values[done:])
            rest = [_from(other, done) for other in others]
            try:
                deque(map(self._producer.produce, repeat(topic), left, *rest), maxlen=0)
                done = len(values)
            except (KafkaException, BufferError) as error:
                self.raise_if_failed()  # what a message met before is why
                done = len(values) - length_hint(left) - 1
                if error_of(error).code() != KafkaError._QUEUE_FULL and not isinstance(  # noqa: SLF001
                    error, BufferError
                ):
                    found = error_of(error)
                    raise failure_of(found, "send a record", topic=topic, row=at + done) from error
                # The client's own bound: it takes more when some are delivered.
                if self._is_idle():
                    raise _no_room("hand records over", self._timeout_s) from error
                self._poll(_POLL_S)
                self._note_delivered(len(self._producer) - done)
        self._note(len(values), size)

    def _note(self, messages: int, size: int) -> None:
        self._sent += messages
        self._bytes += size
        self._under_way.append((self._sent, size))
        self._under_way_bytes += size

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything is delivered: so long, or for as long as something is.

        :raises TailraceError: what a message met; `SINK_WRITE_FAILED` after the timeout.
        """
        try:
            left = self._flushed(timeout_s) if timeout_s else self._flush_while_it_moves()
        except KafkaException as error:  # a fatal one, met by the producer and not by a message
            self.raise_if_failed()
            raise failure_of(error_of(error), "deliver records") from error
        self.raise_if_failed()
        if left:
            raise _no_room(f"deliver {left} messages", timeout_s or self._timeout_s)

    def has_moved(self) -> bool:
        """Return whether something was delivered since this was last asked."""
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

    # Without the client in any frame: the trace of an error would keep it.

    def _flushed(self, timeout_s: float) -> int:
        return answered(lambda: self._producer.flush(timeout_s))

    def _poll(self, timeout_s: float) -> None:
        answered(lambda: self._producer.poll(timeout_s))

    def _note_delivered(self, left: int) -> None:
        if self._sent - left > self._done:
            self._done, self._moved_s = self._sent - left, time.monotonic()

    def _is_idle(self) -> bool:
        return time.monotonic() > self._moved_s + self._timeout_s

    def raise_if_failed(self) -> None:
        """Raise what a message met, with its topic.

        :raises TailraceError: as `failure`.
        """
        if (failure := self.failure("send records")) is not None:
            raise failure

    def close(self) -> None:
        """Give up what is under way, and let go of the producer."""
        self._producer.purge()
        # One that has met a fatal error raises it here once more; the writer knows it.
        with contextlib.suppress(KafkaException):
            self._flushed(0)
        # A client ends when nobody has it, and the trace of an error may have this object for long: for ever
        # where the client raised a fatal error while that one was handled, of which it loses a reference.
        del self._producer

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        # What is purged is so after an error, which is raised when the transaction is to be committed.
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
    # What is given beside values, from a place on.
    if callable(other):
        return other(place)
    return other[place:] if isinstance(other, Sequence) else other


def _no_room(attempted: str, timeout_s: float) -> TailraceError:
    return TailraceError(
        Kind.SINK_WRITE_FAILED,
        f"{attempted}: the cluster took none within {timeout_s:.0f} s",
        "see whether the cluster can be reached; offset_flush_timeout_ms is how long is waited",
    )


def _objects(values: pa.Array | Sequence[Any] | None, at: int, count: int) -> Sequence[Any]:
    """Return a chunk as objects that the client takes: texts, bytes or None."""
    end = min(at + CHUNK, count)
    if values is None:
        return [None] * (end - at)
    part = values[at:end]
    if not isinstance(part, pa.Array):
        return part
    if not pa.types.is_binary(part.type):
        part = part.cast(pa.large_binary())  # the client would encode each text again
    return part.to_pylist()  # type: ignore[no-any-return]


def _headers(events: Converted) -> pa.StructArray | None:
    found = events.headers
    if found is None or found.null_count == len(found):
        return None
    return None if all(child.null_count == len(child) for child in found.flatten()) else found


def _on_the_wire(headers: pa.StructArray) -> Callable[[int], Iterator[list[tuple[str, bytes]]]]:
    """Return what yields the headers of the message at a place, and of those behind it.

    One by one: thousands of lists that wait would have the garbage collector look through everything.
    Most values come again and again, as what is joined from a transaction: one pair for each that differs.
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
    # The header of each message; None: it has none.
    kind = values.type
    if (pa.types.is_integer(kind) or pa.types.is_boolean(kind)) and not values.null_count:
        # Without Arrow's functions, which let go of the interpreter and then wait for it again.
        numbers = values.to_numpy(zero_copy_only=False).tolist()
        known = {number: (name, str(number).lower().encode()) for number in set(numbers)}
        return list(map(known.__getitem__, numbers))
    if pa.types.is_large_binary(kind) or pa.types.is_binary(kind):
        texts = values.to_pylist()  # as JSON is: no two are alike
        if not values.null_count:
            return list(zip(repeat(name), texts, strict=False))
        return [None if text is None else (name, text) for text in texts]
    encoded = values.dictionary_encode()
    texts = header_texts(encoded.dictionary).cast(pa.large_binary()).to_pylist()
    pairs = [*((name, text) for text in texts), None]
    return [pairs[place] for place in encoded.indices.fill_null(len(texts)).to_numpy().tolist()]
