"""Converts the changes of a range to Kafka records, each for the topic of its table, and sends them.

    changes ── transformations ── topic ── converter ── too large? ── partition ── writer
                                                           │
                                                     dead letters

It also sends records other than row changes: new shapes of tables, boundaries of the range's transactions,
and heartbeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import structlog

from tailrace.changelog.reader import LogReader
from tailrace.converters.contract import Converter, KeysFirst
from tailrace.converters.factory import Converting
from tailrace.decode.changes import TableChanges
from tailrace.decode.column_policy import TablePolicy
from tailrace.decode.json.debezium import SourceInfo
from tailrace.decode.schemas import Catalog
from tailrace.errors import Kind, RetriableError, StopEngine, TailraceError
from tailrace.kafka.client.settings import SAFE_BATCH_BYTES
from tailrace.kafka.client.topics import Topics, legal
from tailrace.kafka.events import side_records
from tailrace.kafka.events.boundaries import Boundaries
from tailrace.kafka.events.dead_letters import letters, message_bytes_max, refusal, too_large
from tailrace.kafka.events.side_records import Heartbeats, ShapeChange, shape_changes
from tailrace.kafka.producer.account import Account
from tailrace.kafka.producer.partitioner import BY_KEY, Share, by_key, by_transaction
from tailrace.kafka.producer.sender import Partitions
from tailrace.kafka.producer.writer import Writer
from tailrace.model import Op, ValueModes
from tailrace.protocol.frames import Numbers
from tailrace.ranges.changes import decoded_batches
from tailrace.ranges.plan import InputSplit
from tailrace.records.events import Converted, bytes_of, made_in_parts, width
from tailrace.records.group import Group
from tailrace.records.orders import TableOrders
from tailrace.sinks.contract import function_failure
from tailrace.sinks.kafka.outgoing import Outgoing, Portion, cutting, in_log_order, place_of, placed
from tailrace.transforms.chain import Chain

if TYPE_CHECKING:
    from tailrace.config.kafka import KafkaSinkConfig as KafkaConfig

log = structlog.get_logger(__name__)

T = TypeVar("T")

_WAY_OUT = "exclude the table or the column, or have dead letters written instead: set dead_letter_topic"


@dataclass(slots=True)
class Sent:
    """Counts of what was sent for a range, or for a part of it.

    :param share: the share of the range's records that is sent; None: all.
    :param rows: number of changes.
    :param bytes: size of the values.
    :param dead_letters: number of records that were too large for their topic.
    """

    share: Share | None = None
    rows: int = 0
    bytes: int = 0
    dead_letters: int = 0
    boundaries: Boundaries = field(default_factory=Boundaries)
    orders: TableOrders = field(default_factory=TableOrders)

    def add(self, other: Sent) -> None:
        """Add the counts of `other`."""
        self.rows += other.rows
        self.bytes += other.bytes
        self.dead_letters += other.dead_letters


@dataclass(frozen=True, slots=True)
class Form:
    """The converter, transformations and settings of a sink's records. Can be pickled.

    :param converter: converts keys and values.
    :param chain: transformations of changes before that.
    :param prefix: first part of the names of topics.
    """

    config: KafkaConfig
    converter: Converter
    chain: Chain
    prefix: str
    origin: SourceInfo
    table_policy: TablePolicy
    modes: ValueModes


class Records:
    """A sender of changes as records, for one writer after another.

    :param counted: as in `Topics`.
    """

    def __init__(self, form: Form, account: Account, counted: Mapping[str, int] | None = None) -> None:
        self._form = form
        self._config = config = form.config
        self._converting = Converting(form.converter, to_kafka=True)
        self._topics = Topics(config, account.admin(), form.prefix, account.timeout_s, counted)
        self._origin = form.origin
        self._heartbeats = Heartbeats(config.heartbeat_interval_ms / 1000)
        self._message_max = message_bytes_max(account.options)
        self._are_topics_named = False
        for topic in config.fixed_topics(form.origin.name):
            self._topics.require_data(topic)

    def send(
        self,
        writer: Writer,
        log: LogReader | Path,
        splits: Sequence[InputSplit],
        start: int,
        end: int,
        share: Share | None = None,
    ) -> Sent:
        """Send the changes of `[start, end)`, and the records other than row changes.

        :param splits: of a range that includes it.
        :param share: the share of their records to send; None: all. The first share includes the records
            other than row changes; only the driver sends heartbeats.
        :raises TailraceError: as reading the log, and as `Writer.send`, with the place in the log of the
            record that was refused.
        """
        sent = Sent(share)
        if self._config.schema_changes_topic and (share is None or share.number == 0):
            for change in shape_changes(log, splits, start, end, self._form.modes, self._form.table_policy):
                self._send_shape(writer, change)
        for outgoing in self.outgoing(log, splits, start, end, sent):
            outgoing.send(writer)
        if self._config.provide_transaction_metadata:
            self._send_boundaries(writer, sent.boundaries)
        if share is None:
            self.beat(writer)
        return sent

    def outgoing(
        self,
        log: LogReader | Path,
        splits: Sequence[InputSplit],
        start: int,
        end: int,
        sent: Sent,
    ) -> Iterator[Outgoing]:
        """Yield the records of the changes of `[start, end)` alone; as `send`.

        The records of each topic come in the order of the log.

        :param sent: the counts are added to it.
        """
        if not splits:
            return
        reader = log if isinstance(log, LogReader) else LogReader.open(log, splits[0].task)
        self._name_topics(reader, splits[0])
        for split in splits:
            if split.end <= start:
                continue
            for decoded in decoded_batches(reader, split, None, self._form.modes, self._form.table_policy):
                by_topic: dict[str, list[Portion]] = {}
                for changes in decoded.changes:
                    for portion in self._portions(changes.slice(start, end), sent):
                        by_topic.setdefault(portion[0].topic, []).append(portion)
                while by_topic:  # releases what was sent
                    yield from self._of_topic(by_topic.pop(next(iter(by_topic))), sent)

    def has_beside(self, splits: Sequence[InputSplit]) -> bool:
        """Return whether these splits yield records of single transactions other than row changes."""
        if self._config.provide_transaction_metadata:
            return True
        blocks = (block for split in splits for block in split.blocks)
        return bool(self._config.schema_changes_topic) and any(block.header.has_schema for block in blocks)

    def fits(self, topic: str) -> tuple[int, bool]:
        """Return the largest batch for a topic, in bytes, that fits now even if it does not compress, and
        whether the topic's limit is lower than the one known so far.
        """
        known = self._topics.largest(topic) if topic else None
        limit = self._topics.largest(topic, again=True) if topic else None
        if limit is None:
            return SAFE_BATCH_BYTES, False
        return min(SAFE_BATCH_BYTES, limit * 9 // 10), known is None or limit < known

    @property
    def is_beat_due(self) -> bool:
        """Whether a heartbeat is due now."""
        return self._heartbeats.is_due

    def beat(self, writer: Writer) -> None:
        """Send a heartbeat, if it is due.

        :raises TailraceError: as `send_beside`.
        """
        if self.is_beat_due:
            config = self._config
            topic = config.heartbeat_topic_of(self._origin.name)
            now_ms = time.time_ns() // 1_000_000
            self.send_beside(writer, side_records.heartbeat(topic, now_ms, self._origin))
            self._heartbeats.sent()

    def send_beside(self, writer: Writer, group: Group) -> None:
        """Send records other than row changes to their topic.

        :raises TailraceError: as `Writer.send`, and as the converter's `convert`.
        """
        group = _with_legal_topic(group)
        self._topics.require(group.topic)
        writer.send(group.topic, self._own(self._converting, group))

    def _send_boundaries(self, writer: Writer, boundaries: Boundaries) -> None:
        ended = boundaries.ended()
        if len(ended):
            topic = self._config.transaction_topic or self._topics.beside("transaction")
            self.send_beside(writer, side_records.transactions(topic, ended, self._origin))

    def _send_shape(self, writer: Writer, change: ShapeChange) -> None:
        if self._config.wants(change.relation.schema, change.relation.table):
            topic = self._config.schema_changes_topic
            self.send_beside(writer, side_records.shape(topic, change, self._origin))

    def _name_topics(self, log: LogReader, first: InputSplit) -> None:
        """Check that no two tables share a topic without a route, even if only one of them has changes here.

        :param first: the first split that is sent.
        :raises TailraceError: as `Topics.of_table`.
        """
        if self._are_topics_named or not first.blocks:
            return
        end = log.end().offset
        # Also those that later changes are of: nothing is to be written before the error.
        for in_force in (log.schema_before(first.blocks[0]), log.all_schema_frames(end, end)):
            for schema, table in Catalog(in_force).names():
                if self._config.wants(schema, table):
                    self._topics.of_table(schema, table)
        self._are_topics_named = True

    def _portions(self, changes: TableChanges, sent: Sent) -> Iterator[Portion]:
        relation = changes.relation
        if not changes.count or (relation and not self._config.wants(relation.schema, relation.table)):
            return
        topics = self._topics
        topic = topics.of_table(relation.schema, relation.table) if relation else topics.beside("message")
        places = np.arange(changes.count, dtype=np.int64)
        orders = sent.orders.of(changes) if self._config.provide_transaction_metadata else None
        group = Group.of_changes(topic, places, changes, self._origin, orders)
        for made in map(_with_legal_topic, self._own(self._form.chain.apply, group)):
            if sent.share is None:
                yield made, changes
            elif len(mine := self._narrowed(made, sent.share)):
                yield mine, changes
                sent.rows += len(mine)
        if sent.share is None:
            sent.rows += changes.count

    def _own(self, step: Callable[[Group], T], group: Group) -> T:
        """Return a step's result for a group; its requests to an engine become the errors of a sink.

        :raises TailraceError: as the step; as `function_failure`.
        """
        try:
            return step(group)
        except (RetriableError, StopEngine) as error:
            raise function_failure(error, "transform or convert records", self._config.name) from error

    def _narrowed(self, group: Group, share: Share) -> Group:
        """Return the records with an event that may be in the share: the others need no values."""
        if not isinstance(self._form.converter, KeysFirst):
            return group
        keys, rows = self._form.converter.keys(group)
        count = len(group) if rows is None else len(rows)
        mine = np.flatnonzero(share.has(keys, group.topic, count))
        mine = mine if rows is None else np.unique(rows[mine])
        if group.is_second is not None:  # two records of one change have each other's key as a header
            mine = np.flatnonzero(np.isin(group.index, group.index[mine]))
        return group.take(mine)

    def _of_topic(self, portions: Sequence[Portion], sent: Sent) -> Iterator[Outgoing]:
        for group, changes in portions:
            self._require(group, changes)
        cut = cutting(portions)

        def make(first: int, last: int) -> tuple[list[Outgoing], int]:
            made: list[Outgoing] = []
            size = 0
            for group, changes in cut(first, last):
                events = self._converted(group, changes)
                size += bytes_of(events)
                made += self._of_events(group, events, changes, sent)
            return in_log_order(made), size

        records = sum(len(group) for group, _ in portions)
        for found in made_in_parts(make, records, max(width(group) for group, _ in portions)):
            yield from found

    def _require(self, group: Group, changes: TableChanges) -> None:
        relation = changes.relation
        table = ("", "") if relation is None else (relation.schema, relation.table)
        try:
            self._topics.require(group.topic, *table)
        except TailraceError as error:
            place = place_of([changes], int(changes.log_offset[group.index[0]]))
            raise error.changed(place) from error

    def _converted(self, group: Group, changes: TableChanges) -> Converted:
        try:
            return self._own(self._converting, group)
        except TailraceError as error:
            raise placed(error, [changes], changes.log_offset[group.index]) from error

    def _of_events(
        self, group: Group, events: Converted, changes: TableChanges, sent: Sent
    ) -> Iterator[Outgoing]:
        if sent.share is not None:
            events = sent.share.of(events, group.topic)
        rows: Numbers = group.index if events.rows is None else group.index[events.rows]
        is_second = events.is_second_in(group)
        limit, refused = self._refused(group.topic, events)
        if refused is not None:
            if not self._config.dead_letter_topic:
                row = int(np.argmax(refused))
                place = place_of([changes], int(changes.log_offset[rows[row]]))
                raise refusal(events, row, group.topic, limit, _WAY_OUT, place)
            large = events.take(np.flatnonzero(refused))
            sent.dead_letters += len(large)
            yield self._letters(group.topic, large, rows[refused], changes, limit)
            events, rows = events.take(np.flatnonzero(~refused)), rows[~refused]
            is_second = None if is_second is None else is_second[~refused]
        if self._config.provide_transaction_metadata:
            _note(changes, events, rows, sent.boundaries)
        partitions = self._partitions(group.topic, events, changes, rows)
        if group.wire is None and "partition" in group.columns.schema.names:  # of `outbox`
            partitions = self._chosen(group, events, partitions, changes, rows)
        yield Outgoing(group.topic, events, partitions, changes.log_offset[rows], [changes], is_second)
        sent.bytes += events.values.nbytes if isinstance(events.values, pa.Array) else 0

    def _refused(self, topic: str, events: Converted) -> tuple[int, npt.NDArray[np.bool_] | None]:
        """Return the largest record for a topic, in bytes, and which events are larger; None: none."""
        limit = self._limit(topic)
        refused = too_large(events, limit)
        if refused is not None and limit < self._message_max:
            limit = self._limit(topic, again=True)  # it may have been raised
            refused = too_large(events, limit)
        return limit, refused

    def _limit(self, topic: str, *, again: bool = False) -> int:
        return min(self._message_max, self._topics.largest(topic, again=again) or self._message_max)

    def _partitions(self, topic: str, events: Converted, changes: TableChanges, rows: Numbers) -> Partitions:
        if self._config.partition_by == "transaction":
            # Transactions of sources with shards have no number, but a position.
            xid = np.where(changes.xid == 0, changes.commit_lsn, changes.xid)
            return by_transaction(xid[rows], self._topics.partitions(topic))
        if events.keys is None or "partitioner" in self._config.options:
            return None
        return by_key(events.keys, self._topics.partitions(topic))

    def _chosen(
        self, group: Group, events: Converted, usual: Partitions, changes: TableChanges, rows: Numbers
    ) -> Partitions:
        """Return the partitions that records name themselves, and the usual one of those that name none.

        :raises TailraceError: `SINK_MISCONFIGURED` if the topic lacks such a partition.
        """
        named = group.column("partition").cast(pa.int64())
        named = named if events.rows is None else named.take(pa.array(events.rows))
        number = named.fill_null(0).to_numpy()
        count = self._topics.partitions(group.topic)
        if len(wrong := np.flatnonzero((number < 0) | (number >= count))):
            place = place_of([changes], int(changes.log_offset[rows[wrong[0]]]))
            raise TailraceError(
                Kind.SINK_MISCONFIGURED,
                f"place a record in partition {number[wrong[0]]} of {group.topic!r}: the topic has {count}",
                "add partitions to the topic and start again, or correct the column that `additional` of the "
                "outbox names",
                {"topic": group.topic, **place},
            )
        none = named.is_null().to_numpy(zero_copy_only=False)
        return np.where(none, BY_KEY if usual is None else usual, number).astype(np.int32)

    @property
    def counted(self) -> dict[str, int]:
        """The topics' numbers of partitions when they were first written to."""
        return self._topics.counted

    def _letters(
        self, topic: str, refused: Converted, rows: Numbers, changes: TableChanges, limit: int
    ) -> Outgoing:
        """Return the dead letters of events that are too large."""
        target = legal(self._config.dead_letter_topic, "")
        self._topics.require(target)
        made = letters(refused, rows, changes, topic, limit)
        found = changes.relation.qualified_name if changes.relation else ""
        log.warning("records too large: dead letters", topic=topic, table=found, records=len(refused))
        return Outgoing(target, made, None, changes.log_offset[rows], [changes])


def _with_legal_topic(group: Group) -> Group:
    # The file may name any, and a transformation may have taken the name from anything, such as a value.
    topic = legal(group.topic, group.topic)
    return group if topic == group.topic else group.with_topic(topic)


def _note(changes: TableChanges, events: Converted, rows: Numbers, boundaries: Boundaries) -> None:
    # Tombstones are not counted as events, and rows of a snapshot belong to no transaction.
    if not changes.count or changes.op[0] == ord(Op.READ):
        return
    there = np.ones(len(events), np.bool_)
    if isinstance(events.values, pa.Array) and events.values.null_count:
        there = events.values.is_valid().to_numpy(zero_copy_only=False)
    counts = np.bincount(rows[there], minlength=changes.count)
    some = counts > 0
    relation = changes.relation
    boundaries.note(
        relation.qualified_name if relation else "",
        changes.commit_lsn[some],
        changes.xid[some],
        changes.commit_time_us[some],
        changes.lsn[some],
        counts[some],
    )
    if changes.shards is not None:
        boundaries.note_shards(changes.shards, changes.commit_lsn[some])
