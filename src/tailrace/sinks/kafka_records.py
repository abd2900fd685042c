"""What the changes of a range become in Kafka: records, each for the topic of its table.

    changes ── transformations ── topic ── converter ── too large? ── partition ── writer
                                                           │
                                                     dead letters

Beside them go records that are no changes of rows: shapes of tables that are new, where the range's
transactions began and ended, and now and then a heartbeat.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import structlog

from tailrace.config.patterns import matches_any
from tailrace.converters.contract import Converter, KeysFirst
from tailrace.decode.changes import TableChanges
from tailrace.decode.debezium import SourceFacts
from tailrace.decode.disclosed import Disclosed
from tailrace.errors import Kind, TailraceError
from tailrace.kafka import side_records
from tailrace.kafka.boundaries import Boundaries
from tailrace.kafka.client import SAFE_BATCH_BYTES
from tailrace.kafka.dead_letters import letters
from tailrace.kafka.heartbeats import Heartbeats
from tailrace.kafka.partitioning import by_transaction
from tailrace.kafka.sending import Partitions
from tailrace.kafka.shapes import ShapeChange, shape_changes
from tailrace.kafka.shares import Share
from tailrace.kafka.sizes import OVERHEAD, largest, sizes, taken
from tailrace.kafka.topics import Making, Topics, legal
from tailrace.kafka.writer import Writer
from tailrace.model import Op, ValueModes, format_lsn
from tailrace.protocol.frames import Numbers
from tailrace.ranges.changes import changes_of
from tailrace.ranges.plan import Piece
from tailrace.records.events import Converted
from tailrace.records.group import Group
from tailrace.secrets import Secret, resolved
from tailrace.transforms.chain import Chain

if TYPE_CHECKING:
    from tailrace.config.kafka import KafkaSink as KafkaConfig

log = structlog.get_logger(__name__)

#: librdkafka's own limit for a message, where the options give none.
MESSAGE_BYTES_MAX = 1_000_000


@dataclass(slots=True)
class Sent:
    """What a range was sent as, or a part of it.

    :param rows: changes.
    :param bytes: of values.
    :param dead_letters: records that were too large for their topic.
    """

    rows: int = 0
    bytes: int = 0
    dead_letters: int = 0
    boundaries: Boundaries = field(default_factory=Boundaries)
    #: By table: the transaction of its last change, and how many of its changes were sent so far.
    under_way: dict[str, tuple[int, int]] = field(default_factory=dict)


class Records:
    """Sends changes as records, for one writer after another.

    :param converter: form of keys and values.
    :param chain: transformations that changes go through before.
    :param topics: where they go.
    :param options: of librdkafka.
    """

    def __init__(
        self,
        config: KafkaConfig,
        converter: Converter,
        chain: Chain,
        topics: Topics,
        origin: SourceFacts,
        disclosed: Disclosed,
        modes: ValueModes,
        options: Mapping[str, str | Secret],
    ) -> None:
        self._config = config
        self._converter = converter
        self._chain = chain
        self._topics = topics
        self._origin = origin
        self._disclosed = disclosed
        self._modes = modes
        self._heartbeats = Heartbeats(config.heartbeat_interval_ms / 1000)
        self._message_max = int(resolved(options.get("message.max.bytes", str(MESSAGE_BYTES_MAX))))

    def send(
        self,
        writer: Writer,
        log: Path,
        pieces: Sequence[Piece],
        start: int,
        end: int,
        share: Share | None = None,
    ) -> Sent:
        """Send the changes of `[start, end)`, and what goes beside them.

        :param pieces: of a range that holds it.
        :param share: what is sent of their records; None: all. What goes beside them goes with the first one;
            heartbeats are the driver's.
        :raises TailraceError: what reading the log raises, and as `Writer.send`, with the place in the
            log of the record that was refused.
        """
        sent = Sent()
        if self._config.schema_changes and (share is None or share.number == 0):
            for change in shape_changes(log, pieces, start, end, self._modes, self._disclosed):
                self._send_shape(writer, change)
        for piece in pieces:
            if piece.end <= start:
                continue
            for stretch in changes_of(log, piece, None, self._modes, self._disclosed):
                for changes in stretch:
                    self._send(writer, changes.slice(start, end), sent, share)
        if self._config.provide_transaction_metadata:
            self._send_boundaries(writer, sent.boundaries)
        if share is None:
            self.beat(writer)
        return sent

    def fits(self, topic: str) -> int:
        """Return the most bytes that a batch for a topic may have, however little it shrinks."""
        limit = self._topics.largest(topic) if topic else None
        return SAFE_BATCH_BYTES if limit is None else min(SAFE_BATCH_BYTES, limit * 9 // 10)

    @property
    def is_beat_due(self) -> bool:
        """Whether a heartbeat is to be sent now."""
        return self._heartbeats.is_due

    def beat(self, writer: Writer) -> None:
        """Send a heartbeat, if it is due.

        :raises TailraceError: as `send_beside`.
        """
        if self.is_beat_due:
            config = self._config
            topic = config.heartbeat_topic or f"{config.heartbeat_topic_prefix}.{self._origin.name}"
            self.send_beside(
                writer, side_records.heartbeat(legal(topic, ""), time.time_ns() // 1_000_000, self._origin)
            )
            self._heartbeats.sent()

    def send_beside(self, writer: Writer, group: Group) -> None:
        """Send records that are no changes to their topic.

        :raises TailraceError: as `Writer.send`, and as the converter's `convert`.
        """
        self._topics.require(group.topic)
        writer.send(group.topic, self._converter.convert(group))

    def _send_boundaries(self, writer: Writer, boundaries: Boundaries) -> None:
        ended = boundaries.ended()
        if len(ended):
            topic = self._config.transaction_topic or self._topics.beside("transaction")
            self.send_beside(writer, side_records.transactions(topic, ended, self._origin))

    def _send_shape(self, writer: Writer, change: ShapeChange) -> None:
        if self._config.wants(change.relation.schema, change.relation.table):
            topic = legal(self._config.schema_changes_topic or self._origin.name, "")
            self.send_beside(writer, side_records.shape(topic, change, self._origin))

    def _send(self, writer: Writer, changes: TableChanges, sent: Sent, share: Share | None) -> None:
        relation = changes.relation
        if not changes.count or (relation and not self._config.wants(relation.schema, relation.table)):
            return
        topics = self._topics
        topic = topics.of_table(relation.schema, relation.table) if relation else topics.beside("message")
        group = Group.of_changes(topic, np.arange(changes.count, dtype=np.int64), changes, self._origin)
        for made in self._chain.apply(group):
            if share is None:
                self._send_group(writer, made, changes, sent)
            elif len(mine := self._narrowed(made, share)):
                self._send_group(writer, mine, changes, sent, share)
                sent.rows += len(mine)
        if share is None:
            sent.rows += changes.count

    def _narrowed(self, group: Group, share: Share) -> Group:
        """Return the records of which some event may be in the share: the others need no values."""
        if not isinstance(self._converter, KeysFirst):
            return group
        keys, rows = self._converter.keys(group)
        count = len(group) if rows is None else len(rows)
        mine = np.flatnonzero(share.has(keys, group.topic, count))
        return group.take(mine if rows is None else np.unique(rows[mine]))

    def _send_group(
        self, writer: Writer, group: Group, changes: TableChanges, sent: Sent, share: Share | None = None
    ) -> None:
        relation = changes.relation
        table = ("", "") if relation is None else (relation.schema, relation.table)
        self._topics.require(group.topic, *table)
        if self._config.provide_transaction_metadata:
            group = _counted(group, changes, sent)
        try:
            events = self._converter.convert(group)
        except TailraceError as error:
            raise _placed(error, changes, group.index) from error
        if share is not None:
            events = share.of(events, group.topic)
        rows: Numbers = group.index if events.rows is None else group.index[events.rows]
        events, rows = self._without_too_large(writer, group.topic, events, rows, changes, sent)
        if self._config.provide_transaction_metadata:
            _note(changes, events, rows, sent.boundaries)
        try:
            writer.send(group.topic, events, self._partitions(group.topic, changes, rows))
        except TailraceError as error:
            raise _placed(error, changes, rows) from error
        sent.bytes += events.values.nbytes if isinstance(events.values, pa.Array) else 0

    def _partitions(self, topic: str, changes: TableChanges, rows: Numbers) -> Partitions:
        if self._config.partition_by == "key":
            return None
        return by_transaction(changes.xid[rows], self._topics.partitions(topic))

    def _without_too_large(
        self,
        writer: Writer,
        topic: str,
        events: Converted,
        rows: Numbers,
        changes: TableChanges,
        sent: Sent,
    ) -> tuple[Converted, Numbers]:
        limit = min(self._message_max, self._topics.largest(topic) or self._message_max)
        if largest(events) <= limit:
            return events, rows
        too_large = sizes(events) > limit
        if not too_large.any():
            return events, rows
        refused = taken(events, too_large)
        if self._config.too_large == "fail":
            size = int(sizes(refused)[0]) - OVERHEAD
            raise _too_large(topic, size, limit, changes, int(rows[too_large][0]))
        target = self._config.dead_letter_topic or self._topics.beside("dead-letter")
        self._topics.require(target)
        value_bytes = self._config.dead_letter_value_bytes
        writer.send(target, letters(refused, rows[too_large], changes, topic, limit, value_bytes))
        sent.dead_letters += len(refused)
        found = changes.relation.qualified_name if changes.relation else ""
        log.warning("records too large: dead letters", topic=topic, table=found, records=len(refused))
        return taken(events, ~too_large), rows[~too_large]


def topics_of(config: KafkaConfig, admin: dict[str, Any], prefix: str, timeout_s: float) -> Topics:
    """Return the topics of a sink.

    :param prefix: begins each name.
    """

    def making(schema: str, table: str) -> Making:
        for rule in config.topics:
            if matches_any(rule.tables, schema, table):
                return Making(rule.partitions, rule.replication_factor, rule.settings)
        return Making()

    def routed(schema: str, table: str) -> str | None:
        for route in config.routes:
            if matches_any(route.tables, schema, table):
                return route.topic_of(prefix, schema, table)
        return None

    create = config.create_topics
    return Topics(admin, prefix, making, routed=routed, create=create, timeout_s=timeout_s)


def _too_large(topic: str, size: int, limit: int, changes: TableChanges, row: int) -> TailraceError:
    return TailraceError(
        Kind.SINK_RECORD_TOO_LARGE,
        f"send a record of {size} bytes: {limit} are the most that a record and what is around it may have",
        "raise max.message.bytes of the topic and message.max.bytes in `options`, leave out the table or the "
        "column, or take dead letters instead: too_large: dead_letter",
        {"topic": topic, **_place(changes, row)},
    )


def _placed(error: TailraceError, changes: TableChanges, rows: Numbers) -> TailraceError:
    """Return the error with the table and, where the record is known, its place in the log."""
    context = error.context
    row = context.pop("row", None)
    table = changes.relation.qualified_name if changes.relation else ""
    place = _place(changes, int(rows[row])) if isinstance(row, int) else {"table": table}
    return TailraceError(error.kind, error.message, error.hint, {**context, **place})


def _place(changes: TableChanges, row: int) -> dict[str, object]:
    table = changes.relation.qualified_name if changes.relation else ""
    offset, lsn = int(changes.log_offset[row]), int(changes.commit_lsn[row])
    return {"table": table, "log_offset": offset, "commit_lsn": format_lsn(lsn)}


def _counted(group: Group, changes: TableChanges, sent: Sent) -> Group:
    """Return the group with what it goes on from: a transaction may come in several parts."""
    table = changes.relation.qualified_name if changes.relation else ""
    of_commit = changes.commit_lsn[group.index]
    transaction, count = sent.under_way.get(table, (-1, 0))
    earlier = count if transaction == of_commit[0] else 0
    last = int(of_commit[-1])
    here = int(np.count_nonzero(of_commit == last))
    sent.under_way[table] = last, here + (earlier if last == of_commit[0] else 0)
    return replace(group, earlier=earlier)


def _note(changes: TableChanges, events: Converted, rows: Numbers, boundaries: Boundaries) -> None:
    # A tombstone is no event of its own, and rows of a snapshot are in no transaction.
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
