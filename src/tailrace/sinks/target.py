"""A sink's directory: its identity, its lock and its small state files.

The lock is the operating system's (`flock`): it is released when the process that holds it ends,
in whatever way, and leaves nothing behind. The identity is compared at every open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.changelog import durable
from tailrace.changelog.lock import FileLockedError, lock_file
from tailrace.errors import RAISE_LIMIT, TOO_MANY_FILES, Kind, TailraceError
from tailrace.sinks import names

if TYPE_CHECKING:
    from tailrace.changelog.directory import LogIdentity

FORMAT_VERSION = 1
_IDENTITY = "identity.json"
#: Hint of a write for which there was no room.
MAKE_ROOM = "make room on the sink's file system; the sink continues by itself"
#: Names of files and folders that show that a folder contains a table already.
_DATA_SUFFIXES = (".parquet", ".jsonl", "_delta_log")


@dataclass(slots=True)
class Target:
    """An opened sink directory, locked for this process until `close`."""

    sink: str
    path: Path
    log_id: str
    pipeline: str
    _lock: int

    @classmethod
    def open(cls, sink: str, path: Path, kind: str, log: LogIdentity, pipeline: str) -> Target:
        """Lock the directory, creating it if needed, and check its identity.

        :param kind: the kind of the sink, such as `delta mirror`: sinks of another kind are refused.
        :raises TailraceError: `SINK_LOCKED`, `SINK_FOREIGN`, `SINK_WRITE_FAILED`.
        """
        with writing(sink, f"open {path}"):
            durable.make_directory(path / names.STATE, durable.SHARED_DIRECTORY_MODE)
        lock = locked(path / names.STATE / "lock", sink, path)
        try:
            if not require_ours(sink, path, kind, log, pipeline):
                _require_unused(path, sink)
                with writing(sink, f"write {_IDENTITY}"):
                    content = durable.encode_state(_identity(kind, log, pipeline))
                    durable.write_atomically(path / names.STATE / _IDENTITY, content)
                    durable.sync_directory(path)
        except BaseException:
            os.close(lock)
            raise
        return cls(sink, path, log.log_id, pipeline, lock)

    @property
    def state(self) -> Path:
        return self.path / names.STATE

    def staging(self, task: str, start: int) -> Path:
        """Return the folder into which executors write files of the range that begins at `start`."""
        return self.state / names.staging_directory(task, start)

    def clear_staging(self) -> None:
        """Remove files that earlier writes left. Only while no job of this process runs."""
        with writing(self.sink, "clear the staging folder"):
            remove_folder(self.state / "staging")

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a small state file's content; None if it was never written.

        :raises TailraceError: `SINK_DAMAGED`.
        """
        return read_checked(self.state / name, self.sink)

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Replace a small state file, durably.

        :raises TailraceError: `SINK_WRITE_FAILED`; the file then has its old content.
        """
        with writing(self.sink, f"write {name}"):
            durable.write_atomically(self.state / name, durable.encode_state(content))

    def require_in_place(self) -> None:
        """Check that the directory was not moved or removed since it was opened: the lock went with it.

        :raises TailraceError: `SINK_DAMAGED`; `SINK_WRITE_FAILED`.
        """
        with writing(self.sink, "look at the lock"):
            try:
                if os.path.samestat(os.stat(self.state / "lock"), os.fstat(self._lock)):
                    return
            except FileNotFoundError:
                pass
        raise TailraceError(
            Kind.SINK_DAMAGED,
            "write to the sink: its directory was moved or removed while it was written",
            "put the directory back and start again; or leave nothing there and start again: the sink is "
            "built from the log's start",
            {"sink": self.sink, "path": str(self.path)},
        )

    def close(self) -> None:
        """Unlock. A second call does nothing."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


@contextlib.contextmanager
def writing(sink: str, attempted: str) -> Iterator[None]:
    """Turn errors of the operating system into `SINK_WRITE_FAILED`, which is retried."""
    try:
        yield
    except OSError as error:
        raise _refused(sink, attempted, error.strerror or type(error).__name__, error.errno) from error
    except TailraceError as error:
        if error.kind not in (Kind.LOG_FULL, Kind.LOG_WRITE_FAILED):
            raise
        full = errno.ENOSPC if error.kind is Kind.LOG_FULL else None
        raise _refused(sink, attempted, error.message, full) from error


def _refused(sink: str, attempted: str, found: str, number: int | None) -> TailraceError:
    hint = "check that the sink's directory exists and is writable"
    if number in (errno.ENOSPC, errno.EDQUOT):
        hint = MAKE_ROOM
    elif number in TOO_MANY_FILES:
        hint = RAISE_LIMIT
    return TailraceError(Kind.SINK_WRITE_FAILED, f"{attempted}: {found}", hint, {"sink": sink})


def is_without_room(error: Exception) -> bool:
    """Return whether an error of delta-rs, which has no number, says that the disk is full."""
    return os.strerror(errno.ENOSPC) in str(error)


def read_checked(path: Path, sink: str) -> dict[str, Any] | None:
    """Return the content of a state file with a checksum; None if there is no such file.

    :raises TailraceError: `SINK_DAMAGED` if the checksum does not match.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    content = durable.decode_state(data)
    if content is None:
        raise TailraceError(
            Kind.SINK_DAMAGED,
            f"read {path.name}: it does not match its checksum",
            "restore this file from a backup, or give the sink a new, empty path and let it read "
            "the log from its start",
            {"sink": sink, "file": str(path)},
        )
    return content


def remove_folder(path: Path) -> None:
    """Remove a folder with its content, if it exists, also while tasks of a dead engine still write to it.

    :raises OSError: if it can't be removed.
    """
    for _ in range(3):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
    shutil.rmtree(path)


def sync_directories(directories: set[Path]) -> None:
    """Make files that were created or renamed in each directory durable."""
    for directory in sorted(directories):
        durable.sync_directory(directory)


def locked(file: Path, sink: str, path: Path) -> int:
    """Return a lock file's descriptor, locked for this process until it is closed.

    :param path: the locked directory, for the error.

    :raises TailraceError: `SINK_LOCKED`, `SINK_WRITE_FAILED`.
    """
    try:
        with writing(sink, f"open {file}"):
            return lock_file(file, f"{os.getpid()}\n", mode=0o666)
    except FileLockedError as error:
        raise TailraceError(
            Kind.SINK_LOCKED,
            f"open the sink: another engine writes to it (process {error.holder or 'unknown'})",
            "stop that engine, or give this sink its own name and path",
            {"sink": sink, "path": str(path)},
        ) from None


def require_ours(sink: str, path: Path, kind: str, log: LogIdentity, pipeline: str) -> bool:
    """Check the target's identity; return whether it has one, that is, was ever opened. Reads only.

    :raises TailraceError: `SINK_FOREIGN`, `SINK_DAMAGED`.
    """
    wanted = _identity(kind, log, pipeline)
    found = read_checked(path / names.STATE / _IDENTITY, sink)
    if found is None:
        return False
    differing = [name for name in wanted if found.get(name) != wanted[name]]
    if differing:
        name = differing[0]
        raise TailraceError(
            Kind.SINK_FOREIGN,
            f"open the sink: its {name.replace('_', ' ')} is {found.get(name)!r}, "
            f"this pipeline's is {wanted[name]!r}",
            _FOREIGN_HINTS.get(name, "give this sink its own path"),
            {"sink": sink, "path": str(path)},
        )
    return True


def require_ours_or_unused(sink: str, path: Path, kind: str, log: LogIdentity | None, pipeline: str) -> None:
    """Check that `Target.open` would accept the directory, apart from its lock. Reads only.

    :param log: None: there is none yet, so a target with an identity belongs to another log.
    :raises TailraceError: `SINK_FOREIGN`, `SINK_DAMAGED`.
    """
    if log is None and (path / names.STATE / _IDENTITY).exists():
        raise TailraceError(
            Kind.SINK_FOREIGN,
            f"open the sink: {path} is the target of a log, and this pipeline has none yet",
            _FOREIGN_HINTS["log_id"],
            {"sink": sink, "path": str(path)},
        )
    if (log is None or not require_ours(sink, path, kind, log, pipeline)) and path.is_dir():
        _require_unused(path, sink)


def _identity(kind: str, log: LogIdentity, pipeline: str) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "log_id": log.log_id,
        "pipeline": pipeline,
    }


_FOREIGN_HINTS = {
    "log_id": "the log was created again, or this is another pipeline's target: restore the old log, or "
    "give the sink a new, empty path; to start again in place, move the old data away first",
    "format_version": "use the version of tailrace that wrote it",
    "pipeline": "if the pipeline was given another name, restore it; otherwise give this sink its own path",
}


def _require_unused(path: Path, sink: str) -> None:
    """Raise if the directory has tables of another program, or targets of several sources."""
    for entry in sorted(os.listdir(path)):
        folder = path / entry
        if (folder / names.STATE).is_dir():
            raise TailraceError(
                Kind.SINK_FOREIGN,
                f"open the sink: {entry!r} is a target itself, of one of several sources",
                "give the sink its own path",
                {"sink": sink, "path": str(path)},
            )
        if entry.startswith((".", "_")) or "." not in entry or not folder.is_dir():
            continue
        if any(name.endswith(_DATA_SUFFIXES) for name in os.listdir(folder)):
            raise TailraceError(
                Kind.SINK_FOREIGN,
                f"open the sink: {entry!r} already contains data of an unknown writer",
                "give the sink its own path, or move these tables away",
                {"sink": sink, "path": str(path)},
            )
