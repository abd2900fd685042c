"""A range of one data partition, joined: the same rows at every read, whatever is read at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.join.extraction import Extraction
from tailrace.join.merge import UNKNOWN, Integers, Position
from tailrace.join.partition import JoinedRows, JoinPartition, TransactionWindow
from tailrace.join.planning import BatchPlan, Place, Progress

#: Columns of what is joined (`partition.TRANSACTION`).
FACTS = (
    "transaction_id",
    "transaction_ts_ms",
    "transaction_position",
    "transaction_event_count",
    "total_order",
    "partition_order",
    "partition_complete",
)

#: A row is known as its transaction's last if another transaction's row is one of so many that follow.
_LOOK_AHEAD_ROWS = 1000


@dataclass(frozen=True, slots=True)
class JoinRange:
    """What is read of a data partition for one batch.

    :param position: where the merge begins.
    :param begin: with `transactions_begin`, the ends of the batch before: what is below both was in it.
    :param end: with `transactions_end`, what is below both is in this batch or was in one before.
    :param is_whole: whether no row of such transactions follows in this partition.
    :param is_batch_whole: or in any other.
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
    """Return the ranges of a batch in which there may be rows."""
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

    What is joined has the columns of the data messages, `transaction_offset`, and `FACTS`.
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
        """Rows that wait for their transaction."""
        return self._partition.data_queued

    @property
    def queued_bytes(self) -> int:
        """What they have."""
        return self._partition.queued_bytes

    @property
    def transactions_queued(self) -> int:
        """Transactions that wait for rows."""
        return self._partition.merge.transactions_queued

    def add_data(self, messages: pa.RecordBatch) -> None:
        """Queue messages of the data partition that follow; those behind the range are left out."""
        messages = _before(messages, self._range.end)
        if len(messages):
            self._partition.add_data(messages, self._extraction)

    def add_transactions(self, messages: pa.RecordBatch) -> None:
        """Queue messages of the transaction topic, likewise."""
        messages = _before(messages, self._range.transactions_end)
        if len(messages):
            found = self._extraction.transactions(messages)
            self._window.add(found)
            self._partition.add_transactions(found.rows)

    def take(self) -> pa.RecordBatch | None:
        """Return rows that are joined, and were in no batch before; None if there are none now.

        :raises TailraceError: `JOIN_VIOLATED`.
        """
        rows = self._partition.take_rows(self._window)
        # Also where nothing was joined: those before the first row's own transaction were passed.
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
        """Tell whether nothing more comes, once so much of both topics was given and taken."""
        if self.data_queued:
            return transactions_next >= self._range.transactions_end
        return data_next >= self._range.end

    def rest(self) -> pa.RecordBatch | None:
        """Return the last rows when it is over.

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
        """Return where the next batch's merge begins, when it is over."""
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
        # How many of the rows, the first ones, an earlier batch had.
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
    """Return the rows with `partition_complete`, and for how many, the first ones, it is final.

    It is told from what follows in the partition and not from what was read at a time.
    """
    transactions = batch.column("transaction_offset")
    real = np.flatnonzero(np.asarray(transactions.is_valid()))
    if not len(real):
        return batch, len(batch)
    own = np.asarray(transactions.take(pa.array(real)))
    counts, orders, seen = (
        np.asarray(batch.column(name).take(pa.array(real)).fill_null(UNKNOWN))
        for name in ("transaction_event_count", "total_order", "partition_order")
    )
    closes = (counts != UNKNOWN) & ((seen == counts) | (orders == counts))
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
