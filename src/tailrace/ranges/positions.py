"""Places in a log as people name them: a log offset, an LSN, or a time.

    123456                       a log offset
    16/B374D848                  an LSN of the source, as PostgreSQL writes it
    2026-01-31T12:00:00+01:00    a time of commit; without a zone it is UTC

As the start of a range, a place is inclusive: the transaction whose commit record is at
that LSN, or that committed at that time, belongs to it. As an end it is exclusive.
"""

from __future__ import annotations

import datetime as dt
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tailrace.changelog.reader import LogReader
from tailrace.errors import Kind, TailraceError
from tailrace.model import format_lsn, parse_lsn


@dataclass(frozen=True, slots=True)
class LogPoint:
    """A place as it was named; `time` in microseconds since 1970."""

    kind: Literal["offset", "lsn", "time"]
    value: int


def parse_point(text: str) -> LogPoint:
    """Return the place that `text` names.

    :raises ValueError: if it is neither an offset, an LSN nor a time.
    """
    text = text.strip()
    if text.isdecimal():
        return LogPoint("offset", int(text))
    try:
        return LogPoint("lsn", parse_lsn(text))
    except ValueError:
        pass
    try:
        named = dt.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is neither a log offset (123456), an LSN (16/B374D848) nor a time "
            "(2026-01-31T12:00:00Z)"
        ) from None
    if named.tzinfo is None:
        named = named.replace(tzinfo=dt.UTC)
    return LogPoint("time", (named - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1))


def locate(reader: LogReader, point: LogPoint) -> int:
    """Return the log offset that `point` stands for in this log.

    :raises TailraceError: `LOG_RANGE_GONE` or `LOG_RANGE_INVALID` if it lies outside. A time between the last
        change and now is the log's end: the log of a quiet database does not show that it has come to one.
    """
    if point.kind == "lsn":
        _require_reached(reader, point.value)
        return reader.boundary_at_position(point.value)
    if point.kind == "time":
        end = reader.end().offset
        found = reader.boundary_at_time(point.value)
        if found >= end:
            _require_passed(point.value)
        return found
    if point.value < reader.start:
        raise TailraceError(
            Kind.LOG_RANGE_GONE,
            f"find offset {point.value}: the log begins at {reader.start}, the rest was removed by retention",
            f"begin at {reader.start} or later",
        )
    if point.value > (end := reader.end().offset):
        raise TailraceError(
            Kind.LOG_RANGE_INVALID,
            f"find offset {point.value}: the log ends at {end}",
            "`tailrace log ls` shows what it holds",
        )
    return point.value


def _require_passed(time_us: int) -> None:
    # Of the database's clock only what the log has is known: this machine's may be behind it.
    if time_us > time.time_ns() // 1000:
        raise TailraceError(
            Kind.LOG_RANGE_INVALID,
            f"find the time {np.datetime64(time_us, 'us')}Z in a change log: it has not come yet",
            "name one that has passed, with its zone (+01:00): without one it is taken as UTC",
        )


def _require_reached(reader: LogReader, lsn: int) -> None:
    position = reader.end().position
    if lsn > position:
        raise TailraceError(
            Kind.LOG_RANGE_INVALID,
            f"find the LSN {format_lsn(lsn)} in a change log: it has come to {format_lsn(position)}",
            "wait until capture has come to it, which `tailrace status FILE` shows: until then, what was "
            "committed up to it may not be in the log",
        )
