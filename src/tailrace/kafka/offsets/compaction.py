"""How a topic of offsets is made, and what of one that exists should be otherwise.

A start reads what its partition of the topic holds, and a partition holds what compaction has not removed
yet: the segment that is written, and the ends of transactions for as long as deletes are kept. So both are
kept small here.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

#: Of a topic that is made here; one that exists may have any number.
PARTITIONS = 25
#: On as many brokers, if there are so many.
REPLICAS = 3

_SEGMENT_BYTES = 4 << 20
#: A warning names more than so many: by default it is a gigabyte, which holds millions of offsets.
_SEGMENT_BYTES_MAX = 64 << 20
#: Far longer than any reading of the topic takes.
_DELETES_KEPT_MS = 3_600_000

COMPACTED = {"cleanup.policy": "compact"}
_SMALL = {"segment.bytes": str(_SEGMENT_BYTES), "delete.retention.ms": str(_DELETES_KEPT_MS)}


@dataclass(frozen=True, slots=True)
class TopicWarning:
    """What is not as it should be, and does not stop anybody."""

    message: str
    hint: str


def replicas_of(brokers: int) -> int:
    """Return on how many brokers of so many the topic is to be."""
    return min(REPLICAS, brokers)


def settings_of(replicas: int) -> dict[str, str]:
    """Return the settings of a topic that is made with so many replicas."""
    # What one broker alone has acknowledged is lost with it.
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
    """Return what of an existing topic should be otherwise.

    :param replicas: the fewest that a partition has.
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
