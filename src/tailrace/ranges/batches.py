"""Batches of a log as the engine's batches, and what the engine's offsets say of a log.

An offset says of which log it is, and before which log offset everything is done. It may lie inside
of a transaction: the log is then read from the boundary before it, and what lies before the offset
is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tailrace.decode.changes import TableChanges
from tailrace.decode.json.debezium import SourceInfo
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.frames import Numbers
from tailrace.ranges.changes import DecodedBatch
from tailrace.records.batch import Batch, Offset, Partition
from tailrace.records.group import Group, Places
from tailrace.records.orders import TableOrders

#: The members of an offset.
LOG, LOG_OFFSET = "log", "log_offset"

#: Where logical messages go, which belong to no table.
MESSAGES_TOPIC = "message"

#: Most values in a batch, those that are null among them. The log has a byte of a null; as an object, or as
#: JSON with schemas, each takes up to some hundreds.
VALUES_MAX = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class LogOffsets:
    """For each record of a batch: that everything before the byte after its log offset is done."""

    log_id: str
    log_offsets: Numbers

    def __getitem__(self, place: int, /) -> Offset:
        return offset_of(self.log_id, int(self.log_offsets[place]) + 1)


#: What a hint says where offsets have to go.
REMOVE_OFFSETS = (
    "remove the offsets (of a file, also the one beside it that ends in .previous; in "
    "Kafka, by tailrace offsets reset)"
)


def offset_of(log_id: str, log_offset: int) -> Offset:
    """Return the offset that says: everything before `log_offset` is done."""
    return {LOG: log_id, LOG_OFFSET: log_offset}


def log_offset_of(offset: Offset, log_id: str) -> int:
    """Return before which log offset everything is done.

    :raises TailraceError: `OFFSETS_FOREIGN` if it is no offset of this log.
    """
    found = offset.get(LOG_OFFSET)
    if offset.get(LOG) != log_id or not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise TailraceError(
            Kind.OFFSETS_FOREIGN,
            f"read an offset: it is not one of the change log {log_id}",
            f"the offsets are those of an earlier log. Restore that log; or {REMOVE_OFFSETS}, to be given "
            "this one from its beginning",
        )
    return found


def batches_of(
    partition: Partition, log_id: str, decoded: DecodedBatch, rows_max: int, origin: SourceInfo | None
) -> Iterator[Batch]:
    """Yield the changes of a decoded batch in batches of at most `rows_max` records, in log order.

    They have fewer where a table has so many columns that they would hold more than `VALUES_MAX` values.
    A batch without changes gives one batch without records. The `end` of a batch is behind its
    last record; that of the last one is the batch's.
    """
    changes = decoded.changes
    parts = [of_table.log_offset for of_table in changes]
    offsets = np.concatenate(parts) if parts else np.empty(0, np.int64)
    order = np.argsort(offsets, kind="stable")
    offsets = offsets[order]
    ends = _transaction_ends(decoded, order)
    columns = [len(of_table.relation.columns) for of_table in changes if of_table.relation is not None]
    rows_max = min(rows_max, max(1, VALUES_MAX // max([1, *columns])))
    for first in range(0, max(len(offsets), 1), rows_max):
        upto = min(first + rows_max, len(offsets))
        is_last = upto == len(offsets)
        end = decoded.end if is_last else int(offsets[upto - 1]) + 1
        tables = changes if is_last and not first else _between(changes, int(offsets[first]), end)
        orders = TableOrders()
        yield Batch(
            partition,
            tuple(
                _group(table, np.searchsorted(offsets, table.log_offset) - first, origin, orders)
                for table in tables
            ),
            upto - first,
            LogOffsets(log_id, offsets[first:upto]),
            offset_of(log_id, end),
            None if ends is None else ends[first:upto],
        )


def _between(changes: Sequence[TableChanges], start: int, end: int) -> list[TableChanges]:
    parts = (of_table.slice(start, end) for of_table in changes)
    return [part for part in parts if part.count]


def _transaction_ends(decoded: DecodedBatch, order: Numbers) -> npt.NDArray[np.bool_] | None:
    changes, unit = decoded.changes, decoded.open_at_end
    # A unit that is open without changes began after the last of these.
    is_open = unit is not None and unit.ordinal > 0
    if not len(order):
        return np.empty(0, np.bool_) if is_open else None
    # Of a transaction's changes the first, which has the number 0, may be of a table that is left out.
    ordinals = np.concatenate([of_table.ordinal for of_table in changes])[order]
    positions = np.concatenate([of_table.commit_lsn for of_table in changes])[order]
    ends = (ordinals[1:] == 0) | (np.diff(positions) != 0)
    return np.append(ends, not (is_open and unit is not None and unit.commit_lsn == positions[-1]))


def _group(changes: TableChanges, index: Places, origin: SourceInfo | None, orders: TableOrders) -> Group:
    topic = MESSAGES_TOPIC if changes.relation is None else changes.relation.qualified_name
    return Group.of_changes(topic, index, changes, origin, orders.of(changes))
