"""Repairs the end of the log before a writer's first append, durably.

1  Read the last segment block by block, including the frames. A torn block at its end, with
nothing sound after it, was being written when the writer died. Any other difference is damage:
recovery stops and changes nothing.
2  Find the last boundary. An unfinished unit follows it, which the source sends again as a
whole.
3  Check that everything that was acknowledged lies before it, which the end mark shows.
4  Only then cut: whole segments, newest first, each removal durable before the next, then
the rest of the segment that contains the boundary. A crash at any point in between leaves
a log with an unfinished unit at its end, so that recovery can start again.
5  Seal that segment. The new writer continues in a new segment, so that a previous writer
that still runs can't write into what it writes.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from tailrace import failpoints
from tailrace.changelog import durable, index
from tailrace.changelog import format as codec
from tailrace.changelog.blocks import Place
from tailrace.changelog.endmark import UNKNOWN
from tailrace.changelog.format import DamageError, Tail
from tailrace.changelog.index import Block, SegmentFile, corrupt
from tailrace.changelog.runs import RunBuilder, encode_footer
from tailrace.protocol.metadata_frames import kept_frames


@dataclass(frozen=True, slots=True)
class Recovered:
    """The end of a repaired log, where a new writer continues."""

    place: Place
    schema: dict[str, bytes]  # frames in force at the tail, by key
    empty_segment: bool  # a segment without changes starts here: the next one replaces it

    @property
    def tail(self) -> Tail:
        return Tail(self.place.offset, self.place.position, self.place.position_time_us)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The new end of the log: after a block of one of its segments."""

    segment: int  # first log offset
    blocks: list[Block]  # the blocks to keep, preamble first


_HINT_CUT = (
    "restore this file from a backup of the log. If the machine lost power: what comes after the "
    "damage was not known to be durable; keep a copy, then cut the file to {} bytes and start again: "
    "the source sends what it still has, and anything else is reported as missing"
)
_HINT_DURABLE = (
    "changes that were acknowledged to the source are missing: restore the log's directory from a "
    "backup, or set it aside and take a new snapshot"
)


def recover(task_path: Path, log_id: str, task: str, durable_to: int) -> Recovered:
    """Cut a task's log to its last boundary, and seal it durably. The caller holds the task's lock.

    :param durable_to: log offset up to which the log must be kept; `UNKNOWN` (-1) if unknown.
    :raises TailraceError: `LOG_CORRUPT`, with nothing changed; `LOG_FULL`, `LOG_WRITE_FAILED`.
    """
    seed, log_id_bytes = codec.seed_of(log_id, task), bytes.fromhex(log_id)
    segments = _segments(task_path)
    cut = _find_cut(task_path, segments, seed, log_id_bytes, durable_to)
    end = cut.blocks[-1].header.end if cut else 0
    if end < durable_to:
        raise corrupt(
            task_path / codec.segment_name(cut.segment if cut else 0),
            0 if cut is None else _end_in_file(cut),
            f"it ends at log offset {end}, but was durable up to {durable_to}",
            _HINT_DURABLE,
        )
    try:
        failpoints.hit("log.recovery")
        _remove_after(task_path, segments, cut)
        if cut is None:
            return Recovered(Place(0, 0, 0, 0, 0, None), {}, empty_segment=False)
        return _seal(task_path / codec.segment_name(cut.segment), cut, seed, log_id_bytes)
    except OSError as error:
        raise durable.write_failure(error, "cut the change log to its last boundary", task_path) from error


def durable_end(task_path: Path, log_id: str, task: str) -> Tail:
    """Return the last boundary of the log, for a reader if the end mark was lost. Makes it durable;
    changes nothing.

    :raises TailraceError: `LOG_CORRUPT`, as `recover`.
    """
    seed = codec.seed_of(log_id, task)
    cut = _find_cut(task_path, _segments(task_path), seed, bytes.fromhex(log_id), UNKNOWN)
    if cut is None:
        return Tail(0, 0, 0)
    durable.sync_file(task_path / codec.segment_name(cut.segment))
    last = cut.blocks[-1].header
    return Tail(last.end, last.position, last.position_time_us)


def highest_epoch(task_path: Path, log_id: str, task: str) -> int | None:
    """Return the highest epoch in the headers of a task's segments; `None`: it has no segment.

    Used if the end mark, which contains the epoch, was lost.
    """
    seed, log_id_bytes = codec.seed_of(log_id, task), bytes.fromhex(log_id)
    epochs: list[int] = []
    for name in os.listdir(task_path):
        if codec.segment_offset(name) is not None:
            epochs.append(0)
            with contextlib.suppress(DamageError):  # recovery reports the damage
                file = SegmentFile.open(task_path / name, seed, log_id_bytes)
                epochs.append(file.header.epoch)
                file.close()
    return max(epochs, default=None)


def _segments(task_path: Path) -> list[int]:
    return sorted(
        offset for name in os.listdir(task_path) if (offset := codec.segment_offset(name)) is not None
    )


def _find_cut(task_path: Path, segments: list[int], seed: int, log_id: bytes, durable_to: int) -> _Cut | None:
    until: int | None = None
    chain: int | None = None
    for position, offset in reversed(list(enumerate(segments))):
        path = task_path / codec.segment_name(offset)
        if until is None and not _has_head(path, seed, log_id):
            # A segment gets its name once its header is durable, so this one was truncated later.
            if offset == 0 or position > 0:
                until = offset if position > 0 else None
                continue
            raise corrupt(path, 0, "the header of the only segment is incomplete", _HINT_DURABLE)
        file = _open(path, seed, log_id)
        try:
            blocks = _sound_blocks(file, durable_to) if until is None else _sealed_blocks(file, until)
        finally:
            file.close()
        if chain is not None and blocks[-1].header.crc != chain:
            raise corrupt(path, blocks[-1].file_at, "the next segment does not continue it")
        until, chain = offset, file.header.chain
        kept = _up_to_boundary(blocks)
        if len(kept) > 1 or position == 0:
            return _Cut(offset, kept)
    return None


def _has_head(path: Path, seed: int, log_id: bytes) -> bool:
    """Return whether a segment has its header and preamble, or at least sound data after them."""
    if path.stat().st_size < codec.SEGMENT_HEADER_SIZE:
        return False
    file = _open(path, seed, log_id)
    try:
        next(index.walk_blocks(file, file.start(), None, payloads=True))
    except DamageError:
        return index.find_block(file, codec.SEGMENT_HEADER_SIZE + 1) is not None
    finally:
        file.close()
    return True


def _open(path: Path, seed: int, log_id: bytes) -> SegmentFile:
    try:
        return SegmentFile.open(path, seed, log_id)
    except DamageError as error:
        raise corrupt(path, 0, str(error)) from None


def _sound_blocks(file: SegmentFile, durable_to: int) -> list[Block]:
    """Return the blocks of the last segment, without a torn one at its end."""
    blocks: list[Block] = []
    walk = file.start()
    try:
        for block in index.walk_blocks(file, walk, None, payloads=True):
            blocks.append(block)  # noqa: PERF402 (what came before the damage is kept)
    except DamageError as error:
        if (follows := index.find_block(file, walk.file_at + 1)) is not None:
            never_promised = 0 <= durable_to <= walk.offset
            raise corrupt(
                file.path,
                walk.file_at,
                f"{error}, and sound data follows at byte {follows}",
                _HINT_CUT.format(walk.file_at) if never_promised else "",
            ) from None
    return blocks


def _sealed_blocks(file: SegmentFile, until: int) -> list[Block]:
    try:
        return list(index.walk_blocks(file, file.start(), until))
    except DamageError as error:
        raise corrupt(file.path, 0, str(error)) from None


def _up_to_boundary(blocks: list[Block]) -> list[Block]:
    count = len(blocks)
    while count > 1 and not blocks[count - 1].header.units:
        count -= 1
    return blocks[:count]


def _end_in_file(cut: _Cut) -> int:
    last = cut.blocks[-1]
    return last.file_at + last.header.size_on_disk


def _remove_after(task_path: Path, segments: list[int], cut: _Cut | None) -> None:
    for offset in reversed(segments):
        if cut is None or offset > cut.segment:
            (task_path / codec.segment_name(offset)).unlink()
            durable.sync_directory(task_path)


def _seal(path: Path, cut: _Cut, seed: int, log_id: bytes) -> Recovered:
    end = _end_in_file(cut)
    fd = os.open(path, os.O_RDWR)
    try:
        head = durable.read_fully(fd, codec.SEGMENT_HEADER_SIZE, 0)
        file = SegmentFile(path, fd, codec.decode_segment_header(head, seed, log_id), seed)
        schema = _schema(file, cut.blocks)
        if not index.footer_starts(file, end):
            os.ftruncate(fd, end)
            _write_footer(fd, end, path.name, cut.blocks, seed)
        os.fsync(fd)
    finally:
        os.close(fd)
    durable.sync_directory(path.parent)
    last = cut.blocks[-1].header
    return Recovered(
        Place(last.end, last.crc, last.position, last.position_time_us, last.time_max_us, None),
        schema,
        empty_segment=last.preamble,
    )


def _schema(file: SegmentFile, blocks: list[Block]) -> dict[str, bytes]:
    schema: dict[str, bytes] = {}
    for block in blocks:
        if block.header.has_schema:
            schema.update(kept_frames(file.payload(block)))
    return schema


def _write_footer(fd: int, end: int, segment: str, blocks: list[Block], seed: int) -> None:
    builder = RunBuilder(segment)
    for block in blocks[1:]:
        builder.add(*block)
    last = blocks[-1].header
    footer = encode_footer(builder.refs(), last.end, last.crc, seed)
    try:
        durable.write_fully(fd, [footer], end)
    except OSError as error:
        if error.errno not in durable.NO_ROOM:
            raise
        os.ftruncate(fd, end)  # readers do not need the footer; a full disk must not stop the cut
