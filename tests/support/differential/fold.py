"""Folds a history of changes into tables, and lists changes that are impossible.

It uses nothing of the product. Logical messages of the workload (`ddl`) describe each schema change; a
change with other columns than the table has by then is a problem. So is a change of a row that does
not exist, a transaction with another number of changes than its message (`tx`) says, and one that is
repeated, late or missing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from tests.support.differential.history import Change, Row

EXAMPLES = 3

#: A row in a form that can be counted: (column, text) by column.
Fixed = tuple[tuple[str, str | None], ...]


class Rows:
    """A table's rows while a history is folded.

    A schema change is applied with the next row: that is when it shows in the stream.

    :ivar rows: as of the last change of a row.
    """

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self._waiting: list[Mapping[str, Any]] = []
        self._count = 0
        self._identity: tuple[str, ...] = ()
        self._by_identity: dict[Fixed, set[int]] = defaultdict(set)

    def all(self) -> list[Row]:
        """Return the rows after everything that happened to the table."""
        self._settle()
        return self.held()

    def held(self) -> list[Row]:
        """Return the rows of a target, which learns of a schema change by the next row."""
        return list(self.rows.values())

    def alter(self, fact: Mapping[str, Any]) -> None:
        """Note a schema change."""
        self._waiting.append(fact)

    def _settle(self) -> None:
        for fact in self._waiting:
            self._carry_out(fact)
        if self._waiting:
            self._look_up_by(())
        self._waiting.clear()

    def _carry_out(self, fact: Mapping[str, Any]) -> None:
        match fact:
            case {"add": name, "value": value}:
                self.rows = {at: {**row, name: value} for at, row in self.rows.items()}
            case {"drop": name}:
                self.rows = {
                    at: {each: text for each, text in row.items() if each != name}
                    for at, row in self.rows.items()
                }
            case {"rename": [old, new]}:
                self.rows = {
                    at: {new if each == old else each: text for each, text in row.items()}
                    for at, row in self.rows.items()
                }
            case {"retype": name, "texts": texts}:
                self.rows = {at: {**row, name: texts[row["uid"]]} for at, row in self.rows.items()}

    def apply(self, change: Change, *, in_snapshot: bool) -> str | None:
        """Apply a change; return what is impossible about it.

        :param in_snapshot: rows that do not exist may be changed: the snapshot reads them later.
        """
        self._settle()
        if change.op == "t":
            self.rows.clear()
            self._look_up_by(())
            return None
        known: Row | None = None
        if change.op == "r" and in_snapshot and change.identity:
            known = self._take(change.identity, change.after or {})
        if change.op in "rc":
            read = dict(change.after or {})
            problem = self._put(change, read)
            if known is not None and known != {name: read.get(name, "") for name in known}:
                return "a row is read that differs from what was known of it"
            return problem
        if not change.identity:
            return "an old row is changed, and nothing tells which"
        told = change.before if change.before is not None else change.after
        old = self._take(change.identity, told or {})
        if old is None and in_snapshot:
            if change.op == "u":
                self._put(change, {**(change.before or {}), **(change.after or {})})
            return None
        if change.op == "d":
            return None if old is not None else "a row is deleted that is not there"
        if old is None:
            return "a row is updated that is not there"
        return self._put(change, {**old, **(change.after or {})})

    def _put(self, change: Change, row: Row) -> str | None:
        self._count += 1
        self.rows[self._count] = row
        if self._identity:
            self._by_identity[_fixed(row, self._identity)].add(self._count)
        if set(row) != set(change.columns):
            return f"it has the columns {sorted(row)}, its table has {sorted(change.columns)}"
        return None

    def _take(self, identity: tuple[str, ...], told: Row) -> Row | None:
        if self._identity != identity:
            self._look_up_by(identity)
        if not set(identity) <= set(told):
            return None
        wanted = _fixed(told, identity)
        found = self._by_identity.get(wanted)
        if not found:
            return None
        at = found.pop()
        return self.rows.pop(at)

    def _look_up_by(self, identity: tuple[str, ...]) -> None:
        self._identity = identity
        self._by_identity.clear()
        if identity:
            for at, row in self.rows.items():
                self._by_identity[_fixed(row, identity)].add(at)


class Fold:
    """Takes changes in log order. `problems` has a few examples of each kind.

    :param snapshot_until: the log offset up to which an interrupted snapshot may bring rows: changes
        of tables that have no rows yet are ignored before it.
    """

    def __init__(self, snapshot_until: int = 0) -> None:
        self._snapshot_until = snapshot_until
        self.tables: dict[int, Rows] = defaultdict(Rows)
        self.problems: list[str] = []
        self.transactions: list[tuple[int, int]] = []  # (number, changes) of the messages `tx`

    def take(self, changes: Iterable[Change]) -> None:
        """Fold whole transactions."""
        ordered = list(changes)
        self._order(ordered)
        for commit_lsn, group in groupby(ordered, key=lambda change: change.commit_lsn):
            self._transaction(commit_lsn, list(group))

    def _order(self, changes: Sequence[Change]) -> None:
        wrong = [
            f"{_place(after)} lies behind {_place(before)} in the log"
            for before, after in pairwise(changes)
            if _rank(after) <= _rank(before) or after.log_offset <= before.log_offset
        ]
        self.problems += wrong[:EXAMPLES]

    def _transaction(self, commit_lsn: int, changes: list[Change]) -> None:
        problems = []
        in_snapshot = changes[0].log_offset < self._snapshot_until
        if [change.ordinal for change in changes] != list(range(len(changes))):
            problems.append(f"the transaction at {commit_lsn:X} is not numbered 0 to {len(changes) - 1}")
        if any(change.op == "r" for change in changes) and self.transactions and not in_snapshot:
            problems.append(f"rows of a snapshot come after a transaction, at {commit_lsn:X}")
        for change in changes:
            if change.message is not None:
                problems += self._message(change, changes)
            elif problem := self.tables[change.table].apply(change, in_snapshot=in_snapshot):
                problems.append(f"{_place(change)}: {problem}")
        ours = changes[-1].message is not None and changes[-1].message[0] == "tx"
        if not ours and any(change.op != "r" for change in changes):
            problems.append(f"the transaction at {commit_lsn:X} has no end")
        self.problems += problems[:EXAMPLES]

    def _message(self, change: Change, transaction: list[Change]) -> list[str]:
        assert change.message is not None
        prefix, told = change.message
        if prefix == "ddl":
            if "gone" in told:
                self.tables.pop(told["table"], None)
            else:
                self.tables[told["table"]].alter(told)
        if prefix != "tx":
            return []
        number, changes = told["number"], told["changes"]
        problems = []
        if self.transactions and number != self.transactions[-1][0] + 1:
            problems.append(f"transaction {number} follows transaction {self.transactions[-1][0]}")
        found = sum(1 for each in transaction if each.message is None)
        left_out = transaction[0].log_offset < self._snapshot_until
        if found > changes or (found < changes and not left_out):
            problems.append(f"transaction {number} has {found} changes of {changes}")
        self.transactions.append((number, changes))
        return problems


def differences(name: str, found: Iterable[Row], wanted: Iterable[Row], key: Sequence[str]) -> list[str]:
    """Return how two tables differ, the smallest keys first."""
    left = Counter(_fixed(row, sorted(row)) for row in found)
    right = Counter(_fixed(row, sorted(row)) for row in wanted)
    too_many = [dict(row) for row in (left - right).elements()]
    missing = [dict(row) for row in (right - left).elements()]
    told = []
    for what, rows, others in (("too many", too_many, missing), ("missing", missing, too_many)):
        for row in sorted(rows, key=lambda row: [str(row.get(column)) for column in key])[:EXAMPLES]:
            twin = next((o for o in others if all(o.get(c) == row.get(c) for c in key)), {}) if key else {}
            differs = {column: text for column, text in row.items() if twin.get(column, ...) != text}
            told.append(f"{name}: {what}: {_short({c: row.get(c) for c in key})}: {_short(differs)}")
    return told


def _fixed(row: Row, columns: Iterable[str]) -> Fixed:
    return tuple((column, row[column]) for column in columns)


def _rank(change: Change) -> tuple[int, int]:
    return change.commit_lsn, change.ordinal


def _place(change: Change) -> str:
    where = change.name or "message"
    return f"{where} at ({change.commit_lsn:X}, {change.ordinal}), offset {change.log_offset}, op {change.op}"


def _short(row: Mapping[str, Any]) -> str:
    shown = {
        name: text if text is None or len(text) < 60 else f"{text[:50]}… ({len(text)})"
        for name, text in row.items()
    }
    return str(shown)
