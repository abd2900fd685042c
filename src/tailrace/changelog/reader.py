"""Reads a task's log, in any process, while its writer appends, rolls and is replaced.

A reader never sees anything after the durable end. It plans with references to runs of blocks
(`BlockRef`), which have their place and a summary, without reading them. Blocks before the durable
end never change and never move, so a planned run can be read later, in another process, until
retention removes its segment.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Self

import numpy as np

from tailrace.changelog import format as codec
from tailrace.changelog import index
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.disclosure import kept_renames
from tailrace.changelog.endmark import MARK_NAME, UNKNOWN, read_mark
from tailrace.changelog.format import BlockRef, DamageError, HeldBlock, RunHeader, SegmentHeader, Tail
from tailrace.changelog.index import DamageAtError, SegmentFile, SegmentIndex, corrupt
from tailrace.changelog.recovery import durable_end
from tailrace.changelog.runs import RunBuilder
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.frames import Bytes, Numbers, units_of
from tailrace.protocol.metadata_frames import schema_frames
from tailrace.protocol.renames import Renames, renames_in

#: Number of segments whose indexes are cached; an index has one entry per MiB.
_INDEXES_KEPT = 32
#: Number of runs whose units are cached: the ends of ranges are read more than once.
_UNITS_KEPT = 8

_ANY_ROWS = 1 << 62

# Columns of `units_of`, and the header fields with their upper bounds.
_POSITION, _TIME = 2, 3
_HEADER_FIELD = {_POSITION: "position", _TIME: "time_max_us"}


class LogReader:
    """A reader of one task's log. May be shared between threads. Keeps no file open."""

    def __init__(self, directory: LogDirectory, task: str) -> None:
        """Use `open` instead."""
        self._directory, self._task = directory, task
        self._path = directory.task_path(task)
        self._mark_path = self._path / MARK_NAME
        self._log_id = bytes.fromhex(directory.identity.log_id)
        self._seed = codec.seed_of(directory.identity.log_id, task)
        self._lock = threading.RLock()
        self._segments: list[int] = []
        self._heads: dict[int, SegmentHeader] = {}
        self._indexes: OrderedDict[int, SegmentIndex] = OrderedDict()
        self._units: OrderedDict[tuple[int, int], Numbers] = OrderedDict()
        # The blocks of the last run whose blocks were listed; it may have grown since.
        self._run_blocks: list[index.Block] = []
        self._run_at: tuple[str, int] | None = None  # its segment, and its byte offset there
        self._start: tuple[int, int] | None = None  # first segment, first boundary in it
        self._end = Tail(0, 0, 0)

    @property
    def source_type(self) -> str:
        """The type of the log's source."""
        return self._directory.identity.source.type

    @classmethod
    def open(cls, directory: LogDirectory | Path | str, task: str) -> LogReader:
        """Open a task of a log for reading; nothing is written.

        :raises TailraceError: `LOG_MISSING`, `LOG_CORRUPT`, `LOG_FORMAT_UNKNOWN`.
        """
        if not isinstance(directory, LogDirectory):
            directory = LogDirectory.open(directory)
        reader = cls(directory, task)
        reader.refresh()
        return reader

    def close(self) -> None:
        """Clear the caches."""
        with self._lock:
            self._indexes.clear()
            self._units.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def refresh(self) -> None:
        """List the segments again. Every method does so if it has to.

        :raises TailraceError: `LOG_MISSING`, if the log does not exist any more.
        """
        with self._lock:
            found = self._directory.segments(self._task)
            # A writer may remove or replace a segment that starts at the durable end, unless it is the first.
            self._segments = [offset for offset in found if offset < self._end.offset] or found[:1]
            present = set(self._segments)
            for kept in (self._heads, self._indexes):
                for offset in [offset for offset in kept if offset not in present]:
                    del kept[offset]

    @property
    def start(self) -> int:
        """The first boundary that retention has not removed."""
        with self._lock:
            self._see_end()
            return self._see_start()

    def end(self) -> Tail:
        """Return the current durable end of the log; it never decreases.

        :raises TailraceError: `LOG_CORRUPT`, if the end mark is lost and the log's end damaged.
        """
        with self._lock:
            self._see_end()
            return self._end

    def end_on_disk(self) -> int:
        """Return the log offset of the last boundary in the log's files, which may be after `end`: a loss of
        power may have set the end mark back, until the next writer opens the log. Reads the last segment.

        :raises TailraceError: `LOG_CORRUPT`.
        """
        return durable_end(self._path, self._directory.identity.log_id, self._task).offset

    def blocks(self, start: int, end: int) -> list[BlockRef]:
        """Return the runs of blocks that contain the range, in order; a function of the range alone.

        The first and the last may contain frames outside the range, which the caller cuts off.

        :raises TailraceError: `LOG_RANGE_GONE`, `LOG_RANGE_INVALID`, `LOG_CORRUPT`.
        """
        with self._lock:
            self._check_range(start, end)
            return self._blocks(start, end)

    def read_on(
        self, offset: int, bytes_max: int, until: int | None = None
    ) -> tuple[int, list[BlockRef]] | None:
        """Return the boundary up to which to read next from `offset` on, and the runs up to there; None if
        nothing follows. The runs are those of `blocks`. The log's files are checked only once for both.

        :param offset: the log offset up to which the caller has read; may lie within a unit.
        :param bytes_max: as `boundary_within`.
        :param until: a boundary, the limit of what is returned; None: the log's end.
        :raises TailraceError: as `blocks`.
        """
        with self._lock:
            self._see_end()
            end = self._end.offset if until is None else min(self._end.offset, until)
            if end <= offset:
                return None
            begin = self._last_boundary(offset, self._see_start())
            upto = self._boundary_within(begin, _ANY_ROWS, bytes_max, end)
            return upto, [ref for ref in self._blocks(begin, upto) if ref.header.end > offset]

    def read(self, ref: BlockRef | HeldBlock) -> Bytes:
        """Return the raw frames of a run, read-only, from `ref.header.log_offset` on.

        :raises TailraceError: `LOG_RANGE_GONE`, if retention has removed it; `LOG_CORRUPT`.
        """
        if isinstance(ref, HeldBlock):
            return ref.frames
        with self._opened(ref) as fd:
            return index.read_run(fd, ref, self._seed)

    def schema_before(self, ref: BlockRef | HeldBlock) -> list[bytes]:
        """Return the schema frames in force at the start of a run, each key once, oldest first."""
        if isinstance(ref, HeldBlock):
            return [frame for key, frame in ref.schema.items() if not key.startswith("S")]
        first_offset = codec.segment_offset(ref.segment)
        if first_offset is None:
            raise self._gone(ref.header.log_offset)
        with self._lock:
            return list(self._schema_at(first_offset, ref.header.log_offset).values())

    def all_schema_frames(self, start: int, end: int) -> list[bytes]:
        """Return the schema frames in force at `start`, then those in the range, in order.

        :raises TailraceError: as `blocks`.
        """
        with self._lock:
            refs = self.blocks(start, end)
            if not refs:
                at = bisect.bisect_right(self._segments, start) - 1
                return list(self._schema_at(self._segments[at], start).values()) if at >= 0 else []
            found = self.schema_before(refs[0])
            for ref in refs:
                if ref.header.has_schema:
                    found += [frame for _, frame in schema_frames(self.read(ref))]
            return found

    def renames(self) -> Renames:
        """Return the names that columns have had: those that capture stores, or else those in the log.

        :raises TailraceError: `LOG_CORRUPT`, `LOG_FORMAT_UNKNOWN`; `LOG_RANGE_GONE`.
        """
        kept = kept_renames(self._directory, self._task)
        return kept if kept is not None else renames_in(self.all_schema_frames(self.start, self.end().offset))

    def boundary_within(self, start: int, rows_max: int, bytes_max: int, end: int) -> int:
        """Return the largest boundary up to `end`, inclusive, so that rows and raw bytes from `start` on do
        not exceed the limits, but at least the end of one unit of any size; `end` if it equals `start`.

        :raises TailraceError: as `blocks`.
        """
        with self._lock:
            self._check_range(start, end)
            return self._boundary_within(start, rows_max, bytes_max, end)

    def rest_of_unit(self, offset: int) -> list[BlockRef]:
        """Return the runs from an offset within a unit up to the run in which it ends, without reading them.

        :raises TailraceError: `LOG_RANGE_GONE`, `LOG_CORRUPT`.
        """
        with self._lock:
            self._see_end()
            found = []
            for ref in self._runs(offset, self._end.offset):
                found.append(ref)
                if ref.header.boundary > offset:
                    break
            return found

    def boundaries(self, start: int, end: int) -> Numbers:
        """Return the boundaries in `(start, end]`, in order; `start` and `end` must be boundaries.

        :raises TailraceError: as `blocks`.
        """
        with self._lock:
            found = [self._units_in(ref)[:, 0] for ref in self.blocks(start, end)]
            every: Numbers = np.concatenate([np.empty(0, np.int64), *found])
            return every[(every > start) & (every <= end)]

    def boundary_up_to(self, offset: int) -> int:
        """Return the last boundary up to `offset`, inclusive: where reading from `offset` on has to start.

        :raises TailraceError: `LOG_RANGE_GONE`, `LOG_RANGE_INVALID`, `LOG_CORRUPT`.
        """
        with self._lock:
            return self._last_boundary(offset, self.start)

    def boundary_at_position(self, lsn: int) -> int:
        """Return the boundary at which the first unit with a position after `lsn` starts.

        :raises TailraceError: `LOG_RANGE_GONE`, if retention has removed such units.
        """
        with self._lock:
            return self._start_of_first(lsn + 1, _POSITION)

    def boundary_at_time(self, time_us: int) -> int:
        """Return the boundary at which the first unit that was committed at or after a time starts.

        :param time_us: since 1970. Commit times may decrease from one unit to the next; the first
            such unit in the log's order is returned.
        :raises TailraceError: `LOG_RANGE_GONE`, if retention has removed such units.
        """
        with self._lock:
            return self._start_of_first(time_us, _TIME)

    # The methods below must be called with the lock held.

    def _see_end(self) -> None:
        mark = read_mark(self._mark_path, self._seed)
        if mark is not None and mark.offset != UNKNOWN:
            end = Tail(mark.offset, mark.position, mark.position_time_us)
        else:
            end = durable_end(self._path, self._directory.identity.log_id, self._task)
        # With a damaged slot the mark has an older end; what was durable before still is.
        if end.offset > self._end.offset or not self._segments:
            self._end = max(end, self._end, key=lambda tail: tail.offset)
            self.refresh()

    def _see_start(self) -> int:
        self.refresh()  # retention may have removed segments
        if not self._segments or self._segments[0] >= self._end.offset:
            return self._end.offset
        while self._start is None or self._start[0] != self._segments[0]:
            first = self._segments[0]
            try:
                self._start = (first, self._first_boundary())
            except TailraceError as error:
                # Retention removed it after it was listed: the next segment is the first now.
                if error.kind is not Kind.LOG_RANGE_GONE or self._segments[:1] in ([], [first]):
                    raise
        return self._start[1]

    def _blocks(self, start: int, end: int) -> list[BlockRef]:
        if start == end:
            return []
        return [self._clip(ref, start, end) for ref in self._runs(start, end)]

    def _boundary_within(self, start: int, rows_max: int, bytes_max: int, end: int) -> int:
        if start == end:
            return end
        best, rows = start, 0
        for ref in self._runs(start, end):
            run = ref.header
            if not _is_within(run, start, end, bytes_max) and run.end == self._end.offset:
                # The run still grows, so a cache of its units would soon be useless: read only a part.
                run = (ref := self._deciding(ref, start, rows_max - rows, bytes_max, end)).header
            if _is_within(run, start, end, bytes_max) and rows + run.rows <= rows_max:
                rows += run.rows
                best = max(best, run.boundary)
                continue
            units = self._units_in(ref)
            before, upto = np.searchsorted(units[:, 0], (start, end), side="right")
            rows_before = int(units[before - 1, 1]) if before else 0
            units = units[before:upto]
            fits = (units[:, 0] <= start + bytes_max) & (rows + units[:, 1] - rows_before <= rows_max)
            fitting = int(fits.sum())  # offsets and rows increase, so these are the first ones
            if fitting:
                best = int(units[fitting - 1, 0])
            if fitting < len(units):
                return best if best > start else int(units[0, 0])
            rows += run.rows - rows_before
        return best

    def _last_boundary(self, offset: int, first: int) -> int:
        if offset > self._end.offset:
            raise self._beyond(first, offset)
        if offset < first:
            # The first segment may start within a unit whose beginning was removed.
            raise self._gone(min(offset, self._segments[0] - 1) if self._segments else offset)
        # Checking the offset alone is fast even if the run that contains it still grows.
        if offset in {first, self._end.offset} or self._is_boundary(offset):
            return offset
        for ref in self._runs(offset, offset + 1):
            units = self._units_in(ref)
            before = int(np.searchsorted(units[:, 0], offset, side="right"))
            if before:
                return int(units[before - 1, 0])
            if ref.header.open_at_start is None:
                return max(ref.header.log_offset, first)
            return max(self._boundary_up_to(ref.header.log_offset), first)
        return first

    def _check_range(self, start: int, end: int) -> None:
        first = self.start
        if not 0 <= start <= end <= self._end.offset:
            raise self._beyond(start, end)
        if start < first:
            raise self._gone(start)
        for offset in (start, end):
            if offset not in {first, self._end.offset} and not self._is_boundary(offset):
                raise TailraceError(
                    Kind.LOG_RANGE_INVALID,
                    f"read the change log: offset {offset} is not where a transaction ends",
                    f"the transaction begins at {self._last_boundary(offset, first)}: use that",
                    {"task": self._task},
                )

    def _beyond(self, start: int, end: int) -> TailraceError:
        hint = "if a sink or a checkpoint has these offsets, it is another log's, or this log lost its end"
        if self._end.offset < end <= self.end_on_disk():
            hint = "the end mark is behind, as after a loss of power: run the pipeline, which repairs it"
        return TailraceError(
            Kind.LOG_RANGE_INVALID,
            f"read the change log from {start} to {end}: it is durable from {self.start} "
            f"to {self._end.offset}",
            hint,
            {"task": self._task},
        )

    def _gone(self, offset: int) -> TailraceError:
        self.refresh()
        if self._segments and offset >= self._segments[0]:
            path = self._path / codec.segment_name(offset)
            return corrupt(path, 0, f"the segment that holds log offset {offset} is missing")
        return TailraceError(
            Kind.LOG_RANGE_GONE,
            f"read the change log from {offset}: retention has removed it",
            "take a new snapshot of the sink's tables, and raise the limits in log.retention; "
            "nothing was skipped",
            {"task": self._task, "first_offset": self._segments[0] if self._segments else 0},
        )

    def _is_boundary(self, offset: int) -> bool:
        if offset in self._segments:
            # Read from the segment itself: retention may be removing the one before it.
            return any(ref.header.open_at_start is None for ref in self._runs(offset, offset + 1))
        for ref in self._runs(offset - 1, offset):
            if ref.header.end == self._end.offset:
                ref = self._clip(ref, offset - 1, offset)  # noqa: PLW2901 - as in `boundary_within`
            if ref.header.boundary == offset:
                return True
            units = self._units_in(ref)
            at = int(np.searchsorted(units[:, 0], offset))
            return at < len(units) and int(units[at, 0]) == offset
        return False

    def _runs(self, start: int, end: int) -> Iterator[BlockRef]:
        """Yield the runs that contain bytes of `[start, end)`, complete as they are indexed."""
        at = max(bisect.bisect_right(self._segments, start) - 1, 0)
        while at < len(self._segments) and self._segments[at] < end:
            refs = self._index(at).refs
            first = bisect.bisect_right(refs, start, key=lambda ref: ref.header.end)
            for ref in refs[first:]:
                if ref.header.log_offset >= end:
                    return
                yield ref
            at += 1

    def _index(self, at: int) -> SegmentIndex:
        """Return the index of the segment number `at` in the list, up to the durable end."""
        offset = self._segments[at]
        following = self._segments[at + 1] if at + 1 < len(self._segments) else self._end.offset
        found = self._indexes.get(offset) or SegmentIndex(self._path / codec.segment_name(offset))
        if offset < self._end.offset:  # else nothing in it is durable, and a writer may replace it
            self._indexes[offset] = found
            self._indexes.move_to_end(offset)
            if len(self._indexes) > _INDEXES_KEPT:
                self._indexes.popitem(last=False)
        try:
            found.extend(min(following, self._end.offset), self._seed, self._log_id)
        except FileNotFoundError:
            raise self._gone(offset) from None
        except DamageAtError as damage:
            raise corrupt(found.path, damage.file_at, str(damage)) from None
        return found

    def _head(self, offset: int) -> SegmentHeader:
        if offset not in self._heads:
            path = self._path / codec.segment_name(offset)
            try:
                file = SegmentFile.open(path, self._seed, self._log_id)
            except FileNotFoundError:
                raise self._gone(offset) from None
            except DamageError as error:
                raise corrupt(path, 0, str(error)) from None
            file.close()
            self._heads[offset] = file.header
        return self._heads[offset]

    def _units_in(self, ref: BlockRef) -> Numbers:
        """Return the units that end in a run, each as (log offset after it, rows from the run's start
        up to there, position, time).
        """
        key = (ref.header.log_offset, ref.header.raw_size)
        if key not in self._units:
            units = units_of(self.read(ref), ref.header.state_at_start())
            units[:, 0] += ref.header.log_offset
            self._units[key] = units
            if len(self._units) > _UNITS_KEPT:
                self._units.popitem(last=False)
        return self._units[key]

    def _first_boundary(self) -> int:
        for ref in self._runs(self._segments[0], self._end.offset):
            if ref.header.open_at_start is None:
                return ref.header.log_offset
            if ref.header.units:
                return int(self._units_in(ref)[0, 0])
        return self._end.offset

    def _start_of_first(self, value: int, column: int) -> int:
        """Return the log offset of the first unit whose position or time is at least `value`."""
        start = self.start
        if not self._segments:
            return start
        first = self._head(self._segments[0])
        field = attrgetter(_HEADER_FIELD[column])
        if first.first_offset > 0 and field(first) >= value:
            raise self._gone(first.first_offset - 1)
        at = bisect.bisect_left(self._segments, value, key=lambda offset: field(self._head(offset)))
        for ref in self._runs(self._segments[max(at - 1, 0)], self._end.offset):
            if field(ref.header) < value:
                continue
            units = self._units_in(ref)
            reached = np.flatnonzero(units[:, column] >= value)
            if len(reached):
                found = int(reached[0])
                if units[found, 0] <= start:  # the first segment begins within this unit
                    raise self._gone(first.first_offset - 1)
                before = int(units[found - 1, 0]) if found else self._boundary_up_to(ref.header.log_offset)
                return max(before, start)
        return self._end.offset

    def _boundary_up_to(self, offset: int) -> int:
        at = bisect.bisect_left(self._segments, offset)
        for place in range(at - 1, -1, -1):
            for ref in reversed(self._index(place).refs):
                if 0 <= ref.header.boundary <= offset:
                    return ref.header.boundary
        return self.start

    def _schema_at(self, first_offset: int, log_offset: int) -> dict[str, bytes]:
        """Return the schema frames in force at a log offset of a segment, by key."""
        self._see_end()
        at = bisect.bisect_left(self._segments, first_offset)
        if at == len(self._segments) or self._segments[at] != first_offset:
            raise self._gone(log_offset)
        found = self._index(at)
        schema = dict(found.preamble)
        for ref in found.refs:
            if ref.header.log_offset >= log_offset:
                break
            if ref.header.has_schema:
                schema.update(self._schema_in(found, ref, log_offset))
        return schema

    def _schema_in(self, found: SegmentIndex, ref: BlockRef, before: int) -> list[tuple[str, bytes]]:
        """Return the schema frames of a run's blocks that start before a log offset."""
        if ref.header.end > before and ref.blocks > 1:
            blocks = [block for block in self._blocks_in(ref) if block.header.has_schema]
            parts = [_run_of(ref.segment, [block]) for block in blocks if block.header.log_offset < before]
        else:
            parts = [ref]
        frames: list[tuple[str, bytes]] = []
        for part in parts:
            key = part.file_at, part.blocks
            if key not in found.schemas:
                found.schemas[key] = schema_frames(self.read(part))
            frames += found.schemas[key]
        return frames

    def _clip(self, ref: BlockRef, start: int, end: int) -> BlockRef:
        """Return the part of a run whose blocks contain bytes of `[start, end)`."""
        if ref.blocks == 1 or (ref.header.log_offset >= start and ref.header.end <= end):
            return ref
        blocks = self._blocks_in(ref)
        first = bisect.bisect_right(blocks, start, key=lambda block: block.header.end)
        upto = bisect.bisect_left(blocks, end, key=lambda block: block.header.log_offset)
        return _run_of(ref.segment, blocks[first:upto])

    def _deciding(self, ref: BlockRef, start: int, rows_max: int, bytes_max: int, end: int) -> BlockRef:
        """Return the part of a run from `start` up to the block in which a unit has ended and a limit is
        exceeded, or up to `end`.
        """
        blocks = self._blocks_in(ref)
        rows = units = 0
        # A block that starts before `start` is not counted: how much of it lies before that is unknown.
        for block in blocks[bisect.bisect_left(blocks, start, key=lambda block: block.header.log_offset) :]:
            rows, units = rows + block.header.rows, units + block.header.units
            if units and (rows > rows_max or block.header.end > start + bytes_max):
                end = min(end, block.header.end)
                break
        return self._clip(ref, start, end)

    def _blocks_in(self, ref: BlockRef) -> list[index.Block]:
        """Return the blocks of a run; the last run's are cached, as it is read often while it grows."""
        place = ref.segment, ref.file_at
        known = self._run_blocks[: ref.blocks] if self._run_at == place else []
        rest = ref
        if known:
            last = known[-1]
            at = last.file_at + last.header.size_on_disk
            left = ref.file_at + ref.size_on_disk - at
            header = ref.header._replace(log_offset=last.header.end)
            rest = BlockRef(ref.segment, at, header, ref.blocks - len(known), left)
        if rest.blocks:
            with self._opened(rest) as fd:
                more = index.run_blocks(fd, rest, self._seed)
                if known and more[0].header.chain != known[-1].header.crc:
                    raise DamageAtError("a block does not continue the block before it", rest.file_at)
            known += more
            self._run_at, self._run_blocks = place, known
        elif known[-1].header.crc != ref.header.crc:
            self._run_at = None
            return self._blocks_in(ref)
        return known

    @contextlib.contextmanager
    def _opened(self, ref: BlockRef) -> Iterator[int]:
        """Open a run's segment; errors raised inside name the file."""
        path = self._path / ref.segment
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise self._gone(ref.header.log_offset) from None
        try:
            yield fd
        except DamageAtError as damage:
            raise corrupt(path, damage.file_at, str(damage)) from None
        finally:
            os.close(fd)


def _is_within(run: RunHeader, start: int, end: int, bytes_max: int) -> bool:
    """Return whether all of a run lies in a range, and within `bytes_max` bytes of the range's start."""
    return run.log_offset >= start and run.end <= min(end, start + bytes_max)


def _run_of(segment: str, blocks: Sequence[index.Block]) -> BlockRef:
    """Return a run of these consecutive blocks, of which there is at least one."""
    builder = RunBuilder(segment)
    for block in blocks:
        builder.add(*block)
    return builder.refs()[0]
