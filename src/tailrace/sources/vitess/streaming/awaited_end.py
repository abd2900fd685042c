"""What somebody waits for: that the log has what the shards had when it was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.resharding.coordinator import Coordinator
from tailrace.sources.vitess.resharding.gtid_sets import GtidSet
from tailrace.sources.vitess.resharding.transitions import ShardMode


@dataclass(frozen=True, slots=True)
class AwaitedEnd:
    """A position that the log is to have once each of these shards is so far."""

    position: int
    ends: Mapping[str, GtidSet]

    def missing(self, coordinator: Coordinator) -> list[str]:
        """Return the shards that are not so far."""
        return [shard for shard, end in self.ends.items() if not _has(coordinator, shard, end)]

    def refuse_if_lost(self, coordinator: Coordinator, missing: Iterable[str]) -> None:
        """Fail if what is missing does not come before a person has it copied again.

        :raises TailraceError: `SHARDS_LOST`, with the shards and the command.
        """
        if not all(coordinator.waits_for_snapshot(shard, self.ends) for shard in missing):
            return
        lost = {
            name: shard.kept.lost
            for name, shard in sorted(coordinator.shards.items())
            if shard.state is ShardMode.NEEDS_SNAPSHOT
        }
        named = "; ".join(f"the shard {name}: {why}" for name, why in lost.items())
        ranges = ", ".join(map(str, coordinator.needs_snapshot))
        raise TailraceError(
            Kind.SHARDS_LOST,
            f"catch up with the keyspace: changes of the keys {ranges} come no further, all others are in "
            f"the log: {named}",
            "tailrace snapshot FILE --lost, then start the pipeline again: it copies these keys anew. In a "
            "mirror, rows that are gone meanwhile stay until tailrace snapshot FILE --table has read their "
            "table, unless all keys were lost",
            {"shards": ", ".join(lost), "key_ranges": ranges},
        )


def _has(coordinator: Coordinator, shard: str, end: GtidSet) -> bool:
    found = coordinator.shards.get(shard)
    if found is None or not found.kept.is_read or found.kept.copy is not None:
        return False
    if found.kept.begun:
        return False  # should the shard be gone at the next start, nothing of it would count
    if found.behind or found.state is ShardMode.NEEDS_SNAPSHOT:
        return False
    return GtidSet.parse(found.kept.gtid).contains(end)
