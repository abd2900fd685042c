"""The directory in `log.path`, which one engine holds; and where the logs of several sources lie in it.

<root>/lock              held by the engine, for as long as it runs
<root>/status.json       what the engine shows
<root>/<source>/         with several sources, one's log, like any other; else the root itself is the log

That lock says whether an engine runs: one that waits for its source, or whose sinks have yet to take what
is in the log, writes no log.

The sinks' directories are made alike: `<path>/<source>/` is a target of its own. A directory
that a pipeline with one source has used is not taken over: nothing would read on from there.
"""

from __future__ import annotations

import os
from pathlib import Path

from tailrace.changelog import durable
from tailrace.changelog.directory import OF_THE_ROOT, TASK, LogDirectory, require_unused
from tailrace.changelog.lock import LOCK_NAME, is_locked, is_written, take_lock
from tailrace.config import EngineConfig
from tailrace.errors import Kind, TailraceError
from tailrace.sinks import names as layout

_IDENTITY = "identity.json"


def take_root(config: EngineConfig) -> int:
    """Lock the root for this engine, making it where nothing is; closing the descriptor lets go.

    :raises TailraceError: `LOG_LOCKED`; as `check_roots`; `LOG_FULL`, `LOG_WRITE_FAILED`.
    """
    check_roots(config)
    durable.make_directory(config.log.path)
    return take_lock(config.log.path)


def check_roots(config: EngineConfig) -> None:
    """Check that the directory is a log's, or may become one; with several sources, that it and those of the
    sinks are for several. Reads only.

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
                "give the sink a path of its own",
                {"sink": sink.name, "path": str(sink.path)},
            )


def is_running(config: EngineConfig) -> bool:
    """Return whether an engine runs this configuration now."""
    return is_locked(config.log.path / LOCK_NAME) or is_written(config.log.path, TASK)


def logs_in(root: Path) -> list[LogDirectory]:
    """Return the logs of several sources that lie in `root`, by name; none if it is no root.

    :raises TailraceError: `LOG_CORRUPT`, `LOG_FORMAT_UNKNOWN`.
    """
    return [LogDirectory.open(path) for path in log_folders(root)]


def log_folders(root: Path) -> list[Path]:
    """As `logs_in`, without opening them: they may be damaged."""
    if not root.is_dir() or (root / _IDENTITY).exists():
        return []
    marks = (_IDENTITY, "tasks")  # also one that has lost its identity is a log
    return [path for path in sorted(root.iterdir()) if any((path / mark).exists() for mark in marks)]


def _may_be_a_log(path: Path) -> bool:
    # A folder without an identity was made by an engine that was killed at that moment.
    return path.is_dir() and ((path / _IDENTITY).exists() or not any(path.glob("[!.]*")))
