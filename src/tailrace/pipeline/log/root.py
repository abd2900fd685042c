"""The directory `log.path`, which one engine locks, and the logs of several sources in it.

<root>/lock              held by the engine while it runs
<root>/status.json       the engine's status
<root>/<source>/         with several sources, the log of one source; otherwise the root itself is the log

This lock shows whether an engine runs: an engine that waits for its source, or whose capture has ended
before its sinks, writes no log.

The sinks' directories have the same form: `<path>/<source>/` is a separate target. A directory that a
pipeline with one source has used is refused: no sink would continue there.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tailrace.changelog import durable
from tailrace.changelog.directory import OF_THE_ROOT, TASK, LogDirectory, require_unused
from tailrace.changelog.lock import LOCK_NAME, is_locked, is_written, take_lock
from tailrace.config import EngineConfig
from tailrace.errors import Kind, TailraceError
from tailrace.sinks import names as layout

_IDENTITY = "identity.json"


def take_root(config: EngineConfig) -> int:
    """Lock the root for this engine, creating it if needed; closing the descriptor releases the lock.

    :raises TailraceError: `LOG_LOCKED`; as `check_roots` and `require_owner`; `LOG_FULL`, `LOG_WRITE_FAILED`.
    """
    check_roots(config)
    for pipeline in config.pipelines:
        if (pipeline.log.path / _IDENTITY).exists():
            way_out = "give the directories of the log and of the sinks to root (chown -R root …)"
            require_owner(pipeline.log.path, "run the pipeline", way_out)
    durable.make_directory(config.log.path)
    return take_lock(config.log.path)


def require_owner(log_path: Path, attempted: str, way_out: str) -> None:
    """Check that the pipeline of the log's owner can go on with the files that this process will leave.

    :raises TailraceError: `ENVIRONMENT_UNFIT` if it is root's, and the pipeline another user's.
    """
    owner = (log_path / _IDENTITY).stat().st_uid
    if os.geteuid() != 0 or owner == 0:
        return
    with tempfile.TemporaryFile(dir=log_path) as made:  # some file systems choose the owner themselves
        is_owner = os.fstat(made.fileno()).st_uid == owner
    if not is_owner:
        raise TailraceError(
            Kind.ENVIRONMENT_UNFIT,
            f"{attempted} as root: its files would be root's, but the log is of user {owner}",
            f"run it as that user (sudo -u '#{owner}' …), or {way_out}",
            {"path": str(log_path)},
        )


def check_roots(config: EngineConfig) -> None:
    """Check that the directory is a log or may become one, and, with several sources, that it and the sinks'
    directories are for several. Reads only.

    :raises TailraceError: `LOG_FOREIGN`, `SINK_FOREIGN`.
    """
    root = config.log.path
    if not config.has_several:
        require_unused(root)
        return
    way_out = "name another directory; the log of a single source can't become one of several"
    if (root / _IDENTITY).exists():
        raise TailraceError(
            Kind.LOG_FOREIGN,
            "look at log.path: it is the log of a single source, the configuration has `sources`",
            way_out,
            {"path": str(root)},
        )
    for name in sorted(os.listdir(root)) if root.is_dir() else ():
        if not name.startswith(".") and name not in OF_THE_ROOT and not _may_be_a_log(root / name):
            raise TailraceError(
                Kind.LOG_FOREIGN,
                f"look at log.path: it holds something else ({name!r} …)",
                "name an empty directory in log.path",
                {"path": str(root)},
            )
    for sink in config.folders:
        if (sink.path / layout.STATE).exists():
            raise TailraceError(
                Kind.SINK_FOREIGN,
                "look at the sink's path: it is the target of a single source, the configuration has "
                "`sources`",
                "give the sink its own path",
                {"sink": sink.name, "path": str(sink.path)},
            )


def is_running(config: EngineConfig) -> bool:
    """Return whether an engine runs this configuration now."""
    return is_locked(config.log.path / LOCK_NAME) or is_written(config.log.path, TASK)


def logs_in(root: Path) -> list[LogDirectory]:
    """Return the logs of several sources in `root`, by name; none if it has no such logs.

    :raises TailraceError: `LOG_CORRUPT`, `LOG_FORMAT_UNKNOWN`.
    """
    return [LogDirectory.open(path) for path in log_folders(root)]


def log_folders(root: Path) -> list[Path]:
    """Return the paths of the logs that `logs_in` returns, without opening them: they may be damaged.

    None in a directory that this user may not read, whose opening as a log then says so.
    """
    if not root.is_dir() or not os.access(root, os.R_OK | os.X_OK) or (root / _IDENTITY).exists():
        return []
    marks = (_IDENTITY, "tasks")  # a log that has lost its identity counts, too
    return [path for path in sorted(root.iterdir()) if any((path / mark).exists() for mark in marks)]


def _may_be_a_log(path: Path) -> bool:
    # A folder without an identity was made by an engine that was killed at that moment.
    return path.is_dir() and ((path / _IDENTITY).exists() or not any(path.glob("[!.]*")))
