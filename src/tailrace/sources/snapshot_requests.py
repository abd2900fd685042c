"""Snapshots that somebody asks for, takes back, or has paused and resumed: files in the log's directory.

Any process may write a request, whether or not an engine runs; the engine takes it into what it keeps of
snapshots, durably, and removes the file then. So a request is never lost and never taken twice.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from tailrace.changelog import durable
from tailrace.changelog.directory import LogDirectory
from tailrace.errors import Kind, TailraceError

log = structlog.get_logger(__name__)

FOLDER = "requests"
_SUFFIX = ".state"


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for: a snapshot of tables, the end of one, or that all of them pause or go on.

    :ivar tables: as `schema.table`.
    :ivar where: SQL condition; empty: all rows.
    :ivar cancels: it is the end that is asked for, of those asked-for snapshots that have one of
        `tables`; of all where none are named.
    :ivar pauses: it is asked for that snapshots beside the stream pause, or, False, that they go on.
    """

    id: str
    requested_us: int
    tables: tuple[str, ...] = ()
    where: str = ""
    cancels: bool = False
    pauses: bool | None = None

    @property
    def wants_rows(self) -> bool:
        """Whether it is a snapshot that is asked for."""
        return not self.cancels and self.pauses is None


def ask(
    directory: LogDirectory,
    task: str,
    *,
    tables: Sequence[str] = (),
    where: str = "",
    cancels: bool = False,
    pauses: bool | None = None,
) -> Request:
    """Leave a request for the engine that captures `task`, now or later. Any process.

    :raises TailraceError: `CONFIG_INVALID` if a text is none that a server could take; `LOG_FULL`,
        `LOG_WRITE_FAILED`.
    """
    for text in (*tables, where):
        _require_text(text)
    if wrong := [name for name in tables if "." not in name]:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"ask for a snapshot: {', '.join(map(repr, wrong))} has no schema",
            "name tables as schema.table",
        )
    request = Request(secrets.token_hex(8), time.time_ns() // 1000, tuple(tables), where, cancels, pauses)
    content = {name: getattr(request, name) for name in request.__slots__}
    name = f"tasks/{task}/{FOLDER}/{file_name(request)}"
    path = directory.path / name
    durable.make_directory(path.parent)
    for folder in reversed(path.parents[:3]):
        _require_owner(folder, directory)
    directory.state_write(name, content)
    try:
        _require_owner(path, directory)
    except TailraceError:
        remove([path])
        raise
    return request


def waiting(directory: LogDirectory, task: str) -> list[Request]:
    """Return the requests that no engine has taken yet, the oldest first."""
    return read_requests(request_files(directory, task))


def request_files(directory: LogDirectory, task: str) -> list[Path]:
    """Return the files of requests that no engine has taken yet."""
    return sorted((directory.task_path(task) / FOLDER).glob(f"*{_SUFFIX}"))


def read_requests(files: Sequence[Path]) -> list[Request]:
    """Return the requests in some files, the oldest first; one that can't be read is passed over."""
    found = (_read(path) for path in files)
    return sorted((each for each in found if each is not None), key=lambda each: each.requested_us)


def file_name(request: Request) -> str:
    """Return the name of a request's file."""
    return f"{request.id}{_SUFFIX}"


def remove(files: Sequence[Path]) -> None:
    """Remove the files of requests that are taken, durably: one that came back would be taken twice."""
    for path in files:
        path.unlink(missing_ok=True)
    for folder in {path.parent for path in files}:
        durable.sync_directory(folder)


def _read(path: Path) -> Request | None:
    try:
        content = durable.read_state(path)
        if content is None:
            return None
        return Request(**{**content, "tables": tuple(content["tables"])})
    except (TailraceError, PermissionError, TypeError, KeyError) as error:
        log.warning("a request for a snapshot can't be read: passed over", file=str(path), reason=str(error))
        return None


def _require_owner(path: Path, directory: LogDirectory) -> None:
    """Check that a file or folder is of the user who made the log, whose engine has to read it.

    :raises TailraceError: `LOG_WRITE_FAILED`.
    """
    if not directory.give_to_owner(path):
        raise TailraceError(
            Kind.LOG_WRITE_FAILED,
            "ask for a snapshot: what is written is not the log's owner's, whose engine could not read it",
            "run the command as the user who runs the pipeline, or as root",
            {"path": str(path)},
        )


def _require_text(text: str) -> None:
    try:
        fit = text.encode().find(0) < 0
    except UnicodeEncodeError:
        fit = False
    if not fit:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            "ask for a snapshot: a name or the condition is not text that a server could take",
            "write it in UTF-8, without the character zero",
        )
