"""Registered readers: who has read how far, so that retention knows what is still needed.

One small file a reader, which only that reader writes: `<log>/readers/<name>.json`. One that is not to
outlive its process has a lock beside it, `.<name>.lock`, which ends with the process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tailrace.changelog import durable
from tailrace.changelog.directory import LogDirectory, decode_name, encode_name
from tailrace.changelog.lock import is_locked, lock_file
from tailrace.errors import Kind, TailraceError

READERS = "readers"
_SUFFIX, _LOCK_SUFFIX = ".json", ".lock"


@dataclass(frozen=True, slots=True)
class RegisteredReader:
    """A reader and, by task, the log offset before which it needs nothing any more: a boundary.

    `dropped`: retention took away what it had not read; its offsets hold nothing back.
    `kept`: by task, what the reader itself keeps of how far it is, a JSON object.
    """

    name: str
    offsets: Mapping[str, int] = field(default_factory=dict)
    updated_us: int = 0
    dropped: bool = False
    kept: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Readers:
    """The registered readers of one log."""

    def __init__(self, directory: LogDirectory) -> None:
        self._path = directory.path / READERS

    @classmethod
    def open(cls, path: Path | str) -> Readers:
        """Open the readers of the log at `path`.

        :raises TailraceError: as `LogDirectory.open`.
        """
        return cls(LogDirectory.open(path))

    def register(self, name: str, offsets: Mapping[str, int]) -> RegisteredReader:
        """Make a reader known, from these offsets on; one that is known stays where it is.

        Tasks that it did not know are added. A dropped reader begins again at `offsets`.

        :raises TailraceError: `LOG_CORRUPT`, `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        known = self._read(name)
        if known is None or known.dropped:
            return self._write(RegisteredReader(name, dict(offsets)))
        if set(offsets) <= set(known.offsets):
            return known
        return self._write(replace(known, offsets={**offsets, **known.offsets}))

    def begin(self, name: str, task: str, offset: int) -> int:
        """As `register`, for one task; return where it stands there: at `offset` at most.

        One that had read further was set back by its owner, and needs again what it had read.

        :raises TailraceError: as `register`.
        """
        known = self.register(name, {task: offset})
        if known.offsets[task] > offset:
            known = self._write(replace(known, offsets={**known.offsets, task: offset}))
        return known.offsets[task]

    def commit(self, name: str, task: str, offset: int, kept: Mapping[str, Any] | None = None) -> None:
        """Say that a reader needs nothing of a task before `offset`. Going back is ignored:
        an offset says what may be removed, and that can't be taken back.

        :param kept: takes the place of what the reader kept for the task, in the same act.
        :raises TailraceError: `LOG_RANGE_GONE`, if the reader was dropped; `LOG_RANGE_INVALID`,
            if it is not registered; `LOG_CORRUPT`, `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        reader = self.require(name)
        known = reader.offsets.get(task, -1)
        if offset > known or (kept is not None and kept != reader.kept.get(task)):
            offsets = {**reader.offsets, task: max(offset, known)}
            keeps = reader.kept if kept is None else {**reader.kept, task: kept}
            self._write(replace(reader, offsets=offsets, kept=keeps))

    def get(self, name: str) -> RegisteredReader | None:
        """Return a reader as it is known; None if it is not.

        :raises TailraceError: `LOG_CORRUPT`.
        """
        return self._read(name)

    def require(self, name: str) -> RegisteredReader:
        """Return a reader that may go on.

        :raises TailraceError: as `commit`.
        """
        reader = self._read(name)
        if reader is None:
            raise TailraceError(
                Kind.LOG_RANGE_INVALID,
                f"commit for reader {name!r}: it is not on the log's list, or was taken off it while it read",
                "`tailrace log forget` is for readers that do not come back. Start this one again: it is "
                "registered again, and goes on if the log still has what it needs",
                {"path": str(self._path)},
            )
        if reader.dropped:
            raise TailraceError(
                Kind.LOG_RANGE_GONE,
                f"go on as reader {name!r}: it was dropped, because it held back more of the log "
                "than log.retention allows",
                "take its tables again from the source, then register it again; or set "
                "log.retention.on_slow_reader to hold",
                {"path": str(self._path)},
            )
        return reader

    def all(self) -> list[RegisteredReader]:
        """Return every registered reader, by name.

        :raises TailraceError: `LOG_CORRUPT`: what a reader still needs is not guessed.
        """
        if not self._path.is_dir():
            return []
        names = {
            decode_name(path.name.removesuffix(durable.PREVIOUS_SUFFIX).removesuffix(_SUFFIX))
            for path in self._path.iterdir()
            if not path.name.startswith(".")
        }
        found = (self._read(name) for name in sorted(names))
        return [reader for reader in found if reader is not None]

    def drop(self, name: str) -> None:
        """Mark a reader as dropped, durably: it gets an error when it next commits."""
        reader = self._read(name)
        if reader is not None and not reader.dropped:
            self._write(replace(reader, dropped=True))

    def remove(self, name: str) -> None:
        """Forget a reader; it holds nothing back any more. Unknown names are ignored."""
        path = self._file(name)
        # The newest generation goes last: what is left must not look like an older commit.
        durable.previous_of(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        if self._path.is_dir():
            durable.sync_directory(self._path)

    @contextlib.contextmanager
    def temporary(self, purpose: str) -> Iterator[str]:
        """Give a name that no other reader has, for one that is forgotten at the end of the block, or when
        its process ends.

        :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        durable.make_directory(self._path)
        name = f"{purpose}:{secrets.token_hex(4)}"
        lock = self._path / f".{encode_name(name)}{_LOCK_SUFFIX}"
        try:
            fd = lock_file(lock, f"pid {os.getpid()}\n", patience_s=1.0)  # while somebody looks at it
        except OSError as error:
            raise durable.write_failure(error, f"lock the reader {name}", lock) from error
        try:
            yield name
        finally:
            self.remove(name)
            lock.unlink(missing_ok=True)
            os.close(fd)

    def remove_ended(self) -> None:
        """Forget temporary readers whose process has ended."""
        for lock in self._path.glob(f".*{_LOCK_SUFFIX}"):
            if os.access(lock, os.R_OK) and not is_locked(lock):
                self.remove(decode_name(lock.name[1:].removesuffix(_LOCK_SUFFIX)))
                lock.unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self._path / f"{encode_name(name)}{_SUFFIX}"

    def _read(self, name: str) -> RegisteredReader | None:
        content = durable.read_state(self._file(name))
        return None if content is None else RegisteredReader(**content)

    def _write(self, reader: RegisteredReader) -> RegisteredReader:
        written = replace(reader, updated_us=time.time_ns() // 1000)
        durable.make_directory(self._path)
        durable.write_state(
            self._file(reader.name),
            {
                "name": written.name,
                "offsets": dict(written.offsets),
                "updated_us": written.updated_us,
                "dropped": written.dropped,
                "kept": {task: dict(kept) for task, kept in written.kept.items()},
            },
        )
        return written
