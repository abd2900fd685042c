"""A task's names in a cluster: its offset keys, its transactional ids, and checks that it still owns them.

The cluster fences a producer when another engine has started, and when its transaction was open for too long.
Only in the first case does the task's head contain another engine's lease.
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

    Can be pickled: executors receive it with their tasks, and resolve secrets themselves.

    :param options: librdkafka settings; secrets are references.
    :param atomic: whether records and offsets are written in transactions.
    :param isolation: isolation level at which offsets are read.
    :param batch_bytes: the producers' batch size, unless `options` set one.
    :param limit_ms: minimum transaction timeout, unless `options` set one.
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
        """Timeout of a request, and of a commit."""
        return self.timeout_ms / 1000

    @property
    def key(self) -> bytes:
        """The key of the task's own offset."""
        return source_key(self.owner, {"task": self.task})

    def admin(self) -> dict[str, Any]:
        """Return the settings of an admin client.

        :raises TailraceError: `SECRET_MISSING`, as every method here that creates a client.
        """
        return client.admin(self._common())

    @property
    def owner(self) -> str:
        """The owner of the offsets, as named in their keys."""
        return f"{self.group}-{self.pipeline}"

    def offsets(
        self, timeout_s: float | None = None, *, history: History | None = None, lenient: bool = False
    ) -> OffsetsTopic:
        """Return the offsets topic, without checking that it exists.

        :param timeout_s: timeout of a request; None: that of a commit.
        :param history: as in `OffsetsTopic`, like `lenient`.
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
        """Return a new writer for the task's own producer, not yet opened."""
        return self._writer(offsets, self.key, f"{self.owner}-{self.task}")

    def member(self, offsets: OffsetsTopic, number: int) -> Writer:
        """Return a new writer for one of several producers that share the task (`layout`), counted from 0."""
        # Names contain no colon; with a hyphen the id could be that of a pipeline `<pipeline>-<task>`.
        transactional_id = f"{self.owner}-{self.task}:{number}"
        return self._writer(offsets, self.member_key(number), transactional_id)

    def fence_members(self, offsets: OffsetsTopic, head: Mapping[str, Any] | None) -> None:
        """Fence the producers that shared the task, if `head` names any."""
        for number in range(producers_in(head)):
            self.fence_member(offsets, number)

    def fence_member(self, offsets: OffsetsTopic, number: int) -> None:
        """Fence one of the producers that shared the task.

        Reads no offset: that would wait for all transactions in its partition, other members' too.
        """
        member = self.member(offsets, number)
        try:
            member.fence()
        finally:
            member.close()

    def end_members(self, offsets: OffsetsTopic) -> None:
        """End the transactions that members began before a head, if the head can't be read until they end.

        The writer of such a head crashed before it fenced the members, which the head before it names.
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
    """Return how many producers share a task, according to its head."""
    producers = 0 if head is None else head.get("producers", 0)
    return producers if isinstance(producers, int) else 0


#: Fraction of the time limit after which the cluster may have ended a batch for its time: clocks differ.
_NEARLY = 0.9


def is_taken(offsets: OffsetsTopic, account: Account, ours: Collection[str | None]) -> bool:
    """Return whether another engine has taken a task over: whether its head's lease is not one of `ours`.

    :param ours: the engine's own leases; None stands for a missing head.
    :raises TailraceError: if the head can't be read.
    """
    try:
        found = offsets.settled(account.key, account.isolation)
    except TailraceError as error:
        attempted = f"look whether another engine has taken over: {error.message}"
        raise error.changed(message=attempted) from error
    return (None if found is None else found.get("lease", "")) not in ours


def raise_out_of_time(error: TailraceError, writer: Writer) -> NoReturn:
    """Raise the error of a batch that no other engine ended; if its time ran out, with the time limit.

    `SINK_PREEMPTED` becomes an error that may be retried: the cluster has aborted the transaction.
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
        raise error.changed(
            kind=Kind.SINK_WRITE_FAILED,
            message=f"write a batch: the cluster aborted its transaction; {found}; no other engine has taken "
            "over",
            hint="the batch is written again",
        ) from error
    is_slow = progress.idle_s < limit_s / 2
    cause = "the cluster is slow: see its quotas"
    if not is_slow:
        cause = "a broker can't be reached, a topic was deleted, or too few of its replicas are in sync"
    raise error.changed(
        {LIMIT_S: round(limit_s, 3)} if is_slow else {},
        kind=Kind.SINK_WRITE_FAILED,
        message=f"write a batch: {found}, and the time limit is {limit_s:g} s",
        hint="the batch is written again, a smaller one if it contains several transactions of the source; "
        f"this process may have been suspended, or {cause}",
    ) from error


def too_long(error: TailraceError, way_out: str, **context: object) -> TailraceError:
    """Return the error of a source transaction that takes longer than a Kafka transaction may.

    :param error: as raised by `raise_out_of_time`.
    :param way_out: what helps other than more time.
    """
    return error.changed(
        context,
        kind=Kind.SINK_TRANSACTION_TOO_LONG,
        message=f"write a transaction of the source: {error.message.removeprefix('write a batch: ')}",
        hint="raise transaction.timeout.ms in `options` (and transaction.max.timeout.ms of the brokers, "
        f"which bounds it), or the client's quota; or {way_out}",
    )
