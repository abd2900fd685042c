"""The sink `kafka`: writes ranges of the log as records of topics, each range with its offset.

In process it needs no Spark: ranges are decoded and converted in the feed's thread, by kernels that
release the interpreter's lock, and handed to the client in large batches. On Spark, several producers share a
range (`shares`); so do they in process, if the producers of a former run on Spark ended at different offsets.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from tailrace import failpoints
from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.converters.contract import Converter
from tailrace.decode.column_policy import TablePolicy
from tailrace.decode.json.debezium import SourceInfo
from tailrace.errors import REPORT, Kind, TailraceError
from tailrace.kafka.client import settings
from tailrace.kafka.client.failures import LIMIT_S, REFUSED_BY, REFUSED_LIMIT
from tailrace.kafka.offsets.topic import OffsetsTopic
from tailrace.kafka.producer.account import Account, is_taken, raise_out_of_time, too_long
from tailrace.kafka.producer.layout import (
    AssignmentState,
    Head,
    OpenOwn,
    ReadMembers,
    TakingStep,
    WriteHead,
    beginning,
    taking,
)
from tailrace.kafka.producer.writer import Writer
from tailrace.model import LogRange, ValueModes
from tailrace.ranges.plan import InputSplit
from tailrace.sinks.contract import SinkCommit, first_missing
from tailrace.sinks.kafka.records import Form, Records, Sent
from tailrace.sinks.kafka.shares import ShareJob, write_share
from tailrace.sinks.kafka.transactions import TransactionWriter
from tailrace.sinks.write_job import run
from tailrace.transforms.chain import Chain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.changelog.directory import LogIdentity
    from tailrace.config.kafka import KafkaSinkConfig as KafkaConfig
    from tailrace.config.source.column_policy import ColumnPolicy

says = structlog.get_logger(__name__)

#: Number of attempts at a source transaction that takes longer than Kafka's longest transaction.
_ATTEMPTS = 3

#: Timeout of a request that only reads the state of a sink, in seconds.
ASK_TIMEOUT_S = 10.0


class KafkaSink:
    """The sink `kafka`, a `contract.Sink`; its position is the lowest offset that its producers committed.

    :param converter: converts keys and values.
    :param chain: transformations of changes before that.
    """

    type = "kafka"

    def __init__(
        self,
        config: KafkaConfig,
        converter: Converter,
        chain: Chain,
        rules: ColumnPolicy,
        modes: ValueModes,
    ) -> None:
        self.name = config.name
        self._config = config
        self._converter = converter
        self._chain = chain
        self._rules = rules
        self._modes = modes
        self._open: _Open | None = None

    def open(self, log: LogIdentity, pipeline: str) -> None:
        """As `contract.Sink.open`; with transactions, the pipeline's former producer is fenced.

        :raises TailraceError: `SINK_FOREIGN` if the offset is another log's; `SINK_PREEMPTED`,
            `SINK_REFUSED`, `SINK_MISCONFIGURED`, `OFFSETS_UNREADABLE`, `SINK_WRITE_FAILED`.
        """
        self._release()
        config = self._config
        account = account_of(config, pipeline)
        offsets = account.offsets()
        offsets.require(create=config.create_topics)
        prefix = config.topic_prefix or pipeline
        origin = SourceInfo.of(prefix, log.source)
        table_policy = TablePolicy.of(self._rules)
        if account.atomic:
            # Before a producer is fenced: a pipeline with another log must not stop the rightful one.
            _head_in(offsets.settled(account.key, account.isolation), config, pipeline, log.log_id)
        form = Form(config, self._converter, self._chain, prefix, origin, table_policy, self._modes)
        found = _Open(form, account, offsets, log.log_id)
        try:
            found.take()
        except BaseException:
            found.close()
            raise
        self._open = found

    def position(self, task: str) -> int | None:
        """As `contract.Sink.position`: the lowest position of the producers."""
        return None if self._open is None else self._open.standing.position

    def reach(self, task: str) -> int | None:
        """As `contract.Sink.reach`."""
        return None if self._open is None else self._open.standing.reach

    def write(
        self, spark: SparkSession | None, log: Path, span: LogRange, splits: Sequence[InputSplit]
    ) -> SinkCommit:
        """As `contract.Sink.write`: each producer writes records and offset in one transaction, or one after
        the other (at least once).
        """
        if self._open is None:
            raise TailraceError(
                Kind.INTERNAL, "write to a sink that is not open", REPORT, {"sink": self.name}
            )
        have = first_missing(self.name, span, self.position(span.task))
        if have >= span.end:
            return SinkCommit(span)
        return self._open.write(spark, log, span, splits, have)

    def beat(self) -> None:
        """As `contract.Beats.beat`: a heartbeat and the current offset, in one transaction."""
        if self._open is not None:
            self._open.beat()

    def close(self) -> None:
        """As `contract.Sink.close`; if a transformation or converter fails to close, that is only logged."""
        self._release()
        for close in (self._chain.close, self._converter.close):
            try:
                close()
            except Exception as error:  # noqa: BLE001 - closing continues
                says.warning("closing a step of a sink failed", sink=self.name, error=type(error).__name__)

    def _release(self) -> None:
        found, self._open = self._open, None
        if found is not None:
            found.close()


class _Open:
    """A sink that has taken its task: the driver's side of `kafka.producer.layout`."""

    def __init__(self, form: Form, account: Account, offsets: OffsetsTopic, log_id: str) -> None:
        self._form = form
        self._account = account
        self._offsets = offsets
        self._log_id = log_id
        self._writer: Writer | None = None
        self._records = Records(form, account)
        self._by_transaction = TransactionWriter(TASK, self._records)
        self._commit_s = 0.0  # of the current range
        self._counted: dict[str, int] = {}
        self.standing = AssignmentState()
        # Leases that the head can have unless another engine has taken the task; None: there is no head.
        self._ours: set[str | None] = set()
        # Kept: a new reader scans all of the active segment.
        self._reader: LogReader | None = None

    def take(self) -> None:
        """Take the task over from its current producer."""
        self.standing = self._carry_out(taking(self._producers, _fresh, fenced=self._account.atomic))

    def write(
        self, spark: SparkSession | None, log: Path, span: LogRange, splits: Sequence[InputSplit], have: int
    ) -> SinkCommit:
        """Write the changes of `span` from `have` on.

        Two errors lead to an immediate retry with other settings: smaller batches of the client if one does
        not compress enough for its topic, and the longest transaction timeout if a transaction of the source
        exceeds Kafka's. These settings hold until the sink is opened again.
        """
        attempts = 0
        while True:
            try:
                return self._write(spark, log, span, splits, have)
            except TailraceError as error:
                reached = self.standing.position or have
                have, attempts = reached, (1 if reached > have else attempts + 1)
                if not self._adapted(error, log, have, span, attempts):
                    raise
            failpoints.hit("kafka.after_refusal")
            self._take_with_time()
            have = self.standing.position or have

    def _adapted(self, error: TailraceError, log: Path, have: int, span: LogRange, attempts: int) -> bool:
        """Return whether the range should be retried, with the account's settings adapted to the error.

        :raises TailraceError: `SINK_TRANSACTION_TOO_LONG`.
        """
        if error.kind is Kind.SINK_RECORD_TOO_LARGE and REFUSED_BY in error.context:
            return self._fits_now(str(error.context.get("topic", "")))
        if LIMIT_S not in error.context or not self._is_one_unit(log, have, span):
            return False  # the next attempt gets a smaller range
        if not self._account.limit_ms and "transaction.timeout.ms" not in self._account.options:
            says.warning("a source transaction takes long: longer timeout", why=error.message)
            self._account = replace(self._account, limit_ms=settings.LONGEST_MS)
            return True
        if attempts < _ATTEMPTS:
            return True  # the cause of the delay may have passed
        way_out = "have it written without a Kafka transaction: atomic_source_offset_commit: false"
        raise too_long(error, way_out, log_offset=have)

    def _fits_now(self, topic: str) -> bool:
        """Return whether a retry may help: with smaller batches, or with the lower limit of the topic."""
        fitting, is_lower = self._records.fits(topic)
        if fitting >= self._account.batch_bytes or "batch.size" in self._account.options:
            return is_lower  # then larger records become dead letters
        says.warning("batches are too large for a topic: smaller ones now", topic=topic, bytes=fitting)
        self._account = replace(self._account, batch_bytes=fitting)
        return True

    def _is_one_unit(self, log: Path, have: int, span: LogRange) -> bool:
        """Return whether what was written in one transaction is a single unit: a transaction of the source,
        or a snapshot's chunk.
        """
        if self._form.config.transaction_boundary == "transaction" and not self._producers:
            return True
        with LogReader.open(LogDirectory.open(log), span.task) as reader:
            return reader.boundary_within(have, 1, 1, span.end) >= span.end

    def _take_with_time(self) -> None:
        while True:
            try:
                return self.take()
            except TailraceError as error:
                limit_ms = self._account.limit_ms
                if REFUSED_LIMIT not in error.context or limit_ms <= 1:
                    raise
                shorter = limit_ms // 2
                # 1: the usual timeout; a longer one is not requested again.
                self._account = replace(
                    self._account, limit_ms=shorter if shorter >= self._account.timeout_ms else 1
                )

    def _write(
        self, spark: SparkSession | None, log: Path, span: LogRange, splits: Sequence[InputSplit], have: int
    ) -> SinkCommit:
        if self.standing.head is None and self._producers:
            self.standing = self._carry_out(beginning(self._log_id, have, self._producers, _fresh))
        head = self.standing.head
        failpoints.hit("sink.before_write")
        if head is None or not head.producers:
            return self._write_alone(log, span, splits, have)
        written = self._write_shares(spark, log, span, splits, head)
        self.standing = self.standing.written_to(span.end)
        if self.standing.is_even and not self.standing.has(self._producers):
            self.take()  # the former layout's producers have reached the same offset
        self.beat()
        return written

    def beat(self) -> None:
        """Send a heartbeat, if one is due, and the current head, with the task's own producer."""
        if self.standing.head is None or self._writer is None or not self._records.is_beat_due:
            return
        with self._explaining(self._writer):
            self._records.beat(self._writer)
            self._writer.commit(self.standing.head.as_offset())

    def close(self) -> None:
        """Close the task's own producer."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    @property
    def _producers(self) -> int:
        return self._form.config.producers if self._form.config.on_spark else 0

    def _write_alone(self, log: Path, span: LogRange, splits: Sequence[InputSplit], have: int) -> SinkCommit:
        assert self._writer is not None  # by `take`
        started = time.perf_counter()
        self._commit_s, sent = 0.0, Sent()
        reader = self._reader = self._reader or LogReader.open(log, span.task)
        with self._explaining(self._writer):
            if self._form.config.transaction_boundary == "transaction":
                self._by_transaction.write(self._writer, reader, have, span.end, sent, self._commit)
            else:
                sent = self._records.send(self._writer, reader, splits, have, span.end)
                self._commit(span.end)
        send_s = time.perf_counter() - started - self._commit_s
        seconds = {"send": send_s, "commit": self._commit_s}
        return SinkCommit(span, sent.rows, sent.bytes, 0, seconds, sent.dead_letters)

    def _commit(self, log_offset: int) -> None:
        """Commit the records sent; all of them are before `log_offset`."""
        assert self._writer is not None  # by `take`
        failpoints.hit("sink.after_write")
        began_s = time.perf_counter()
        head = Head(self._log_id, log_offset, lease=self._lease())
        failpoints.hit("sink.before_commit")
        self._ours.add(head.lease)
        self._writer.commit(head.as_offset())
        self._ours = {head.lease}
        failpoints.hit("sink.after_commit")
        self.standing = AssignmentState(head, (log_offset,))
        self._commit_s += time.perf_counter() - began_s

    def _write_shares(
        self, spark: SparkSession | None, log: Path, span: LogRange, splits: Sequence[InputSplit], head: Head
    ) -> SinkCommit:
        numbers = range(head.producers)
        # The tasks do not read again what is read here.
        keys = [self._account.key, *map(self._account.member_key, numbers)]
        self._offsets.read_each(keys, self._account.isolation)
        history = self._offsets.history
        job = ShareJob(
            str(log), tuple(splits), span.end, self._account, self._form, head, history, self._counted
        )
        if spark is None:
            # A former run on Spark left its producers at different offsets.
            found = [write_share(job, number) for number in numbers]
        else:
            found = run(spark, numbers, partial(write_share, job), self._form.config.name)
        for each in found:
            self._counted = {**each.counted, **self._counted}
        rows, size = sum(each.rows for each in found), sum(each.bytes for each in found)
        seconds = {"send": max(each.send_s for each in found), "commit": max(each.commit_s for each in found)}
        return SinkCommit(span, rows, size, 0, seconds, sum(each.dead_letters for each in found))

    def _lease(self) -> str:
        """Return the lease of the task's own producer; empty without transactions: nothing is fenced then."""
        if not self._account.atomic:
            return ""
        return _fresh() if self.standing.head is None else self.standing.head.lease

    @contextlib.contextmanager
    def _explaining(self, writer: Writer) -> Iterator[None]:
        """Replace the producer's errors by ones that say if another engine took over, or time ran out."""
        try:
            yield
        except TailraceError as error:
            if error.kind is Kind.SINK_PREEMPTED and self._is_taken():
                raise
            raise_out_of_time(error, writer)

    def _is_taken(self) -> bool:
        """Return whether another engine has taken the task over.

        :raises TailraceError: if the head can't be read; the policy is that error's.
        """
        return is_taken(self._offsets, self._account, self._ours)

    def _carry_out(self, steps: Generator[TakingStep, Any, AssignmentState]) -> AssignmentState:
        result: Any = None
        try:
            while True:
                result = self._perform(steps.send(result))
        except StopIteration as end:
            found: AssignmentState = end.value
            return found

    def _perform(self, step: TakingStep) -> Any:
        if isinstance(step, OpenOwn):
            self.close()
            self._account.end_members(self._offsets)
            self._writer = self._account.writer(self._offsets)
            head = _head_in(self._writer.open(), self._form.config, self._account.pipeline, self._log_id)
            self._ours = {None if head is None else head.lease}
            return head
        if isinstance(step, WriteHead):
            assert self._writer is not None  # by the order of the steps
            self._ours.add(step.head.lease)
            with self._explaining(self._writer):
                self._writer.commit(step.head.as_offset())
            self._ours = {step.head.lease}
            failpoints.hit("kafka.after_head")
            return None
        if isinstance(step, ReadMembers):
            keys = [self._account.member_key(number) for number in range(step.producers)]
            found = self._offsets.read_each(keys, self._account.isolation)
            return [found.get(key) for key in keys]
        self._account.fence_member(self._offsets, step.number)
        failpoints.hit("kafka.after_fence")
        return None


def recorded_kafka_position(config: KafkaConfig, pipeline: str, log: LogIdentity) -> int | None:
    """Return the offset before which all producers have committed everything, without fencing a producer.

    :raises TailraceError: `SINK_FOREIGN`, `OFFSETS_UNREADABLE`, `SINK_REFUSED`, `SINK_WRITE_FAILED`.
    """
    account = account_of(config, pipeline)
    offsets = account.offsets(min(account.timeout_s, ASK_TIMEOUT_S))
    if not offsets.exists():
        return None
    head = _head_in(offsets.read(account.key, account.isolation), config, pipeline, log.log_id)
    return None if head is None else furthest_whole(account, offsets, head)


def furthest_whole(account: Account, offsets: OffsetsTopic, head: Head) -> int:
    """Return the offset before which all of a task's producers have written everything.

    :raises TailraceError: `OFFSETS_UNREADABLE`, `SINK_REFUSED`, `SINK_WRITE_FAILED`.
    """
    keys = [account.member_key(number) for number in range(head.producers)]
    found = offsets.read_each(keys, account.isolation) if keys else {}
    return min((head.reached(found.get(key)) for key in keys), default=head.log_offset)


def offset_at(log_id: str, log_offset: int) -> dict[str, Any]:
    """Return the offset record of a sink that has written everything before `log_offset` of that log."""
    return Head(log_id, log_offset).as_offset()


def account_of(config: KafkaConfig, pipeline: str) -> Account:
    """Return the account of a sink's only task."""
    return Account(
        config.bootstrap_servers,
        config.options,
        config.offsets_topic,
        config.group,
        pipeline,
        TASK,
        bool(config.atomic_source_offset_commit),
        config.consumer_isolation_level,
        config.offset_flush_timeout_ms,
        config.smallest_limit or settings.BATCH_BYTES,
    )


def _head_in(
    offset: Mapping[str, Any] | None, config: KafkaConfig, pipeline: str, log_id: str
) -> Head | None:
    if offset is None:
        return None
    head = Head.of(offset)
    if head.log_id != log_id:
        raise TailraceError(
            Kind.SINK_FOREIGN,
            f"continue after the offset in {config.offsets_topic!r}: it belongs to another log",
            f"`tailrace offsets reset FILE --sink {config.name}` makes the sink write this log from "
            f"its start, `tailrace offsets set FILE --sink {config.name} --to … --skip-changes` from a later "
            "place; or give the pipeline another name, or "
            "the sink another `group`",
            {"sink": config.name, "pipeline": pipeline, "log_id": head.log_id},
        )
    return head


def _fresh() -> str:
    return secrets.token_hex(8)
