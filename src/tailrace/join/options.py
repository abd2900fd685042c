"""Settings of the join of Kafka topics."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tailrace.config.converters import RegistryAddress
from tailrace.config.fields import MIB, ByteCount, Section
from tailrace.config.kafka_clients import ClientOptions, TopicName
from tailrace.config.source.section import SourceSection


def _has_one_placeholder(topic: str) -> str:
    if "{" in topic.replace("{topic}", "") or "}" in topic.replace("{topic}", ""):
        raise ValueError("has a placeholder that is not {topic}")
    return topic


_Path = Annotated[str, Field(min_length=1, max_length=1000)]
_OptionalPath = Annotated[str, Field(max_length=1000)]


class _Fields(Section):
    @model_validator(mode="after")
    def _lie_apart(self) -> Self:
        paths = {path for path in self.model_dump().values() if path}
        for outer, inner in itertools.permutations(sorted(paths), 2):
            if inner.startswith(f"{outer}."):
                raise ValueError(f"{inner}: is a field of {outer}, which is one, too: name one of the two")
        return self


class DataFields(_Fields):
    """Fields of data messages; `a.b` is a field of a field."""

    key: _Path = Field(description="Names what the message is one of: a text or a whole number.")
    order: _OptionalPath = Field(default="", description="Its place among those, rising.")


class TransactionFields(_Fields):
    """Fields of the transaction topic's messages, of which there is one for each key."""

    key: _Path = Field(description="The key, no other message's; messages without it are passed over.")
    order: _OptionalPath = Field(default="", description="A whole number that rises from one to the next.")
    count: _OptionalPath = Field(default="", description="How many data messages it has.")
    time_ms: _OptionalPath = Field(default="", description="When it was, in milliseconds since 1970.")


class JoinFields(Section):
    """The fields with keys and orders."""

    data: DataFields
    transactions: TransactionFields


def _key(text: str) -> str:
    from tailrace.join.computed import require_key  # loads DuckDB

    require_key(text)
    return text


def _number(text: str) -> str:
    from tailrace.join.computed import require_number

    if text:
        require_number(text)
    return text


_KeyExpression = Annotated[str, AfterValidator(_key)]
_NumberExpression = Annotated[str, AfterValidator(_number)]


class DataExpressions(Section):
    """As `DataFields`, each an expression over the message."""

    key: _KeyExpression
    order: _NumberExpression = ""


class TransactionExpressions(Section):
    """As `TransactionFields`, each an expression over the message."""

    key: _KeyExpression
    order: _NumberExpression = ""
    count: _NumberExpression = ""
    time_ms: _NumberExpression = ""


class JoinExpressions(Section):
    """The expressions for keys and orders."""

    data: DataExpressions
    transactions: TransactionExpressions


class JoinedTopics(Section):
    """Data topics, and the topic of their transactions, on one cluster."""

    bootstrap_servers: str = Field(min_length=1, description="`host:port`, several with commas between.")
    data: tuple[TopicName, ...] = Field(
        min_length=1, description="Topics of changes, with any number of partitions."
    )
    transactions: TopicName = Field(description="Topic of their transactions, with one partition.")
    options: ClientOptions = Field(
        default={}, description="Options of librdkafka's: security, sockets; secrets as references."
    )
    queue_records_max: Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        default=100_000,
        description="Most records of a data partition that wait for their transaction, and most transactions "
        "that wait for a partition. A partition whose queue is full is paused; what one read brings beyond "
        "that is kept: at most 65 536 records, and about 48 MiB.",
    )
    queue_bytes_max: ByteCount = Field(
        default=16 * MIB, description="Most bytes of the records of a data partition that wait."
    )

    registry: RegistryAddress | None = Field(
        default=None,
        description="Schema registry of both topics: they are Avro then. Without it they are JSON.",
    )

    fields: JoinFields | None = Field(
        default=None,
        description="Where keys and orders are in JSON, if not where Debezium has them.",
    )
    expressions: JoinExpressions | None = Field(
        default=None, description="In place of `fields`: what they are, each an expression over the message."
    )

    @model_validator(mode="after")
    def _are_of_one_form(self) -> Self:
        given = [name for name in ("registry", "fields", "expressions") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                f"{given[-1]}: `registry` is for Debezium's Avro, `fields` and `expressions` are of JSON: "
                "give one of them"
            )
        return self

    @model_validator(mode="after")
    def _are_two_sides(self) -> Self:
        if self.transactions in self.data:
            raise ValueError("data: the topic of transactions can't be one of the data topics")
        if len(set(self.data)) < len(self.data):
            raise ValueError("data: a topic is named twice")
        return self

    def joined_topic(self, topic: str) -> str:
        """Return the topic of a data topic's joined records."""
        return topic


class KafkaJoinOptions(JoinedTopics):
    """The settings of the connector."""

    topic: Annotated[str, Field(min_length=1), AfterValidator(_has_one_placeholder)] = Field(
        default="{topic}-joined",
        description="Topic of the joined records, in which `{topic}` is the data topic's name.",
    )

    @model_validator(mode="after")
    def _do_not_feed_themselves(self) -> Self:
        read = {*self.data, self.transactions}
        for topic in self.data:
            if self.joined_topic(topic) in read:
                raise ValueError(
                    f"topic: the joined records of {topic} would go into {self.joined_topic(topic)}, "
                    "which is read"
                )
        return self

    def joined_topic(self, topic: str) -> str:
        """Return the topic of a data topic's joined records."""
        return self.topic.replace("{topic}", topic)


class KafkaJoinSection(SourceSection, JoinedTopics):
    """The section `source` of `type: kafka-join`."""

    type: Literal["kafka-join"] = "kafka-join"

    @property
    def address(self) -> str:
        """The source's address, for messages."""
        return f"{self.bootstrap_servers}, topics {', '.join(self.data)}"

    @property
    def connect_timeout_s(self) -> float:
        """Timeout of a connection, in seconds."""
        return 30.0
