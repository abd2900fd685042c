"""Puts whole transactions together from several partitions: each row once, in the transactions' order."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from tailrace.join.assembly import Assembly
from tailrace.join.extraction import MESSAGES
from tailrace.join.merge import UNKNOWN, Joined
from tailrace.join.partition import TRANSACTION, JoinedRows

PLACES = [("a", 0), ("a", 1), ("b", 0)]

Rows = list[int | None]  # for each row its transaction


def taken(rows: Rows, first: int) -> JoinedRows:
    """Return rows as a merge returns them; the offset identifies a row."""
    own = np.array([UNKNOWN if row is None else row for row in rows], np.int64)
    offsets = np.maximum.accumulate(own)
    numbers = np.arange(first, first + len(rows), dtype=np.int64)
    joined = Joined(
        len(rows),
        np.where(own < 0, -1, 0),
        offsets,
        numbers + 1,
        numbers,
        numbers,
        numbers,
        np.ones(len(rows), bool),
    )
    values = [str(number).encode() for number in numbers]
    messages = pa.RecordBatch.from_arrays(
        [pa.array(values, pa.binary())] * 2 + [pa.array(numbers)] * 2, schema=MESSAGES
    )
    return JoinedRows(messages, pa.nulls(len(rows), TRANSACTION), joined)


def history(chance: random.Random) -> dict[tuple[str, int], Rows]:
    """Return the rows of each partition, in the order of transactions."""
    rows: dict[tuple[str, int], Rows] = {place: [] for place in PLACES}
    for transaction in range(chance.randint(1, 6)):
        for place in PLACES:
            rows[place] += [transaction] * chance.choice([0, 0, 1, 3])
            if chance.random() < 0.2:
                rows[place].append(None)
    return rows


def assembled(
    chance: random.Random, rows: dict[tuple[str, int], Rows], whole: Callable[..., bool]
) -> list[tuple[int | None, tuple[str, int], int]]:
    """Feed an assembly at random; return its output: transaction, partition and row."""
    assembly, left, out = Assembly(), {place: list(found) for place, found in rows.items()}, []
    closed: set[int] = set()

    def needed(place: tuple[str, int]) -> int:
        # The transaction that a partition's next rows may have: all before it are passed.
        return next((row for row in left[place] if row is not None), 1 << 40)

    def collect(runs):
        for run in runs:
            for number, *_ in run.messages():
                out.append((run.transaction, run.place, number))

    while any(left.values()) or assembly.next() is not None:
        if fed := [place for place in PLACES if left[place]]:
            place = chance.choice(fed)
            count = chance.randint(1, 4)
            first = len(rows[place]) - len(left[place])
            assembly.add(place, taken(left[place][:count], first))
            del left[place][:count]
        collect(assembly.take_loose())
        while (run := assembly.next()) is not None:
            transaction = assembly.open if assembly.open is not None else run.transaction
            assert transaction is not None
            if assembly.frontier(needed, PLACES) < transaction:
                break
            assert transaction not in closed
            closes = whole(assembly, transaction, needed)
            if closes:
                closed.add(transaction)
            if not closes and chance.random() < 0.7:
                break
            collect(assembly.take(transaction, closes=closes))
            if not closes:
                break
            collect(assembly.take_loose())
    if (is_open := assembly.open) is not None:
        collect(assembly.take(is_open, closes=True))
    collect(assembly.take_loose())
    return out


def by_frontier(assembly: Assembly, transaction: int, needed: Callable[..., int]) -> bool:
    return assembly.frontier(needed, PLACES, transaction) > transaction


def check(seed: int, whole: Callable[..., bool]) -> None:
    chance = random.Random(seed)
    rows = history(chance)
    out = assembled(chance, rows, whole)
    for place in PLACES:
        assert [number for _, at, number in out if at == place] == list(range(len(rows[place]))), seed
    real = [transaction for transaction, _, _ in out if transaction is not None]
    assert real == sorted(real), seed


@pytest.mark.slow
def test_each_row_is_returned_once_in_the_order_of_transactions(join_seed: int) -> None:
    for seed in range(join_seed, join_seed + 500):
        check(seed, by_frontier)


@pytest.mark.parametrize("counted", [True, False])
def test_a_transaction_is_complete_when_all_its_rows_are_counted(counted: bool) -> None:
    assembly = Assembly()
    assembly.add(("a", 0), taken([1, 1], 0))
    assert assembly.rows_of(1) == 2
    if counted:
        assembly.take(1, closes=False)
        assembly.add(("a", 1), taken([1, None, 1, 2], 0))
        assert assembly.rows_of(1) == 4
        assert sum(run.rows for run in assembly.take(1, closes=True)) == 3
        assert assembly.open is None
        head = assembly.next()
        assert head is not None
        assert head.transaction == 2


def test_closing_a_transaction_as_soon_as_it_has_rows_is_found() -> None:
    def check_all() -> None:
        for seed in range(500):
            check(seed, lambda *_: True)

    with pytest.raises(AssertionError):
        check_all()
