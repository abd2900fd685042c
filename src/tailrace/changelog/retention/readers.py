"""Registered readers (consumers) and the log offsets up to which they have read, for retention.

Each reader has a small file, which only that reader's process writes: `<log>/readers/<name>.json`. Several
of its threads may: an engine stores its offset there, and the log offset that it has released. A temporary
reader also has a lock, `.<name>.temporary`, which ends with its process. (A sink may have `.<name>.lock`.)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
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
_SUFFIX, _LOCK_SUFFIX = ".json", ".temporary"
#: The locks that earlier versions gave to temporary readers; no sink's name has a colon.
_EARLIER_LOCKS = f".{encode_name('replay:')}*.lock"
#: Age beyond which no process renames its temporary file any more, in seconds.
_LEFT_S = 3600.0
#: By the folder of a log's readers: held from reading a reader's file until it is written.
_locks: dict[str, threading.RLock] = {}

os.register_at_fork(after_in_child=_locks.clear)


@dataclass(frozen=True, slots=True)
class RegisteredReader:
    """A reader and, by task, the boundary before which it does not need the log any more.

    `dropped`: retention removed segments that it had not read; its offsets hold no segments.
    `kept`: by task, a JSON object with the reader's own record of its progress.
    """

    name: str
    offsets: Mapping[str, int] = field(default_factory=dict)
    updated_us: int = 0
    dropped: bool = False
    kept: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Readers:
    """The registered readers of one log."""

    def __init__(self, directory: LogDirectory) -> None:
        self._directory = directory
        self._path = directory.path / READERS
        self._lock = _locks.setdefault(str(self._path), threading.RLock())

    @classmethod
    def open(cls, path: Path | str) -> Readers:
        """Open the readers of the log at `path`.

        :raises TailraceError: as `LogDirectory.open`.
        """
        return cls(LogDirectory.open(path))

    def register(self, name: str, offsets: Mapping[str, int]) -> RegisteredReader:
        """Register a reader at these offsets; a registered reader keeps the offsets that it has.

        Missing tasks are added. A dropped reader starts again at `offsets`.

        :raises TailraceError: `LOG_CORRUPT`, `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        with self._lock:
            known = self._read(name)
            if known is None or known.dropped:
                # Twice: a commit on a full disk is written over the previous generation.
                self._write(RegisteredReader(name, dict(offsets)))
                return self._write(RegisteredReader(name, dict(offsets)))
            if set(offsets) <= set(known.offsets):
                return known
            return self._write(replace(known, offsets={**offsets, **known.offsets}))

    def begin(self, name: str, task: str, offset: int) -> int:
        """Register a reader for one task as `register` does; return its offset there, at most `offset`.

        A larger registered offset is set back: the reader needs the log from `offset` on again.

        :raises TailraceError: as `register`.
        """
        with self._lock:
            known = self.register(name, {task: offset})
            if known.offsets[task] > offset:
                known = self._write(replace(known, offsets={**known.offsets, task: offset}))
            return known.offsets[task]

    def commit(self, name: str, task: str, offset: int, kept: Mapping[str, Any] | None = None) -> None:
        """Record that a reader needs nothing of a task before `offset`. A lower offset than the
        recorded one is ignored: what lies before that may already be removed.

        :param kept: replaces the reader's own record for the task, atomically with the offset.
        :raises TailraceError: `LOG_RANGE_GONE`, if the reader was dropped; `LOG_RANGE_INVALID`,
            if it is not registered; `LOG_CORRUPT`, `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        with self._lock:
            reader = self.require(name)
            known = reader.offsets.get(task, -1)
            if offset > known or (kept is not None and kept != reader.kept.get(task)):
                offsets = {**reader.offsets, task: max(offset, known)}
                keeps = reader.kept if kept is None else {**reader.kept, task: kept}
                self._write(replace(reader, offsets=offsets, kept=keeps))

    def get(self, name: str) -> RegisteredReader | None:
        """Return a registered reader; None if it is not registered.

        :raises TailraceError: `LOG_CORRUPT`.
        """
        return self._read(name)

    def require(self, name: str) -> RegisteredReader:
        """Return a reader that is registered and not dropped.

        :raises TailraceError: as `commit`.
        """
        reader = self._read(name)
        if reader is None:
            raise TailraceError(
                Kind.LOG_RANGE_INVALID,
                f"commit for reader {name!r}: it is not registered, or was removed while it read",
                "`tailrace log forget` is for readers that do not come back. Start this one again: it is "
                "registered again, and continues if the log still has what it needs",
                {"path": str(self._path)},
            )
        if reader.dropped:
            raise TailraceError(
                Kind.LOG_RANGE_GONE,
                f"continue as reader {name!r}: it was dropped, because it needed more of the log "
                "than log.retention keeps",
                "take a new snapshot of its tables, then register it again; or set "
                "log.retention.on_slow_reader to hold",
                {"path": str(self._path)},
            )
        return reader

    def all(self) -> list[RegisteredReader]:
        """Return every registered reader, sorted by name.

        :raises TailraceError: `LOG_CORRUPT`: the offsets of a reader are unknown.
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
        """Mark a reader as dropped, durably: its next commit raises an error."""
        with self._lock:
            reader = self._read(name)
            if reader is not None and not reader.dropped:
                self._write(replace(reader, dropped=True))

    def remove(self, name: str) -> None:
        """Remove a reader, which then holds no segments any more. Unknown names are ignored."""
        path = self._file(name)
        # The newest generation is removed last: the other one alone would be an older commit.
        durable.previous_of(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        if self._path.is_dir():
            durable.sync_directory(self._path)

    @contextlib.contextmanager
    def temporary(self, purpose: str) -> Iterator[str]:
        """Return a new name for a reader that is removed at the end of the block, or after its process has
        ended.

        :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`.
        """
        self._directory.make_folder(READERS)
        name = f"{purpose}:{secrets.token_hex(4)}"
        lock = self._path / f".{encode_name(name)}{_LOCK_SUFFIX}"
        try:
            # It gets its name once it is locked: `remove_ended` removes the ones that are not.
            unnamed = lock.with_suffix(durable.TEMPORARY_SUFFIX)
            fd = lock_file(unnamed, f"pid {os.getpid()}\n")
            self._directory.give_to_owner(unnamed)
            unnamed.rename(lock)
        except OSError as error:
            raise durable.write_failure(error, f"lock the reader {name}", lock) from error
        try:
            yield name
        finally:
            self.remove(name)
            lock.unlink(missing_ok=True)
            os.close(fd)

    def remove_ended(self) -> None:
        """Remove temporary readers whose process has ended, and files that a killed process left."""
        for left in self._path.glob(f".*{durable.TEMPORARY_SUFFIX}"):
            with contextlib.suppress(OSError):  # its process may rename it, or another user own it
                if time.time() - left.stat().st_mtime > _LEFT_S:
                    left.unlink()
        for lock in (*self._path.glob(f".*{_LOCK_SUFFIX}"), *self._path.glob(_EARLIER_LOCKS)):
            if os.access(lock, os.R_OK) and not is_locked(lock):
                self.remove(decode_name(lock.stem[1:]))
                lock.unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self._path / f"{encode_name(name)}{_SUFFIX}"

    def _read(self, name: str) -> RegisteredReader | None:
        content = durable.read_state(self._file(name))
        return None if content is None else RegisteredReader(**content)

    def _write(self, reader: RegisteredReader) -> RegisteredReader:
        written = replace(reader, updated_us=time.time_ns() // 1000)
        self._directory.make_folder(READERS)
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
