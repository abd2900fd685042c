"""The end mark: a file that says how far a task's log is durable, and that fences writers.

A writer that takes over replaces the file with a *new* one, with a higher epoch. If the previous
writer still runs, it sees that the path no longer leads to the file that it has open; what it may
still write into the old file is never read.

The mark is written after each fsync of the log and is itself not fsynced: after a power failure
it may be behind the log's durable end, never ahead of it.
"""

from __future__ import annotations

import os
from pathlib import Path

from tailrace.changelog import durable
from tailrace.changelog.format import (
    MARK_FILE_SIZE,
    MARK_SLOT_SIZE,
    DamageError,
    EndMark,
    Tail,
    decode_mark,
    encode_mark,
)
from tailrace.errors import Kind, TailraceError

MARK_NAME = "end"
#: A mark's offset if the mark was lost, so that it is not known how far the log is durable.
UNKNOWN = -1
#: Number of times that the file is read: a slot may be half written during one.
_READ_ATTEMPTS = 3


class EndMarkFile:
    """The end mark as its writer uses it: publishes the durable end, and detects a replaced file."""

    def __init__(self, path: Path, seed: int, mark: EndMark) -> None:
        """Replace the mark at `path`: both slots contain `mark`, and the previous writer is fenced.

        :raises TailraceError: `LOG_FULL` or `LOG_WRITE_FAILED`.
        """
        self._path, self._seed, self._mark = path, seed, mark
        slots = [encode_mark(mark._replace(sequence=number), seed) for number in (0, 1)]
        durable.write_atomically(path, b"".join(slots))
        self._mark = mark._replace(sequence=1)
        self._fd = os.open(path, os.O_RDWR)
        self._held = os.fstat(self._fd)

    @property
    def mark(self) -> EndMark:
        """The mark that was published last."""
        return self._mark

    def check(self) -> None:
        """Check that no other writer has taken over.

        :raises TailraceError: `LOG_FENCED`; `LOG_MISSING` if the log was moved or removed.
        """
        try:
            found = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            raise TailraceError(
                Kind.LOG_MISSING,
                "write the change log: its end mark is gone",
                "the log was moved or removed while it was written: put it back, then start again. What was "
                "acknowledged is in it; the source sends the rest again",
                {"file": str(self._path)},
            ) from None
        if found.st_ino != self._held.st_ino or found.st_dev != self._held.st_dev:
            raise TailraceError(
                Kind.LOG_FENCED,
                "write the change log: another writer has taken it over",
                "this process ends, and nothing that it wrote after the takeover was kept; the other one "
                "continues. To capture here again, stop that one, then start this one again",
                {"file": str(self._path), "epoch": self._mark.epoch},
            )

    def publish(self, tail: Tail) -> None:
        """Publish to every process that the log is durable up to `tail`.

        :raises OSError: if the write fails; the slot with the previous mark is then intact.
        """
        mark = EndMark(
            self._mark.sequence + 1,
            self._mark.epoch,
            tail.offset,
            tail.position,
            tail.position_time_us,
        )
        slot_at = mark.sequence % 2 * MARK_SLOT_SIZE
        durable.write_fully(self._fd, [encode_mark(mark, self._seed)], slot_at)
        self._mark = mark

    def close(self) -> None:
        os.close(self._fd)


def read_slots(data: bytes, seed: int) -> tuple[list[EndMark], list[tuple[int, str]]]:
    """Return the sound marks in the file's bytes, and (file offset, description) of each damage."""
    marks: list[EndMark] = []
    damage: list[tuple[int, str]] = []
    for at in range(0, MARK_FILE_SIZE, MARK_SLOT_SIZE):
        try:
            marks.append(decode_mark(data[at : at + MARK_SLOT_SIZE], seed))
        except DamageError as error:
            damage.append((at, str(error)))
    if len(data) > MARK_FILE_SIZE:
        damage.append((MARK_FILE_SIZE, "the end mark is longer than its two slots"))
    return marks, damage


def read_mark(path: Path, seed: int) -> EndMark | None:
    """Return the newest sound mark; `None` if there is none. Its offset may be `UNKNOWN`."""
    marks: list[EndMark] = []
    for _ in range(_READ_ATTEMPTS):
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        marks, damage = read_slots(data, seed)
        if not damage:
            break
    return max(marks, default=None)
