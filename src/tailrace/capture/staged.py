"""Staged files: the rows of one chunk, on their way from whoever read them into the log.

A staged file holds frames of rows, one after another, as they are to stand in the log but for their
ordinal. It counts for nothing by itself: whoever wrote it tells its length, its rows and its
checksum, and a file that is not exactly that is never taken. Nor is any after a crash: what lies
there when a task opens its log is removed, so nothing needs to be flushed to the disk.

Each reader has a folder of its own, and each file a name of its own: what a doubled or late writer
leaves behind goes with the folder, or finds no folder any more.
"""

from __future__ import annotations

import os
import secrets
import shutil
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import crc32c

from tailrace import failpoints
from tailrace.capture.units import RowFrame
from tailrace.changelog import durable
from tailrace.errors import Kind, TailraceError
from tailrace.protocol import frames

#: In a task's folder of the log.
FOLDER = "staged"

#: The part of a file that is looked at in one step.
_READ_BYTES = 1024 * 1024

_SIZE = struct.Struct("!i")  # of a frame, after its first byte
_ROWS = struct.Struct("!I")  # the last thing before the text


class TooLarge(Exception):  # noqa: N818 - not an error: the chunk is read in another way
    """Raised to a writer whose file would become larger than it may."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file that is whole, as its writer tells it. Sizes in bytes; `crc` of all of them."""

    path: str
    size: int
    rows: int
    crc: int


class StagedWriter:
    """Writes one staged file into `folder`; removes it again unless `finish` was called.

    :param size_max: a larger one is not written.
    :raises TailraceError: `ENVIRONMENT_UNFIT` if the folder is not there; as `write`.
    """

    def __init__(self, folder: str, size_max: int) -> None:
        self._path = Path(folder) / f"{secrets.token_hex(8)}.rows"
        self._size_max = size_max
        self._size = self._rows = self._crc = 0
        self._finished = False
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            self._fd = os.open(self._path, flags, durable.FILE_MODE)
        except FileNotFoundError:
            raise TailraceError(
                Kind.ENVIRONMENT_UNFIT,
                "stage a chunk of a snapshot: the log's directory is not there for the executor",
                "log.path must lead to one directory on the driver and on every executor; or set "
                "source.snapshot_read_on: process",
                {"folder": folder},
            ) from None
        except OSError as error:
            raise self._failure(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        if not self._finished:
            self._path.unlink(missing_ok=True)

    def write(self, rows: Sequence[RowFrame]) -> None:
        """Append frames.

        :raises TooLarge: if the file would become larger than it may.
        :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        for frame, count in rows:
            if self._size + len(frame) > self._size_max:
                raise TooLarge
            try:
                self._size = durable.write_fully(self._fd, [frame], self._size)
            except OSError as error:
                raise self._failure(error) from error
            self._crc = crc32c.crc32c(frame, self._crc)
            self._rows += count
            failpoints.hit("staging.in_copy")

    def finish(self) -> StagedFile:
        """Leave the file to whoever is told of it."""
        self._finished = True
        return StagedFile(str(self._path), self._size, self._rows, self._crc)

    def _failure(self, error: OSError) -> TailraceError:
        return durable.write_failure(error, "stage a chunk of a snapshot", self._path)


def check(staged: StagedFile) -> None:
    """Make sure that a file is what its writer told.

    :raises TailraceError: `SPARK_FAILED` if not: it is to be written again.
    """
    crc = size = 0
    try:
        with open(staged.path, "rb", buffering=0) as file:
            while data := file.read(_READ_BYTES):
                crc, size = crc32c.crc32c(data, crc), size + len(data)
    except OSError as error:
        raise _unfit(staged, error.strerror or type(error).__name__) from error
    if (size, crc) != (staged.size, staged.crc):
        raise _unfit(staged, f"{size} of {staged.size} bytes, or other ones")


def rows_of(staged: StagedFile) -> Iterator[RowFrame]:
    """Yield the frames of a file that was checked, in order.

    :raises TailraceError: `SPARK_FAILED` if they are not what was checked.
    """
    left, missing = staged.rows, staged.size
    with open(staged.path, "rb") as file:
        while missing:
            head = file.read(1 + _SIZE.size)
            size = 1 + _SIZE.unpack_from(head, 1)[0] if len(head) == 1 + _SIZE.size else 0
            if not frames.SNAPSHOT_TEXT_AT <= size <= missing:
                raise _unfit(staged, "no frames of rows")
            frame = bytearray(size)
            frame[: len(head)] = head
            if file.readinto(memoryview(frame)[len(head) :]) != size - len(head):
                raise _unfit(staged, "less than was checked")
            rows = _ROWS.unpack_from(frame, frames.SNAPSHOT_TEXT_AT - _ROWS.size)[0]
            yield frame, rows
            left, missing = left - rows, missing - size
    if left:
        raise _unfit(staged, "another number of rows")


def new_folder(parent: Path) -> Path:
    """Return a new empty folder in `parent`, which is made if need be.

    :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`.
    """
    folder = parent / secrets.token_hex(8)
    try:
        durable.make_directory(folder)
    except OSError as error:
        raise durable.write_failure(error, "make a folder for staged chunks", folder) from error
    return folder


def remove(folder: Path) -> None:
    """Remove a folder and all in it; what can't be removed is left for the next start."""
    shutil.rmtree(folder, ignore_errors=True)


def _unfit(staged: StagedFile, found: str) -> TailraceError:
    return TailraceError(
        Kind.SPARK_FAILED,
        f"take in a staged chunk of a snapshot: {found}",
        "log.path must lead to one directory on the driver and on every executor; it is tried again",
        {"file": staged.path},
    )
