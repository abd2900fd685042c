"""Assembles joined rows of all partitions to whole transactions, in the order of the transactions.

A transaction is whole when all of its rows, as counted by its `END`, are joined, or when no partition can
have more of them. Before that it may be written in parts: then it stays open until it is whole. A part has
no row after one that another partition may still have, as that may be a truncation.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tailrace.join.merge import Position
from tailrace.join.messages import Place
from tailrace.join.partition import JoinedRows

#: A place after the last one in any transaction.
_ALL = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TransactionRun:
    """Consecutive rows of one transaction in a partition.

    :param transaction: offset of its `END`; None: rows of no transaction.
    :param last: exclusive.
    :param size_bytes: the rows' share of the size of `taken`.
    """

    place: Place
    taken: JoinedRows
    transaction: int | None
    first: int
    last: int
    size_bytes: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.last - self.first

    @property
    def position(self) -> Position:
        """Position from which the partition's merge continues after these rows."""
        return self.taken.joined.position(self.last - 1)

    @property
    def facts(self) -> dict[str, Any]:
        """The values joined to the first row (`partition.TRANSACTION`)."""
        found: dict[str, Any] = self.taken.facts[self.first].as_py() or {}
        return found

    def rows_upto(self, order: int) -> int:
        """Return the number of first rows whose place in the transaction is at most `order`."""
        if self.transaction is None:
            return self.rows
        orders = self.taken.joined.orders[self.first : self.last]
        return int(np.searchsorted(orders, order, side="right"))

    def messages(self) -> Iterator[tuple[int, int, bytes | None, bytes | None]]:
        """Yield each row's step in its transaction (`UNKNOWN`: not given), offset, key and value."""
        count = self.rows
        messages = self.taken.messages.slice(self.first, count)
        steps = self.taken.joined.steps[self.first : self.last].tolist()
        columns = (messages.column(name).to_pylist() for name in ("offset", "key", "value"))
        yield from zip(steps, *columns, strict=True)


class Assembly:
    """The joined rows that are not written yet, by partition, each in its order."""

    def __init__(self) -> None:
        self._runs: dict[Place, deque[TransactionRun]] = {}
        self._waiting: dict[Place, int] = {}
        self._waiting_bytes: dict[Place, int] = {}
        self._open: int | None = None
        self._written = 0  # rows of the open transaction

    @property
    def open(self) -> int | None:
        """The transaction of which a part is written; None: there is none."""
        return self._open

    def waiting(self, place: Place) -> int:
        """Return the number of a partition's rows that wait."""
        return self._waiting.get(place, 0)

    def waiting_bytes(self, place: Place) -> int:
        """Return the size of a partition's rows that wait, in bytes."""
        return self._waiting_bytes.get(place, 0)

    def add(self, place: Place, taken: JoinedRows) -> None:
        """Add joined rows of a partition."""
        joined = taken.joined
        own = np.where(joined.transactions >= 0, joined.offsets, -1)
        bounds = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), joined.rows]
        runs = self._runs.setdefault(place, deque())
        row_bytes = taken.messages.nbytes // joined.rows
        self._waiting[place] = self.waiting(place) + joined.rows
        self._waiting_bytes[place] = self.waiting_bytes(place) + joined.rows * row_bytes
        for first, last in itertools.pairwise(bounds):
            offset = int(own[first])
            transaction = None if offset < 0 else offset
            runs.append(TransactionRun(place, taken, transaction, first, last, (last - first) * row_bytes))

    def take_loose(self) -> list[TransactionRun]:
        """Return rows of no transaction that are first in their partition; none if a transaction is open."""
        found: list[TransactionRun] = []
        if self._open is None:
            for runs in self._runs.values():
                while runs and runs[0].transaction is None:
                    found.append(self._popped(runs))
        return found

    def next(self) -> TransactionRun | None:
        """Return rows of the first transaction that waits; None: there is none."""
        heads = (_head(runs, None) for runs in self._runs.values())
        return min(
            (run for run in heads if run is not None), key=lambda run: run.transaction or 0, default=None
        )

    def rows_of(self, transaction: int) -> int:
        """Return the number of rows of the first transaction that wait here or were written."""
        written = self._written if self._open == transaction else 0
        return written + sum(_rows(_own(runs, transaction), transaction) for runs in self._runs.values())

    def frontier(
        self, needed: Callable[[Place], int], places: Sequence[Place], beside: int | None = None
    ) -> int:
        """Return the first transaction of which rows wait here, or may still follow.

        :param needed: returns for a partition the first transaction that its next rows may belong to.
        :param beside: a transaction whose rows that wait here are ignored.
        """
        first = []
        for place in places:
            head = _head(self._runs.get(place, ()), beside)
            first.append(needed(place) if head is None or head.transaction is None else head.transaction)
        return min(first, default=0)

    def in_order_upto(self, transaction: int, needed: Callable[[Place], int], places: Sequence[Place]) -> int:
        """Return the place in the first transaction up to which no more of its rows can follow.

        :param needed: as `frontier`.
        """
        upto = _ALL
        for place in places:
            runs = self._runs.get(place, ())
            if needed(place) > transaction or _head(runs, transaction) is not None:
                continue  # it has no more rows of the transaction
            own = [run for run in runs if run.transaction == transaction]
            upto = min(upto, int(own[-1].taken.joined.orders[own[-1].last - 1]) if own else 0)
        return upto

    def take(self, transaction: int, *, closes: bool, upto: int = _ALL) -> list[TransactionRun]:
        """Return the waiting rows of the first transaction, with rows of no transaction between them.

        :param closes: whether no more rows follow; otherwise the transaction is open once a row is returned.
        :param upto: the last place in the transaction that is taken; rows without a place are always taken.
        """
        found: list[TransactionRun] = []
        for runs in self._runs.values():
            for run in _own(runs, transaction, to_end=self._open == transaction and not closes):
                rows = run.rows_upto(upto)
                if rows:
                    found.append(self._popped(runs, rows))
                if rows < run.rows:
                    break
        self._written = 0 if closes else self._written + _rows(found, transaction)
        if closes or found:
            self._open = None if closes else transaction
        return found

    def _popped(self, runs: deque[TransactionRun], rows: int | None = None) -> TransactionRun:
        run = runs.popleft()
        if rows is not None and rows < run.rows:
            last, size = run.first + rows, run.size_bytes * rows // run.rows
            runs.appendleft(replace(run, first=last, size_bytes=run.size_bytes - size))
            run = replace(run, last=last, size_bytes=size)
        self._waiting[run.place] -= run.rows
        self._waiting_bytes[run.place] -= run.size_bytes
        return run


def _head(runs: Iterable[TransactionRun], beside: int | None) -> TransactionRun | None:
    # Returns the first run of a transaction other than `beside`.
    return next((run for run in runs if run.transaction is not None and run.transaction != beside), None)


def _own(runs: Iterable[TransactionRun], transaction: int, *, to_end: bool = False) -> list[TransactionRun]:
    # Returns the runs of the first transaction, and runs of none between them or, with `to_end`, after them.
    found: list[TransactionRun] = []
    count = 0
    for run in runs:
        if run.transaction not in (None, transaction):
            break
        found.append(run)
        if to_end or run.transaction == transaction:
            count = len(found)
    return found[:count]


def _rows(runs: Iterable[TransactionRun], transaction: int) -> int:
    return sum(run.rows for run in runs if run.transaction == transaction)
