"""Requests to take, cancel, pause or resume snapshots: files in the log's directory.

Any process may write a request, whether or not an engine runs. The engine stores it in its snapshot plans,
durably, and then removes the file, so a request is never lost and never taken twice.
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
    """A request: for a snapshot of tables, to cancel one, or to pause or resume all of them.

    :ivar tables: as `schema.table`.
    :ivar where: SQL condition; empty: all rows.
    :ivar cancels: cancels the requested snapshots that have one of `tables`; all of them if none are
        named.
    :ivar pauses: True pauses the snapshots that are read while streaming, False resumes them.
    """

    id: str
    requested_us: int
    tables: tuple[str, ...] = ()
    where: str = ""
    cancels: bool = False
    pauses: bool | None = None

    @property
    def wants_rows(self) -> bool:
        """Whether it requests a snapshot."""
        return not self.cancels and self.pauses is None


def ask(
    directory: LogDirectory,
    *,
    tables: Sequence[str] = (),
    where: str = "",
    cancels: bool = False,
    pauses: bool | None = None,
) -> Request:
    """Write a request for the engine that captures into the log, now or later. Any process.

    :raises TailraceError: `CONFIG_INVALID` if a server can't accept a text; `LOG_FULL`,
        `LOG_WRITE_FAILED`.
    """
    for text in (*tables, where):
        _require_text(text)
    if wrong := [name for name in tables if "." not in name]:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"request a snapshot: {', '.join(map(repr, wrong))} has no schema",
            "name tables as schema.table",
        )
    request = Request(secrets.token_hex(8), time.time_ns() // 1000, tuple(tables), where, cancels, pauses)
    content = {name: getattr(request, name) for name in request.__slots__}
    name = f"tasks/{TASK}/{FOLDER}/{request.id}{_SUFFIX}"
    path = directory.path / name
    directory.state_write(name, content)
    try:
        _require_owner(path, directory)
    except FileNotFoundError:  # an engine has read it, and taken it
        pass
    except TailraceError:
        remove(path)
        raise
    return request


def waiting(directory: LogDirectory) -> list[Request]:
    """Return the requests that no engine has taken yet, oldest first; unreadable ones are skipped."""
    return [request for request, _ in _read_all(directory) if request is not None]


def take_requests(directory: LogDirectory, take: Callable[[Request], bool]) -> bool:
    """Call `take` with each waiting request, oldest first, and remove those taken; return whether any was.

    :param take: returns whether it stored the request durably; if not, the request stays.
    """
    is_any_taken = False
    for request, path in _read_all(directory):
        if request is None or take(request):
            is_any_taken = True
            # At once: a cancellation that is taken twice would cancel later requests, too.
            remove(path)
    return is_any_taken


def request_files(directory: LogDirectory) -> list[Path]:
    """Return the files of requests that no engine has taken yet."""
    return sorted((directory.task_path(TASK) / FOLDER).glob(f"*{_SUFFIX}"))


def remove(path: Path) -> None:
    """Remove the file of a taken request, durably: if it reappeared, it would be taken twice."""
    path.unlink(missing_ok=True)
    durable.sync_directory(path.parent)


def _read_all(directory: LogDirectory) -> list[tuple[Request | None, Path]]:
    """Return the requests with their files, oldest first; None for a request that can't be read."""
    found = [(_read(path), path) for path in request_files(directory)]
    return sorted(found, key=lambda each: each[0].requested_us if each[0] is not None else 0)


def _read(path: Path) -> Request | None:
    try:
        content = durable.read_state(path)
        if content is None:
            return None
        return Request(**{**content, "tables": tuple(content["tables"])})
    except (TailraceError, PermissionError, TypeError, KeyError) as error:
        log.warning("a request for a snapshot can't be read: skipped", file=str(path), reason=str(error))
        return None


def _require_owner(path: Path, directory: LogDirectory) -> None:
    """Make sure that a file or folder belongs to the log's owner, whose engine must read it.

    :raises TailraceError: `LOG_WRITE_FAILED`.
    """
    if not directory.give_to_owner(path):
        raise TailraceError(
            Kind.LOG_WRITE_FAILED,
            "request a snapshot: the file belongs to another user than the log, whose engine can't read it",
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
            "request a snapshot: a name or the condition is not text that a server accepts",
            "write it in UTF-8, without the character zero",
        )
