"""Logging of an embedded engine: to Python's `logging`, as of any library.

A program that has configured structlog itself, as `tailrace run` does, keeps its configuration.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import structlog

from tailrace.secrets import redact


def to_logging() -> None:
    """Send log lines to loggers named after Tailrace's modules, unless structlog is already configured."""
    if structlog.is_configured():
        return
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            _line,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def _line(_logger: object, _name: str, event: MutableMapping[str, Any]) -> str:
    # Values by `repr`: a name can't forge a line. Resolved passwords are removed.
    trace = event.pop("exception", "")
    words = [str(event.pop("event", "")), *(f"{key}={value!r}" for key, value in event.items())]
    return redact(" ".join(words) + (f"\n{trace}" if trace else ""))
