"""The lock of a task's one writer: a lock of the operating system, released when its process ends.

Whether there is a writer is read from the lock itself, as a crash does not leave it behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from pathlib import Path

from tailrace.changelog.directory import encode_name
from tailrace.changelog.durable import FILE_MODE, write_failure
from tailrace.errors import Kind, TailraceError
from tailrace.waits import wait_until

LOCK_NAME = "lock"
#: Timeout and interval of attempts, in seconds: `tailrace status` holds a shared lock for microseconds.
_PATIENCE_S, _RETRY_S = 0.5, 0.02
_LOOK_S = 0.2

#: By descriptor: device and number of the file that is locked through it, or was.
_locked: dict[int, tuple[int, int]] = {}


def _let_go() -> None:
    # In a forked process: its copies of descriptors would hold the locks after the writer has ended. They are
    # replaced, not closed: copies of the objects that hold locks may close them.
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd, file in _locked.items():
        with contextlib.suppress(OSError):
            if _file_of(fd) == file:
                os.dup2(nothing, fd, inheritable=False)
    os.close(nothing)
    _locked.clear()


os.register_at_fork(after_in_child=_let_go)


def _file_of(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def take_lock(task_path: Path) -> int:
    """Lock a task for writing and return the descriptor that holds the lock; closing it releases it.

    :raises TailraceError: `LOG_LOCKED`, within a second, if another writer holds it; `LOG_FULL` or
        `LOG_WRITE_FAILED` if the file can't be made.
    """
    path = task_path / LOCK_NAME
    try:
        return lock_file(path, f"pid {os.getpid()} on {socket.gethostname()}\n", patience_s=_PATIENCE_S)
    except FileLockedError as error:
        raise TailraceError(
            Kind.LOG_LOCKED,
            f"open the change log for writing: {error.holder or 'another process'} is writing it",
            "stop the other pipeline, or give this one its own log",
            {"file": str(path)},
        ) from None
    except OSError as error:
        raise write_failure(error, "lock the change log", path) from error


class FileLockedError(Exception):
    """Another process has the lock; `holder` is the file's description of it, or empty."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


def lock_file(path: Path, holder: str, *, mode: int = FILE_MODE, patience_s: float = 0.0) -> int:
    """Lock a file, created if missing, and return the descriptor that holds the lock until it is closed.

    :param holder: description of this process, which is written into the file for error messages.
    :raises FileLockedError: another process still has the lock after `patience_s`.
    :raises OSError: the file can't be created or opened.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT, mode)
    try:
        if not wait_until(lambda: _lock(fd), patience_s, _RETRY_S):
            raise FileLockedError(os.pread(fd, 300, 0).decode(errors="replace").strip())
    except BaseException:
        os.close(fd)
        raise
    with contextlib.suppress(OSError):  # a full disk: the holder is not named
        os.ftruncate(fd, 0)
        os.pwrite(fd, holder.encode(), 0)
    _locked[fd] = _file_of(fd)
    return fd


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_written(log_path: Path, task: str) -> bool:
    """Return whether some process writes this task of the log at `log_path`."""
    return is_locked(log_path / "tasks" / encode_name(task) / LOCK_NAME)


def is_locked(path: Path) -> bool:
    """Return whether some process holds the lock file at `path`; False if this user may not open it.

    Holds a shared lock for a moment; several processes may call this at once.

    :raises OSError: the file can't be opened for another reason.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def wait_until_unwritten(log_path: Path, task: str, timeout_s: float, stop: threading.Event) -> None:
    """Wait until no process writes this task of the log, `stop` is set, or `timeout_s` has passed."""
    wait_until(lambda: not is_written(log_path, task), timeout_s, _LOOK_S, stop)


def refuse_if_written(log_path: Path, task: str) -> None:
    """Raise an error if a pipeline already runs on this log, before anything is started.

    This only fails earlier: the writer's lock is what excludes a second writer.

    :raises TailraceError: `LOG_LOCKED`.
    """
    if is_written(log_path, task):
        raise TailraceError(
            Kind.LOG_LOCKED,
            "start the pipeline: its change log is being written by another process",
            "stop the other one (`tailrace status FILE` shows it), or give this pipeline its own log",
            {"path": str(log_path)},
        )
