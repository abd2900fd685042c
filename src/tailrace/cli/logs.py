"""Log lines, to standard error: time, level, event, then names with values as Python shows them.

Values are shown by `repr`, so that a table's name can't forge a line or steer a terminal, and
secrets that this process has resolved are cut out of every line.
"""

from __future__ import annotations

import datetime as dt
import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from tailrace.secrets import redact


def configure_logs(level: str) -> None:
    """Send log lines of `level` (debug, info, warning) and above to standard error."""
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            _line,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=lambda *_: _StandardError(),
        cache_logger_on_first_use=False,
    )


class _StandardError:
    """Writes to what `sys.stderr` is at that moment: the live display may have put itself there."""

    def msg(self, message: str) -> None:
        sys.stderr.write(message + "\n")

    debug = info = warning = warn = error = critical = exception = fatal = log = msg


def _line(_logger: object, name: str, event: MutableMapping[str, Any]) -> str:
    time = dt.datetime.now(dt.UTC).strftime("%H:%M:%S.%f")[:-3]
    trace = event.pop("exception", "")
    words = [time, f"{event.pop('level', name):<7}", str(event.pop("event", ""))]
    words += [f"{key}={value!r}" for key, value in event.items()]
    return redact(" ".join(words) + (f"\n{trace}" if trace else ""))
