"""Waiting for an end: the positions of the shards at the time of a request, which the log has to reach."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import structlog

from tailrace.config.source.vitess import VitessSource
from tailrace.errors import Kind, Policy, TailraceError
from tailrace.sources.vitess.connection.metadata import ask_gtids, of_primary, serving_shards
from tailrace.sources.vitess.connection.vtgate import Row, Vtgate
from tailrace.sources.vitess.resharding.coordinator import Coordinator
from tailrace.sources.vitess.resharding.gtid_sets import GtidSet
from tailrace.sources.vitess.resharding.transitions import ShardMode

log = structlog.get_logger(__name__)

#: Wait until all shards are asked again after one did not answer, in seconds.
ASK_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class AwaitedEnd:
    """A position that the log gets once it has the transactions in `ends`: those of each shard's primary when
    it was asked.

    :param read: those of a tablet of the type that is read, which may lag.
    """

    position: int
    ends: Mapping[str, GtidSet]
    read: Mapping[str, GtidSet]

    def missing(self, coordinator: Coordinator) -> list[str]:
        """Return the shards whose ends the log has not reached."""
        return [shard for shard, end in self.ends.items() if not _has(coordinator, shard, end)]

    def refuse_if_lost(self, coordinator: Coordinator, missing: Iterable[str]) -> None:
        """Fail if all missing changes wait until the user has lost keys copied again.

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
            f"catch up with the keyspace: changes of the keys {ranges} are no longer captured, all others "
            f"are in the log: {named}",
            "tailrace snapshot FILE --lost, then start the pipeline again: it copies these keys again. In a "
            "mirror, rows deleted meanwhile stay until tailrace snapshot FILE --table has read their "
            "table, unless all keys were lost",
            {"shards": ", ".join(lost), "key_ranges": ranges},
        )


class EndQuestion:
    """A request to the shards for their ends, one for all waiting callers, repeated until all have answered.
    Streaming continues meanwhile. Call `want` from any thread, `turn` from one.
    """

    def __init__(self, source: VitessSource, vtgate: Vtgate) -> None:
        self._source, self._vtgate = source, vtgate
        self._lock = threading.Lock()
        self._wanted = 0
        self._asked: tuple[int, dict[str, tuple[Future[list[Row]], Future[list[Row]]]]] | None = None
        self._again_at_s = float("-inf")

    def want(self, position: int) -> None:
        """Request the ends that the shards have from now on, under this position."""
        with self._lock:
            self._wanted = max(self._wanted, position)

    def turn(self, now_s: float) -> AwaitedEnd | None:
        """Return an end if all shards have answered, else None; ask the shards if an end is wanted.

        :raises TailraceError: for errors that can't be retried, or if vtgate can't list the serving shards.
        """
        if self._asked is None:
            if now_s >= self._again_at_s and (position := self._take()):
                shards = serving_shards(self._vtgate, self._source)
                self._asked = (position, {shard: self._ask(shard) for shard in shards})
            return None
        position, answers = self._asked
        if not all(answer.done() for both in answers.values() for answer in both):
            return None
        self._asked = None
        try:
            ends = {shard: _gtids(newest) for shard, (newest, _) in answers.items()}
            return AwaitedEnd(position, ends, {shard: _gtids(read) for shard, (_, read) in answers.items()})
        except TailraceError as error:
            if error.policy is not Policy.RETRY:
                raise
            log.warning("asking the shards for their positions failed; it is retried", error=str(error))
            self.want(position)
            self._again_at_s = now_s + ASK_AGAIN_S
            return None

    def _ask(self, shard: str) -> tuple[Future[list[Row]], Future[list[Row]]]:
        newest = ask_gtids(self._vtgate, of_primary(self._source), shard)
        is_read = self._source.tablet_type == "primary"
        return newest, newest if is_read else ask_gtids(self._vtgate, self._source, shard)

    def _take(self) -> int:
        with self._lock:
            wanted, self._wanted = self._wanted, 0
        return wanted


def _gtids(answer: Future[list[Row]]) -> GtidSet:
    return GtidSet.parse(answer.result()[0][0] or "")


def _has(coordinator: Coordinator, shard: str, end: GtidSet) -> bool:
    found = coordinator.shards.get(shard)
    if found is None or not found.kept.is_read or found.kept.copy is not None:
        return False
    if found.kept.begun:
        return False  # if the shard no longer exists at the next start, nothing of it counts
    if found.behind or found.state is ShardMode.NEEDS_SNAPSHOT:
        return False
    return GtidSet.parse(found.kept.gtid).contains(end)
