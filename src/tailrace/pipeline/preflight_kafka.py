"""Preflight of sinks of Kafka: the cluster, the offsets topic, the topics of tables, and rights on them.

Nothing is made, and nobody is fenced: so whether the transactional id may be used is seen at the start only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tailrace.capture.publication import Table
from tailrace.config import PipelineConfig
from tailrace.config.engine_options import OffsetStorage
from tailrace.config.kafka import KafkaSink
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.offset_store import KafkaOffsetStore
from tailrace.kafka.reach import require_reachable
from tailrace.pipeline.findings import Finding, from_failure
from tailrace.sinks.kafka import ASK_TIMEOUT_S, account_of
from tailrace.sinks.kafka_records import topics_of

#: After so many refused topics the rest would say the same.
_REFUSED_MAX = 10
#: A cluster that says these says them of every topic.
_OF_THE_CLUSTER = frozenset({Kind.SINK_WRITE_FAILED, Kind.SECRET_MISSING})


def cluster_findings(sink: KafkaSink, pipeline: PipelineConfig) -> Iterator[Finding]:
    """Yield what is wrong with the cluster and the offsets topic."""
    account = account_of(sink, pipeline.name)
    offsets = account.offsets(min(account.timeout_s, ASK_TIMEOUT_S))
    try:
        offsets.check(create=sink.create_topics)
    except TailraceError as failure:
        yield from_failure(failure)


def storage_findings(storage: OffsetStorage, name: str) -> Iterator[Finding]:
    """Yield what is wrong with the topic of the own offsets of the engine `name`, which are in Kafka."""
    try:
        KafkaOffsetStore(storage, name, atomic=False).check(ASK_TIMEOUT_S)
    except TailraceError as failure:
        yield from_failure(failure)


def topic_findings(sink: KafkaSink, pipeline: PipelineConfig, tables: Sequence[Table]) -> Iterator[Finding]:
    """Yield what is wrong with the topics of `tables`.

    Where transformations choose topics nothing is known of them beforehand.
    """
    if sink.transformations:
        return
    account = account_of(sink, pipeline.name)
    timeout_s = min(account.timeout_s, ASK_TIMEOUT_S)
    try:
        require_reachable(account.admin(), timeout_s)
    except TailraceError:
        return  # told by `cluster_findings`
    topics = topics_of(sink, account.admin(), sink.topic_prefix or pipeline.name, timeout_s)
    refused = 0
    for table in tables:
        if not sink.wants(table.schema, table.name):
            continue
        try:
            topics.check(topics.of_table(table.schema, table.name), table.schema, table.name)
        except TailraceError as failure:
            yield from_failure(failure)
            refused += 1
            if refused >= _REFUSED_MAX or failure.kind in _OF_THE_CLUSTER:
                return
