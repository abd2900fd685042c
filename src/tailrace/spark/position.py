"""Places in a log, as people and Spark's checkpoints name them.

A person writes `earliest`, `latest`, a log offset, an LSN or a time. Spark keeps a dictionary
that also names the log and the task: offsets of one log mean nothing in another.
"""

from __future__ import annotations

import functools
from typing import Any

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.disclosure import kept_disclosure
from tailrace.changelog.reader import LogReader
from tailrace.decode.column_policy import EVERYTHING, TablePolicy
from tailrace.errors import Kind, TailraceError
from tailrace.ranges.positions import locate, parse_point


def opened(path: str, task: str) -> LogReader:
    """Return this process's reader of a task. It is kept, with the indexes that it has read; if
    another log was put in the place of the one it read, a new one is made.

    :raises TailraceError: `LOG_MISSING`, `LOG_CORRUPT`, `LOG_FORMAT_UNKNOWN`.
    """
    return _reader(path, task, LogDirectory.open(path).identity.log_id)


@functools.lru_cache(maxsize=8)
def _reader(path: str, task: str, log_id: str) -> LogReader:  # noqa: ARG001 — part of the key
    return LogReader.open(path, task)


def table_policy(path: str, task: str, *, raw: bool) -> TablePolicy:
    """Return which columns of a task's log are delivered, and how they are masked; secrets are resolved now.

    :param raw: everything, as the log holds it.
    :raises TailraceError: `LOG_MISSING`, `LOG_CORRUPT`, `LOG_FORMAT_UNKNOWN`, `SECRET_MISSING`.
    """
    if raw:
        return EVERYTHING
    return TablePolicy.of(kept_disclosure(LogDirectory.open(path), task))


def task_named(path: str, task: str) -> str:
    """Return `task`, or the log's only task if it is "".

    :raises TailraceError: `LOG_MISSING` if there is no log, or the task is not in it;
        `CONFIG_INVALID` if there are several and none is named.
    """
    tasks = LogDirectory.open(path).tasks()
    if task in tasks:
        return task
    if not task and len(tasks) == 1:
        return tasks[0]
    known = ", ".join(repr(name) for name in tasks) or "none yet"
    if not task and tasks:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"read a change log: it has several tasks: {known}",
            'choose one with .option("task", "…"); there is no order between tasks',
            {"log": path},
        )
    raise TailraceError(
        Kind.LOG_MISSING,
        f"read a change log: there is no task {task!r} in it; its tasks: {known}",
        "start the pipeline that writes this log once" if not tasks else "name one of these",
        {"log": path},
    )


def resolve(reader: LogReader, place: str) -> int:
    """Return the boundary that `place` means: everything before it comes before the place.

    An LSN means the place after the unit that ends there, so that reading starts with what
    was committed later. A time means the place before the first unit committed at it or later;
    without a zone it is UTC.

    :raises TailraceError: `CONFIG_INVALID` if it is no place; `LOG_RANGE_GONE` if retention has
        removed it; `LOG_RANGE_INVALID` if the log ends before it or it lies inside a unit.
    """
    text = place.strip()
    if text.lower() == "earliest":
        return reader.start
    if text.lower() == "latest":
        return reader.end().offset
    try:
        point = parse_point(text)
    except ValueError as error:
        raise _no_place(place) from error
    if point.kind == "offset":
        return checked(reader, point.value)
    return locate(reader, point)


def checked(reader: LogReader, offset: int) -> int:
    """Return `offset` if the log holds it as a boundary.

    :raises TailraceError: `LOG_RANGE_GONE` or `LOG_RANGE_INVALID`.
    """
    reader.blocks(offset, offset)
    return offset


class LogPosition:
    """Spark's offset dictionaries for one task of one log.

    :param table: that is read; None: envelopes of all.
    """

    def __init__(self, path: str, task: str, table: str | None) -> None:
        self._log_id = LogDirectory.open(path).identity.log_id
        self._task = task
        self._table = table

    def encode(self, offset: int, begin: int | None = None) -> dict[str, Any]:
        """Return the dictionary of a log offset.

        :param begin: of the batch that ends there; None: none does, a query begins there.
        """
        batch = {} if begin is None else {"begin": begin}
        of = {"log_id": self._log_id, "task": self._task, "table": self._table}
        return {**of, "offset": offset, **batch}

    def decode(self, kept: dict[str, Any]) -> int:
        """Return the log offset of a dictionary that `encode` made.

        :raises TailraceError: `LOG_FOREIGN` if it belongs to another log, task or table.
        """
        if kept.get("log_id") != self._log_id or kept.get("task") != self._task:
            raise TailraceError(
                Kind.LOG_FOREIGN,
                f"go on from a checkpoint: it belongs to task {kept.get('task')!r} of log "
                f"{kept.get('log_id')}, this is task {self._task!r} of log {self._log_id}",
                "point the option path at the log that the checkpoint was made with, or start with a "
                "new checkpoint and a new target",
            )
        offset = int(kept["offset"])
        # Checkpoints of earlier versions do not say what was read.
        if (table := kept.get("table", self._table)) != self._table:
            before, now = (repr(name) if name else "envelopes of all tables" for name in (table, self._table))
            raise TailraceError(
                Kind.LOG_FOREIGN,
                f"go on from a checkpoint: it belongs to a query of {before}, this is one of {now}, which "
                "would lack all changes up to there",
                "start with a new checkpoint and a new target; to have later changes alone, as of a table "
                f"that was renamed, with startingOffset {offset}",
                {"offset": offset},
            )
        return offset

    def batch(self, start: dict[str, Any], end: dict[str, Any]) -> tuple[int, int]:
        """Return where the batch from `start` to `end` begins and ends.

        Until its first batch is done, Spark asks at each start of a query where it begins. The answer may be
        another one by then, and what was planned must stay.

        :raises TailraceError: as `decode`.
        """
        begin, upto = self.decode(start), self.decode(end)
        return begin if "begin" in start else int(end.get("begin", begin)), upto


def _no_place(place: str) -> TailraceError:
    return TailraceError(
        Kind.CONFIG_INVALID,
        f"find the place {place!r} in a change log: it is none",
        "write earliest, latest, a log offset, an LSN such as 16/B374D848, or a time such as "
        "2026-01-31T12:00:00Z",
    )
