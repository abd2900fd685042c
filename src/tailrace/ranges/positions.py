"""Points in a log as users name them: a log offset, an LSN, or a time.

    123456                       a log offset
    16/B374D848                  an LSN of the source, as PostgreSQL writes it
    2026-01-31T12:00:00+01:00    a time of commit; without a zone it is UTC

As the start of a range, a point is inclusive: the transaction whose commit record is at
that LSN, or that committed at that time, belongs to the range. As an end it is exclusive.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tailrace.changelog.reader import LogReader
from tailrace.errors import Kind, TailraceError
from tailrace.model import format_lsn, parse_lsn


@dataclass(frozen=True, slots=True)
class LogPoint:
    """A point as the user named it; a time in microseconds since 1970."""

    kind: Literal["offset", "lsn", "time"]
    value: int


def parse_point(text: str) -> LogPoint:
    """Return the point that `text` names.

    :raises ValueError: if it is not an offset, an LSN or a time.
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
    """Return the log offset of `point` in this log.

    :raises TailraceError: `LOG_RANGE_GONE` or `LOG_RANGE_INVALID` if it lies outside. A time between the last
        change and now is the log's end: the log of an idle database doesn't show that it has reached a time.
    """
    if point.kind == "lsn":
        _require_reached(reader, point.value)
        with _removed(reader, f"LSN {format_lsn(point.value)}"):
            return reader.boundary_at_position(point.value)
    if point.kind == "time":
        end = reader.end().offset
        with _removed(reader, f"time {np.datetime64(point.value, 'us')}Z"):
            found = reader.boundary_at_time(point.value)
        if found >= end:
            _require_passed(point.value)
        return found
    if point.value < reader.start:
        raise _gone(reader, f"offset {point.value}")
    if point.value > (end := reader.end().offset):
        raise TailraceError(
            Kind.LOG_RANGE_INVALID,
            f"find offset {point.value}: the log ends at {end}",
            "`tailrace log ls` shows its contents",
        )
    return point.value


@contextlib.contextmanager
def _removed(reader: LogReader, named: str) -> Iterator[None]:
    try:
        yield
    except TailraceError as error:
        raise _gone(reader, named) if error.kind is Kind.LOG_RANGE_GONE else error from None


def _gone(reader: LogReader, named: str) -> TailraceError:
    return TailraceError(
        Kind.LOG_RANGE_GONE,
        f"find {named}: the log begins at {reader.start}, the rest was removed by retention",
        f"start at {reader.start} or later",
    )


def _require_passed(time_us: int) -> None:
    # Compared with this machine's clock: the database's is only known as far as the log goes.
    if time_us > time.time_ns() // 1000:
        raise TailraceError(
            Kind.LOG_RANGE_INVALID,
            f"find the time {np.datetime64(time_us, 'us')}Z in a change log: it is in the future",
            "give a time in the past, with its zone (+01:00): a time without a zone is UTC",
        )


def _require_reached(reader: LogReader, lsn: int) -> None:
    position = reader.end().position
    if lsn > position:
        raise TailraceError(
            Kind.LOG_RANGE_INVALID,
            f"find the LSN {format_lsn(lsn)} in a change log: it has reached {format_lsn(position)}",
            "wait until capture has reached it, which `tailrace status FILE` shows: until then, transactions "
            "committed before it may be missing from the log",
        )
