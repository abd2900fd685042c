"""The sink `kafka`: cluster, topics and delivery guarantee."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from tailrace.config.converters import ConverterSection, in_bytes
from tailrace.config.engine_options import Milliseconds
from tailrace.config.fields import Extension, Section
from tailrace.config.kafka_clients import KafkaSection, TopicName
from tailrace.config.patterns import Patterns
from tailrace.config.sinks import SinkConfig
from tailrace.config.transformations.options import Route
from tailrace.model import Pacing

#: The part of `offset_flush_timeout_ms` that a batch should take.
_TIME_SHARE = 4
_TOPIC_LIMIT = "max.message.bytes"
#: Kafka's internal topics.
KAFKAS_OWN = ("__consumer_offsets", "__transaction_state")
#: librdkafka's default of `batch.size`.
_BATCH_BYTES = 1_000_000


#: Settings that have an effect only with another one: its name, a test of its value, and its form in YAML.
_BESIDE: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "offset_flush_interval_ms": ("transaction_boundary", "interval".__eq__, "transaction_boundary: interval"),
    "transaction_topic": ("provide_transaction_metadata", bool, "provide_transaction_metadata: true"),
    "heartbeat_topic_prefix": ("heartbeat_interval_ms", bool, "heartbeat_interval_ms"),
}


def _with_limit(settings: dict[str, str]) -> dict[str, str]:
    if not settings.get(_TOPIC_LIMIT, "0").isdecimal():
        raise ValueError(f"{_TOPIC_LIMIT}: must be a number of bytes, in quotes")
    return settings


class TopicRule(Section):
    """Settings for the creation of topics of matching tables."""

    tables: Patterns = Field(
        description="Tables whose topics are created so; the first rule that matches counts."
    )
    partitions: Annotated[int, Field(ge=1, le=100_000)] = Field(default=1, description="Partitions.")
    replication_factor: Annotated[int, Field(ge=1, le=100)] | None = Field(
        default=None, description="Copies of each partition. Default: the cluster's."
    )
    settings: Annotated[dict[str, str], AfterValidator(_with_limit)] = Field(
        default={}, description="Settings of the topic, under Kafka's names."
    )


def _placeholders(topic: str) -> str:
    left = re.sub(r"\{(prefix|schema|table)\}", "", topic)
    if "{" in left or "}" in left:
        raise ValueError("has another placeholder than {prefix}, {schema} and {table}")
    return topic


class TopicRoute(Section):
    """The topic for the changes of matching tables."""

    tables: Patterns = Field(
        description="Tables whose changes are written to it; the first route that matches counts."
    )
    topic: Annotated[str, Field(min_length=1), AfterValidator(_placeholders)] = Field(
        description="Name of the topic, in which `{prefix}`, `{schema}` and `{table}` are replaced. Tables "
        "may share one."
    )

    def topic_of(self, prefix: str, schema: str, table: str) -> str:
        """Return the topic of a table that matches."""
        found = {"{prefix}": prefix, "{schema}": schema, "{table}": table}
        return re.sub(r"\{\w+\}", lambda name: found[name[0]], self.topic)


class KafkaSinkConfig(KafkaSection, SinkConfig):
    """Topics of a Kafka cluster, one for each table."""

    type: Literal["kafka"] = Field(description="Kind of the sink.")
    bootstrap_servers: str = Field(min_length=1, description="`host:port`, several separated by commas.")
    topic_prefix: str = Field(
        default="",
        description="Start of topics' names: `<prefix>.<schema>.<table>`. Default: the pipeline's name.",
    )
    atomic_source_offset_commit: bool | None = Field(
        default=None,
        description="`true`: exactly once: the records of a batch and the offset after them are written in "
        "one transaction. `false`: at least once, the offset is written after the records' acknowledgement. "
        "Default: `engine.atomic_source_offset_commit`.",
    )
    offsets_topic: TopicName = Field(
        default="tailrace-offsets",
        description="Compacted topic of the offsets; created if missing. Pipelines may share it.",
    )
    transaction_boundary: Literal["poll", "interval", "records", "transaction"] = Field(
        default="poll",
        description="The content of one Kafka transaction (or, without transactions, of a batch that is "
        "followed by an offset): `poll`, the changes that are in the log, at most `batch_rows_max`, "
        "`batch_bytes_max`, and as many as are written in about a quarter of `offset_flush_timeout_ms`; "
        "`interval`, the changes that come, or can be written, in `offset_flush_interval_ms`; `records`, "
        "`batch_rows_max` changes, fewer if no more come within `interval_ms`; `transaction`, one "
        "transaction of the source. A transaction of the source is never split.",
    )
    offset_flush_interval_ms: Milliseconds = Field(
        default=1000, description="Milliseconds from commit to commit, under `interval`."
    )
    offset_flush_timeout_ms: Milliseconds = Field(
        default=60_000,
        gt=0,
        description="Longest time for a commit after the batch's records are delivered, and longest wait "
        "for their delivery without any progress.",
    )
    runs_on: Literal["process", "spark"] = Field(
        default="process",
        description="Where ranges of the log are converted and written: in the pipeline's own process, or by "
        "Spark tasks on executors, one for each producer.",
    )
    producers: Annotated[int, Field(ge=1, le=256)] = Field(
        default=1,
        description="Under `runs_on: spark`, the number of producers that share a range. Each writes the "
        "records of its part of the keys, and has a transactional id `<group>-<pipeline>-<task>:<number>` "
        "and an offset. May be changed between runs.",
    )
    create_topics: bool = Field(default=True, description="Whether missing topics are created.")
    topics: tuple[TopicRule, ...] = Field(
        default=(), description="Settings for the creation of topics; without a rule, one partition."
    )
    routes: tuple[TopicRoute, ...] = Field(
        default=(),
        description="Topics for tables whose topic is not `<topic_prefix>.<schema>.<table>`.",
    )
    partition_by: Literal["key", "transaction"] = Field(
        default="key",
        description="`key`: all changes of a key are in one partition, the same as with Java's clients; "
        "`transaction`: all of a transaction, and changes of one key are in order only within each.",
    )
    dead_letter_topic: str = Field(
        default="",
        description="Topic for dead-letter records, which describe a record that its own topic refuses, in "
        "the same transaction. Default: such a record stops the sink, with its table and position.",
    )
    provide_transaction_metadata: bool = Field(
        default=False,
        description="Whether each transaction's BEGIN and END, with its counts of events, are written to "
        "`transaction_topic`, and records have their transaction.",
    )
    transaction_topic: str = Field(default="", description="Default: `<topic_prefix>.transaction`.")
    heartbeat_interval_ms: Milliseconds = Field(
        default=0, description="Milliseconds from heartbeat to heartbeat. 0: no heartbeats."
    )
    heartbeat_topic_prefix: str = Field(
        default="__debezium-heartbeat",
        min_length=1,
        description="Start of their topic's name: `<heartbeat_topic_prefix>.<topic_prefix>`.",
    )
    schema_changes_topic: str = Field(
        default="",
        description="Topic for the schema of a table before its first change, and before the first change "
        "after each schema change. Default: none.",
    )
    converter: Annotated[ConverterSection, AfterValidator(in_bytes)] = Field(
        default=Extension.model_validate({"type": "json"}), description="Format of keys and values."
    )

    # Topics of the offsets of other sinks and the engine in the same file.
    _offsets_topics: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def on_spark(self) -> bool:
        return self.runs_on == "spark"

    def beside(self, offsets_topics: frozenset[str]) -> Self:
        """Return the sink for a file whose offsets are in these topics."""
        found = self.model_copy()
        found._offsets_topics = offsets_topics  # noqa: SLF001 - of the same class
        return found

    @property
    def topics_refused(self) -> frozenset[str]:
        """Topics of offsets, and Kafka's internal ones: no record is written to them."""
        return self._offsets_topics | {self.offsets_topic, *KAFKAS_OWN}

    def fixed_topics(self, prefix: str) -> list[str]:
        """Return the topics whose names follow from the file alone.

        :param prefix: the start of topics' names.
        """
        found = [self.transaction_topic, *self.topics_beside(prefix)]
        found += [route.topic_of(prefix, "{schema}", "{table}") for route in self.routes]
        found += [
            step.replacement
            for step in self.transformations
            if isinstance(step, Route) and step.replacement and "$" not in step.replacement
        ]
        return [topic for topic in found if topic]

    def topics_beside(self, prefix: str) -> list[str]:
        """Return the topics of dead letters and of records that are not changes.

        :param prefix: the start of topics' names.
        """
        found = [self.dead_letter_topic, self.schema_changes_topic]
        if self.provide_transaction_metadata:
            found.append(self.transaction_topic or f"{prefix}.transaction")
        if self.heartbeat_interval_ms:
            found.append(self.heartbeat_topic_of(prefix))
        return [topic for topic in found if topic]

    def heartbeat_topic_of(self, prefix: str) -> str:
        """Return the topic of heartbeats; `prefix` is the start of topics' names."""
        return f"{self.heartbeat_topic_prefix}.{prefix}"

    @model_validator(mode="after")
    def _producers_have_a_place(self) -> Self:
        if self.producers > 1 and self.runs_on == "process":
            raise ValueError("producers: several run as Spark tasks: set runs_on: spark, or leave it out")
        if self.producers > 1 and self.provide_transaction_metadata:
            raise ValueError(
                "provide_transaction_metadata: counts the events of whole transactions, which several "
                "producers share: set producers: 1"
            )
        if self.producers > 1 and self.partition_by == "transaction":
            raise ValueError(
                "partition_by: the records of a transaction are in order in their partition only if one "
                "producer writes them: set producers: 1, or partition_by: key"
            )
        return self

    @property
    def without_effect(self) -> dict[str, str]:
        """The given settings that have no effect, each with the setting that it needs."""
        return {
            name: wanted
            for name, (beside, is_so, wanted) in _BESIDE.items()
            if name in self.model_fields_set and not is_so(getattr(self, beside))
        }

    @property
    def target(self) -> str:
        return self.topic_prefix or "topics"

    @property
    def pacing(self) -> Pacing:
        # Only a part of a batch's time limit: the next batch may take longer.
        usual = replace(super().pacing, within_s=self.offset_flush_timeout_ms / 1000 / _TIME_SHARE)
        if self.transaction_boundary == "interval":
            interval_s = self.offset_flush_interval_ms / 1000
            within_s = min(interval_s, usual.within_s or interval_s)
            return replace(usual, interval_s=interval_s, within_s=within_s)
        if self.transaction_boundary == "records":
            return replace(usual, begins_full=True)
        if self.transaction_boundary == "transaction":
            # In process the sink ends a Kafka transaction at the end of one of the source, within a batch.
            return replace(usual, rows_max=1) if self.on_spark else replace(usual, interval_s=0, within_s=1.0)
        return usual

    @property
    def smallest_limit(self) -> int | None:
        """The smallest `max.message.bytes` of `topics` that is less than a usual batch; None: there is none.

        The broker compares batches with a topic's limit, and the client does not split them.
        """
        limits = [int(rule.settings.get(_TOPIC_LIMIT, _BATCH_BYTES)) for rule in self.topics]
        smallest = min(limits, default=_BATCH_BYTES)
        return smallest if smallest < _BATCH_BYTES else None

    def converter_options(self) -> dict[str, Any]:
        """Return the converter's options, with those that follow from the sink's own."""
        own = {"provide_transaction_metadata": True} if self.provide_transaction_metadata else {}
        return {**own, **self.converter.options}
