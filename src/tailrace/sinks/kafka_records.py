"""What the changes of a range become in Kafka: records, each for the topic of its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tailrace.config.patterns import matches_any
from tailrace.converters.contract import Converter
from tailrace.decode.changes import TableChanges
from tailrace.decode.debezium import SourceFacts
from tailrace.decode.disclosed import Disclosed
from tailrace.errors import TailraceError
from tailrace.kafka.topics import Making, Topics
from tailrace.kafka.writer import Writer
from tailrace.model import ValueModes
from tailrace.ranges.changes import changes_of
from tailrace.ranges.plan import Piece
from tailrace.records.events import Converted
from tailrace.records.group import Group

if TYPE_CHECKING:
    from tailrace.config.kafka import KafkaSink as KafkaConfig


class Records:
    """Sends changes as records, for one writer after another.

    :param converter: form of keys and values.
    :param topics: where they go.
    """

    def __init__(
        self,
        config: KafkaConfig,
        converter: Converter,
        topics: Topics,
        origin: SourceFacts,
        disclosed: Disclosed,
        modes: ValueModes,
    ) -> None:
        self._config = config
        self._converter = converter
        self._topics = topics
        self._origin = origin
        self._disclosed = disclosed
        self._modes = modes

    def send(
        self, writer: Writer, log: Path, pieces: Sequence[Piece], start: int, end: int
    ) -> tuple[int, int]:
        """Send the changes of `[start, end)`; return how many they are, and the bytes of their values.

        :param pieces: of a range that holds it.
        :raises TailraceError: what reading the log raises, and as `Writer.send`, with the place in the
            log of the record that was refused.
        """
        rows, size = 0, 0
        for piece in pieces:
            for stretch in changes_of(log, piece, None, self._modes, self._disclosed):
                for changes in stretch:
                    sent, sent_bytes = self._send(writer, changes.slice(start, end))
                    rows, size = rows + sent, size + sent_bytes
        return rows, size

    def _send(self, writer: Writer, changes: TableChanges) -> tuple[int, int]:
        relation = changes.relation
        if not changes.count or (relation and not self._config.wants(relation.schema, relation.table)):
            return 0, 0
        topic = (
            self._topics.of_table(relation.schema, relation.table) if relation else self._topics.of_messages()
        )
        group = Group.of_changes(topic, np.arange(changes.count, dtype=np.int64), changes, self._origin)
        converted = self._converter.convert(group)
        try:
            writer.send(topic, converted)
        except TailraceError as error:
            raise _placed(error, changes, converted) from error
        return changes.count, converted.values.nbytes if isinstance(converted.values, pa.Array) else 0


def topics_of(config: KafkaConfig, admin: dict[str, Any], prefix: str, timeout_s: float) -> Topics:
    """Return the topics of a sink.

    :param prefix: begins each name.
    """

    def making(schema: str, table: str) -> Making:
        for rule in config.topics:
            if matches_any(rule.tables, schema, table):
                return Making(rule.partitions, rule.replication_factor, rule.settings)
        return Making()

    return Topics(admin, prefix, making, create=config.create_topics, timeout_s=timeout_s)


def _placed(error: TailraceError, changes: TableChanges, converted: Converted) -> TailraceError:
    """Return the error with the table and, where the record is known, its place in the log."""
    context = error.context
    row = context.pop("row", None)
    table = changes.relation.qualified_name if changes.relation else ""
    if isinstance(row, int):
        source = row if converted.rows is None else int(converted.rows[row])
        context["log_offset"] = int(changes.log_offset[source])
    return TailraceError(error.kind, error.message, error.hint, {**context, "table": table})
