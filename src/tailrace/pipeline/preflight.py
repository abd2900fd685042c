"""Preflight: everything that a pipeline needs, looked at before it runs; nothing is changed.

Every check is made even if others fail, as far as it can be: all problems at once, each with
what repairs it. Only what lies behind a closed door (a source that can't be reached) is left.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from tailrace import config
from tailrace.changelog.directory import LogDirectory
from tailrace.config import PipelineConfig
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.background import as_failure
from tailrace.pipeline.findings import Finding, Severity, error, from_failure, warning
from tailrace.pipeline.preflight_source import source_findings

__all__ = ["Finding", "Severity", "preflight"]

#: Below the first the pipeline should not start, below the second it won't run for long.
ROOM_BYTES_MIN = 64 << 20
ROOM_BYTES_WARNED = 1 << 30


def preflight(file: Path) -> list[Finding]:
    """Return every problem that the pipeline of `file` has. Takes seconds at most."""
    pipeline, problems = config.read(file)
    found = [
        error(Kind.CONFIG_INVALID, str(problem), f"correct {os.fspath(file)}; see docs/configuration.md")
        for problem in problems
    ]
    if pipeline is None:
        return [*found, *_guarded(_java)]
    directory = _open_log(pipeline, found)
    if pipeline.sinks:
        found += _guarded(_java)
    found += _guarded(lambda: _settings(pipeline))
    found += _guarded(lambda: _rooms(pipeline))
    found += _guarded(lambda: source_findings(pipeline, directory))
    return found


def _guarded(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    # A check that fails is itself a finding; what it had found before stays.
    found: list[Finding] = []
    try:
        found.extend(check())
    except TailraceError as failure:
        found.append(from_failure(failure))
    except Exception as failure:  # noqa: BLE001 - no check may hide the others
        found.append(from_failure(as_failure(failure)))
    return found


def _java() -> Iterator[Finding]:
    from tailrace.spark.java import require_java

    require_java()
    yield from ()


def _settings(pipeline: PipelineConfig) -> Iterator[Finding]:
    pipeline.spark.settings()
    yield from ()


def _open_log(pipeline: PipelineConfig, found: list[Finding]) -> LogDirectory | None:
    try:
        return LogDirectory.open(pipeline.log.path)
    except TailraceError as failure:
        if failure.kind is not Kind.LOG_MISSING:
            found.append(from_failure(failure))
        return None


def _rooms(pipeline: PipelineConfig) -> Iterator[Finding]:
    yield from _room("log.path", pipeline.log.path, Kind.LOG_FULL, Kind.LOG_WRITE_FAILED)
    for number, sink in enumerate(pipeline.sinks):
        yield from _room(f"sinks[{number}].path", sink.path, Kind.SINK_WRITE_FAILED, Kind.SINK_WRITE_FAILED)


def _room(place: str, path: Path, full: Kind, unwritable: Kind) -> Iterator[Finding]:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        yield error(
            unwritable, f"{place}: {existing} is not a directory", f"correct {place}, or move the file away"
        )
        return
    if not os.access(existing, os.W_OK | os.X_OK):
        yield error(
            unwritable,
            f"{place}: this user may not write in {existing}",
            f"chown {_user()} {existing}, or choose another {place}",
        )
    free = shutil.disk_usage(existing).free
    if free < ROOM_BYTES_MIN:
        yield error(
            full,
            f"{place}: only {free >> 20} MiB are free at {existing}",
            f"make room, or choose another {place}",
        )
    elif free < ROOM_BYTES_WARNED:
        yield warning(full, f"{place}: only {free >> 20} MiB are free at {existing}", "make room soon")


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
