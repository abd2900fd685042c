"""A data partition in a join: its waiting messages, its merge, and the batches of joined records."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.join.extraction import MESSAGES, Extraction, Transactions, extracted
from tailrace.join.merge import UNKNOWN, Integers, Joined, Merge, Position, TransactionRows
from tailrace.records.batch import Batch, Offset
from tailrace.records.group import Group

#: The values joined to a row: facts of its transaction, and the row's place in it.
TRANSACTION = pa.struct(
    [
        ("id", pa.string()),
        ("ts_ms", pa.int64()),
        ("position", pa.int64()),
        ("event_count", pa.int64()),
        ("total_order", pa.int64()),
        ("partition_order", pa.int64()),
        ("partition_complete", pa.bool_()),
    ]
)


def offset_of(position: Position) -> Offset:
    """Return a position in the form that is committed."""
    return asdict(position)


def position_of(offset: Offset) -> Position:
    """Return the position of a committed offset."""
    return Position(**{name: int(value) for name, value in offset.items()})


@dataclass(frozen=True, slots=True)
class EndedTransaction:
    """An ended transaction: the offset of its `END`, and the position and time of its commit, if known."""

    offset: int
    order: int | None
    time_ms: int | None


class TransactionWindow:
    """The transactions that a task's partitions may still need, stored once for all of them.

    :param next_offset: the transaction that is read next has this offset or a higher one.
    """

    def __init__(self, next_offset: int) -> None:
        self._offsets: Integers = np.empty(0, np.int64)
        self._columns = pa.RecordBatch.from_pylist([], _FACTS)
        self.next_offset = next_offset

    def add(self, found: Transactions) -> None:
        """Add transactions that were read; those that the window already has are not changed."""
        rows = found.rows
        if not len(rows.offsets):
            return
        columns = pa.RecordBatch.from_arrays(
            [
                found.ids,
                found.times_ms,
                pa.array(np.full(len(rows.offsets), UNKNOWN) if rows.orders is None else rows.orders),
                pa.array(rows.counts),
            ],
            schema=_FACTS,
        )
        is_read_again = len(self._offsets) > 0 and rows.offsets[0] <= self._offsets[-1]
        self._offsets = np.concatenate([self._offsets, rows.offsets])
        self._columns = pa.concat_batches([self._columns, columns])
        if is_read_again:
            self._offsets, places = np.unique(self._offsets, return_index=True)
            self._columns = self._columns.take(pa.array(places))
        self.next_offset = int(rows.offsets[-1]) + 1

    def forget_before(self, offset: int) -> None:
        """Remove the transactions before an offset, which no partition needs any more."""
        count = int(np.searchsorted(self._offsets, offset))
        self._offsets, self._columns = self._offsets[count:], self._columns.slice(count)

    def last_before(self, offset: int) -> EndedTransaction | None:
        """Return the window's last transaction before an offset; None: there is none."""
        count = int(np.searchsorted(self._offsets, offset))
        if not count:
            return None
        facts = self._columns.slice(count - 1, 1).to_pylist()[0]
        order = facts["position"]
        return EndedTransaction(
            int(self._offsets[count - 1]),
            None if order is None or order == UNKNOWN else order,
            facts["ts_ms"],
        )

    def first_after(self, offset: int) -> int | None:
        """Return the offset of the window's first transaction after an offset; None: there is none."""
        at = int(np.searchsorted(self._offsets, offset, side="right"))
        return int(self._offsets[at]) if at < len(self._offsets) else None

    def facts(self, joined: Joined) -> pa.StructArray:
        """Return the values joined to rows, a struct of `TRANSACTION`; null for rows of no transaction."""
        has_one = joined.transactions >= 0
        places = np.searchsorted(self._offsets, joined.offsets)
        found = self._columns.take(pa.array(np.where(has_one, places, 0), mask=~has_one))
        numbers = [joined.orders, joined.seen]
        orders = [pa.array(values, mask=(values == UNKNOWN) | ~has_one) for values in numbers]
        ends = pa.array(joined.ends, mask=~has_one)
        known = [found.column("id"), found.column("ts_ms"), *map(_known, found.columns[2:])]
        return pa.StructArray.from_arrays(
            [*known, *orders, ends], fields=list(TRANSACTION), mask=pa.array(~has_one)
        )


_FACTS = pa.schema(
    [("id", pa.string()), ("ts_ms", pa.int64()), ("position", pa.int64()), ("count", pa.int64())]
)


def _known(values: pa.Array) -> pa.Array:
    there = np.asarray(values.is_null()) | (np.asarray(values.fill_null(UNKNOWN)) == UNKNOWN)
    return pa.array(np.asarray(values.fill_null(UNKNOWN)), mask=there)


class _Offsets:
    """For each record of a batch, the offset from which the join continues after it."""

    def __init__(self, joined: Joined, first: int) -> None:
        self._joined, self._first = joined, first

    def __getitem__(self, place: int) -> Offset:
        return offset_of(self._joined.position(self._first + place))


@dataclass(frozen=True, slots=True)
class JoinedRows:
    """Joined rows, in order.

    :param messages: the columns of `MESSAGES`, and any others of the reader.
    :param facts: for each row a struct of `TRANSACTION`; null for rows of no transaction.
    """

    messages: pa.RecordBatch
    facts: pa.StructArray
    joined: Joined


@dataclass(slots=True)
class _Waiting:
    messages: pa.RecordBatch
    size_bytes: int


class JoinPartition:
    """A data partition. Used only on the task's thread.

    :param topic: topic of its joined records.
    :param name: topic and partition, for errors.
    """

    def __init__(self, topic: str, name: Mapping[str, str], position: Position) -> None:
        self.name = dict(name)
        self.topic = topic
        self.merge = Merge(position, name)
        self.transactions_fed = position.transactions
        self.queued_bytes = 0
        self.is_paused = False
        self._waiting: deque[_Waiting] = deque()

    @property
    def transactions_needed(self) -> int:
        """Offset of the first transaction with which rows may still be joined."""
        first = self.merge.transactions_from
        return self.transactions_fed if first is None else first

    @property
    def data_queued(self) -> int:
        """Number of rows that wait for their transaction."""
        return self.merge.data_queued

    def add_data(self, messages: pa.RecordBatch, extraction: Extraction) -> None:
        """Queue the messages after those that were queued before."""
        self.merge.add_data(extracted(extraction.data, messages, **self.name))
        size = messages.nbytes
        self._waiting.append(_Waiting(messages, size))
        self.queued_bytes += size

    def add_transactions(self, rows: TransactionRows) -> None:
        """Queue those of the transactions that this partition has not had before."""
        first = int(np.searchsorted(rows.offsets, self.transactions_fed))
        if first < len(rows.offsets):
            self.transactions_fed = int(rows.offsets[-1]) + 1
            self.merge.add_transactions(rows.part(first, len(rows.offsets)))

    def take(self, window: TransactionWindow, records_max: int) -> list[Batch]:
        """Return batches of the rows that can be joined now, in order.

        :raises TailraceError: `JOIN_VIOLATED`.
        """
        rows = self.take_rows(window)
        if rows is None:
            return []
        count = rows.joined.rows
        return [
            self._batch(rows, first, min(first + records_max, count))
            for first in range(0, count, records_max)
        ]

    def take_rows(self, window: TransactionWindow) -> JoinedRows | None:
        """Return the rows that can be joined now, or None if there are none.

        :raises TailraceError: `JOIN_VIOLATED`.
        """
        if not self.data_queued:
            return None
        joined = self.merge.take()
        if not joined.rows:
            return None
        return JoinedRows(self._taken(joined.rows), window.facts(joined), joined)

    def _batch(self, rows: JoinedRows, first: int, last: int) -> Batch:
        count, joined = last - first, rows.joined
        part = rows.messages.slice(first, count)
        columns: dict[str, Any] = {
            "key": part.column("key"),
            "value": part.column("value"),
            # One header, not one for each field: seven headers took half as long as a copy of the message.
            "headers": pa.StructArray.from_arrays([rows.facts.slice(first, count)], ["transaction"]),
        }
        group = Group.of_columns(self.topic, np.arange(count), pa.RecordBatch.from_pydict(columns))
        ends = np.asarray(joined.ends[first:last])
        return Batch(self.name, (group,), count, _Offsets(joined, first), None, ends)

    def _taken(self, rows: int) -> pa.RecordBatch:
        # Removes the messages of the first rows from the queue and returns them.
        parts, size = [], 0
        while rows:
            head = self._waiting[0]
            count = min(rows, len(head.messages))
            parts.append(head.messages.slice(0, count))
            size += head.size_bytes
            rows -= count
            if count == len(head.messages):
                self.queued_bytes -= head.size_bytes
                self._waiting.popleft()
            else:
                head.messages = head.messages.slice(count)
        if len(parts) == 1 and 2 * parts[0].nbytes >= size:
            return parts[0]  # without a copy, which takes time; a smaller part would keep all that was read
        return pa.concat_batches(parts) if parts else pa.RecordBatch.from_pylist([], MESSAGES)
