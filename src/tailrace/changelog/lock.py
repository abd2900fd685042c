"""One writer a task: a lock of the operating system, which ends with the process that held it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

from tailrace.changelog.durable import FILE_MODE
from tailrace.errors import Kind, TailraceError

LOCK_NAME = "lock"
#: `tailrace status` probes the lock with a shared one, for microseconds.
_PATIENCE_S, _RETRY_S = 0.5, 0.02


def take_lock(task_path: Path) -> int:
    """Lock a task for writing and return the descriptor that holds it; closing it lets go.

    The file names its holder for people; it is the lock that counts, not what the file says.

    :raises TailraceError: `LOG_LOCKED`, within a second, if another writer holds it.
    """
    path = task_path / LOCK_NAME
    fd = os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)
    try:
        _lock(fd, time.monotonic() + _PATIENCE_S)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except BlockingIOError:
        holder = os.pread(fd, 300, 0).decode(errors="replace").strip()
        os.close(fd)
        raise TailraceError(
            Kind.LOG_LOCKED,
            f"open the change log for writing: {holder or 'another process'} is writing it",
            "stop the other pipeline, or give this one a log of its own",
            {"file": str(path)},
        ) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(fd: int, deadline_s: float) -> None:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(_RETRY_S)
        else:
            return
