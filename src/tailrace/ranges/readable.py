"""Whether readers can read a log: every change of it is looked for, as they do, and no value decoded."""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.format import BlockRef
from tailrace.changelog.reader import LogReader
from tailrace.changelog.verify import Damage
from tailrace.errors import Kind, TailraceError
from tailrace.ranges.changes import stretches_of
from tailrace.ranges.plan import Piece, pieces


def unreadable(log: LogDirectory) -> Iterator[Damage]:
    """Yield where readers would stop, the first place of each piece; the log's bytes are sound.

    :raises TailraceError: `LOG_CORRUPT`, if they are not.
    """
    for task in log.tasks():
        with LogReader.open(log, task) as reader:
            start, end = reader.start, reader.end().offset
            for piece in pieces(task, reader.blocks(start, end), start, end):
                found = _stop_in(reader, log, piece)
                if found is not None:
                    yield found


def _stop_in(reader: LogReader, log: LogDirectory, piece: Piece) -> Damage | None:
    reached = piece.start
    try:
        for stretch in stretches_of(reader, piece):
            for changes in stretch.changes:
                changes.tuples()
            reached = stretch.end
    except TailraceError as error:
        if error.kind in {Kind.LOG_RANGE_GONE, Kind.SCHEMA_PENDING}:
            return None  # retention took it meanwhile, or capture has yet to learn what it is
        blocks = (block for block in piece.blocks if isinstance(block, BlockRef))
        block = next(block for block in blocks if block.header.end > reached)
        inside = (log.task_path(piece.task) / block.segment).relative_to(log.path)
        return Damage(str(inside), block.file_at, f"no reader gets past offset {reached}: {error.message}")
    return None
