"""The merge compared with the simple model and a naive join, over all interleavings of small histories."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.join.merge import UNKNOWN, DataRows, Joined, Merge, Position, TransactionRows
from tests.support.examples import examples
from tests.support.join.model import Model, Out, Row, RuleBrokenError, Transaction


def data_rows(rows: list[Row]) -> DataRows:
    return DataRows(
        np.array([row.offset for row in rows], np.int64),
        pa.array([row.key for row in rows], pa.string()),
        np.array([row.follows for row in rows], np.int64),
        np.array([row.order for row in rows], np.int64),
    )


def transaction_rows(rows: list[Transaction]) -> TransactionRows:
    has_orders = all(row.order != UNKNOWN for row in rows)
    return TransactionRows(
        np.array([row.offset for row in rows], np.int64),
        pa.array([row.key for row in rows], pa.string()),
        np.array([row.order for row in rows], np.int64) if has_orders and rows else None,
        np.array([row.count for row in rows], np.int64),
    )


#: How many random histories are tried, and of how many the rest is joined again from each position.
HISTORIES, RESUMED = examples(800).max_examples, examples(150).max_examples

#: Keys that the context of a violation has at least.
POSITIONS = {"data_offset", "transaction_offset"}


class Fast:
    """The merge, driven as the model is; it records the positions after each row."""

    def __init__(self, position: Position | None = None) -> None:
        self.merge = Merge(position or Position())
        self.positions: list[Position] = []

    def add_data(self, rows: list[Row]) -> None:
        self.merge.add_data(data_rows(rows))

    def add_transactions(self, rows: list[Transaction]) -> None:
        self.merge.add_transactions(transaction_rows(rows))

    def take(self) -> list[Out]:
        try:
            joined = self.merge.take()
        except TailraceError as error:
            if error.kind is not Kind.JOIN_VIOLATED or not set(error.context) >= POSITIONS:
                raise
            raise RuleBrokenError(error.context["rule"]) from error
        self.positions += [joined.position(row) for row in range(joined.rows)]
        return outs(joined)


def outs(joined: Joined) -> list[Out]:
    return [
        Out(
            int(joined.next_offsets[row]) - 1,
            int(joined.offsets[row]) if joined.transactions[row] >= 0 else None,
            int(joined.seen[row]),
            bool(joined.ends[row]),
        )
        for row in range(joined.rows)
    ]


def drive(merge: Fast | Model, steps: list[list[Row] | list[Transaction]]) -> list[object]:
    """Add what each step brings and return what can be joined; the last element names a broken rule."""
    found: list[object] = []
    for step in steps:
        if step and isinstance(step[0], Row):
            merge.add_data(step)
        else:
            merge.add_transactions(step)  # type: ignore[arg-type]
        try:
            while got := merge.take():
                found.extend(got)
        except RuleBrokenError as error:
            found.append(str(error))
            break
        found.append("waits")
    return found


def interleavings(rows: list[Row], transactions: list[Transaction]) -> Iterator[list[list]]:
    """Yield every order in which two queues can be filled one by one."""
    total = len(rows) + len(transactions)
    for chosen in itertools.combinations(range(total), len(rows)):
        left, right = iter(rows), iter(transactions)
        yield [[next(left)] if at in chosen else [next(right)] for at in range(total)]


def naive(rows: list[Row], transactions: list[Transaction]) -> list[tuple[int, int | None]]:
    """Join by key, with all rows at hand."""
    by_key = {transaction.key: transaction.offset for transaction in transactions}
    return [(row.offset, None if row.key is None else by_key[row.key]) for row in rows]


def joined_pairs(found: list[object]) -> list[tuple[int, int | None]]:
    return [(each.data, each.transaction) for each in found if isinstance(each, Out)]


def history(rng: random.Random, *, ordered: bool, sizes: int = 4) -> tuple[list[Row], list[Transaction]]:
    """Return a correct history: transactions with gaps, and rows without a transaction among the rows."""
    rows: list[Row] = []
    transactions: list[Transaction] = []
    data_offset = transaction_offset = lsn = 0
    for number in range(rng.randint(0, sizes)):
        before, lsn = lsn, lsn + rng.randint(1, 3)
        count, order = rng.randint(0, 3), 0
        for _ in range(count):
            data_offset += rng.choice([1, 1, 2])
            order += rng.choice([1, 1, 2])
            follows = before if ordered and (number or rng.random() < 0.5) else UNKNOWN
            rows.append(Row(data_offset, f"t{number}", follows, order if rng.random() < 0.9 else UNKNOWN))
            if rng.random() < 0.2:
                data_offset += 1
                rows.append(Row(data_offset, None))
        transaction_offset += rng.choice([1, 2, 3])
        known = rng.choice([UNKNOWN, order + rng.choice([0, 0, 2])])
        transactions.append(Transaction(transaction_offset, f"t{number}", lsn if ordered else UNKNOWN, known))
    return rows, transactions


def small_histories(*, ordered: bool) -> Iterator[tuple[list[Row], list[Transaction]]]:
    """Yield all correct histories of three transactions with up to two rows each, perhaps a row of none."""
    for counts in itertools.product(range(3), repeat=3):
        keys = [(f"t{number}", number, order + 1) for number in range(3) for order in range(counts[number])]
        transactions = [
            Transaction(number, f"t{number}", 10 * number + 10 if ordered else UNKNOWN, counts[number])
            for number in range(3)
        ]
        for free in (None, len(keys) // 2):
            places: list[tuple[str | None, int, int]] = list(keys)
            if free is not None:
                places.insert(free, (None, 0, UNKNOWN))
            follows = [10 * number if ordered and key else UNKNOWN for key, number, _ in places]
            yield (
                [Row(at, place[0], follows[at], place[2]) for at, place in enumerate(places)],
                transactions,
            )


def check_all_interleavings(*, ordered: bool) -> int:
    """Compare the merge with the naive join and the model, over all interleavings of all small histories."""
    count = 0
    for rows, transactions in small_histories(ordered=ordered):
        for steps in interleavings(rows, transactions):
            count += 1
            found = drive(Fast(), steps)
            assert joined_pairs(found) == naive(rows, transactions), steps
            assert found == drive(Model(), steps), steps
    return count


@pytest.mark.ci
@pytest.mark.parametrize("ordered", [True, False])
def test_all_interleavings_of_small_histories_equal_the_naive_join(ordered):
    assert check_all_interleavings(ordered=ordered) == 1782


def mutated(rng: random.Random, rows: list[Row], transactions: list[Transaction]) -> str:
    """Break an assumption in place; return a description."""
    what = rng.choice(["repeat", "swap", "lose", "repeat transaction", "swap transactions", "again"])
    if what == "repeat" and rows:
        at = rng.randrange(len(rows))
        rows.insert(rng.randint(at, len(rows)), rows[at])
    elif what == "again" and rows:
        rows.extend(rows[rng.randrange(len(rows)) :])
    elif what == "swap" and len(rows) > 1:
        at, other = rng.sample(range(len(rows)), 2)
        rows[at], rows[other] = rows[other], rows[at]
    elif what == "lose" and transactions:
        del transactions[rng.randrange(len(transactions))]
    elif what == "repeat transaction" and transactions:
        at = rng.randrange(len(transactions))
        transactions.insert(rng.randint(at, len(transactions)), transactions[at])
    elif what == "swap transactions" and len(transactions) > 1:
        at, other = rng.sample(range(len(transactions)), 2)
        transactions[at], transactions[other] = transactions[other], transactions[at]
    rows[:] = [Row(at, row.key, row.follows, row.order) for at, row in enumerate(rows)]
    transactions[:] = [Transaction(at, t.key, t.order, t.count) for at, t in enumerate(transactions)]
    return what


def random_steps(rng: random.Random, rows: list[Row], transactions: list[Transaction]) -> list[list]:
    left, right, steps = list(rows), list(transactions), []
    while left or right:
        queue = rng.choice([each for each in (left, right) if each])
        count = rng.randint(1, len(queue)) if rng.random() < 0.5 else 1
        steps.append(queue[:count])
        del queue[:count]
    return steps


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("broken", [False, True])
def test_random_histories_equal_the_model(ordered, broken, join_seed):
    rng = random.Random(join_seed)
    for number in range(HISTORIES):
        rows, transactions = history(rng, ordered=ordered, sizes=8)
        done = [mutated(rng, rows, transactions) for _ in range(rng.randint(1, 2))] if broken else []
        steps = random_steps(rng, rows, transactions)
        found = drive(Fast(), steps)
        assert found == drive(Model(), steps), (join_seed, number, done, steps)
        if not broken:
            assert joined_pairs(found) == naive(rows, transactions), (join_seed, number, steps)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_restart_at_any_position_gives_the_same_rest(ordered, join_seed):
    rng = random.Random(join_seed)
    for number in range(RESUMED):
        rows, transactions = history(rng, ordered=ordered, sizes=6)
        whole = Fast()
        first = [out for out in drive(whole, random_steps(rng, rows, transactions)) if isinstance(out, Out)]
        for done, position in enumerate(whole.positions, 1):
            left = [row for row in rows if row.offset >= position.data]
            queued = [each for each in transactions if each.offset >= position.transactions]
            found = drive(Fast(position), random_steps(rng, left, queued))
            rest = [out for out in found if isinstance(out, Out)]
            expected = [(out.data, out.transaction, out.seen) for out in first[done:]]
            case = (join_seed, number, position)
            assert [(out.data, out.transaction, out.seen) for out in rest if out.transaction is not None] == [
                each for each in expected if each[1] is not None
            ], case
            assert [out.data for out in rest] == [each[0] for each in expected], case


def _exclusive(joined: Joined, row: int) -> Position:
    found = SOUND_POSITION(joined, row)
    return replace(found, transactions=found.transactions + 1)


def _eager(merge: Merge) -> Joined:
    found = SOUND_TAKE(merge)
    merge._pass(merge.transactions_queued)
    return found


def _one_to_one(merge: Merge) -> Joined:
    found = SOUND_TAKE(merge)
    if found.rows and merge.transactions_queued:
        merge._pass(1)
    return found


def _uncounted(joined: Joined, row: int) -> Position:
    return replace(SOUND_POSITION(joined, row), seen=0)


SOUND_TAKE, SOUND_POSITION = Merge.take, Joined.position

PLANTED = {
    "a transaction is passed as soon as no row waits for it": (Merge, "take", _eager),
    "a transaction is passed once a row has got it": (Merge, "take", _one_to_one),
    "a row of a passed transaction waits for ever": (Merge, "_never_comes", lambda *_: None),
    "a row may have a transaction that was passed before it": (
        Merge,
        "_misplaced",
        lambda _merge, _follows, places: len(places),
    ),
    "a repeated transaction is queued": (
        Merge,
        "_good_transactions",
        lambda _merge, rows: len(rows.offsets),
    ),
    "the position is behind the transaction": (Joined, "position", _exclusive),
    "the position does not count rows": (Joined, "position", _uncounted),
}


#: The quick ones first: the first that finds the bug is enough.
CHECKS = [
    lambda: test_random_histories_equal_the_model(True, True, 7),
    lambda: test_random_histories_equal_the_model(False, True, 7),
    lambda: test_a_restart_at_any_position_gives_the_same_rest(True, 7),
]


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug, monkeypatch):
    owner, name, instead = PLANTED[bug]
    monkeypatch.setattr(owner, name, instead)
    assert any(map(fails, CHECKS))


@pytest.mark.slow
def test_no_bug_is_found_without_one():
    assert not any(map(fails, CHECKS))


def fails(check: Callable[[], object]) -> bool:
    try:
        check()
    except (AssertionError, TailraceError, IndexError):
        return True
    return False
