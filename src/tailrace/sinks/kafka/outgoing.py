"""Converted records for a topic, merged in the order of the log.

A topic gets records of several groups if tables share it, or if a predicate or a schema change splits the
changes of one table. Consumers, and compaction, rely on the order within a key: so the records of such groups
are converted for the same part of the log, and then sent in the order of the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tailrace.decode.changes import TableChanges
from tailrace.errors import TailraceError
from tailrace.kafka.producer.partitioner import BY_KEY
from tailrace.kafka.producer.sender import Partitions
from tailrace.kafka.producer.writer import Writer
from tailrace.model import format_lsn
from tailrace.protocol.frames import Numbers
from tailrace.records.events import Converted, interleaved
from tailrace.records.group import Flags, Group, source_order

#: Records for a topic, and the changes that they come from, which their places refer to.
Portion = tuple[Group, TableChanges]


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """Records for one topic, ready to be sent.

    :param partitions: as in `Writer.send`.
    :param log_offset: of each event's change, ascending.
    :param is_second: `Group.is_second` of each event's record.
    :param tables: the changes that the records come from.
    """

    topic: str
    events: Converted
    partitions: Partitions
    log_offset: Numbers
    tables: Sequence[TableChanges]
    is_second: Flags | None = None

    def part(self, first: int, last: int) -> Outgoing:
        """Return the records `[first, last)`, counted from 0."""
        return Outgoing(
            self.topic,
            self.events.part(first, last),
            None if self.partitions is None else self.partitions[first:last],
            self.log_offset[first:last],
            self.tables,
            None if self.is_second is None else self.is_second[first:last],
        )

    def send(self, writer: Writer) -> None:
        """Send the records.

        :raises TailraceError: as `Writer.send`, with the place in the log of the record that was refused.
        """
        try:
            writer.send(self.topic, self.events, self.partitions)
        except TailraceError as error:
            raise placed(error, self.tables, self.log_offset) from error


def in_log_order(parts: Sequence[Outgoing]) -> list[Outgoing]:
    """Return records of the same part of the log as one `Outgoing` for each topic."""
    by_topic: dict[str, list[Outgoing]] = {}
    for part in parts:
        by_topic.setdefault(part.topic, []).append(part)
    return [of_topic[0] if len(of_topic) == 1 else _merged(of_topic) for of_topic in by_topic.values()]


def _merged(parts: Sequence[Outgoing]) -> Outgoing:
    log_offset = np.concatenate([part.log_offset for part in parts])
    order = source_order([part.log_offset for part in parts], [part.is_second for part in parts])
    partitions = None
    if any(part.partitions is not None for part in parts):
        partitions = np.concatenate([_or_by_key(part.partitions, len(part.events)) for part in parts])[order]
    tables = [table for part in parts for table in part.tables]
    events = interleaved([part.events for part in parts], order)
    return Outgoing(parts[0].topic, events, partitions, log_offset[order], tables)


def _or_by_key(partitions: Partitions, count: int) -> npt.NDArray[np.int32]:
    return np.full(count, BY_KEY, np.int32) if partitions is None else partitions


def cutting(portions: Sequence[Portion]) -> Callable[[int, int], list[Portion]]:
    """Return a function for the records `[first, last)`, counted from 0 in the order of the log."""
    if len(portions) == 1 and portions[0][0].is_second is None:
        [(group, changes)] = portions
        return lambda first, last: [(group.slice(first, last), changes)]
    offsets = [changes.log_offset[group.index] for group, changes in portions]
    ends = np.append(np.sort(np.concatenate(offsets)), np.iinfo(np.int64).max)

    def cut(first: int, last: int) -> list[Portion]:
        places = [np.searchsorted(each, [ends[first], ends[last]]).tolist() for each in offsets]
        return [
            (group.slice(begin, end), changes)
            for (group, changes), (begin, end) in zip(portions, places, strict=True)
            if begin < end
        ]

    return cut


def placed(error: TailraceError, tables: Sequence[TableChanges], log_offset: Numbers) -> TailraceError:
    """Return the error with the table and, where the record is known, its place in the log.

    :param log_offset: of the change of each record that may have caused it.
    """
    context = error.context
    row = context.pop("row", None)
    place: dict[str, object] = {"table": ", ".join(dict.fromkeys(map(_name, tables)))}
    if isinstance(row, int):
        place = place_of(tables, int(log_offset[row]))
    return TailraceError(error.kind, error.message, error.hint, {**context, **place})


def place_of(tables: Sequence[TableChanges], log_offset: int) -> dict[str, Any]:
    """Return an error's context for a change: its table, and its place in the log and in the source."""
    for changes in tables:
        row = int(np.searchsorted(changes.log_offset, log_offset))
        if row < changes.count and changes.log_offset[row] == log_offset:
            lsn = format_lsn(int(changes.commit_lsn[row]))
            return {"table": _name(changes), "log_offset": log_offset, "commit_lsn": lsn}
    raise AssertionError("the change is one of these tables'")


def _name(changes: TableChanges) -> str:
    return changes.relation.qualified_name if changes.relation else ""
