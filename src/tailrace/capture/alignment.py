"""Which columns of the catalogue a Relation message speaks of, though the catalogue may be ahead.

The stream lags behind the database, by hours where a backlog is read. What the catalogue says
when a Relation message arrives may be of a later version of the table. PostgreSQL keeps the rows
of dropped columns, never uses a number twice, gives new columns higher numbers, and sends columns
in the order of their numbers. So a message is laid beside the columns that are there and those
that were dropped since, in order, and the best fit is taken. A row's `xmin` tells which
transaction wrote it last: what is older than the transaction that sent the message was so then.

Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tailrace.model import Column


@dataclass(frozen=True, slots=True)
class CatalogColumn:
    """A row of `pg_attribute`. `later`: it was written by the message's transaction or a later one."""

    number: int
    name: str
    dropped: bool
    type_oid: int
    type_modifier: int
    later: bool
    unsent: bool = False  # generated, or left out by the publication


_SURE, _LIKELY, _POSSIBLE, _SAME_TYPE = 100, 60, 20, 3
_SKIPPED, _UNMATCHED = -30, -40
_IMPOSSIBLE = -(10**6)


def aligned(sent: Sequence[Column], catalog: Sequence[CatalogColumn], before: Mapping[str, int]) -> list[int]:
    """Return the number of each column that was sent; 0 where it can't be told.

    :param catalog: in the order of their numbers.
    :param before: numbers of the columns in the version that was in force, by name.
    """
    there = [column for column in catalog if not column.dropped or column.later]
    if all(not column.dropped for column in there):
        direct = _direct(sent, there)
        if direct is not None:
            return direct
    return _best(sent, there, before)


def _direct(sent: Sequence[Column], there: Sequence[CatalogColumn]) -> list[int] | None:
    """Return the numbers where each name is found, in order, and nothing speaks against it."""
    names = {column.name: column for column in there}
    found = [names.get(column.name) for column in sent]
    numbers = [0 if column is None else column.number for column in found]
    if 0 in numbers or any(first >= second for first, second in itertools.pairwise(numbers)):
        return None
    same = all(
        other is not None and (other.type_oid, other.type_modifier) == (column.type_oid, column.type_modifier)
        for column, other in zip(sent, found, strict=True)
    )
    return numbers if same else None


def _best(sent: Sequence[Column], there: Sequence[CatalogColumn], before: Mapping[str, int]) -> list[int]:
    # As the alignment of two texts: rows for what was sent, columns for the catalogue's.
    rows, columns = len(sent), len(there)
    score = [[0] * (columns + 1) for _ in range(rows + 1)]
    taken = [[0] * (columns + 1) for _ in range(rows + 1)]  # 0 match, 1 skip catalogue's, 2 leave unmatched
    for c in range(1, columns + 1):
        score[0][c] = score[0][c - 1] + _skipping(there[c - 1])
        taken[0][c] = 1
    for r in range(1, rows + 1):
        score[r][0], taken[r][0] = score[r - 1][0] + _UNMATCHED, 2
        for c in range(1, columns + 1):
            choices = (
                score[r - 1][c - 1] + _fit(sent[r - 1], there[c - 1], before),
                score[r][c - 1] + _skipping(there[c - 1]),
                score[r - 1][c] + _UNMATCHED,
            )
            best = max(range(3), key=choices.__getitem__)
            score[r][c], taken[r][c] = choices[best], best
    numbers = [0] * rows
    r, c = rows, columns
    while r:
        if taken[r][c] == 0:
            r, c = r - 1, c - 1
            numbers[r] = there[c].number
        elif taken[r][c] == 1:
            c -= 1
        else:
            r -= 1
    return numbers


def _fit(column: Column, other: CatalogColumn, before: Mapping[str, int]) -> int:
    same_type = (column.type_oid, column.type_modifier) == (other.type_oid, other.type_modifier)
    bonus = _SAME_TYPE if same_type else 0
    if other.dropped:  # its name and type are gone
        return _SURE + _SAME_TYPE + 1 if before.get(column.name) == other.number else _POSSIBLE
    if column.name == other.name:
        return _SURE + bonus
    if not other.later:
        return _IMPOSSIBLE  # nobody renamed it since
    return (_LIKELY if before.get(column.name) == other.number else _POSSIBLE) + bonus


def _skipping(other: CatalogColumn) -> int:
    # What came later, or was dropped earlier than the message, was not sent; the rest should be.
    return 0 if other.later or other.unsent else _SKIPPED
