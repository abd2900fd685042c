"""What is told of a keyspace's shards, and the time up to which all of them are in the log. Any thread."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from tailrace.sources.progress import SourceHealth
from tailrace.sources.vitess.resharding.transitions import READ, Shard, ShardMode
from tailrace.sources.vitess.streaming.shard_progress import ShardProgress


def health_of(
    shards: Mapping[str, Shard], progress: Mapping[str, ShardProgress], tasks: Mapping[str, str]
) -> SourceHealth:
    """Return the state of the shards, one by one, and the watermark.

    :param tasks: the address of each task's vtgate.
    """
    known = dict(shards)
    lost = any(shard.state is ShardMode.NEEDS_SNAPSHOT for shard in known.values())
    state = ShardMode.NEEDS_SNAPSHOT.value if lost else "streaming"
    shown = {name: _shown(shard, progress.get(name)) for name, shard in known.items()}
    until_us = watermark_us(known, progress)
    details = {"tasks": tasks, "watermark": _iso(until_us) if until_us else None, "shards": shown}
    return SourceHealth(state, None, details)


def watermark_us(shards: Mapping[str, Shard], progress: Mapping[str, ShardProgress]) -> int:
    """Return the time up to which all shards are here; 0: not known."""
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
