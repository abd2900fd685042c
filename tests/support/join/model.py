"""The merge in plain Python, row by row, with which the fast one is compared."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tailrace.join.merge import UNKNOWN


@dataclass(frozen=True)
class Row:
    """A data row."""

    offset: int
    key: str | None
    follows: int = UNKNOWN
    order: int = UNKNOWN


@dataclass(frozen=True)
class Transaction:
    """A row of the transaction topic."""

    offset: int
    key: str
    order: int = UNKNOWN
    count: int = UNKNOWN


@dataclass(frozen=True)
class Out:
    """A joined row: both offsets, rows of the transaction up to it, whether it is known to be the last."""

    data: int
    transaction: int | None
    seen: int
    ends: bool


class RuleBrokenError(Exception):
    """A rule was broken; the message is its name."""


@dataclass
class Model:
    """The documented algorithm, with checks of its assumptions."""

    data: deque[Row] = field(default_factory=deque)
    transactions: deque[Transaction] = field(default_factory=deque)
    passed: list[str] = field(default_factory=list)
    last_order: int = UNKNOWN
    broken_transactions: bool = False
    current: Transaction | None = None
    seen: int = 0
    order: int = UNKNOWN
    ended: bool = True

    def add_data(self, rows: list[Row]) -> None:
        self.data.extend(rows)

    def add_transactions(self, rows: list[Transaction]) -> None:
        for row in rows:
            if row.order != UNKNOWN:
                again = row.order <= self.last_order
            else:
                again = row.key in self.passed or any(row.key == each.key for each in self.transactions)
            self.broken_transactions = self.broken_transactions or again
            if not self.broken_transactions:
                self.transactions.append(row)
                self.last_order = row.order

    def take(self) -> list[Out]:
        """Return the rows that can be joined now.

        :raises RuleBrokenError: if there are none, and a rule is broken.
        """
        found: list[Out] = []
        try:
            while self.data:
                out = self._step()
                if out is not None:
                    found.append(out)
                elif not self.transactions:
                    break
        except RuleBrokenError:
            if not found:
                raise
            return found
        if not found and self.broken_transactions:
            raise RuleBrokenError("transactions_out_of_order")
        return found

    def _step(self) -> Out | None:
        row = self.data[0]
        if row.key is None:
            self.data.popleft()
            return Out(row.offset, None, self.seen, self.ended)
        if row.key in self.passed:
            raise RuleBrokenError("data_out_of_order")
        if not self.transactions:
            return None
        own = self.transactions[0]
        is_own = own.key == row.key
        if own.order != UNKNOWN and row.follows != UNKNOWN and is_own != (own.order > row.follows):
            raise RuleBrokenError("transaction_missing")
        if not is_own:
            self.passed.append(own.key)
            self.transactions.popleft()
            return None
        if self.current != own:
            self.current, self.seen, self.order = own, 0, UNKNOWN
        if row.order != UNKNOWN and row.order <= self.order:
            raise RuleBrokenError("data_out_of_order")
        if own.count != UNKNOWN and self.seen >= own.count:
            raise RuleBrokenError("data_out_of_order")
        self.data.popleft()
        self.seen, self.order = self.seen + 1, row.order
        following = next((each.key for each in self.data if each.key is not None), row.key)
        self.ended = following != row.key or own.count == self.seen
        return Out(row.offset, own.offset, self.seen, self.ended)
