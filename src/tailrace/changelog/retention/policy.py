"""Decides which segments retention removes, and which readers it drops for that. Pure.

Whole segments are removed, the oldest first, while the log is larger than the size limit or the
segment is older than the age limit. Without limits nothing is removed. A registered reader that has
not read a segment holds it and all later ones, or is dropped, depending on the configuration.

The last segment is never removed, nor a segment that is not known to be durable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

SECOND_US = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRules:
    """Limits of one task's log; `None`: no such limit.

    `on_slow_reader`: what happens if a registered reader still needs a segment that a limit would
    remove. `hold`: the segment is kept, and the log grows. `drop`: the segment is removed; the
    reader gets an error and must start again.
    """

    size_bytes: int | None = None
    age_s: float | None = None
    on_slow_reader: Literal["hold", "drop"] = "hold"


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """Offsets, size and time of a segment, which holds `[first_offset, end_offset)`."""

    first_offset: int
    end_offset: int
    size_bytes: int
    time_us: int  # commit time of the last unit that ended in or before it


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """The segments to remove, by first offset, oldest first; before that, the readers to drop, by name.

    `held_by`: the names of the readers that keep further segments from being removed.
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
    """Return the segments to remove and the readers to drop.

    :param segments: all segments of a task, oldest first; the last is being written.
    :param readers: by name, the log offset before which the reader needs nothing.
    :param now_us: the time from which ages are computed; see `now_of`.
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
    """Return the time from which ages are computed: the earlier one of the two.

    So neither this machine's clock nor the source's can empty the log by jumping ahead.
    """
    return min(newest_commit_us, wall_clock_us)
