"""The sink `kafka`: which cluster, which topics, and how sure."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tailrace.config.engine_options import Milliseconds
from tailrace.config.fields import Extension, Name, Section
from tailrace.config.kafka_clients import ClientOptions, client_settings
from tailrace.config.patterns import Patterns
from tailrace.config.sinks import Pacing, SinkConfig


class TopicRule(Section):
    """How topics are made whose table matches."""

    tables: Patterns = Field(
        description="Tables whose topics are made so; the first rule that matches counts."
    )
    partitions: Annotated[int, Field(ge=1, le=100_000)] = Field(default=1, description="Partitions.")
    replication_factor: Annotated[int, Field(ge=1, le=100)] | None = Field(
        default=None, description="Copies of each partition. Default: the cluster's."
    )
    settings: dict[str, str] = Field(default={}, description="Settings of the topic, under Kafka's names.")


class KafkaSink(SinkConfig):
    """Topics of a Kafka cluster, one for each table."""

    on_spark: ClassVar[bool] = False

    type: Literal["kafka"] = Field(description="Kind of the sink.")
    bootstrap_servers: str = Field(min_length=1, description="`host:port`, several with commas between.")
    topic_prefix: str = Field(
        default="",
        description="Begins the names of topics: `<prefix>.<schema>.<table>`. Default: the pipeline's name.",
    )
    group: Name = Field(
        default="tailrace",
        description="Begins the transactional id, `<group>-<pipeline>-<task>`: who shares it on one cluster "
        "fences each other.",
    )
    atomic_source_offset_commit: bool | None = Field(
        default=None,
        description="`true`: exactly once: the records of a batch and the offset that they lead to are one "
        "transaction. `false`: at least once, the offset is written when the records are acknowledged. "
        "Default: `engine.atomic_source_offset_commit`.",
    )
    offsets_topic: str = Field(
        default="tailrace-offsets",
        min_length=1,
        description="Compacted topic of the offsets; made if missing. Pipelines may share it.",
    )
    transaction_boundary: Literal["poll", "interval", "records", "transaction"] = Field(
        default="poll",
        description="What becomes one transaction of Kafka (or, without, is followed by an offset): `poll`, "
        "what is there at a look at the log, within `batch_rows_max` and `batch_bytes_max`; `interval`, "
        "what comes, or can be written, in `offset_flush_interval_ms`; `records`, `transaction_records` "
        "changes; `transaction`, each transaction of the source by itself. Whatever is chosen, none of the "
        "source's transactions is split.",
    )
    offset_flush_interval_ms: Milliseconds = Field(
        default=1000, description="Milliseconds from commit to commit, under `interval`."
    )
    transaction_records: Annotated[int, Field(ge=1, le=100_000_000)] = Field(
        default=10_000,
        description="Changes in a transaction of Kafka, under `records`; fewer if no more come within "
        "`interval_ms`, more only if a single transaction of the source has more.",
    )
    offset_flush_timeout_ms: Milliseconds = Field(
        default=60_000,
        description="Longest that a commit may take, the sending of the batch's records included.",
    )
    consumer_isolation_level: Literal["read_committed", "read_uncommitted"] = Field(
        default="read_committed",
        description="How offsets are read. With `read_uncommitted`, offsets of a transaction that was never "
        "committed count: changes may be lost.",
    )
    create_topics: bool = Field(default=True, description="Whether topics that are missing are made.")
    topics: tuple[TopicRule, ...] = Field(
        default=(), description="How topics are made; without a rule, with one partition."
    )
    converter: Extension = Field(
        default=Extension.model_validate({"type": "json"}), description="Form of keys and values."
    )
    options: ClientOptions = Field(
        default={},
        description="Options of librdkafka under their own names: security, compression, batching. Values "
        "may be references; passwords and keys must be.",
    )

    @property
    def target(self) -> str:
        return self.topic_prefix or "topics"

    @property
    def pacing(self) -> Pacing:
        usual = super().pacing
        if self.transaction_boundary == "interval":
            interval_s = self.offset_flush_interval_ms / 1000
            return replace(usual, interval_s=interval_s, within_s=interval_s)
        if self.transaction_boundary == "records":
            return replace(usual, rows_max=self.transaction_records)
        if self.transaction_boundary == "transaction":
            return replace(usual, rows_max=1)
        return usual

    def client_settings(self) -> dict[str, str]:
        """Return `options` as librdkafka takes them, references resolved now.

        :raises TailraceError: `SECRET_MISSING`.
        """
        return client_settings(self.options)
