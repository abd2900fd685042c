"""Preflight of sinks whose converter has a schema registry: does it answer, and would it take the schemas.

Nothing is registered. A schema that the registry has not seen yet is compared by it as on registering it,
with the newest version of its subject or with all; whether one may write there shows when that is done.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np

from tailrace import __version__
from tailrace.config import PipelineConfig
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.converters.contract import ChecksAhead, Converter
from tailrace.converters.factory import build
from tailrace.errors import Kind, TailraceError
from tailrace.records.group import Group
from tailrace.sinks.kafka.records import topics_of
from tailrace.sources.contract import SourceCheck
from tailrace.sources.findings import Finding, from_failure, warning
from tailrace.sources.postgres.decode.changes import no_changes
from tailrace.sources.postgres.decode.column_policy import TablePolicy
from tailrace.sources.postgres.decode.json.debezium import SourceInfo

#: Longest that the registry is asked about tables of one sink.
ASK_TABLES_S = 20.0
#: After so many refused tables the rest would say the same.
_REFUSED_MAX = 10
#: What a registry says of every table.
_OF_THE_REGISTRY = frozenset({Kind.REGISTRY_UNREACHABLE, Kind.REGISTRY_REFUSED, Kind.SECRET_MISSING})


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
    """Yield which of the tables' schemas the registry would refuse, as they are let out of the log.

    Where transformations change records nothing is known of their schemas beforehand.
    """
    try:
        converter = _converter(sink)
    except TailraceError:
        return  # told by `converter_findings`
    with closing(converter):
        if not sink.transformations and isinstance(converter, ChecksAhead):
            yield from _of_tables(converter, sink, pipeline, source)


def _of_tables(
    converter: ChecksAhead, sink: KafkaSinkConfig, pipeline: PipelineConfig, source: SourceCheck
) -> Iterator[Finding]:
    prefix = sink.topic_prefix or pipeline.name
    topics = topics_of(sink, {}, prefix, ASK_TABLES_S)
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
                return  # told by `converter_findings`, which asked before
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
