"""The offset store `kafka`: an engine's offsets in a compacted topic, under the engine's name."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tailrace.config.engine_options import OffsetStorage
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.offsets.compaction import TopicWarning
from tailrace.kafka.offsets.topic import OffsetsTopic, source_key
from tailrace.kafka.producer.account import Account
from tailrace.kafka.producer.writer import Writer
from tailrace.records.batch import Offset, Partition

#: How long the start, and each question, may take.
START_S = 30.0

#: In the place of a task's number: the one producer of an engine's offsets.
_TASK = "offsets"


class KafkaOffsetStore:
    """Keeps offsets in a topic (`engine.contracts.OffsetStore`). Any thread, one at a time.

    :param atomic: whether each write is a transaction. Then the start fences an engine of the same name
        that still runs: it can write no more, and stops with `OFFSETS_PREEMPTED`. Else offsets of several
        partitions are written one after another, which hurts none of them: between partitions there is
        no order.
    """

    def __init__(self, storage: OffsetStorage, name: str, *, atomic: bool) -> None:
        assert storage.bootstrap_servers is not None
        self._storage = storage
        self._name = name
        self._atomic = atomic
        self._lock = threading.Lock()
        self._topic: OffsetsTopic | None = None
        self._writer: Writer | None = None
        # What there was when it was last looked at or written, and what was to be written since.
        self._known: dict[bytes, Offset | None] = {}
        self._attempted: dict[bytes, Offset | None] = {}
        self._lost: TailraceError | None = None  # once pre-empted, for ever

    def start(self) -> None:
        """Make sure of the topic; with transactions, fence the engine before.

        :raises TailraceError: `SINK_MISCONFIGURED`, `SINK_REFUSED`; `OFFSETS_UNREADABLE`.
        """
        with self._lock:
            topic = self._account().offsets(START_S)
            topic.require(create=self._storage.create_topic)
            self._topic = topic
            self._writer = self._opened(topic)

    def check(self, timeout_s: float) -> Sequence[TopicWarning]:
        """Look whether `start` would find what it needs; nothing is made, and nobody fenced.

        :returns: what of the topic should be otherwise.
        :raises TailraceError: as `start`, but for the right to the transactional id.
        """
        return self._account().offsets(timeout_s).check(create=self._storage.create_topic)

    def read(self, partitions: Sequence[Partition]) -> Mapping[int, Offset]:
        """Return the offset of each partition that has one, by its number. Works without a start, too.

        :raises TailraceError: `OFFSETS_UNREADABLE`, `SINK_REFUSED`.
        """
        keys = [self._key(partition) for partition in partitions]
        with self._lock:
            topic = self._topic
            if topic is None:
                topic = self._account().offsets(START_S)
                if not topic.exists():
                    return {}
            found = self._read(topic, keys)
            self._known |= {key: found.get(key) for key in keys}
        return {number: found[key] for number, key in enumerate(keys) if key in found}

    def write(self, offsets: Sequence[tuple[Partition, Offset]], timeout_s: float) -> None:
        """Keep offsets; acknowledged by all replicas in sync when this returns.

        :raises TailraceError: `OFFSETS_UNWRITABLE`; `OFFSETS_PREEMPTED` if another engine of this name has
            begun, from then on always.
        """
        wanted = {self._key(partition): offset for partition, offset in offsets}
        _require_json(wanted.values())
        self._keep(wanted, timeout_s)

    def take_back(self, partitions: Sequence[Partition], timeout_s: float) -> None:
        """Have these partitions no offset any more; as `write`.

        :raises TailraceError: as `write`.
        """
        self._keep({self._key(partition): None for partition in partitions}, timeout_s)

    def _keep(self, wanted: Mapping[bytes, Offset | None], timeout_s: float) -> None:
        if not wanted:
            return
        with self._lock, self._failing():
            if self._topic is None:
                raise TailraceError(Kind.INTERNAL, "write offsets to a store that is not started")
            if self._lost is not None:
                raise self._lost
            if self._writer is None:
                self._require_ours(self._topic)
                self._writer = self._opened(self._topic)
            self._attempted |= wanted
            self._writer.commit_all(wanted, timeout_s)
            self._known |= wanted
            self._attempted.clear()

    def stop(self) -> None:
        """Let the producer go."""
        with self._lock:
            self._close()

    def _account(self) -> Account:
        storage = self._storage
        return Account(
            storage.bootstrap_servers or "",
            storage.options,
            storage.topic,
            storage.group,
            self._name,
            _TASK,
            self._atomic,
            storage.consumer_isolation_level,
            int(START_S * 1000),
        )

    def _key(self, partition: Partition) -> bytes:
        return source_key(f"{self._storage.group}-{self._name}", partition)

    def _read(self, topic: OffsetsTopic, keys: Sequence[bytes]) -> dict[bytes, dict[str, Any]]:
        return topic.read_each(keys, self._storage.consumer_isolation_level) if keys else {}

    def _opened(self, topic: OffsetsTopic) -> Writer:
        writer = self._account().writer(topic)
        if self._atomic:
            try:
                writer.open()
            except BaseException:
                writer.close()
                raise
        return writer

    def _require_ours(self, topic: OffsetsTopic) -> None:
        """Look, before fencing anybody, whether another engine wrote while this one could not."""
        if not self._atomic:
            return
        found = self._read(topic, list(self._known))
        for key, known in self._known.items():
            if found.get(key) not in (known, self._attempted.get(key, known)):
                raise _preempted(self._storage.topic)
        # A commit without an answer may have come to be: the next look begins from what is there now.
        self._known = {key: found.get(key) for key in self._known}
        self._attempted.clear()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except TailraceError as error:
            writer = self._writer
            # The coordinator ends a transaction that is open for too long, too. The next write then looks
            # whether another engine has written.
            is_late = writer is not None and writer.progress.seconds >= writer.limit_s
            # A life that failed is over: the next write begins another.
            self._close()
            if error.kind is Kind.OFFSETS_PREEMPTED or (error.kind is Kind.SINK_PREEMPTED and not is_late):
                self._lost = _preempted(self._storage.topic)
                raise self._lost from error
            raise TailraceError(Kind.OFFSETS_UNWRITABLE, error.message, error.hint, error.context) from error

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _require_json(offsets: Iterable[Offset]) -> None:
    # Before anything is sent: all of a write or nothing.
    try:
        json.dumps([dict(offset) for offset in offsets])
    except (TypeError, ValueError) as error:
        raise TailraceError(
            Kind.OFFSETS_UNWRITABLE,
            f"write offsets: one holds what JSON can't ({type(error).__name__})",
            "offsets are JSON objects",
        ) from None


def _preempted(topic: str) -> TailraceError:
    return TailraceError(
        Kind.OFFSETS_PREEMPTED,
        "write offsets: another engine of this name has begun; this one stops",
        "stop one of them, or give it another name, or engine.offset_storage.group",
        {"topic": topic},
    )
