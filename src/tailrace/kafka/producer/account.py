"""Whose offsets are kept in a cluster, the producers that write under that name, and whether they still may.

The cluster fences a producer when another engine has begun, and when its transaction was open for too long.
The lease in the task's head is another's in the first case alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from tailrace.config.kafka_clients import client_settings
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.client import settings as client
from tailrace.kafka.client.failures import LIMIT_S
from tailrace.kafka.offsets.topic import History, OffsetsTopic, source_key
from tailrace.kafka.producer.writer import AtomicWriter, PlainWriter, Task, Writer
from tailrace.secrets import Secret


@dataclass(frozen=True, slots=True)
class Account:
    """A task's account in a cluster: its transactional ids and the keys of its offsets.

    May be pickled: executors get it inside of their tasks, and resolve secrets themselves.

    :param options: of librdkafka; secrets are references.
    :param atomic: whether records and offsets are written in transactions.
    :param isolation: how offsets are read.
    :param batch_bytes: of producers, where `options` give none.
    :param limit_ms: least that a transaction is given, where `options` say nothing.
    """

    bootstrap: str
    options: Mapping[str, str | Secret]
    offsets_topic: str
    group: str
    pipeline: str
    task: str
    atomic: bool
    isolation: str
    timeout_ms: int
    batch_bytes: int = client.BATCH_BYTES
    limit_ms: int = 0

    @property
    def timeout_s(self) -> float:
        """Longest that a question, or a commit, may take."""
        return self.timeout_ms / 1000

    @property
    def key(self) -> bytes:
        """The key of the task's own offset."""
        return source_key(self.owner, {"task": self.task})

    def admin(self) -> dict[str, Any]:
        """Return the settings of an admin client.

        :raises TailraceError: `SECRET_MISSING`, as all that makes a client here.
        """
        return client.admin(self._common())

    @property
    def owner(self) -> str:
        """Whose the offsets are, in their keys."""
        return f"{self.group}-{self.pipeline}"

    def offsets(
        self, timeout_s: float | None = None, *, history: History | None = None, lenient: bool = False
    ) -> OffsetsTopic:
        """Return the topic of the offsets, not yet looked for.

        :param timeout_s: longest that a question may take, if not as long as a commit.
        :param history: as `OffsetsTopic` has it, like `lenient`.
        """
        common = self._common()
        return OffsetsTopic(
            self.offsets_topic,
            self.owner,
            client.admin(common),
            client.consumer(common, self.isolation),
            timeout_s or self.timeout_s,
            history=history,
            lenient=lenient,
        )

    def writer(self, offsets: OffsetsTopic) -> Writer:
        """Return a new producer of the task itself, not yet opened."""
        return self._writer(offsets, self.key, f"{self.owner}-{self.task}")

    def member(self, offsets: OffsetsTopic, number: int) -> Writer:
        """Return likewise one of several producers that share the task (`layout`), counted from 0."""
        # No name has a colon: with another hyphen it would be that of a pipeline `<pipeline>-<task>`.
        transactional_id = f"{self.owner}-{self.task}:{number}"
        return self._writer(offsets, self.member_key(number), transactional_id)

    def fence_members(self, offsets: OffsetsTopic, head: Mapping[str, Any] | None) -> None:
        """Take the ids of those who shared the task, if `head` says that there were some."""
        for number in range(producers_in(head)):
            self.fence_member(offsets, number)

    def fence_member(self, offsets: OffsetsTopic, number: int) -> None:
        """Take the id of one of those who shared the task.

        No offset is read: that waits for all transactions in its partition, other members' too.
        """
        member = self.member(offsets, number)
        try:
            member.fence()
        finally:
            member.close()

    def end_members(self, offsets: OffsetsTopic) -> None:
        """End what members had begun before a head, where the head can't be read before that has ended.

        Such a head was written by somebody who ended before fencing the members: those of the head before it.
        """
        if self.atomic and offsets.awaits_an_end(self.key, self.isolation):
            self.fence_members(offsets, offsets.settled(self.key, self.isolation))

    def member_key(self, number: int) -> bytes:
        """Return the key of the offset of one of several producers."""
        return source_key(self.owner, {"task": self.task, "producer": str(number)})

    def _writer(self, offsets: OffsetsTopic, key: bytes, transactional_id: str) -> Writer:
        wanted = transactional_id if self.atomic else None
        settings = client.producer(self._common(), self.timeout_ms, wanted, self.batch_bytes, self.limit_ms)
        task = Task(settings, offsets, key, self.isolation, self.timeout_s)
        return AtomicWriter(task) if self.atomic else PlainWriter(task)

    def _common(self) -> dict[str, Any]:
        return client.client(self.bootstrap, client_settings(self.options), self.timeout_ms)


def producers_in(head: Mapping[str, Any] | None) -> int:
    """Return how many producers share a task, as its head says."""
    producers = 0 if head is None else head.get("producers", 0)
    return producers if isinstance(producers, int) else 0


#: The part of its time after which a batch may have been ended for it: clocks differ.
_NEARLY = 0.9


def is_taken(offsets: OffsetsTopic, account: Account, ours: Collection[str | None]) -> bool:
    """Return whether another engine has taken a task: whether its head has a lease that is none of `ours`.

    :param ours: None: there was no head.
    :raises TailraceError: where that can't be looked up.
    """
    try:
        found = offsets.settled(account.key, account.isolation)
    except TailraceError as error:
        attempted = f"look whether another engine has taken over: {error.message}"
        raise TailraceError(error.kind, attempted, error.hint, error.context) from error
    return (None if found is None else found.get("lease", "")) not in ours


def raise_out_of_time(error: TailraceError, writer: Writer) -> NoReturn:
    """Raise what a batch met that nobody else has ended: where its time was too short, with what that was.

    An error of kind `SINK_PREEMPTED` is one that may pass then: the cluster has ended the transaction.
    :raises TailraceError: always.
    """
    progress, limit_s = writer.progress, writer.limit_s
    is_over = progress.seconds >= limit_s * _NEARLY
    if error.kind not in (Kind.SINK_PREEMPTED, Kind.SINK_WRITE_FAILED) or (
        error.kind is Kind.SINK_WRITE_FAILED and not is_over
    ):
        raise error
    found = (
        f"{progress.delivered} of {progress.records} records ({progress.bytes} bytes) were delivered in "
        f"{progress.seconds:.0f} s"
    )
    if not is_over:
        raise TailraceError(
            Kind.SINK_WRITE_FAILED,
            f"write a batch: the cluster has ended its transaction; {found}; nobody else has taken over",
            "it is begun again",
            error.context,
        ) from error
    context = error.context
    if progress.idle_s < limit_s / 2:
        context[LIMIT_S] = round(limit_s, 3)
    raise TailraceError(
        Kind.SINK_WRITE_FAILED,
        f"write a batch: {found}, and {limit_s:g} s are the most that it may take",
        "it is begun again, with less where it holds several transactions of the source; this process may "
        "have stood still, or the cluster is slow: see its quotas",
        context,
    ) from error


def too_long(error: TailraceError, way_out: str, **context: object) -> TailraceError:
    """Return the error of a transaction of the source that does not fit into the time of one of Kafka's.

    :param error: as `raise_out_of_time` raises it.
    :param way_out: what else than more time helps.
    """
    return TailraceError(
        Kind.SINK_TRANSACTION_TOO_LONG,
        f"write a transaction of the source: {error.message.removeprefix('write a batch: ')}",
        "raise transaction.timeout.ms in `options` (and transaction.max.timeout.ms of the brokers, which "
        f"bounds it), or the client's quota; or {way_out}",
        {**error.context, **context},
    )
