"""What a person should know of the shards: those that do not go on, and why."""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.sources.progress import SourceWarning
from tailrace.sources.vitess.resharding.coordinator import Coordinator
from tailrace.sources.vitess.resharding.transitions import ShardMode


def shard_warnings(coordinator: Coordinator) -> Iterator[SourceWarning]:
    """Yield a warning for each shard that has one. Any thread."""
    for name, shard in sorted(dict(coordinator.shards).items()):
        if shard.state is ShardMode.NEEDS_SNAPSHOT:
            yield SourceWarning(
                f"shard_needs_snapshot {name}",
                f"the shard {name} can't be gone on with: {shard.kept.lost}",
                "its changes come no further until its keys are copied again: begin a new log",
            )
        elif shard.trouble and shard.failures > 1:
            yield SourceWarning(
                f"shard_delayed {name}",
                f"the shard {name} does not go on: {shard.trouble}",
                "it is tried again",
            )
        elif shard.state is ShardMode.AT_JOURNAL and (journal := shard.kept.journal) is not None:
            others = [other for other in journal.participants if not coordinator.is_at(other, journal)]
            yield SourceWarning(
                f"shard_waits {name}", f"the shard {name} is at a reshard, and waits for {', '.join(others)}"
            )
