"""What is let out of a task's log, kept beside it for readers that have only the log's path.

Capture writes it before the log's first byte, and again whenever the configuration has changed.
It names secrets by reference only, and says nothing to who may read the log's segments: those
hold what the server sent.
"""

from __future__ import annotations

from pydantic import ValidationError

from tailrace.changelog.directory import LogDirectory, encode_name
from tailrace.config.disclosure import Disclosure
from tailrace.errors import Kind, TailraceError


def keep_disclosure(log: LogDirectory, task: str, rules: Disclosure) -> None:
    """Keep `rules` for the readers of a task's log, durably.

    :raises TailraceError: `LOG_FULL`, `LOG_WRITE_FAILED`.
    """
    content = rules.model_dump(mode="json")
    if log.state_read(_name(task)) != content:
        log.state_write(_name(task), content)


def kept_disclosure(log: LogDirectory, task: str) -> Disclosure:
    """Return what was last kept; everything is let out of a log that was never told otherwise.

    :raises TailraceError: `LOG_CORRUPT`; `LOG_FORMAT_UNKNOWN` if a later version wrote it.
    """
    content = log.state_read(_name(task))
    if content is None:
        return Disclosure()
    try:
        return Disclosure.model_validate(content)
    except ValidationError:
        raise TailraceError(
            Kind.LOG_FORMAT_UNKNOWN,
            "read what may be let out of the log: it has settings that this version does not know",
            "read the log with the version of tailrace that captures into it",
            {"path": str(log.path)},
        ) from None


def _name(task: str) -> str:
    return f"tasks/{encode_name(task)}/disclosure.state"
