"""Snapshots that somebody asks for, takes back, or has paused and resumed: files in the log's directory.

Any process may write a request, whether or not an engine runs; the engine takes it into what it keeps of
snapshots, durably, and removes the file then. So a request is never lost and never taken twice.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from tailrace.changelog import durable
from tailrace.changelog.directory import TASK, LogDirectory
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
    *,
    tables: Sequence[str] = (),
    where: str = "",
    cancels: bool = False,
    pauses: bool | None = None,
) -> Request:
    """Leave a request for the engine that captures into the log, now or later. Any process.

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
    name = f"tasks/{TASK}/{FOLDER}/{request.id}{_SUFFIX}"
    path = directory.path / name
    durable.make_directory(path.parent)
    for folder in reversed(path.parents[:3]):
        _require_owner(folder, directory)
    directory.state_write(name, content)
    try:
        _require_owner(path, directory)
    except TailraceError:
        remove(path)
        raise
    return request


def waiting(directory: LogDirectory) -> list[Request]:
    """Return the requests that no engine has taken yet, the oldest first; one that can't be read is none."""
    return [request for request, _ in _read_all(directory) if request is not None]


def take_requests(directory: LogDirectory, take: Callable[[Request], bool]) -> bool:
    """Have each request that waits be taken, the oldest first, and remove its file; return whether any was.

    :param take: returns whether it took a request, durably; if not, it waits on.
    """
    is_any_taken = False
    for request, path in _read_all(directory):
        if request is None or take(request):
            is_any_taken = True
            # At once: were a cancellation taken twice, it would end what was asked for behind it.
            remove(path)
    return is_any_taken


def request_files(directory: LogDirectory) -> list[Path]:
    """Return the files of requests that no engine has taken yet."""
    return sorted((directory.task_path(TASK) / FOLDER).glob(f"*{_SUFFIX}"))


def remove(path: Path) -> None:
    """Remove the file of a request that is taken, durably: one that came back would be taken twice."""
    path.unlink(missing_ok=True)
    durable.sync_directory(path.parent)


def _read_all(directory: LogDirectory) -> list[tuple[Request | None, Path]]:
    """Return the requests with their files, the oldest first; in place of one that can't be read, None."""
    found = [(_read(path), path) for path in request_files(directory)]
    return sorted(found, key=lambda each: each[0].requested_us if each[0] is not None else 0)


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
