"""Writers of batches: the records, then the source offset after them.

`AtomicWriter` writes both in one transaction, as the table in `transaction` prescribes; `PlainWriter`
writes the offset after the records are acknowledged: at least once. One object is one attempt.
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

#: Longest wait for a connection before `init_transactions`, in seconds.
_CONNECTS_S = 2.0

_NOT_WAITED_S = 0.001

#: Interval between checks for deliveries during a commit, in seconds.
_LOOK_S = 2.0

#: An object that JSON can hold.
Offset = Mapping[str, Any]


class Writer(Protocol):
    """A writer of one task's batches, one after another, on one thread."""

    @property
    def progress(self) -> SendProgress:
        """The progress of the current batch, or of the one that failed."""

    @property
    def limit_s(self) -> float:
        """Longest time that a batch may take, in seconds."""

    def connect(self) -> None:
        """Start to connect, and return at once. Fences no producer; makes a later `open` faster."""

    def fence(self) -> None:
        """Fence the producer before: its open transaction is aborted. `open` does this first."""

    def open(self) -> Offset | None:
        """Start the producer, and return the offset that was committed last; None: there is none."""

    def send(self, topic: str, events: Converted, partitions: Partitions = None) -> None:
        """Send records of the batch, in order, to the given partitions; None: each by its key."""

    def commit(self, offset: Offset | None) -> None:
        """End the batch: the records sent and `offset` are durable on return. None: delete the offset."""

    def commit_all(self, offsets: Mapping[bytes, Offset | None], timeout_s: float | None = None) -> None:
        """As `commit`, with the offsets of several keys, within `timeout_s` (None: the task's timeout)."""

    def close(self) -> None:
        """Discard records that are not committed, and end the producer's threads and connections."""


@dataclass(frozen=True, slots=True)
class Task:
    """The offset that a writer writes, and the settings of its producer.

    :param settings: the producer's librdkafka settings.
    :param key: the offset's key in `offsets`.
    :param timeout_s: timeout of the start, and of each commit.
    """

    settings: Mapping[str, Any]
    offsets: OffsetsTopic
    key: bytes
    isolation: str
    timeout_s: float


class AtomicWriter:
    """A writer of records and offset in one transaction; fences the producer with its transactional id."""

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
        """As `Writer.limit_s`: the coordinator aborts a transaction that is open for longer."""
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
        """As `Writer.open`; first fences the producer before, so that its last commit is read.

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

        :raises TailraceError: as `Sender.send`; then the transaction is aborted, and this writer ends.
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
            committed, or when the outcome is unknown: the next writer reads the offset before it writes.
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
        # A producer that has no connection when it looks for its coordinator retries only after half a
        # second. The first answer comes over the connection to a bootstrap address, which may be closed then.
        for _ in range(2):
            # The broker may hang: saving half a second is not worth the whole timeout.
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
                # After its own timeout, the client continues the commit when it is called again; the timeout
                # counts from the last delivery. Another error, such as the broker's REQUEST_TIMED_OUT or
                # expired messages, is final: called again, the client would return it at once.
                found = error_of(error)
                if found.code() != KafkaError._TIMED_OUT or not found.retriable():  # noqa: SLF001
                    raise
                if self._sender.has_moved():
                    deadline = time.monotonic() + self._task.timeout_s
                elif time.monotonic() >= deadline:
                    raise

    # Separate methods, as `_fence`: so an error's traceback does not hold a reference to the producer.

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
            # Unless another producer has taken the id, an undelivered message is the cause.
            met = None if failure.kind is Kind.SINK_PREEMPTED else self._sender.failure(attempted)
            if met is None and is_denial(found):
                # The cluster refused to add a topic to the transaction, and does not say which one.
                met = self._task.offsets.denial_of([*self._sender.topics, self._task.offsets.name], attempted)
            return failure if met is None else met
        # WRITE implies DESCRIBE, which is checked first.
        settings = self._task.settings
        return denied(settings, attempted, "transactional-id", str(settings["transactional.id"]), ["WRITE"])

    def _raise_if_preempted(self, error: TailraceError) -> None:
        # The abort may show that the producer was pre-empted; then that is the error: a retry would
        # pre-empt the other producer in turn.
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
            log.warning("fenced: the producer's epoch is no longer valid", **self._whose())

    def _whose(self) -> dict[str, str]:
        return {"transactional_id": str(self._task.settings["transactional.id"])}


class PlainWriter:
    """A writer of records and then their offset; after a crash in between, the records are repeated."""

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
        """As `Writer.limit_s`: the client drops a record that waits for longer; 0 ms: no limit."""
        return int(self._task.settings["message.timeout.ms"]) / 1000 or math.inf

    def connect(self) -> None:
        """As `Writer.connect`."""
        _warm_up(self._producer, self._task.offsets.name)

    def fence(self) -> None:
        """Do nothing: without transactions a producer can't be fenced."""

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
        """As `Writer.commit_all`; after an error, some of the offsets may be written.

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
    # The first request waits for a twentieth of a second while the client connects.
    with contextlib.suppress(KafkaException):
        answered(lambda: producer.list_topics(topic, timeout=_NOT_WAITED_S))
