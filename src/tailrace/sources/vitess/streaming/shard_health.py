"""The progress of shards that isn't part of their state, and the health report that is made from it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tailrace.sources.progress import SourceHealth
from tailrace.sources.vitess.resharding.transitions import READ, Shard, ShardMode


@dataclass(slots=True)
class ShardProgress:
    """The progress of one shard, in addition to its state.

    :ivar moved_s: when its stream last delivered a row or position of the shard, monotonic.
    :ivar probed_s: when its server was last asked for its transactions, monotonic; `asked_us`: wall clock.
    :ivar whole_until_us: everything that was committed before this time is in the log.
    :ivar lags: whether the replica that is read lacked transactions of the primary, and sent none since.
    :ivar stalls: consecutive times that its stream was opened again because it didn't progress.
    """

    moved_s: float = field(default_factory=time.monotonic)
    probed_s: float = field(default_factory=time.monotonic)
    asked_us: int = 0
    whole_until_us: int = 0
    lags: bool = False
    stalls: int = 0

    def move(self, *, is_further: bool) -> None:
        """Note that the stream delivered a row or position of the shard.

        :param is_further: whether it was a row or a transaction, not just the position of a restarted copy.
        """
        self.moved_s = time.monotonic()
        if is_further:
            self.stalls, self.lags = 0, False


def health_of(
    shards: Mapping[str, Shard], progress: Mapping[str, ShardProgress], tasks: Mapping[str, str]
) -> SourceHealth:
    """Return the state of each shard, and the watermark. Any thread.

    :param tasks: the address of vtgate, by task.
    """
    known = dict(shards)
    lost = any(shard.state is ShardMode.NEEDS_SNAPSHOT for shard in known.values())
    state = ShardMode.NEEDS_SNAPSHOT.value if lost else "streaming"
    shown = {name: _shown(shard, progress.get(name)) for name, shard in known.items()}
    until_us = watermark_us(known, progress)
    details = {"tasks": tasks, "watermark": _iso(until_us) if until_us else None, "shards": shown}
    return SourceHealth(state, None, details)


def watermark_us(shards: Mapping[str, Shard], progress: Mapping[str, ShardProgress]) -> int:
    """Return the time up to which all shards are in the log, microseconds; 0: not known. Any thread."""
    known = dict(shards)
    if any(shard.state in {ShardMode.NEEDS_SNAPSHOT, ShardMode.AT_JOURNAL} for shard in known.values()):
        return 0
    times = [
        progress[name].whole_until_us if name in progress and shard.kept.copy is None else 0
        for name, shard in known.items()
        if not shard.kept.children
    ]
    return min(times, default=0)


def _shown(shard: Shard, progress: ShardProgress | None) -> dict[str, Any]:
    kept = shard.kept
    found: dict[str, Any] = {
        "state": shard.state.value,
        "task": shard.task if shard.state in READ else None,
        "gtid": kept.gtid,
        "quiet_s": round(time.monotonic() - progress.moved_s, 1) if progress is not None else None,
        "epoch": kept.epoch,
    }
    if kept.parents:
        found["from"] = list(kept.parents)
    if kept.children:
        found["to"] = list(kept.children)
    if kept.copy is not None:
        found["copied"] = sorted(kept.copy.copied)
    if kept.ahead:
        found["ahead"] = sorted({chunk.table for chunk in kept.ahead})
    return found


def _iso(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1_000_000, UTC).isoformat(timespec="milliseconds")
