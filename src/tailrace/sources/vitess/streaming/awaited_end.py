"""What somebody waits for: that the log has what the shards had when it was asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import structlog

from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, Policy, TailraceError
from tailrace.sources.vitess.connection.metadata import ask_gtids, serving_shards
from tailrace.sources.vitess.connection.vtgate import Row, Vtgate
from tailrace.sources.vitess.resharding.coordinator import Coordinator
from tailrace.sources.vitess.resharding.gtid_sets import GtidSet
from tailrace.sources.vitess.resharding.transitions import ShardMode

log = structlog.get_logger(__name__)

#: So long after a question that a shard did not answer, all are asked again.
ASK_AGAIN_S = 1.0


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


class EndQuestion:
    """Asks the shards what they have, once for all who wait, and again as long as one gives no answer: no
    other shard waits for it. `want` from any thread, `turn` for one.
    """

    def __init__(self, source: VitessSource, vtgate: Vtgate) -> None:
        self._source, self._vtgate = source, vtgate
        self._lock = threading.Lock()
        self._wanted = 0
        self._asked: tuple[int, dict[str, Future[list[Row]]]] | None = None
        self._again_at_s = float("-inf")

    def want(self, position: int) -> None:
        """Have an end awaited under this position: what the shards have from now on."""
        with self._lock:
            self._wanted = max(self._wanted, position)

    def turn(self, now_s: float) -> AwaitedEnd | None:
        """Return an end that is known now; ask if somebody waits. None: there is none now.

        :raises TailraceError: what does not pass; where vtgate does not say which shards serve.
        """
        if self._asked is None:
            if now_s >= self._again_at_s and (position := self._take()):
                shards = serving_shards(self._vtgate, self._source)
                self._asked = (
                    position,
                    {shard: ask_gtids(self._vtgate, self._source, shard) for shard in shards},
                )
            return None
        position, answers = self._asked
        if not all(answer.done() for answer in answers.values()):
            return None
        self._asked = None
        try:
            gtids = {shard: str(answer.result()[0][0] or "") for shard, answer in answers.items()}
        except TailraceError as error:
            if error.policy is not Policy.RETRY:
                raise
            log.warning("which end is waited for is not known; the shards are asked again", error=str(error))
            self.want(position)
            self._again_at_s = now_s + ASK_AGAIN_S
            return None
        return AwaitedEnd(position, {shard: GtidSet.parse(gtid) for shard, gtid in gtids.items()})

    def _take(self) -> int:
        with self._lock:
            wanted, self._wanted = self._wanted, 0
        return wanted


def _has(coordinator: Coordinator, shard: str, end: GtidSet) -> bool:
    found = coordinator.shards.get(shard)
    if found is None or not found.kept.is_read or found.kept.copy is not None:
        return False
    if found.kept.begun:
        return False  # should the shard be gone at the next start, nothing of it would count
    if found.behind or found.state is ShardMode.NEEDS_SNAPSHOT:
        return False
    return GtidSet.parse(found.kept.gtid).contains(end)
