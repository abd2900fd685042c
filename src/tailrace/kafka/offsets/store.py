"""The offset store `kafka`: an engine's offsets in a compacted topic, under the engine's name."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import structlog

from tailrace import failpoints
from tailrace.config.engine_options import OffsetStorage
from tailrace.errors import REPORT, Kind, TailraceError
from tailrace.kafka.client.settings import SAFE_BATCH_BYTES
from tailrace.kafka.offsets.compaction import TopicWarning
from tailrace.kafka.offsets.topic import OffsetsTopic
from tailrace.kafka.producer.account import Account, producers_in
from tailrace.kafka.producer.task_producer import (
    APPEARS_S,
    LOOK_S,
    OF_ENGINE,
    TaskProducer,
    partition_key,
    require_json,
    require_ours,
)
from tailrace.kafka.producer.writer import Writer
from tailrace.records.batch import Offset, Partition
from tailrace.waits import wait_until

log = structlog.get_logger(__name__)

#: Timeout of the start, and of each request, in seconds.
START_S = 30.0


class KafkaOffsetStore:
    """An offset store in a topic (`engine.contracts.OffsetStore`). Any thread, one at a time.

    With transactions the start takes the engine's name over as a driver takes a task (`producer.layout`): it
    fences the engine of that name before, writes a head with a new lease, and fences the producers of that
    engine's tasks. An engine that is fenced later finds another lease in the head if another engine has
    started, and its own if the cluster aborted a transaction that was open for too long.

    :param atomic: whether each write is a transaction. Then an engine of the same name that still runs can
        write no more, and stops with `OFFSETS_PREEMPTED`. Otherwise the offsets of several partitions are
        written one after another, which is safe: between partitions there is no order.
    :param tasks: the most tasks that write with producers of their own (`task_producer`).
    """

    def __init__(self, storage: OffsetStorage, name: str, *, atomic: bool, tasks: int = 0) -> None:
        assert storage.bootstrap_servers is not None
        self._storage = storage
        self._name = name
        self._atomic = atomic
        self._tasks = tasks
        self._lease = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._topic: OffsetsTopic | None = None
        self._writer: Writer | None = None
        self._lost: TailraceError | None = None  # set when pre-empted, and never reset

    def start(self) -> None:
        """Make sure that the topic exists; with transactions, fence the engine before, and its tasks.

        :raises TailraceError: `SINK_MISCONFIGURED`, `SINK_REFUSED`; `OFFSETS_UNREADABLE`; `SINK_PREEMPTED`.
        """
        with self._lock:
            self._start()

    def _start(self) -> None:
        topic = self._account().offsets(START_S)
        topic.require(create=self._storage.create_topic)
        self._topic = topic
        self._writer = self._account().writer(topic)
        if self._atomic:
            self._take(topic, self._writer)

    def check(self, timeout_s: float) -> Sequence[TopicWarning]:
        """Check whether `start` would succeed, without creating the topic or fencing a producer.

        :returns: warnings about the topic's settings.
        :raises TailraceError: as `start`; the right to the transactional id is not checked.
        """
        return self._account().offsets(timeout_s).check(create=self._storage.create_topic)

    def read(self, partitions: Sequence[Partition]) -> Mapping[int, Offset]:
        """Return the offset of each partition that has one, by its index. Works before `start`, too.

        :raises TailraceError: `OFFSETS_UNREADABLE`, `SINK_REFUSED`.
        """
        keys = [self._key(partition) for partition in partitions]
        with self._lock:
            topic = self._topic
            if topic is None:
                topic = self._account().offsets(START_S)
                if not topic.exists():
                    return {}
            found = topic.read_each(keys, self._storage.consumer_isolation_level) if keys else {}
        return {number: found[key] for number, key in enumerate(keys) if key in found}

    def write(self, offsets: Sequence[tuple[Partition, Offset]], timeout_s: float) -> None:
        """Store offsets; all in-sync replicas have acknowledged them when this returns.

        :raises TailraceError: `OFFSETS_UNWRITABLE`; `OFFSETS_PREEMPTED` if another engine of this name has
            started, and from then on at each call.
        """
        wanted = {self._key(partition): offset for partition, offset in offsets}
        require_json(wanted.values())
        self._keep(wanted, timeout_s)

    def take_back(self, partitions: Sequence[Partition], timeout_s: float) -> None:
        """Delete the offsets of these partitions; as `write`.

        :raises TailraceError: as `write`.
        """
        self._keep({self._key(partition): None for partition in partitions}, timeout_s)

    def task_producer(self, number: int) -> TaskProducer:
        """Return the producer of one attempt of one of the engine's tasks; after `start`."""
        with self._lock:
            assert self._topic is not None
            history = self._topic.history
        create = self._storage.create_topic
        return TaskProducer(self._account(), number, self._lease, history, create_topics=create)

    def stop(self) -> None:
        """Close the producer."""
        with self._lock:
            self._close()

    def _keep(self, wanted: Mapping[bytes, Offset | None], timeout_s: float) -> None:
        if not wanted:
            return
        with self._lock, self._failing():
            if self._topic is None:
                raise TailraceError(Kind.INTERNAL, "write offsets to a store that is not started", REPORT)
            if self._lost is not None:
                raise self._lost
            if self._writer is None and not wait_until(self._topic.is_there, APPEARS_S, LOOK_S):
                log.warning("the topic of offsets was deleted; it is created again", topic=self._topic.name)
                self._start()
            if self._writer is None:
                self._writer = self._account().writer(self._topic)
                if self._atomic:
                    # Before any producer is fenced, and again: another engine may start in between.
                    self._require_ours(self._topic)
                    self._writer.open()
                    self._require_ours(self._topic)
            self._writer.commit_all(wanted, timeout_s)

    def _take(self, topic: OffsetsTopic, writer: Writer) -> None:
        try:
            self._account().end_members(topic)
            before = writer.open()
            earlier = producers_in(before)
            writer.commit(self._head(max(earlier, self._tasks)))
            failpoints.hit("kafka.after_head")
            self._account().fence_members(topic, before)
            failpoints.hit("kafka.after_fence")
            if earlier > self._tasks:
                writer.commit(self._head(self._tasks))
        except BaseException:
            self._close()
            raise

    def _head(self, producers: int) -> dict[str, Any]:
        return {"lease": self._lease, "producers": producers}

    def _account(self) -> Account:
        storage = self._storage
        return Account(
            storage.bootstrap_servers or "",
            storage.options,
            storage.topic,
            storage.group,
            self._name,
            OF_ENGINE,
            self._atomic,
            storage.consumer_isolation_level,
            int(START_S * 1000),
            # Larger ones must compress, and a task can't repeat its batch in smaller ones.
            SAFE_BATCH_BYTES,
        )

    def _key(self, partition: Partition) -> bytes:
        return partition_key(self._account(), partition)

    def _require_ours(self, topic: OffsetsTopic) -> None:
        """Check that no other engine of this name has started.

        :raises TailraceError: `OFFSETS_PREEMPTED`; `SINK_WRITE_FAILED`, `SINK_REFUSED`.
        """
        require_ours(topic, self._account(), self._lease)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except TailraceError as error:
            # A producer that failed can't be used any more: the next write creates another.
            self._close()
            failure = self._explained(error)
            if failure.kind is Kind.OFFSETS_PREEMPTED:
                self._lost = failure
                raise failure from (error.__cause__ if failure is error else error)
            raise failure.changed(kind=Kind.OFFSETS_UNWRITABLE) from error

    def _explained(self, error: TailraceError) -> TailraceError:
        """Return the error to raise: a fenced producer may also have had a transaction open for too long."""
        if error.kind is Kind.SINK_PREEMPTED and self._topic is not None:
            try:
                self._require_ours(self._topic)
            except TailraceError as found:
                return found
        return error

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
