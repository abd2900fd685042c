"""The column policy of a task's log, stored next to it for readers that have only the log's path.

Capture writes the rules before the log's first byte, and again when the configuration has changed.
They name secrets by reference only. They protect nothing from a reader of the segments, which contain
what the server sent.

Rules name columns, and still apply after a rename. So the former names of columns are stored, too:
durably, before the log has a row with the new name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tailrace.changelog.directory import LogDirectory, encode_name
from tailrace.config.source.column_policy import ColumnPolicy
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.renames import Renames

_Kept = TypeVar("_Kept")


def keep_disclosure(log: LogDirectory, task: str, rules: ColumnPolicy) -> None:
    """Store `rules` for the readers of a task's log, durably.

    :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`.
    """
    _keep(log, _name(task), rules.model_dump(mode="json"))


def kept_disclosure(log: LogDirectory, task: str) -> ColumnPolicy:
    """Return the stored column policy; if there is none, a policy that shows everything.

    :raises TailraceError: `LOG_CORRUPT`; `LOG_FORMAT_UNKNOWN` if a later version wrote it.
    """
    unknown = "read the column policy of the log: it has settings that this version does not know"
    return _kept(log, _name(task), ColumnPolicy.model_validate, unknown) or ColumnPolicy()


def disclosure_is_kept(log: LogDirectory, task: str, rules: ColumnPolicy) -> bool:
    """Return whether capture has stored `rules` and the columns' names, as read from the server."""
    return log.state_read(_name(task)) == rules.model_dump(mode="json") and (
        log.state_read(_renames_name(task)) is not None
    )


def keep_renames(log: LogDirectory, task: str, renames: Renames) -> None:
    """Store the names that columns have had, durably.

    :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`.
    """
    _keep(log, _renames_name(task), renames.as_json())


def kept_renames(log: LogDirectory, task: str) -> Renames | None:
    """Return the names that columns have had; None if the log is of a version that did not store them.

    :raises TailraceError: `LOG_CORRUPT`; `LOG_FORMAT_UNKNOWN` if a later version wrote it.
    """
    unknown = "read the former names of columns: this version does not know their format"
    return _kept(log, _renames_name(task), Renames.from_json, unknown)


def _keep(log: LogDirectory, name: str, content: dict[str, Any]) -> None:
    if log.state_read(name) != content:
        # Twice: if the newest generation is damaged, the previous one would show what this one hides.
        log.state_write(name, content)
        log.state_write(name, content)


def _kept(
    log: LogDirectory, name: str, read: Callable[[dict[str, Any]], _Kept], unknown: str
) -> _Kept | None:
    content = log.state_read(name)
    try:
        return None if content is None else read(content)
    except ValueError:
        raise TailraceError(
            Kind.LOG_FORMAT_UNKNOWN,
            unknown,
            "read the log with the version of tailrace that captures into it",
            {"path": str(log.path)},
        ) from None


def _name(task: str) -> str:
    return f"tasks/{encode_name(task)}/disclosure.state"


def _renames_name(task: str) -> str:
    return f"tasks/{encode_name(task)}/renames.state"
