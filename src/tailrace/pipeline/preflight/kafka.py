"""Preflight of sinks of Kafka: the cluster, the offsets topic, the topics of tables, and rights on them.

Nothing is made, and nobody is fenced: so whether the transactional id may be used is seen at the start only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tailrace.config import PipelineConfig
from tailrace.config.engine_options import OffsetStorage
from tailrace.config.kafka import KafkaSinkConfig
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.client.connectivity import require_reachable
from tailrace.kafka.offsets.compaction import TopicWarning
from tailrace.kafka.offsets.store import KafkaOffsetStore
from tailrace.sinks.kafka.records import topics_of
from tailrace.sinks.kafka.sink import ASK_TIMEOUT_S, account_of
from tailrace.sources.findings import Finding, from_failure, warning

#: After so many refused topics the rest would say the same.
_REFUSED_MAX = 10
#: A cluster that says these says them of every topic.
_OF_THE_CLUSTER = frozenset({Kind.SINK_WRITE_FAILED, Kind.SECRET_MISSING})


def cluster_findings(sink: KafkaSinkConfig, pipeline: PipelineConfig) -> Iterator[Finding]:
    """Yield what is wrong with the cluster and the offsets topic."""
    account = account_of(sink, pipeline.name)
    offsets = account.offsets(min(account.timeout_s, ASK_TIMEOUT_S))
    try:
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
    """Yield what is wrong with the topics of `tables`, each a schema and a name.

    Where transformations choose topics nothing is known of them beforehand.
    """
    account = account_of(sink, pipeline.name)
    timeout_s = min(account.timeout_s, ASK_TIMEOUT_S)
    try:
        require_reachable(account.admin(), timeout_s)
    except TailraceError:
        return  # told by `cluster_findings`
    prefix = sink.topic_prefix or pipeline.name
    topics = topics_of(sink, account.admin(), prefix, timeout_s)
    for topic in dict.fromkeys(sink.fixed_topics(prefix)):
        try:
            topics.require_data(topic)
        except TailraceError as failure:
            yield from_failure(failure)
    if sink.transformations:
        return
    refused = 0
    for schema, table in tables:
        if not sink.wants(schema, table):
            continue
        try:
            topics.check(topics.of_table(schema, table), schema, table)
        except TailraceError as failure:
            yield from_failure(failure)
            refused += 1
            if refused >= _REFUSED_MAX or failure.kind in _OF_THE_CLUSTER:
                return
