"""Matches the columns of a Relation message with those of the catalogue, which may be newer.

The stream is behind the database, by hours if a backlog is read, so the catalogue may describe a
later version of the table than the message. PostgreSQL keeps the catalogue rows of dropped columns,
never uses a number twice, gives new columns higher numbers, and sends columns in the order of their
numbers. So the message's columns are aligned, in order, with the present columns and those dropped
since, and the best alignment is used. A row's `xmin` is the transaction that wrote it last: a row
older than the transaction that sent the message was the same then, unless its writer ended later.

If another alignment is about as good for a column, its number remains unknown.

Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tailrace.model import Column


@dataclass(frozen=True, slots=True)
class CatalogColumn:
    """A row of `pg_attribute`. `later`: it was written by the message's transaction or a later one;
    `own`: by the message's transaction.
    """

    number: int
    name: str
    dropped: bool
    type_oid: int
    type_modifier: int
    later: bool
    not_sent: bool = False  # generated, or left out by the publication
    own: bool = False


_SURE, _LIKELY, _POSSIBLE, _ALTERED_TWICE, _SAME_TYPE = 100, 60, 20, 10, 3
_SKIPPED, _SENT_BEFORE, _UNMATCHED = -30, -100, -40
_IMPOSSIBLE = -(10**6)
#: Alignments whose scores differ by no more than this are considered equally good.
_WITHIN_REACH = _SAME_TYPE + 1


def aligned(sent: Sequence[Column], catalog: Sequence[CatalogColumn], before: Mapping[str, int]) -> list[int]:
    """Return the number of each column that was sent; 0 if it is unknown or in doubt.

    :param catalog: in the order of their numbers.
    :param before: numbers of the columns in the version in force before, by name.
    """
    known = frozenset(before.values())
    there = [column for column in catalog if not column.dropped or column.later]
    if all(not column.dropped for column in there):
        direct = _direct(sent, there, known)
        if direct is not None:
            return direct
    there = [column for column in catalog if not column.dropped or column.later or column.number in known]
    numbers: list[int] = []
    row = at = 0
    for fixed_row, fixed_at in _anchors(sent, there, before):
        numbers += _best(sent[row:fixed_row], there[at:fixed_at], before, ended=False)
        numbers.append(there[fixed_at].number)
        row, at = fixed_row + 1, fixed_at + 1
    return numbers + _best(sent[row:], there[at:], before, ended=True)


def _anchors(
    sent: Sequence[Column], there: Sequence[CatalogColumn], before: Mapping[str, int]
) -> list[tuple[int, int]]:
    """Return the indexes, in both sequences, of columns that certainly match, if they are in order.

    The columns between two of them are matched separately, because matching takes quadratic time.
    """
    places = {
        other.name: at
        for at, other in enumerate(there)
        if not (other.later or other.dropped or other.not_sent)
    }
    found = [(row, places[column.name]) for row, column in enumerate(sent) if column.name in places]
    if any(first[1] >= second[1] for first, second in itertools.pairwise(found)):
        return []
    return [(row, at) for row, at in found if before.get(sent[row].name) in (None, there[at].number)]


def _direct(
    sent: Sequence[Column], there: Sequence[CatalogColumn], known: Collection[int]
) -> list[int] | None:
    """Return the numbers if each name is found, in order, and nothing contradicts that; else None."""
    names = {column.name: column for column in there}
    found = [names.get(column.name) for column in sent]
    numbers = [0 if column is None else column.number for column in found]
    if 0 in numbers or any(first >= second for first, second in itertools.pairwise(numbers)):
        return None
    taken, last = frozenset(numbers), max(numbers, default=0)
    skipped = [other for other in there if other.later and other.number not in taken]
    if any(_skipping(other, known, last=other.number > last) for other in skipped):
        return None  # it existed then, so it must be one of the columns that were sent
    same = all(
        other is not None and (other.type_oid, other.type_modifier) == (column.type_oid, column.type_modifier)
        for column, other in zip(sent, found, strict=True)
    )
    return numbers if same else None


def _best(
    sent: Sequence[Column], there: Sequence[CatalogColumn], before: Mapping[str, int], *, ended: bool
) -> list[int]:
    # Sequence alignment: rows are the sent columns, columns the catalogue's. The best score with a given pair
    # is the best score before it, plus the pair's, plus the best score after it.
    if not sent:
        return []
    fits = [[_fit(column, other, before) for other in there] for column in sent]
    known = frozenset(before.values())
    within = [_skipping(other, known, last=False) for other in there]
    behind = [_skipping(other, known, last=ended) for other in there]
    ahead_of = _scores(fits, within, within)
    turned = _scores([row[::-1] for row in fits[::-1]], within[::-1], behind[::-1])
    rows, columns = len(sent), len(there)
    numbers = []
    for r in range(rows):
        rest = turned[rows - r - 1]
        choices = [
            (ahead_of[r][c] + fits[r][c] + rest[columns - c - 1], there[c].number) for c in range(columns)
        ]
        choices += [(ahead_of[r][c] + _UNMATCHED + rest[columns - c], 0) for c in range(columns + 1)]
        best, number = max(choices)
        doubtful = any(other != number and score >= best - _WITHIN_REACH for score, other in choices)
        numbers.append(0 if doubtful else number)
    return numbers


def _scores(
    fits: Sequence[Sequence[int]], skipped: Sequence[int], at_first: Sequence[int]
) -> list[list[int]]:
    """Return the best score of aligning the first r rows with the first c columns, as [r][c].

    :param fits: the score of each pair of row and column.
    :param skipped: the score of skipping a column; `at_first`: before the first row.
    """
    columns = len(skipped)
    scores = [[0, *itertools.accumulate(at_first)]]
    for fit in fits:
        above, row = scores[-1], [scores[-1][0] + _UNMATCHED]
        for c in range(1, columns + 1):
            row.append(max(above[c - 1] + fit[c - 1], row[c - 1] + skipped[c - 1], above[c] + _UNMATCHED))
        scores.append(row)
    return scores


def _fit(column: Column, other: CatalogColumn, before: Mapping[str, int]) -> int:
    same_type = (column.type_oid, column.type_modifier) == (other.type_oid, other.type_modifier)
    bonus = _SAME_TYPE if same_type else 0
    held = before.get(column.name) == other.number
    if not other.later and (other.dropped or column.name != other.name):
        # In this form it was not sent; if it was in force before, its change was committed after the message.
        return _POSSIBLE + bonus if held else _IMPOSSIBLE
    if other.dropped:  # its name and type are gone
        return _SURE + _SAME_TYPE + 1 if held else _POSSIBLE
    if column.name == other.name:
        return _SURE + bonus
    if held:
        return _LIKELY + bonus
    # With another name and another type it was altered twice; more likely the old column was dropped.
    return _POSSIBLE + bonus if same_type else _ALTERED_TWICE


def _skipping(other: CatalogColumn, known: Collection[int], *, last: bool) -> int:
    """Return the score of a column that was not sent.

    :param last: no column with a higher number was sent.
    """
    if other.not_sent:
        return 0
    if other.dropped:
        # A column that was sent before, and was dropped after the message, existed then.
        return _SKIPPED if other.number in known and other.later and not other.own else 0
    if other.number in known:
        return _SENT_BEFORE  # and it still exists: now a column list leaves it out
    # A column that was added later was not sent; then no column with a higher number was sent either.
    return 0 if other.later and last else _SKIPPED
