"""The producer of an engine's task: writes records and the source offsets after them.

It is a member of the engine's task `offsets` (`layout`), with the transactional id
`<group>-<engine>-offsets:<n>`. The engine's store fences all members of the engine before it, and writes a
head with a new lease, before any offset is read (`offsets.store`). A member starts as follows: (1) it checks
the head, before it fences any producer; (2) it opens its producer, which fences the attempt before; (3) it
checks the head again: a member that opened after a later engine had fenced it finds that engine's lease, and
stops. Only then it reads offsets. If a replaced engine opens a member late, it fences the new engine's
member once; the new engine's member finds its own lease in the head, and starts again.

Each commit includes a record of the member's own, with the lease and the commit's number: from it the next
attempt learns whether a commit without an answer took effect.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import structlog

from tailrace.config.kafka import KafkaSinkConfig
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.client.topics import Topics, legal
from tailrace.kafka.events.dead_letters import message_bytes_max, refusal, too_large
from tailrace.kafka.offsets.topic import History, OffsetsTopic, source_key
from tailrace.kafka.producer.account import Account, is_taken, raise_out_of_time
from tailrace.kafka.producer.partitioner import by_key
from tailrace.kafka.producer.sender import SendProgress
from tailrace.records.batch import Offset, Partition
from tailrace.records.events import Converted
from tailrace.waits import wait_until

log = structlog.get_logger(__name__)

#: Name of the task whose members are an engine's producers; other tasks are named by their number.
OF_ENGINE = "offsets"

#: How long the offsets topic is looked for: one just created is not known to all brokers yet.
APPEARS_S = 5.0
LOOK_S = 0.1


class TaskProducer:
    """The Kafka producer of one attempt of a task. Not for several threads at once.

    :param account: the engine's account.
    :param lease: the engine's lease.
    :param history: what has already been read of the offsets topic.
    :param create_topics: whether missing topics are created.
    """

    def __init__(
        self, account: Account, number: int, lease: str, history: History, *, create_topics: bool
    ) -> None:
        self._account = account
        self._number = number
        self._lease = lease
        self._commits = 0
        self._offsets = account.offsets(history=history)
        self._writer = account.member(self._offsets, number)
        section = KafkaSinkConfig(
            type="kafka",
            bootstrap_servers=account.bootstrap,
            offsets_topic=account.offsets_topic,
            create_topics=create_topics,
        )
        self._topics = Topics(section, account.admin(), "", account.timeout_s)
        self._message_max = message_bytes_max(account.options)

    @property
    def progress(self) -> SendProgress:
        """The progress of the transaction."""
        return self._writer.progress

    @property
    def limit_s(self) -> float:
        """Longest time that a transaction may take, in seconds."""
        return self._writer.limit_s

    def open(self) -> None:
        """Start the producer; the attempt before commits nothing more.

        :raises TailraceError: `OFFSETS_PREEMPTED` if another engine of this name has started;
            `SINK_MISCONFIGURED` if the offsets topic was deleted; `SINK_WRITE_FAILED`, `SINK_REFUSED`,
            `OFFSETS_UNREADABLE`.
        """
        if not wait_until(self._offsets.is_there, APPEARS_S, LOOK_S):
            raise TailraceError(
                Kind.SINK_MISCONFIGURED,
                f"look for the offsets topic {self._offsets.name!r}: it does not exist any more",
                "find out why it was deleted, and restore it; an engine that is started without it begins at "
                "the start of its source, and writes everything again",
                {"topic": self._offsets.name},
            )
        with self._explaining():
            self._require_ours()
            found = self._writer.open() or {}
            self._require_ours()
        self._commits = int(found.get("commit", 0))
        log.info("a task continues after its last commit", task=self._number, commit=self._commits)

    def read(self, partitions: Sequence[Partition]) -> Mapping[int, Offset]:
        """Return the offset of each partition that has one, by its index in `partitions`; after `open`.

        :raises TailraceError: `OFFSETS_UNREADABLE`, `SINK_REFUSED`, `SINK_WRITE_FAILED`.
        """
        keys = [partition_key(self._account, partition) for partition in partitions]
        found = self._offsets.read_each(keys, self._account.isolation) if keys else {}
        return {number: found[key] for number, key in enumerate(keys) if key in found}

    def send(self, topic: str, events: Converted) -> None:
        """Send events to a topic, each to the partition of its key.

        :raises TailraceError: `SINK_RECORD_TOO_LARGE`, `SINK_MISCONFIGURED`, `SINK_REFUSED`,
            `SINK_WRITE_FAILED`, `OFFSETS_PREEMPTED`; the transaction has then ended.
        """
        topic = legal(topic, topic)
        self._topics.require(topic)
        limit = min(self._message_max, self._topics.largest(topic) or self._message_max)
        if (refused := too_large(events, limit)) is not None:
            way_out = "or have a transformation leave out the record or a column"
            raise refusal(events, int(np.argmax(refused)), topic, limit, way_out, {})
        partitions = None
        if events.keys is not None and "partitioner" not in self._account.options:
            partitions = by_key(events.keys, self._topics.partitions(topic))
        with self._explaining():
            self._writer.send(topic, events, partitions)

    def commit(self, offsets: Sequence[tuple[Partition, Offset]], timeout_s: float | None = None) -> None:
        """Commit the records sent, together with these offsets.

        :param timeout_s: of this commit; None: the account's timeout.
        :raises TailraceError: `OFFSETS_PREEMPTED`; `OFFSETS_UNWRITABLE` for an offset that JSON can't hold;
            `SINK_WRITE_FAILED` if nothing was committed, or if the outcome is unknown: the next attempt
            reads it before it writes.
        """
        wanted: dict[bytes, Offset] = {partition_key(self._account, each): offset for each, offset in offsets}
        require_json(wanted.values())
        number = self._commits + 1
        if self._account.atomic:
            own = self._account.member_key(self._number)
            wanted[own] = {"lease": self._lease, "commit": number}
        with self._explaining():
            self._writer.commit_all(wanted, timeout_s)
        self._commits = number

    def close(self) -> None:
        """Discard records that are not committed, and close the producer."""
        self._writer.close()

    def _require_ours(self) -> None:
        require_ours(self._offsets, self._account, self._lease)

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Replace the producer's errors by ones that say whether another engine started, or time ran out."""
        try:
            yield
        except TailraceError as error:
            if error.kind is Kind.SINK_PREEMPTED:
                self._require_ours()
            raise_out_of_time(error, self._writer)


def partition_key(account: Account, partition: Partition) -> bytes:
    """Return the key of the offset of a source's partition.

    :raises TailraceError: `ENGINE_MISUSED` for one whose key would be that of the engine's own records.
    """
    if partition.get("task") == OF_ENGINE and partition.keys() <= {"task", "producer"}:
        raise TailraceError(
            Kind.ENGINE_MISUSED,
            f"keep the offset of partition {dict(partition)} in Kafka: the engine's own is kept there",
            "use other partition names in the connector",
        )
    return source_key(account.owner, partition)


def require_json(offsets: Iterable[Offset]) -> None:
    """Check before sending that all offsets can be written, so that either all are written or none.

    :raises TailraceError: `OFFSETS_UNWRITABLE`.
    """
    try:
        json.dumps([dict(offset) for offset in offsets])
    except (TypeError, ValueError) as error:
        raise TailraceError(
            Kind.OFFSETS_UNWRITABLE,
            f"write offsets: one contains a value that JSON can't represent ({type(error).__name__})",
            "offsets are JSON objects",
        ) from None


def require_ours(offsets: OffsetsTopic, account: Account, lease: str) -> None:
    """Check that no other engine of this name has started.

    :param lease: this engine's lease.
    :raises TailraceError: `OFFSETS_PREEMPTED`; `SINK_WRITE_FAILED`, `SINK_REFUSED`.
    """
    if account.atomic and is_taken(offsets, account, {lease}):
        # A commit is acknowledged before its marker is in every partition: our head may not be visible yet.
        found = offsets.read(account.key, account.isolation) or {}
        if found.get("lease") != lease:
            raise engine_preempted(account.offsets_topic)


def engine_preempted(topic: str) -> TailraceError:
    """Return the error of an engine that another engine of the same name has replaced."""
    return TailraceError(
        Kind.OFFSETS_PREEMPTED,
        "write offsets: another engine of this name has started; this one stops",
        "stop one of them, or give it another name, or another `group`",
        {"topic": topic},
    )
