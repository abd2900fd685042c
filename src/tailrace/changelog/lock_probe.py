"""Is there a writer on a log? Asked of the lock itself, which no crash leaves behind."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

from tailrace.changelog.directory import encode_name
from tailrace.changelog.lock import LOCK_NAME
from tailrace.errors import Kind, TailraceError

_LOOK_S = 0.2


def is_written(log_path: Path, task: str) -> bool:
    """Tell whether some process writes this task of the log at `log_path`."""
    return is_locked(log_path / "tasks" / encode_name(task) / LOCK_NAME)


def is_locked(path: Path) -> bool:
    """Tell whether some process holds the lock file at `path`.

    Holds a shared lock for an instant; several may ask at once.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def wait_until_unwritten(log_path: Path, task: str, timeout_s: float, stop: threading.Event) -> None:
    """Wait until no process writes this task of the log, at most so long, or until `stop` is set."""
    until_s = time.monotonic() + timeout_s
    while is_written(log_path, task) and time.monotonic() < until_s and not stop.wait(_LOOK_S):
        pass


def refuse_if_written(log_path: Path, task: str) -> None:
    """Fail at once where a pipeline runs already, before anything is started beside it.

    Only for speed: the writer's own lock is what keeps a second one out.

    :raises TailraceError: `LOG_LOCKED`.
    """
    if is_written(log_path, task):
        raise TailraceError(
            Kind.LOG_LOCKED,
            "start the pipeline: its change log is being written by another process",
            "stop the other one (`tailrace status FILE` shows it), or give this pipeline a log of its own",
            {"path": str(log_path)},
        )
