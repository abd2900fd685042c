"""The sink `kafka`: which cluster, which topics, and how sure."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from tailrace.config.engine_options import Milliseconds
from tailrace.config.fields import Extension, Name, Section, Setting
from tailrace.config.patterns import Patterns
from tailrace.config.sinks import SinkConfig
from tailrace.secrets import resolved

#: Options of librdkafka that a file may give, by name or by beginning. Others are either the sink's own
#: affair (what its guarantees rest on) or make no sense here.
ALLOWED_OPTIONS = re.compile(
    r"security\.protocol|sasl\..*|ssl\..*|enable\.ssl\..*|client\.(id|rack|dns\.lookup)|"
    r"compression\.(type|codec|level)|linger\.ms|batch\.(size|num\.messages)|message\.max\.bytes|"
    r"message\.timeout\.ms|transaction\.timeout\.ms|request\.timeout\.ms|"
    r"socket\..*|reconnect\..*|retry\.backoff\..*|connections\.max\.idle\.ms|"
    r"broker\.address\..*|metadata\.max\.age\.ms|topic\.metadata\.refresh\.interval\.ms|partitioner"
)


def _options(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if not ALLOWED_OPTIONS.fullmatch(name):
            raise ValueError(
                f"{name} can't be set: possible are options of librdkafka for connections, "
                "security, compression and batching; what exactly-once rests on is the sink's own"
            )
    return options


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
    atomic_source_offset_commit: bool = Field(
        default=False,
        description="`true`: exactly once: the records of a batch and the offset that they lead to are one "
        "transaction. `false`: at least once, the offset is written when the records are acknowledged.",
    )
    offsets_topic: str = Field(
        default="tailrace-offsets",
        min_length=1,
        description="Compacted topic of the offsets; made if missing. Pipelines may share it.",
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
    options: Annotated[dict[str, Setting], AfterValidator(_options)] = Field(
        default={},
        description="Options of librdkafka under their own names: security, compression, batching. Values "
        "may be references.",
    )

    @property
    def target(self) -> str:
        return self.topic_prefix or "topics"

    def client_settings(self) -> dict[str, str]:
        """Return `options` as librdkafka takes them, references resolved now.

        :raises TailraceError: `SECRET_MISSING`.
        """
        return {name: resolved(value) for name, value in self.options.items()}
