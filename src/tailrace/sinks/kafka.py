"""The sink `kafka`: ranges of the log as records of topics, each range with its offset.

It needs no Spark: ranges are decoded and converted here, in the feed's thread, by kernels that leave
the interpreter's lock alone, and handed to the client in large batches.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tailrace import failpoints
from tailrace.config.patterns import matches_any
from tailrace.converters.contract import Converter
from tailrace.decode.changes import TableChanges
from tailrace.decode.debezium import SourceFacts
from tailrace.decode.disclosed import Disclosed
from tailrace.errors import Kind, TailraceError
from tailrace.kafka import client
from tailrace.kafka.offsets import OffsetsTopic, key_of
from tailrace.kafka.topics import Making, Topics
from tailrace.kafka.writer import AtomicWriter, PlainWriter, Task, Writer
from tailrace.model import LogRange, ValueModes
from tailrace.ranges.changes import changes_of
from tailrace.ranges.plan import Piece
from tailrace.records.events import Converted
from tailrace.records.group import Group
from tailrace.sinks.contract import SinkCommit, first_missing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.changelog.directory import LogIdentity
    from tailrace.config.disclosure import Disclosure
    from tailrace.config.kafka import KafkaSink as KafkaConfig

#: The one task of a log that a sink is fed from.
_TASK = "0"

#: Longest that a look at a cluster may take, for those who only want to know.
ASK_TIMEOUT_S = 10.0


class KafkaSink:
    """As `contract.Sink`; its position is the offset that was committed last.

    :param converter: form of keys and values.
    """

    def __init__(
        self, config: KafkaConfig, converter: Converter, rules: Disclosure, modes: ValueModes, version: str
    ) -> None:
        self._config = config
        self._converter = converter
        self._rules = rules
        self._modes = modes
        self._version = version
        self._writer: Writer | None = None
        self._topics: Topics | None = None
        self._position: int | None = None
        self._log_id = ""
        self._origin: SourceFacts | None = None

    @property
    def name(self) -> str:
        """As `contract.Sink.name`."""
        return self._config.name

    @property
    def type(self) -> str:
        """As `contract.Sink.type`."""
        return "kafka"

    def open(self, log: LogIdentity, pipeline: str) -> None:
        """As `contract.Sink.open`: with transactions, whoever wrote for this pipeline before is fenced.

        :raises TailraceError: `SINK_FOREIGN` if the offset is another log's; `SINK_PREEMPTED`,
            `SINK_REFUSED`, `SINK_MISCONFIGURED`, `OFFSETS_UNREADABLE`, `SINK_WRITE_FAILED`.
        """
        self.close()
        config = self._config
        timeout_s = config.offset_flush_timeout_ms / 1000
        common = client.client(config.bootstrap_servers, config.client_settings())
        admin = client.admin(common)
        offsets = _offsets_topic(config, common, timeout_s)
        offsets.require(create=config.create_topics)
        prefix = config.topic_prefix or pipeline
        self._topics = Topics(admin, prefix, self._making, create=config.create_topics, timeout_s=timeout_s)
        self._origin = SourceFacts(prefix, log.source.database, self._version)
        self._log_id = log.log_id
        self._writer = self._new_writer(common, offsets, pipeline, timeout_s)
        try:
            self._position = _position_in(self._writer.open(), config, pipeline, log)
        except BaseException:
            self.close()
            raise

    def position(self, task: str) -> int | None:
        """As `contract.Sink.position`."""
        return self._position

    def reach(self, task: str) -> int | None:
        """As `contract.Sink.reach`."""
        return self.position(task)

    def write(
        self, spark: SparkSession | None, log: Path, span: LogRange, pieces: Sequence[Piece]
    ) -> SinkCommit:
        """As `contract.Sink.write`: records and offset in one transaction, or one after the other."""
        have = first_missing(self.name, span, self._position)
        if have >= span.end:
            return SinkCommit(span)
        writer = self._opened()
        started = time.perf_counter()
        rows, size = 0, 0
        disclosed = Disclosed.of(self._rules)
        failpoints.hit("sink.before_write")
        for piece in pieces:
            for stretch in changes_of(log, piece, None, self._modes, disclosed):
                for changes in stretch:
                    sent, bytes_sent = self._send(writer, changes.slice(have, span.end))
                    rows, size = rows + sent, size + bytes_sent
        failpoints.hit("sink.after_write")
        written = time.perf_counter()
        failpoints.hit("sink.before_commit")
        writer.commit({"log_id": self._log_id, "log_offset": span.end})
        failpoints.hit("sink.after_commit")
        self._position = span.end
        done = time.perf_counter()
        return SinkCommit(span, rows, size, 0, {"send": written - started, "commit": done - written})

    def close(self) -> None:
        """As `contract.Sink.close`."""
        writer, self._writer, self._position = self._writer, None, None
        if writer is not None:
            writer.close()

    def _send(self, writer: Writer, changes: TableChanges) -> tuple[int, int]:
        relation = changes.relation
        if not changes.count or (relation and not self._config.wants(relation.schema, relation.table)):
            return 0, 0
        assert self._topics is not None
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

    def _new_writer(
        self, common: dict[str, Any], offsets: OffsetsTopic, pipeline: str, timeout_s: float
    ) -> Writer:
        config = self._config
        atomic = config.atomic_source_offset_commit
        transactional_id = f"{config.group}-{pipeline}-{_TASK}" if atomic else None
        task = Task(
            client.producer(common, config.offset_flush_timeout_ms, transactional_id),
            offsets,
            key_of(config.group, pipeline, _TASK),
            config.consumer_isolation_level,
            timeout_s,
        )
        return AtomicWriter(task) if atomic else PlainWriter(task)

    def _making(self, schema: str, table: str) -> Making:
        for rule in self._config.topics:
            if matches_any(rule.tables, schema, table):
                return Making(rule.partitions, rule.replication_factor, rule.settings)
        return Making()

    def _opened(self) -> Writer:
        if self._writer is None:
            raise TailraceError(Kind.INTERNAL, "write to a sink that is not open", "", {"sink": self.name})
        return self._writer


def recorded_kafka_position(config: KafkaConfig, pipeline: str, log: LogIdentity) -> int | None:
    """Return the offset that was committed last, whoever writes now; nobody is fenced.

    :raises TailraceError: `SINK_FOREIGN`, `OFFSETS_UNREADABLE`, `SINK_REFUSED`, `SINK_WRITE_FAILED`.
    """
    timeout_s = min(config.offset_flush_timeout_ms / 1000, ASK_TIMEOUT_S)
    common = client.client(config.bootstrap_servers, config.client_settings())
    offsets = _offsets_topic(config, common, timeout_s)
    if not offsets.exists():
        return None
    key = key_of(config.group, pipeline, _TASK)
    return _position_in(offsets.read(key, config.consumer_isolation_level), config, pipeline, log)


def _offsets_topic(config: KafkaConfig, common: Mapping[str, Any], timeout_s: float) -> OffsetsTopic:
    consumer = client.consumer(common, config.consumer_isolation_level)
    return OffsetsTopic(config.offsets_topic, client.admin(common), consumer, timeout_s)


def _position_in(
    offset: Mapping[str, Any] | None, config: KafkaConfig, pipeline: str, log: LogIdentity
) -> int | None:
    if offset is None:
        return None
    found, reached = offset.get("log_id"), offset.get("log_offset")
    if found != log.log_id or not isinstance(reached, int):
        raise TailraceError(
            Kind.SINK_FOREIGN,
            f"go on after the offset in {config.offsets_topic!r}: it is that of another log",
            "give the pipeline another name, or the sink another `group`, if the topics are to get the "
            "changes of this log from its start",
            {"sink": config.name, "pipeline": pipeline, "log_id": str(found)},
        )
    return reached


def _placed(error: TailraceError, changes: TableChanges, converted: Converted) -> TailraceError:
    """Return the error with the table and, where the record is known, its place in the log."""
    context = error.context
    row = context.pop("row", None)
    table = changes.relation.qualified_name if changes.relation else ""
    if isinstance(row, int):
        source = row if converted.rows is None else int(converted.rows[row])
        context["log_offset"] = int(changes.log_offset[source])
    return TailraceError(error.kind, error.message, error.hint, {**context, "table": table})
