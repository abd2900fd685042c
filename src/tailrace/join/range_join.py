"""The join of a range of one data partition: the same rows at every read, whatever the sizes of the reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.join.extraction import Extraction
from tailrace.join.merge import UNKNOWN, Integers, Position
from tailrace.join.partition import JoinedRows, JoinPartition, TransactionWindow
from tailrace.join.planning import BatchPlan, Place, Progress

#: Columns of the joined values (`partition.TRANSACTION`).
FACTS = (
    "transaction_id",
    "transaction_ts_ms",
    "transaction_position",
    "transaction_event_count",
    "total_order",
    "partition_order",
    "partition_complete",
)

#: Number of following rows in which another transaction's row shows that a row is its transaction's last.
_LOOK_AHEAD_ROWS = 1000


@dataclass(frozen=True, slots=True)
class JoinRange:
    """The range of a data partition that one batch reads.

    :param position: the position at which the merge starts.
    :param begin: with `transactions_begin`: rows before both were in a previous batch.
    :param end: with `transactions_end`: rows before both are in this batch or in a previous one.
    :param is_whole: whether no further row of these transactions follows in this partition.
    :param is_batch_whole: whether none follows in any partition.
    """

    place: Place
    position: Position
    begin: int
    end: int
    transactions_begin: int
    transactions_end: int
    is_whole: bool
    is_batch_whole: bool


def ranges_of(plan: BatchPlan) -> list[JoinRange]:
    """Return the ranges of a batch that may have rows."""
    is_batch_whole = plan.is_whole
    return [
        JoinRange(
            place, each.position, each.begin, each.end, plan.begin, plan.end, each.is_whole, is_batch_whole
        )
        for place, each in sorted(plan.partitions.items())
        if each.has_rows
    ]


class RangeJoin:
    """Joins the messages of a range. One thread.

    Joined rows have the columns of the data messages, `transaction_offset`, and `FACTS`.
    """

    def __init__(self, wanted: JoinRange, extraction: Extraction) -> None:
        self._range, self._extraction = wanted, extraction
        topic, number = wanted.place
        self._window = TransactionWindow(wanted.position.transactions)
        self._partition = JoinPartition("", {"topic": topic, "partition": str(number)}, wanted.position)
        self._was_given = wanted.position.data < wanted.begin
        self._last_transaction = UNKNOWN
        self._tail: pa.RecordBatch | None = None

    @property
    def data_queued(self) -> int:
        """Number of rows that wait for their transaction."""
        return self._partition.data_queued

    @property
    def queued_bytes(self) -> int:
        """Size of the rows that wait, in bytes."""
        return self._partition.queued_bytes

    @property
    def transactions_queued(self) -> int:
        """Number of transactions that wait for rows."""
        return self._partition.merge.transactions_queued

    def add_data(self, messages: pa.RecordBatch) -> None:
        """Queue the next messages of the data partition; those after the range are left out."""
        messages = _before(messages, self._range.end)
        if len(messages):
            self._partition.add_data(messages, self._extraction)

    def add_transactions(self, messages: pa.RecordBatch) -> None:
        """Queue the next messages of the transaction topic; those after the range are left out."""
        messages = _before(messages, self._range.transactions_end)
        if len(messages):
            found = self._extraction.transactions(messages)
            self._window.add(found)
            self._partition.add_transactions(found.rows)

    def take(self) -> pa.RecordBatch | None:
        """Return joined rows that no previous batch had; None if there are none now.

        :raises TailraceError: `JOIN_VIOLATED`.
        """
        rows = self._partition.take_rows(self._window)
        # Even if nothing was joined: the transactions before that of the first row were passed.
        self._window.forget_before(self._partition.transactions_needed)
        if rows is None:
            return None
        batch = self._new(rows)
        if not len(batch):
            return None
        if self._tail is not None:
            batch = pa.concat_batches([self._tail, batch])
        batch, count = _completed(batch)
        self._tail = batch.slice(count) if count < len(batch) else None
        return batch.slice(0, count) if count else None

    def is_over(self, data_next: int, transactions_next: int) -> bool:
        """Return whether no more rows follow, once both topics were added up to these offsets, and joined."""
        if self.data_queued:
            return transactions_next >= self._range.transactions_end
        return data_next >= self._range.end

    def rest(self) -> pa.RecordBatch | None:
        """Return the last rows, when `is_over` is true.

        :raises TailraceError: `JOIN_VIOLATED`.
        """
        is_held = self.data_queued > 0
        if is_held:
            self._partition.merge.require_order()
        batch, self._tail = self._tail, None
        if batch is None or not (is_held or self._range.is_whole):
            return batch
        ends = np.asarray(batch.column("partition_complete").fill_null(False)).copy()
        ends[0] = True
        return _with_ends(batch, ends)

    def progress(self) -> Progress:
        """Return the position of the next batch's merge, when `is_over` is true."""
        wanted, position = self._range, self._partition.merge.position
        position = replace(position, data=position.data if self.data_queued else wanted.end)
        if wanted.is_whole:
            position = Position(position.data, wanted.transactions_end)
        return Progress(position, wanted.end, wanted.transactions_end)

    def _new(self, rows: JoinedRows) -> pa.RecordBatch:
        joined = rows.joined
        has_one = joined.transactions >= 0
        first = self._given_before(np.asarray(rows.messages.column("offset")), joined.offsets, has_one)
        columns = {name: rows.messages.column(name) for name in rows.messages.schema.names}
        columns["transaction_offset"] = pa.array(joined.offsets, mask=~has_one)
        columns |= zip(FACTS, rows.facts.flatten(), strict=True)
        return pa.RecordBatch.from_pydict(columns).slice(first)

    def _given_before(self, offsets: Integers, transactions: Integers, has_one: np.ndarray) -> int:
        # Returns how many of the first rows a previous batch had.
        if not self._was_given:
            return 0
        after = np.where(np.cumsum(has_one) > 0, transactions, self._last_transaction)
        self._last_transaction = int(after[-1])
        was = (offsets < self._range.begin) & (after < self._range.transactions_begin)
        self._was_given = bool(was.all())
        return len(was) if self._was_given else int(np.argmin(was))


def _before(messages: pa.RecordBatch, end: int) -> pa.RecordBatch:
    return messages.slice(0, int(np.searchsorted(np.asarray(messages.column("offset")), end)))


def _completed(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
    """Return the rows with `partition_complete`, and the number of first rows for which it is final.

    It depends on the following rows of the partition, not on the sizes of the reads.
    """
    transactions = batch.column("transaction_offset")
    real = np.flatnonzero(np.asarray(transactions.is_valid()))
    if not len(real):
        return batch, len(batch)
    own = np.asarray(transactions.take(pa.array(real)))
    counts, seen = (
        np.asarray(batch.column(name).take(pa.array(real)).fill_null(UNKNOWN))
        for name in ("transaction_event_count", "partition_order")
    )
    closes = (counts != UNKNOWN) & (seen == counts)
    follows = np.diff(real) <= _LOOK_AHEAD_ROWS
    closes[:-1] |= (own[1:] != own[:-1]) & follows
    ends = np.zeros(len(batch), np.bool_)
    ends[real] = closes
    last = int(real[-1])
    is_final = bool(closes[-1]) or len(batch) - last > _LOOK_AHEAD_ROWS
    return _with_ends(batch, ends), len(batch) if is_final else last


def _with_ends(batch: pa.RecordBatch, ends: np.ndarray) -> pa.RecordBatch:
    place = batch.schema.get_field_index("partition_complete")
    mask = pc.is_null(batch.column("transaction_offset"))
    values = pa.array(ends, mask=np.asarray(mask))
    return batch.set_column(place, batch.schema.field(place), values)
