"""The merge of one data partition with the transaction topic: two bounded queues, both in order. Pure.

The rule: if the heads of both queues have the same key, the data row is joined and its queue advances;
otherwise the transaction queue advances; if a queue is empty, the merge waits. The rule is applied to runs of
rows of one transaction, with functions of Arrow and numpy, never row by row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import Kind, TailraceError

Integers = npt.NDArray[np.int64]

#: An order, a bound or a count that is not known.
UNKNOWN = -1

#: Number of keys of passed transactions that are kept to detect repeated ones: the newest; about 1 MB.
PASSED_MAX = 10_000


@dataclass(frozen=True, slots=True)
class DataRows:
    """Rows of a data partition, in its order; all arrays have one value for each.

    :param offsets: in the partition, increasing.
    :param keys: of the rows' transactions; null: a row of no transaction, such as one of a snapshot.
    :param follows: the row's transaction is the first with a higher order than this. `UNKNOWN`: not given.
    :param orders: the row's place in its transaction, increasing; `UNKNOWN`: not given.
    :param steps: increase where `orders` may be equal, as those of the two rows of one change. None: as
        `orders`.
    """

    offsets: Integers
    keys: pa.Array
    follows: Integers
    orders: Integers
    steps: Integers | None = None

    def part(self, first: int, last: int) -> DataRows:
        """Return rows `[first, last)`."""
        cut = slice(first, last)
        steps = None if self.steps is None else self.steps[cut]
        return DataRows(self.offsets[cut], self.keys[cut], self.follows[cut], self.orders[cut], steps)


@dataclass(frozen=True, slots=True)
class TransactionRows:
    """Rows of the transaction topic, one for each transaction; all arrays have one value for each.

    :param offsets: in the topic's partition, increasing.
    :param keys: unique, never null.
    :param orders: increasing from transaction to transaction; None: the topic has none.
    :param counts: number of the transaction's rows in all partitions; `UNKNOWN`: not given.
    """

    offsets: Integers
    keys: pa.Array
    orders: Integers | None
    counts: Integers

    def part(self, first: int, last: int) -> TransactionRows:
        """Return rows `[first, last)`."""
        cut = slice(first, last)
        orders = None if self.orders is None else self.orders[cut]
        return TransactionRows(self.offsets[cut], self.keys[cut], orders, self.counts[cut])

    def followed_by(self, others: TransactionRows) -> TransactionRows:
        """Return these rows, followed by others."""
        orders = None
        if self.orders is not None and others.orders is not None:
            orders = np.concatenate([self.orders, others.orders])
        return TransactionRows(
            np.concatenate([self.offsets, others.offsets]),
            pa.concat_arrays([self.keys, others.keys]),
            orders,
            np.concatenate([self.counts, others.counts]),
        )


@dataclass(frozen=True, slots=True)
class Position:
    """The position from which a merge continues, which is committed as its offset.

    :param data: offset of the next data row.
    :param transactions: offset of the transaction of the last joined row, as more of its rows may follow; if
        there is none, of the next transaction.
    :param seen: number of that transaction's rows that were joined.
    :param order: order of the last of these rows, or its step; `UNKNOWN` if it has none.
    """

    data: int = 0
    transactions: int = 0
    seen: int = 0
    order: int = UNKNOWN


@dataclass(frozen=True, slots=True)
class Joined:
    """The result of a merge step: the first rows of the data queue, which are removed from it.

    :param rows: number of rows; all arrays have one value for each.
    :param transactions: index of the row's transaction in the transaction queue before the step; -1: none.
    :param offsets: offset of the row's transaction; for a row without one, that of the previous row.
    :param next_offsets: offset of the data after the row.
    :param seen: number of the transaction's rows in this partition up to the row, inclusive.
    :param orders: the row's place in its transaction.
    :param steps: as those of `DataRows`.
    :param ends: whether it is known that no row of the transaction follows in this partition.
    """

    rows: int
    transactions: Integers
    offsets: Integers
    next_offsets: Integers
    seen: Integers
    orders: Integers
    steps: Integers
    ends: npt.NDArray[np.bool_]

    def position(self, row: int) -> Position:
        """Return the position from which a merge continues after a row."""
        return Position(
            int(self.next_offsets[row]), int(self.offsets[row]), int(self.seen[row]), int(self.steps[row])
        )


@dataclass(frozen=True, slots=True)
class _Runs:
    # A chunk of rows, divided once into runs: consecutive rows of one transaction.
    rows: DataRows
    starts: Integers
    keys: pa.Array


class Merge:
    """The merge of one data partition.

    :param position: the position from which it continues.
    :param names: topic and partition, for errors.
    """

    def __init__(self, position: Position, names: Mapping[str, str | int] | None = None) -> None:
        self._names = dict(names or {})
        self._position = position
        self._data: deque[_Runs] = deque()
        self._window: TransactionRows | None = None
        self._passed: pa.Array | None = None
        self._last_order = UNKNOWN
        self._data_offset, self._transaction_offset = position.data - 1, position.transactions - 1
        self._ended = position.seen == 0
        self._failure: TailraceError | None = None

    @property
    def position(self) -> Position:
        """The position after everything that `take` returned."""
        return self._position

    @property
    def data_queued(self) -> int:
        """Number of rows that wait for their transaction."""
        return sum(len(runs.rows.offsets) for runs in self._data)

    @property
    def transactions_queued(self) -> int:
        """Number of transactions that wait for rows."""
        return 0 if self._window is None else len(self._window.offsets)

    @property
    def transactions_from(self) -> int | None:
        """Offset of the first transaction that waits for rows; None if there is none."""
        return None if not self.transactions_queued or self._window is None else int(self._window.offsets[0])

    def add_data(self, rows: DataRows) -> None:
        """Queue the rows after those that were queued before.

        :raises TailraceError: `JOIN_VIOLATED` if offsets do not increase.
        """
        self._data_offset = self._rising(rows.offsets, self._data_offset, "data")
        if len(rows.offsets):
            starts = _run_starts(rows.keys)
            self._data.append(_Runs(rows, starts, rows.keys.take(pa.array(starts))))

    def add_transactions(self, rows: TransactionRows) -> None:
        """Queue the transactions after those that were queued before.

        A repeated one and those after it are not queued: `take` raises the error once all rows before it are
        joined.
        :raises TailraceError: `JOIN_VIOLATED` if offsets do not increase.
        """
        self._transaction_offset = self._rising(rows.offsets, self._transaction_offset, "transaction")
        if self._failure is not None or not len(rows.offsets):
            return
        good = self._good_transactions(rows)
        if good < len(rows.offsets):
            self._failure = self._violation(
                "transactions_out_of_order",
                "a transaction comes again, or after a later one",
                self._position.data,
                int(rows.offsets[good]),
            )
            rows = rows.part(0, good)
        if rows.orders is not None and good:
            self._last_order = int(rows.orders[-1])
        self._window = rows if self._window is None else self._window.followed_by(rows)

    def take(self) -> Joined:
        """Return the rows that can be joined now, which may be none.

        :raises TailraceError: `JOIN_VIOLATED` if the next row or transaction violates the rules of the merge.
        """
        rows, starts, keys = self._queue()
        is_real = np.asarray(pc.is_valid(keys))
        places = self._places(keys)
        waiting = np.flatnonzero(is_real & (places < 0))
        stop = int(waiting[0]) if len(waiting) else len(starts)
        is_waiting, failure = stop < len(starts), None
        misplaced = self._misplaced(rows.follows[starts[:stop]], places[:stop])
        if misplaced < stop:
            stop, is_waiting = misplaced, False
            failure = self._wrong(rows, int(starts[stop]), int(places[stop]))
        elif is_waiting:
            failure = self._never_comes(rows, int(starts[stop]), keys[stop])
            is_waiting = failure is None
        end = int(starts[stop]) if stop < len(starts) else len(rows.offsets)
        # The run at which it stops is of another transaction than the last joined row, or violates a rule.
        joined, repeated = self._join(rows, starts[:stop], places[:stop], end, has_next=stop < len(starts))
        if joined.rows < end:
            is_waiting, failure = False, repeated
        failure = failure or (self._failure if is_waiting or stop == len(starts) else None)
        passed = self.transactions_queued if is_waiting else max(0, int(joined.transactions.max(initial=0)))
        if failure is not None and not joined.rows:
            raise failure
        if joined.rows:
            self._position, self._ended = joined.position(joined.rows - 1), bool(joined.ends[-1])
            self._drop_rows(joined.rows)
        self._pass(passed)
        return joined

    def pass_transactions(self, offset: int, data: int) -> int:
        """Pass the transactions up to an offset, inclusive, and return their number.

        Only if no row is queued. The caller knows that the partition has no more rows of these transactions.

        :param data: offset up to which the partition was read; there may be aborted rows before it.
        """
        if self._data or self._window is None:
            return 0
        passed = int(np.searchsorted(self._window.offsets, offset, side="right"))
        if passed:
            after = int(self._window.offsets[passed - 1]) + 1
            self._position, self._ended = Position(max(self._position.data, data), after), True
            self._pass(passed)
        return passed

    def require_order(self) -> None:
        """Check that no later row's transaction was passed while the first row waits for its own.

        :raises TailraceError: `JOIN_VIOLATED`: the first row's transaction is missing.
        """
        rows, starts, keys = self._queue()
        if not len(starts) or self._passed is None:
            return
        later = np.flatnonzero(
            np.asarray(pc.is_in(keys, value_set=self._passed)) & np.asarray(keys.is_valid())
        )
        if len(later):
            raise self._violation(
                "transaction_missing",
                "the transaction of a row is not there, and that of a later row is",
                int(rows.offsets[0]),
                self._position.transactions,
            )

    # ------------------------------------------------------------------ checks

    def _rising(self, offsets: Integers, last: int, what: str) -> int:
        if not len(offsets):
            return last
        if int(offsets[0]) <= last or bool((np.diff(offsets) <= 0).any()):
            raise self._violation(
                "offsets_out_of_order", f"the {what} offsets do not rise", int(offsets[0]), int(offsets[0])
            )
        return int(offsets[-1])

    def _good_transactions(self, rows: TransactionRows) -> int:
        # Returns the number of transactions before the first repeated one.
        if rows.orders is not None:
            is_bad = rows.orders <= np.concatenate([[self._last_order], rows.orders[:-1]])
        else:
            first = np.asarray(pc.index_in(rows.keys, value_set=rows.keys))
            is_bad = first < np.arange(len(first))
            for known in (self._passed, None if self._window is None else self._window.keys):
                if known is not None:
                    is_bad |= np.asarray(pc.is_in(rows.keys, value_set=known))
        bad = np.flatnonzero(is_bad)
        return int(bad[0]) if len(bad) else len(rows.offsets)

    def _misplaced(self, follows: Integers, places: Integers) -> int:
        # Returns the first run whose transaction precedes that of an earlier run, or contradicts `follows`.
        real = np.flatnonzero(places >= 0)
        if not len(real):
            return len(places)
        at = places[real]
        is_bad = np.concatenate([[False], at[1:] < at[:-1]])
        window = self._window
        if window is not None and window.orders is not None:
            own = np.searchsorted(window.orders, follows[real], side="right")
            is_bad |= (follows[real] != UNKNOWN) & (own != at)
        bad = np.flatnonzero(is_bad)
        return int(real[bad[0]]) if len(bad) else len(places)

    def _wrong(self, rows: DataRows, row: int, place: int) -> TailraceError:
        assert self._window is not None
        return self._out_of_place(int(rows.offsets[row]), int(self._window.offsets[place]))

    def _never_comes(self, rows: DataRows, row: int, key: pa.Scalar) -> TailraceError | None:
        # Returns the error if the transaction of a row, which is not queued, can't follow any more.
        data, window, follows = int(rows.offsets[row]), self._window, int(rows.follows[row])
        if self._passed is not None and pc.index(self._passed, key).as_py() >= 0:
            return self._out_of_place(data, self._position.transactions)
        if window is not None and window.orders is not None and follows != UNKNOWN:
            own = int(np.searchsorted(window.orders, follows, side="right"))
            if own < len(window.offsets):
                return self._violation(
                    "transaction_missing",
                    "the transaction of a row is not in the transaction topic where it must be",
                    data,
                    int(window.offsets[own]),
                )
        return None

    def _out_of_place(self, data: int, transaction: int) -> TailraceError:
        return self._violation(
            "data_out_of_order",
            "a row comes again, or after rows of a later transaction",
            data,
            transaction,
        )

    def _violation(self, rule: str, found: str, data: int, transaction: int) -> TailraceError:
        return TailraceError(
            Kind.JOIN_VIOLATED,
            f"join data with transactions: {found}",
            "see that `transactions` is the topic of the data's producer, that it writes both exactly once "
            "and in order, that compaction and retention keep the transactions of all data, and that data "
            "is partitioned by key",
            {**self._names, "rule": rule, "data_offset": data, "transaction_offset": transaction},
        )

    # ------------------------------------------------------------------ the step

    def _queue(self) -> tuple[DataRows, Integers, pa.Array]:
        # Returns the whole data queue as one chunk, with its runs.
        if not self._data:
            return _NO_ROWS, _NONE, pa.array([], pa.string())
        if len(self._data) > 1:
            chunks = [runs.rows for runs in self._data]
            firsts = np.cumsum([0, *(len(rows.offsets) for rows in chunks[:-1])])
            starts = [runs.starts + first for runs, first in zip(self._data, firsts, strict=True)]
            keys = pa.concat_arrays([runs.keys for runs in self._data])
            self._data = deque([_Runs(_concatenated(chunks), np.concatenate(starts), keys)])
        (runs,) = self._data
        return runs.rows, runs.starts, runs.keys

    def _places(self, keys: pa.Array) -> Integers:
        # Returns for each run the index of its transaction in the queue; -1: not queued, or no transaction.
        if self._window is None or not len(keys):
            return np.full(len(keys), UNKNOWN, np.int64)
        found = pc.index_in(keys, value_set=self._window.keys)
        return np.asarray(pc.fill_null(found, UNKNOWN)).astype(np.int64)

    def _join(
        self, rows: DataRows, starts: Integers, places: Integers, end: int, *, has_next: bool
    ) -> tuple[Joined, TailraceError | None]:
        """Return the joined rows before `end`, or before a repeated row, with the error for it."""
        state, failure = self._position, None
        place = np.repeat(places, np.diff(np.append(starts, end)))
        real = np.flatnonzero(place >= 0)
        seen, orders, steps = np.full(end, state.seen), np.full(end, UNKNOWN), np.full(end, state.order)
        offsets, ends = np.full(end, state.transactions), np.full(end, self._ended)
        if len(real):
            assert self._window is not None
            at, order = place[real], rows.orders[real]
            step = order if rows.steps is None else rows.steps[real]
            own, counts = self._window.offsets[at], self._window.counts[at]
            is_carried = state.seen > 0 and int(own[0]) == state.transactions
            changes = np.concatenate([[True], at[1:] != at[:-1]])
            firsts = np.flatnonzero(changes)
            counted = np.arange(1, len(at) + 1) - np.repeat(firsts, np.diff(np.append(firsts, len(at))))
            before = np.where(changes, UNKNOWN, np.roll(step, 1))
            if is_carried:
                counted[: firsts[1] if len(firsts) > 1 else len(at)] += state.seen
                before[0] = state.order
            is_known = counts != UNKNOWN
            closes = np.concatenate([changes[1:], [has_next]])
            # A place does not tell: rows before it may have been dropped, which are not counted.
            closes |= is_known & (counted == counts)
            latest = np.cumsum(place >= 0) - 1
            known = latest >= 0
            found = (seen, counted), (orders, order), (steps, step), (offsets, own), (ends, closes)
            for out, values in found:
                out[known] = values[latest[known]]
            bad = np.flatnonzero(((order != UNKNOWN) & (step <= before)) | (is_known & (counted > counts)))
            if len(bad):
                end = int(real[bad[0]])
                failure = self._out_of_place(int(rows.offsets[end]), int(own[bad[0]]))
        place, offsets, seen, orders, steps = (a[:end] for a in (place, offsets, seen, orders, steps))
        following = rows.offsets[:end] + 1
        return Joined(end, place, offsets, following, seen, orders, steps, ends[:end]), failure

    def _drop_rows(self, count: int) -> None:
        (runs,) = self._data
        self._data.clear()
        rows = runs.rows.part(count, len(runs.rows.offsets))
        if len(rows.offsets):
            run = int(np.searchsorted(runs.starts, count, side="right")) - 1
            starts = np.maximum(runs.starts[run:] - count, 0)
            self._data.append(_Runs(rows, starts, runs.keys[run:]))

    def _pass(self, count: int) -> None:
        if not count:
            return
        assert self._window is not None
        passed = self._window.keys[:count]
        known = passed if self._passed is None else pa.concat_arrays([self._passed, passed])
        self._passed = known[max(0, len(known) - PASSED_MAX) :]
        self._window = self._window.part(count, len(self._window.offsets))


def _run_starts(keys: pa.Array) -> Integers:
    # Returns the indexes of rows that are of another transaction than the row before.
    if len(keys) == 0:
        return _NONE
    is_null = np.asarray(pc.is_null(keys))
    differs = np.asarray(pc.fill_null(pc.not_equal(keys[1:], keys[:-1]), True))
    differs = differs & ~(is_null[1:] & is_null[:-1])
    return np.concatenate([[0], np.flatnonzero(differs) + 1]).astype(np.int64)


def _concatenated(chunks: list[DataRows]) -> DataRows:
    steps = [rows.orders if rows.steps is None else rows.steps for rows in chunks]
    return DataRows(
        np.concatenate([rows.offsets for rows in chunks]),
        pa.concat_arrays([rows.keys for rows in chunks]),
        np.concatenate([rows.follows for rows in chunks]),
        np.concatenate([rows.orders for rows in chunks]),
        np.concatenate(steps),
    )


_NONE: Integers = np.empty(0, np.int64)
_NO_ROWS = DataRows(_NONE, pa.array([], pa.string()), _NONE, _NONE)
