"""Positions in a log, as options and Spark's checkpoints contain them.

An option is `earliest`, `latest`, a log offset, an LSN or a time. Spark stores a dictionary that
also identifies the log and the task, as an offset of one log has no meaning in another.
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
    """Return this process's reader of a task. It is cached, with the indexes that it has read, and
    replaced if there is another log at the path.

    :raises TailraceError: `LOG_MISSING`, `LOG_CORRUPT`, `LOG_FORMAT_UNKNOWN`.
    """
    return _reader(path, task, LogDirectory.open(path).identity.log_id)


@functools.lru_cache(maxsize=8)
def _reader(path: str, task: str, log_id: str) -> LogReader:  # noqa: ARG001 — part of the key
    return LogReader.open(path, task)


def table_policy(path: str, task: str, *, raw: bool) -> TablePolicy:
    """Return which columns of a task's log are delivered, and how they are masked; resolves the secrets.

    :param raw: all columns, unmasked, as in the log.
    :raises TailraceError: `LOG_MISSING`, `LOG_CORRUPT`, `LOG_FORMAT_UNKNOWN`, `SECRET_MISSING`.
    """
    if raw:
        return EVERYTHING
    return TablePolicy.of(kept_disclosure(LogDirectory.open(path), task))


def task_named(path: str, task: str) -> str:
    """Return `task`, or the log's only task if it is "".

    :raises TailraceError: `LOG_MISSING` if there is no log, or it does not have the task;
        `CONFIG_INVALID` if the log has several tasks and `task` is "".
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
        f"read a change log: it has no task {task!r}; its tasks: {known}",
        "run the pipeline that writes this log once" if not tasks else "name one of these",
        {"log": path},
    )


def resolve(reader: LogReader, place: str) -> int:
    """Return the boundary of `place`, the text of an option.

    For an LSN it is the boundary after the unit that ends there, so that reading starts with later
    commits. For a time it is the boundary before the first unit that was committed then or later; a
    time without a zone is in UTC.

    :raises TailraceError: `CONFIG_INVALID` if `place` can't be parsed; `LOG_RANGE_GONE` if retention has
        removed it; `LOG_RANGE_INVALID` if the log ends before it or it lies within a unit.
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
    """Return `offset` if it is a boundary of the log.

    :raises TailraceError: `LOG_RANGE_GONE` or `LOG_RANGE_INVALID`.
    """
    reader.blocks(offset, offset)
    return offset


class LogPosition:
    """Spark's offset dictionaries for one task of one log.

    :param table: the table that is read; None: envelopes of all tables.
    """

    def __init__(self, path: str, task: str, table: str | None) -> None:
        self._log_id = LogDirectory.open(path).identity.log_id
        self._task = task
        self._table = table

    def encode(self, offset: int, begin: int | None = None) -> dict[str, Any]:
        """Return the dictionary of a log offset.

        :param begin: start of the batch that ends at `offset`; None: a query starts at `offset`.
        """
        batch = {} if begin is None else {"begin": begin}
        of = {"log_id": self._log_id, "task": self._task, "table": self._table}
        return {**of, "offset": offset, **batch}

    def decode(self, kept: dict[str, Any]) -> int:
        """Return the log offset in a dictionary of `encode`.

        :raises TailraceError: `LOG_FOREIGN` if it belongs to another log, task or table.
        """
        if kept.get("log_id") != self._log_id or kept.get("task") != self._task:
            raise TailraceError(
                Kind.LOG_FOREIGN,
                f"continue from a checkpoint: it belongs to task {kept.get('task')!r} of log "
                f"{kept.get('log_id')}, this is task {self._task!r} of log {self._log_id}",
                "set the option path to the log that the checkpoint belongs to, or start with a "
                "new checkpoint and a new target",
            )
        offset = int(kept["offset"])
        # Checkpoints of earlier versions do not contain the table.
        if (table := kept.get("table", self._table)) != self._table:
            before, now = (repr(name) if name else "envelopes of all tables" for name in (table, self._table))
            raise TailraceError(
                Kind.LOG_FOREIGN,
                f"continue from a checkpoint: it belongs to a query of {before}, this is one of {now}, which "
                "would lack all earlier changes",
                "start with a new checkpoint and a new target; if only later changes are needed, as for a "
                f"renamed table, with startingOffset {offset}",
                {"offset": offset},
            )
        return offset

    def batch(self, start: dict[str, Any], end: dict[str, Any]) -> tuple[int, int]:
        """Return the log offsets at which the batch from `start` to `end` starts and ends.

        Until its first batch is complete, each start of a query calls `initialOffset` again, which may then
        return another offset. A planned batch must keep its range.

        :raises TailraceError: as `decode`.
        """
        begin, upto = self.decode(start), self.decode(end)
        return begin if "begin" in start else int(end.get("begin", begin)), upto


def _no_place(place: str) -> TailraceError:
    return TailraceError(
        Kind.CONFIG_INVALID,
        f"find {place!r} in a change log: it is not a position",
        "write earliest, latest, a log offset, an LSN such as 16/B374D848, or a time such as "
        "2026-01-31T12:00:00Z",
    )
