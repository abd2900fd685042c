"""Writers of batches: records first, then the offset that they lead to.

`AtomicWriter` carries out what the transaction's table says, so that both are one; `PlainWriter`
writes the offset when the records are acknowledged: at least once. One object is one attempt.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer

from tailrace import failpoints
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.client.failures import (
    answered,
    error_of,
    event_of,
    failure_of,
    persist,
    preempted,
)
from tailrace.kafka.client.requests import made
from tailrace.kafka.client.rights import denied, is_denial
from tailrace.kafka.offsets.topic import OffsetsTopic, value_of
from tailrace.kafka.producer.sender import Partitions, Sender, SendProgress
from tailrace.kafka.producer.transaction import Command, ProducerEvent, ProducerState, Transaction
from tailrace.records.events import Converted

log = structlog.get_logger(__name__)

#: Longest to wait for a connection before the client begins.
_CONNECTS_S = 2.0

_NOT_WAITED_S = 0.001

#: Between looks at what is delivered, during a commit.
_LOOK_S = 2.0

#: An object that JSON can hold.
Offset = Mapping[str, Any]


class Writer(Protocol):
    """Writes batches for one task, one after another, on one thread."""

    @property
    def progress(self) -> SendProgress:
        """How far the batch is, or the one that failed was."""

    @property
    def limit_s(self) -> float:
        """Longest that a batch may take."""

    def connect(self) -> None:
        """Begin to connect, and return at once; nobody is disturbed. `open` is quicker some time after it."""

    def fence(self) -> None:
        """End what the producer before had begun; nothing more comes of it. `open` does this first."""

    def open(self) -> Offset | None:
        """Begin, and return the offset that was committed last; None: there is none."""

    def send(self, topic: str, events: Converted, partitions: Partitions = None) -> None:
        """Send records of the batch, in order, to these partitions or each by its key."""

    def commit(self, offset: Offset | None) -> None:
        """End the batch: what was sent and `offset` are durable when it returns. None: there is none now."""

    def commit_all(self, offsets: Mapping[bytes, Offset | None], timeout_s: float | None = None) -> None:
        """As `commit`, with the offsets of several keys; it may take so long, or as long as any commit."""

    def close(self) -> None:
        """Give up what was sent and not committed, and end the producer's threads and connections."""


@dataclass(frozen=True, slots=True)
class Task:
    """Whose offset is written, and how.

    :param settings: of the producer.
    :param key: of the offset, in `offsets`.
    :param timeout_s: longest that the start, and each commit, may take.
    """

    settings: Mapping[str, Any]
    offsets: OffsetsTopic
    key: bytes
    isolation: str
    timeout_s: float


class AtomicWriter:
    """Records and offset in one transaction; the producer that had the transactional id before is fenced."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._transaction = Transaction()
        self._producer = made(Producer, task.settings)
        self._sender = Sender(self._producer, task.settings, task.timeout_s)

    @property
    def progress(self) -> SendProgress:
        """As `Writer.progress`."""
        return self._sender.progress

    @property
    def limit_s(self) -> float:
        """As `Writer.limit_s`: the coordinator ends a transaction that is open for longer."""
        return int(self._task.settings["transaction.timeout.ms"]) / 1000

    def connect(self) -> None:
        """As `Writer.connect`."""
        _warm_up(self._producer, self._task.offsets.name)

    def fence(self) -> None:
        """As `Writer.fence`.

        :raises TailraceError: `SINK_PREEMPTED`, `SINK_REFUSED`, `SINK_WRITE_FAILED`.
        """
        self._step(ProducerEvent.START)
        self._attempt("begin as the only producer", self._initialise)
        self._step(ProducerEvent.INITIALISED)

    def open(self) -> Offset | None:
        """As `Writer.open`; the producer before is fenced first, so that its last commit is seen.

        :raises TailraceError: `SINK_PREEMPTED`, `SINK_REFUSED`, `OFFSETS_UNREADABLE`, `SINK_WRITE_FAILED`.
        """
        self.fence()
        try:
            found = self._task.offsets.read(self._task.key, self._task.isolation)
        except TailraceError:
            self._step(ProducerEvent.BROKEN)
            raise
        self._step(ProducerEvent.OFFSETS_READ)
        return found

    def send(self, topic: str, events: Converted, partitions: Partitions = None) -> None:
        """As `Writer.send`.

        :raises TailraceError: as `Sender.send`; the transaction is then aborted, and this writer has ended.
        """
        self._begin()
        try:
            self._sender.send(topic, events, partitions)
        except TailraceError as error:
            self._fail(ProducerEvent.FENCED if error.kind is Kind.SINK_PREEMPTED else ProducerEvent.REFUSED)
            self._raise_if_preempted(error)
            raise

    def commit(self, offset: Offset | None) -> None:
        """As `Writer.commit`, atomically.

        :raises TailraceError: `SINK_PREEMPTED`; `SINK_WRITE_FAILED`, when nothing of the batch was
            committed or when that is not known: the next writer finds out before it does anything.
        """
        self.commit_all({self._task.key: offset})

    def commit_all(self, offsets: Mapping[bytes, Offset | None], timeout_s: float | None = None) -> None:
        """As `Writer.commit_all`, atomically.

        :raises TailraceError: as `commit`.
        """
        self._begin()  # progress without records is an offset too
        self._step(ProducerEvent.DUE)
        failpoints.hit("kafka.before_offset")
        self._attempt("write the offset", lambda: self._send_offsets(offsets))
        failpoints.hit("kafka.before_commit")
        self._attempt("commit a transaction", lambda: self._commit(timeout_s), committing=True)
        failpoints.hit("kafka.after_commit")
        self._step(ProducerEvent.COMMITTED)

    def close(self) -> None:
        """As `Writer.close`."""
        if self._transaction.state in (ProducerState.NEW, ProducerState.READY):
            self._step(ProducerEvent.STOP)
        elif self._transaction.state is ProducerState.OPEN:
            self._step(ProducerEvent.STOP)
            self._abort()
        self._sender.close()
        del self._producer

    def _begin(self) -> None:
        _, commands = self._transaction.step(ProducerEvent.RECORDS)
        if Command.BEGIN in commands:
            self._attempt("begin a transaction", self._begin_once)
            self._sender.begin()
            failpoints.hit("kafka.after_begin")
        self._step(ProducerEvent.RECORDS)

    def _initialise(self) -> None:
        persist(self._task.timeout_s, self._fence)

    def _fence(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        # A producer without a connection just when it looks for its coordinator looks again only after half
        # a second. The first answer comes over that to a bootstrap address, which may end with it.
        for _ in range(2):
            # One that stands still may be asked: that half second is not worth all the time there is.
            with contextlib.suppress(KafkaException):
                self._list_offsets_topic(min(_CONNECTS_S, _left_s(deadline)))
        answered(lambda: self._producer.init_transactions(_left_s(deadline)))

    def _send_offsets(self, offsets: Mapping[bytes, Offset | None]) -> None:
        for key, offset in offsets.items():
            self._sender.send_offset(self._task.offsets, key, value_of(offset))

    def _commit(self, timeout_s: float | None) -> None:
        if timeout_s is not None:
            persist(timeout_s, self._commit_once)
            return
        deadline = time.monotonic() + self._task.timeout_s
        while True:
            try:
                persist(min(_LOOK_S, _left_s(deadline)), self._commit_once)
                return
            except KafkaException as error:
                # The client goes on with it when it is asked again. Its time is that without a delivery.
                # An answer of the broker, REQUEST_TIMED_OUT too, ends it, and so do messages whose time is
                # over: asked again, the client repeats it, at once.
                found = error_of(error)
                if found.code() != KafkaError._TIMED_OUT or not found.retriable():  # noqa: SLF001
                    raise
                if self._sender.has_moved():
                    deadline = time.monotonic() + self._task.timeout_s
                elif time.monotonic() >= deadline:
                    raise

    # Separate methods, as `_fence`: the trace of an error has these, and not the producer.

    def _list_offsets_topic(self, timeout_s: float) -> None:
        answered(lambda: self._producer.list_topics(self._task.offsets.name, timeout=timeout_s))

    def _begin_once(self) -> None:
        answered(lambda: self._producer.begin_transaction())  # noqa: PLW0108 - see above

    def _commit_once(self, timeout_s: float) -> None:
        answered(lambda: self._producer.commit_transaction(timeout_s))

    def _abort_once(self, timeout_s: float) -> None:
        answered(lambda: self._producer.abort_transaction(timeout_s))

    def _abort(self) -> None:
        try:
            persist(self._task.timeout_s, self._abort_once)
        except KafkaException as error:
            # The next producer aborts it by fencing.
            found = error_of(error)
            log.warning("transaction not aborted", why=found.name())
            self._step(event_of(found))
        else:
            self._step(ProducerEvent.ABORTED)

    def _attempt(self, attempted: str, act: Callable[[], object], *, committing: bool = False) -> None:
        try:
            act()
        except KafkaException as error:
            found = error_of(error)
            self._fail(event_of(found, committing=committing))
            failure = self._failure(found, attempted)
            self._raise_if_preempted(failure)
            raise failure from error

    def _failure(self, found: KafkaError, attempted: str) -> TailraceError:
        if found.code() != KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            failure = failure_of(found, attempted, **self._whose())
            # A message that was not delivered is why, if nobody has taken the id.
            met = None if failure.kind is Kind.SINK_PREEMPTED else self._sender.failure(attempted)
            if met is None and is_denial(found):
                # The cluster refused to take a topic into the transaction, and does not say which one.
                met = self._task.offsets.denial_of([*self._sender.topics, self._task.offsets.name], attempted)
            return failure if met is None else met
        # WRITE includes DESCRIBE, which is what may be missing first.
        settings = self._task.settings
        return denied(settings, attempted, "transactional-id", str(settings["transactional.id"]), ["WRITE"])

    def _raise_if_preempted(self, error: TailraceError) -> None:
        # What is learnt on aborting decides: a producer that was pre-empted must not begin again, and
        # pre-empt in turn.
        if self._transaction.state is ProducerState.PREEMPTED and error.kind is not Kind.SINK_PREEMPTED:
            raise preempted(f"abort after {error.kind}", **self._whose()) from error

    def _fail(self, event: ProducerEvent) -> None:
        if event is ProducerEvent.REFUSED and self._transaction.state in (
            ProducerState.FENCING,
            ProducerState.READY,
        ):
            event = ProducerEvent.BROKEN
        self._step(event)
        if self._transaction.state is ProducerState.ABORTING:
            self._abort()

    def _step(self, event: ProducerEvent) -> None:
        self._transaction, _ = self._transaction.step(event)
        if self._transaction.state is ProducerState.PREEMPTED:
            log.warning("fenced: the producer's epoch is over", **self._whose())

    def _whose(self) -> dict[str, str]:
        return {"transactional_id": str(self._task.settings["transactional.id"])}


class PlainWriter:
    """Records, then their offset: after a crash between both, the records come again."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._producer = made(Producer, task.settings)
        self._sender = Sender(self._producer, task.settings, task.timeout_s)

    @property
    def progress(self) -> SendProgress:
        """As `Writer.progress`."""
        return self._sender.progress

    @property
    def limit_s(self) -> float:
        """As `Writer.limit_s`: a record that waits for longer is given up; with 0 ms none is."""
        return int(self._task.settings["message.timeout.ms"]) / 1000 or math.inf

    def connect(self) -> None:
        """As `Writer.connect`."""
        _warm_up(self._producer, self._task.offsets.name)

    def fence(self) -> None:
        """As `Writer.fence`: it can't be."""

    def open(self) -> Offset | None:
        """As `Writer.open`.

        :raises TailraceError: `OFFSETS_UNREADABLE`, `SINK_REFUSED`, `SINK_WRITE_FAILED`.
        """
        return self._task.offsets.read(self._task.key, self._task.isolation)

    def send(self, topic: str, events: Converted, partitions: Partitions = None) -> None:
        """As `Writer.send`.

        :raises TailraceError: as `Sender.send`.
        """
        self._sender.send(topic, events, partitions)

    def commit(self, offset: Offset | None) -> None:
        """As `Writer.commit`: every record is acknowledged before the offset is sent.

        :raises TailraceError: `SINK_WRITE_FAILED`, `SINK_REFUSED`, `SINK_RECORD_TOO_LARGE`.
        """
        self.commit_all({self._task.key: offset})

    def commit_all(self, offsets: Mapping[bytes, Offset | None], timeout_s: float | None = None) -> None:
        """As `Writer.commit_all`: on an error some may be written, and others not.

        :raises TailraceError: as `commit`.
        """
        self._sender.flush(timeout_s)
        failpoints.hit("kafka.before_offset")
        topic = self._task.offsets
        try:
            for key, offset in offsets.items():
                self._sender.send_offset(topic, key, value_of(offset))
        except KafkaException as error:
            raise failure_of(error_of(error), "write the offset", topic=topic.name) from error
        self._sender.flush(timeout_s)
        self._sender.begin()
        failpoints.hit("kafka.after_commit")

    def close(self) -> None:
        """As `Writer.close`."""
        self._sender.close()
        del self._producer


def _left_s(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


def _warm_up(producer: Producer, topic: str) -> None:
    # The first question waits for a twentieth of a second while the client connects.
    with contextlib.suppress(KafkaException):
        answered(lambda: producer.list_topics(topic, timeout=_NOT_WAITED_S))
