"""Which segments may go, and which readers that costs. Pure: a function of facts.

The oldest segments go first, whole, while the log is larger than its size or they are older
than its age. Without either limit nothing goes. A registered reader that has not read a
segment holds it and all after it; or is dropped, if the configuration says so.

Never goes: the last segment, and what is not known to be durable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

SECOND_US = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRules:
    """Limits of one task's log; `None`: no such limit.

    `on_slow_reader`: what gives when a registered reader still needs what the limits would
    remove. `hold`: the limits; the log grows. `drop`: the reader; it gets an error and must
    begin again.
    """

    size_bytes: int | None = None
    age_s: float | None = None
    on_slow_reader: Literal["hold", "drop"] = "hold"


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """What is known of a segment, `[first_offset, end_offset)`."""

    first_offset: int
    end_offset: int
    size_bytes: int
    time_us: int  # commit time of the last unit that ended in or before it


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What goes: segments by first offset, oldest first; readers by name, to be dropped before.

    `held_by` names the readers without which more would have gone.
    """

    remove: tuple[int, ...] = ()
    drop: tuple[str, ...] = ()
    held_by: tuple[str, ...] = ()


def plan(
    segments: Sequence[SegmentFacts],
    readers: Mapping[str, int],
    rules: RetentionRules,
    *,
    durable_end: int,
    now_us: int,
) -> RetentionPlan:
    """Decide what goes.

    :param segments: all of a task's, oldest first; the last is being written.
    :param readers: the log offset before which each reader needs nothing.
    :param now_us: what ages are measured against; see `now_of`.
    """
    remove: list[int] = []
    dropped: set[str] = set()
    size_bytes = sum(segment.size_bytes for segment in segments)
    for segment in segments[:-1]:
        too_large = rules.size_bytes is not None and size_bytes > rules.size_bytes
        too_old = rules.age_s is not None and now_us - segment.time_us > rules.age_s * SECOND_US
        if not (too_large or too_old) or segment.end_offset > durable_end:
            break
        slow = {name for name, offset in readers.items() if offset < segment.end_offset}
        if slow - dropped and rules.on_slow_reader == "hold":
            return RetentionPlan(tuple(remove), held_by=tuple(sorted(slow)))
        dropped |= slow
        remove.append(segment.first_offset)
        size_bytes -= segment.size_bytes
    return RetentionPlan(tuple(remove), tuple(sorted(dropped)))


def now_of(newest_commit_us: int, wall_clock_us: int) -> int:
    """Return the time that ages are measured against: neither clock alone can empty the log.

    A machine's clock that jumps ahead is held back by the newest commit time in the log, and
    the source's clock by ours.
    """
    return min(newest_commit_us, wall_clock_us)
