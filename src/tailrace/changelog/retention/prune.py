"""Carries out retention: drops readers, then removes segments, each step durable before the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tailrace import failpoints
from tailrace.changelog import durable
from tailrace.changelog import format as codec
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.endmark import MARK_NAME, UNKNOWN, read_mark
from tailrace.changelog.format import DamageError
from tailrace.changelog.index import SegmentFile, corrupt
from tailrace.changelog.retention.policy import RetentionRules, SegmentFacts, now_of, plan
from tailrace.changelog.retention.readers import Readers


@dataclass(frozen=True, slots=True)
class Pruned:
    """What retention removed and dropped, and which readers hold further segments."""

    segments: tuple[str, ...]
    size_bytes: int
    dropped_readers: tuple[str, ...]
    held_by: tuple[str, ...]


def apply(
    directory: LogDirectory,
    task: str,
    rules: RetentionRules,
    *,
    keep_from: int | None = None,
    wall_clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
) -> Pruned:
    """Apply the rules to one task's log. To be called in the process that writes the log.

    May run concurrently with the writer and any number of readers.

    :param keep_from: the writer itself needs everything from this log offset on.
    :raises TailraceError: `LOG_CORRUPT`, if a segment's header or a reader's file is damaged:
        nothing is then removed; `LOG_WRITE_FAILED`, `LOG_FULL`.
    """
    path = directory.task_path(task)
    mark = read_mark(path / MARK_NAME, codec.seed_of(directory.identity.log_id, task))
    if mark is None or mark.offset == UNKNOWN:
        return Pruned((), 0, (), ())  # the next writer determines how far the log is durable
    readers = Readers(directory)
    readers.remove_ended()
    segments = segment_facts(directory, task)
    decided = plan(
        segments,
        {
            reader.name: reader.offsets[task]
            for reader in readers.all()
            if task in reader.offsets and not reader.dropped
        },
        rules,
        durable_end=mark.offset if keep_from is None else min(mark.offset, keep_from),
        now_us=now_of(mark.position_time_us, wall_clock_us()),
    )
    if decided.remove:
        try:
            failpoints.hit("log.before_retention")
            for name in decided.drop:
                readers.drop(name)
            _remove(path, decided.remove)
            failpoints.hit("log.after_retention")
        except OSError as error:
            raise durable.write_failure(error, "remove old segments", path) from error
    return Pruned(
        tuple(codec.segment_name(offset) for offset in decided.remove),
        sum(segment.size_bytes for segment in segments if segment.first_offset in decided.remove),
        decided.drop,
        decided.held_by,
    )


def segment_facts(directory: LogDirectory, task: str) -> list[SegmentFacts]:
    """Return the facts of a task's segments, oldest first; the last one's end is set to its start.

    :raises TailraceError: `LOG_CORRUPT`, `LOG_MISSING`.
    """
    path = directory.task_path(task)
    seed = codec.seed_of(directory.identity.log_id, task)
    heads: list[codec.SegmentHeader] = []
    sizes: list[int] = []
    for offset in directory.segments(task):
        segment = path / codec.segment_name(offset)
        try:
            file = SegmentFile.open(segment, seed, bytes.fromhex(directory.identity.log_id))
        except FileNotFoundError:
            continue  # removed since by the writer, with an open transaction, or by retention
        except DamageError as error:
            raise corrupt(segment, 0, str(error)) from None
        heads.append(file.header)
        sizes.append(file.size())
        file.close()
    return [
        SegmentFacts(head.first_offset, after.first_offset, size, after.position_time_us)
        for head, after, size in zip(heads, heads[1:] + heads[-1:], sizes, strict=True)
    ]


def _remove(task_path: Path, offsets: Sequence[int]) -> None:
    for offset in offsets:
        (task_path / codec.segment_name(offset)).unlink(missing_ok=True)
        # One by one: a power failure must not leave a gap.
        durable.sync_directory(task_path)
        failpoints.hit("log.in_retention")
