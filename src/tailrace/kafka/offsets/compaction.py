"""Settings of a new offsets topic, and warnings about those of an existing one.

A start reads all of its partition, which contains what compaction has not removed yet: the active segment,
and the markers of transactions for as long as deletes are retained. So both are kept small.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

#: Number of partitions of a new topic; an existing one may have any number.
PARTITIONS = 25
#: Replication factor of a new topic, if there are as many brokers.
REPLICAS = 3

_SEGMENT_BYTES = 4 << 20
#: Largest segment size without a warning. Kafka's default is a gigabyte, which holds millions of offsets.
_SEGMENT_BYTES_MAX = 64 << 20
#: Retention of tombstones, in milliseconds: far longer than any reading of the topic takes.
_DELETES_KEPT_MS = 3_600_000

COMPACTED = {"cleanup.policy": "compact"}
_SMALL = {"segment.bytes": str(_SEGMENT_BYTES), "delete.retention.ms": str(_DELETES_KEPT_MS)}


@dataclass(frozen=True, slots=True)
class TopicWarning:
    """A problem with a topic that does not prevent its use."""

    message: str
    hint: str


def replicas_of(brokers: int) -> int:
    """Return the replication factor for a cluster with this number of brokers."""
    return min(REPLICAS, brokers)


def settings_of(replicas: int) -> dict[str, str]:
    """Return the settings of a new topic with this number of replicas."""
    # Records that a single broker has acknowledged are lost with it.
    durable = {"min.insync.replicas": "2"} if replicas >= REPLICAS else {}
    return {**COMPACTED, **_SMALL, **durable}


def command_for(bootstrap: str, topic: str, settings: Mapping[str, str]) -> str:
    """Return the command that gives a topic these settings."""
    given = ",".join(f"{name}={value}" for name, value in settings.items())
    words = ["kafka-configs.sh", "--bootstrap-server", bootstrap, "--alter", "--entity-type", "topics"]
    return shlex.join([*words, "--entity-name", topic, "--add-config", given])


def concerns_of(
    topic: str, bootstrap: str, settings: Mapping[str, str], replicas: int, brokers: int
) -> list[TopicWarning]:
    """Return warnings about an existing topic.

    :param replicas: the lowest number that a partition has.
    """
    found = []
    if replicas < replicas_of(brokers):
        found.append(
            TopicWarning(
                f"the offsets topic {topic!r} is kept on {replicas} of {brokers} brokers: the offsets are "
                "lost with them",
                f"raise its replication factor to {replicas_of(brokers)} with kafka-reassign-partitions.sh",
            )
        )
    if int(settings.get("segment.bytes", "0")) > _SEGMENT_BYTES_MAX:
        found.append(
            TopicWarning(
                f"the offsets topic {topic!r} has segments of {settings['segment.bytes']} bytes, which are "
                "compacted only when they are full: each start reads them",
                command_for(bootstrap, topic, _SMALL),
            )
        )
    return found
