"""The sink `kafka`: ranges of the log as records of topics, each range with its offset.

It needs no Spark: ranges are decoded and converted here, in the feed's thread, by kernels that leave
the interpreter's lock alone, and handed to the client in large batches.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace import failpoints
from tailrace.converters.contract import Converter
from tailrace.decode.debezium import SourceFacts
from tailrace.decode.disclosed import Disclosed
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.account import Account
from tailrace.kafka.writer import Writer
from tailrace.model import LogRange, ValueModes
from tailrace.ranges.plan import Piece
from tailrace.sinks.contract import SinkCommit, first_missing
from tailrace.sinks.kafka_records import Records, topics_of
from tailrace.transforms.chain import Chain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.changelog.directory import LogIdentity
    from tailrace.config.disclosure import Disclosure
    from tailrace.config.kafka import KafkaSink as KafkaConfig

#: The one task of a log that a sink is fed from.
TASK = "0"

#: Longest that a look at a cluster may take, for those who only want to know.
ASK_TIMEOUT_S = 10.0


class KafkaSink:
    """As `contract.Sink`; its position is the offset that was committed last.

    :param converter: form of keys and values.
    :param chain: what changes go through before.
    """

    def __init__(
        self,
        config: KafkaConfig,
        converter: Converter,
        chain: Chain,
        rules: Disclosure,
        modes: ValueModes,
        version: str,
    ) -> None:
        self._config = config
        self._converter = converter
        self._chain = chain
        self._rules = rules
        self._modes = modes
        self._version = version
        self._writer: Writer | None = None
        self._records: Records | None = None
        self._position: int | None = None
        self._log_id = ""

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
        account = account_of(config, pipeline)
        offsets = account.offsets()
        offsets.require(create=config.create_topics)
        prefix = config.topic_prefix or pipeline
        topics = topics_of(config, account.admin(), prefix, account.timeout_s)
        origin = SourceFacts(prefix, log.source.database, self._version)
        disclosed = Disclosed.of(self._rules)
        self._records = Records(config, self._converter, self._chain, topics, origin, disclosed, self._modes)
        self._log_id = log.log_id
        if account.atomic:
            # Before anybody is fenced: who has no business here must not stop the one who has.
            _position_in(offsets.settled(account.key), config, pipeline, log)
        self._writer = account.writer(offsets)
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
        writer, records = self._opened()
        started = time.perf_counter()
        failpoints.hit("sink.before_write")
        sent = records.send(writer, log, pieces, have, span.end)
        failpoints.hit("sink.after_write")
        written = time.perf_counter()
        failpoints.hit("sink.before_commit")
        writer.commit(offset_at(self._log_id, span.end))
        failpoints.hit("sink.after_commit")
        self._position = span.end
        done = time.perf_counter()
        seconds = {"send": written - started, "commit": done - written}
        return SinkCommit(span, sent.rows, sent.bytes, 0, seconds, sent.dead_letters)

    def beat(self) -> None:
        """As `contract.Beats.beat`: a heartbeat with the offset that there is, in one transaction."""
        if self._position is None or self._records is None or not self._records.is_beat_due:
            return
        writer, records = self._opened()
        records.beat(writer)
        writer.commit(offset_at(self._log_id, self._position))

    def close(self) -> None:
        """As `contract.Sink.close`."""
        writer, self._writer, self._position = self._writer, None, None
        if writer is not None:
            writer.close()

    def _opened(self) -> tuple[Writer, Records]:
        if self._writer is None or self._records is None:
            raise TailraceError(Kind.INTERNAL, "write to a sink that is not open", "", {"sink": self.name})
        return self._writer, self._records


def recorded_kafka_position(config: KafkaConfig, pipeline: str, log: LogIdentity) -> int | None:
    """Return the offset that was committed last, whoever writes now; nobody is fenced.

    :raises TailraceError: `SINK_FOREIGN`, `OFFSETS_UNREADABLE`, `SINK_REFUSED`, `SINK_WRITE_FAILED`.
    """
    account = account_of(config, pipeline)
    offsets = account.offsets(min(account.timeout_s, ASK_TIMEOUT_S))
    if not offsets.exists():
        return None
    return _position_in(offsets.read(account.key, account.isolation), config, pipeline, log)


def offset_at(log_id: str, log_offset: int) -> dict[str, Any]:
    """Return the offset that says: everything before `log_offset` of that log is in the topics."""
    return {"log_id": log_id, "log_offset": log_offset}


def account_of(config: KafkaConfig, pipeline: str) -> Account:
    """Return the account of a sink's only task.

    :raises TailraceError: `SECRET_MISSING`.
    """
    return Account(
        config.bootstrap_servers,
        config.client_settings(),
        config.offsets_topic,
        config.group,
        pipeline,
        TASK,
        bool(config.atomic_source_offset_commit),
        config.consumer_isolation_level,
        config.offset_flush_timeout_ms,
    )


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
            "`tailrace offsets reset FILE` has the topics get the changes of this log from its start, "
            "`tailrace offsets set FILE --to …` from a later place; or give the pipeline another name, or "
            "the sink another `group`",
            {"sink": config.name, "pipeline": pipeline, "log_id": str(found)},
        )
    return reached
