"""Preflight of Kafka sinks: the cluster, the offsets topic, topics of tables, rights; the schema registry.

Nothing is created or registered, and no producer is fenced, so the right to use the transactional id is
checked at the start only. The registry checks the compatibility of a new schema as on registration, with the
newest version of its subject or with all; the right to write there is checked by the first registration.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np

from tailrace import __version__
from tailrace.config import PipelineConfig
from tailrace.config.engine_options import OffsetStorage
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.converters.contract import ChecksAhead, Converter
from tailrace.converters.factory import build
from tailrace.decode.changes import no_changes
from tailrace.decode.column_policy import TablePolicy
from tailrace.decode.json.debezium import SourceInfo
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.client.requests import require_reachable
from tailrace.kafka.client.topics import Topics, legal
from tailrace.kafka.offsets.compaction import TopicWarning
from tailrace.kafka.offsets.store import KafkaOffsetStore
from tailrace.records.group import Group
from tailrace.sinks.kafka.sink import ASK_TIMEOUT_S, account_of
from tailrace.sources.contract import SourceCheck
from tailrace.sources.findings import Finding, from_failure, warning

#: Most refused topics or tables that are reported: the others are most likely refused for the same reason.
_REFUSED_MAX = 10
#: Errors that concern the cluster, not one topic.
_OF_THE_CLUSTER = frozenset({Kind.SINK_WRITE_FAILED, Kind.SECRET_MISSING})

#: Longest time for the registry's checks of one sink's tables, in seconds.
ASK_TABLES_S = 20.0
#: Errors that concern the registry, not one table.
_OF_THE_REGISTRY = frozenset({Kind.REGISTRY_UNREACHABLE, Kind.REGISTRY_REFUSED, Kind.SECRET_MISSING})


def cluster_findings(sink: KafkaSinkConfig, pipeline: PipelineConfig) -> Iterator[Finding]:
    """Yield the problems of the cluster and the offsets topic."""
    account = account_of(sink, pipeline.name)
    offsets = account.offsets(min(account.timeout_s, ASK_TIMEOUT_S))
    try:
        account.writer(offsets).close()  # the client raises for options that it does not accept
        yield from _warnings(offsets.check(create=sink.create_topics))
    except TailraceError as failure:
        yield from_failure(failure)


def storage_findings(storage: OffsetStorage, name: str) -> Iterator[Finding]:
    """Yield the problems of the topic with the own offsets of the engine `name`."""
    try:
        yield from _warnings(KafkaOffsetStore(storage, name, atomic=False).check(ASK_TIMEOUT_S))
    except TailraceError as failure:
        yield from_failure(failure)


def _warnings(concerns: Sequence[TopicWarning]) -> Iterator[Finding]:
    for concern in concerns:
        yield warning(Kind.SINK_MISCONFIGURED, concern.message, concern.hint)


def topic_findings(
    sink: KafkaSinkConfig, pipeline: PipelineConfig, tables: Sequence[tuple[str, str]]
) -> Iterator[Finding]:
    """Yield the problems of the topics of `tables`, each a schema and a name, and of the sink's other topics.

    Topics of tables that transformations choose are not known beforehand.
    """
    account = account_of(sink, pipeline.name)
    timeout_s = min(account.timeout_s, ASK_TIMEOUT_S)
    try:
        require_reachable(account.admin(), timeout_s)
    except TailraceError:
        return  # `cluster_findings` reports it
    prefix = sink.topic_prefix or pipeline.name
    topics = Topics(sink, account.admin(), prefix, timeout_s)
    for topic in dict.fromkeys(sink.fixed_topics(prefix)):
        try:
            topics.require_data(topic)
        except TailraceError as failure:
            yield from_failure(failure)
    wanted = [(topic, "", "") for topic in sink.topics_beside(prefix) if topic not in sink.topics_refused]
    if not sink.transformations:
        wanted += [("", schema, table) for schema, table in tables if sink.wants(schema, table)]
    refused = 0
    for beside, schema, table in wanted:
        try:
            topic = legal(beside, beside) if beside else topics.of_table(schema, table)
            topics.check(topic, schema, table)
        except TailraceError as failure:
            yield from_failure(failure)
            refused += 1
            if refused >= _REFUSED_MAX or failure.kind in _OF_THE_CLUSTER:
                return


def schema_findings(
    sink: KafkaSinkConfig, pipeline: PipelineConfig, source: SourceCheck
) -> Iterator[Finding]:
    """Yield which of the tables' schemas the registry would refuse, as readers of the log see them.

    Schemas of records that transformations change are not known beforehand.
    """
    try:
        converter = _converter(sink)
    except TailraceError:
        return  # `converter_findings` reports it
    with closing(converter):
        if not sink.transformations and isinstance(converter, ChecksAhead):
            yield from _of_tables(converter, sink, pipeline, source)


def _of_tables(
    converter: ChecksAhead, sink: KafkaSinkConfig, pipeline: PipelineConfig, source: SourceCheck
) -> Iterator[Finding]:
    prefix = sink.topic_prefix or pipeline.name
    topics = Topics(sink, {}, prefix, ASK_TABLES_S)
    table_policy = TablePolicy.of(pipeline.source.disclosure)
    deadline = time.monotonic() + ASK_TABLES_S
    found = source.relations(sink.wants)
    refused = 0
    for asked, table in enumerate(found):
        if time.monotonic() >= deadline:
            yield _out_of_time(asked, len(found))
            return
        changes = no_changes(table, table_policy)
        try:
            topic = topics.of_table(table.schema, table.table)
            origin = SourceInfo(prefix, "", __version__, pipeline.source.type)
            converter.check_shape(Group.of_changes(topic, np.empty(0, np.int64), changes, origin))
        except TailraceError as failure:
            if failure.kind in _OF_THE_REGISTRY and not asked:
                return  # `converter_findings`, which asked before, reports it
            yield from_failure(failure)
            refused += 1
            if refused >= _REFUSED_MAX or failure.kind in _OF_THE_REGISTRY:
                return


def _converter(sink: KafkaSinkConfig) -> Converter:
    return build(sink.converter.type, sink.converter_options())


def _out_of_time(asked: int, count: int) -> Finding:
    return warning(
        Kind.REGISTRY_UNREACHABLE,
        f"ask the schema registry about {count} tables: within {ASK_TABLES_S:.0f} s it answered for {asked}",
        "the others are checked when their first change is written; or find out why the registry is slow",
    )
