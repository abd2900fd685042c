"""Preflight of sinks of Kafka: the cluster, the offsets topic, topics of tables, rights; the schema registry.

Nothing is made or registered, and nobody is fenced: so whether the transactional id may be used is seen at
the start only. A schema that the registry has not seen yet is compared by it as on registering it, with the
newest version of its subject or with all; whether one may write there shows when that is done.
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

#: After so many refused topics or tables the rest would say the same.
_REFUSED_MAX = 10
#: A cluster that says these says them of every topic.
_OF_THE_CLUSTER = frozenset({Kind.SINK_WRITE_FAILED, Kind.SECRET_MISSING})

#: Longest that the registry is asked about tables of one sink.
ASK_TABLES_S = 20.0
#: What a registry says of every table.
_OF_THE_REGISTRY = frozenset({Kind.REGISTRY_UNREACHABLE, Kind.REGISTRY_REFUSED, Kind.SECRET_MISSING})


def cluster_findings(sink: KafkaSinkConfig, pipeline: PipelineConfig) -> Iterator[Finding]:
    """Yield what is wrong with the cluster and the offsets topic."""
    account = account_of(sink, pipeline.name)
    offsets = account.offsets(min(account.timeout_s, ASK_TIMEOUT_S))
    try:
        account.writer(offsets).close()  # the client says which options it does not take
        yield from _told(offsets.check(create=sink.create_topics))
    except TailraceError as failure:
        yield from_failure(failure)


def storage_findings(storage: OffsetStorage, name: str) -> Iterator[Finding]:
    """Yield what is wrong with the topic of the own offsets of the engine `name`, which are in Kafka."""
    try:
        yield from _told(KafkaOffsetStore(storage, name, atomic=False).check(ASK_TIMEOUT_S))
    except TailraceError as failure:
        yield from_failure(failure)


def _told(concerns: Sequence[TopicWarning]) -> Iterator[Finding]:
    for concern in concerns:
        yield warning(Kind.SINK_MISCONFIGURED, concern.message, concern.hint)


def topic_findings(
    sink: KafkaSinkConfig, pipeline: PipelineConfig, tables: Sequence[tuple[str, str]]
) -> Iterator[Finding]:
    """Yield what is wrong with the topics of `tables`, each a schema and a name, and those beside them.

    Where transformations choose topics of tables nothing is known of these beforehand.
    """
    account = account_of(sink, pipeline.name)
    timeout_s = min(account.timeout_s, ASK_TIMEOUT_S)
    try:
        require_reachable(account.admin(), timeout_s)
    except TailraceError:
        return  # `cluster_findings` has it
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


def converter_findings(sink: KafkaSinkConfig) -> Iterator[Finding]:
    """Yield what keeps the sink's converter from its registry."""
    try:
        with closing(_converter(sink)) as converter:
            if isinstance(converter, ChecksAhead):
                converter.check()
    except TailraceError as failure:
        yield from_failure(failure)


def schema_findings(
    sink: KafkaSinkConfig, pipeline: PipelineConfig, source: SourceCheck
) -> Iterator[Finding]:
    """Yield which of the tables' schemas the registry would refuse, as readers of the log see them.

    Where transformations change records nothing is known of their schemas beforehand.
    """
    try:
        converter = _converter(sink)
    except TailraceError:
        return  # `converter_findings` has it
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
                return  # `converter_findings`, which asked before, has it
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
        "the others show when their first change is written; or see why the registry is slow",
    )
