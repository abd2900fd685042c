"""Former names of columns, so that rules still apply after a column was renamed.

A column is identified by its table's oid and its `pg_attribute.attnum`, which don't change when the column,
the table or the schema is renamed. A column without a number, because its table was dropped before the
catalogue was queried, may be any of the columns that it replaced: it has the names of all of them.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from tailrace.model import Column
from tailrace.protocol.facts import ColumnFacts, Facts
from tailrace.protocol.frames import CONTROL, KIND_AT, control_json

#: Schema, table and column.
ColumnName = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Renames:
    """All names, the oldest first, of the columns that have had several, by relation and column.

    A column's key is its number, or its name if the number is not known. For a table with rules, every column
    is listed from the start: no row reveals one that is not read, or that is renamed before any row.
    """

    by_relation: Mapping[int, Mapping[str, tuple[ColumnName, ...]]] = field(default_factory=dict)

    def names(self) -> set[ColumnName]:
        """Return all names of the listed columns."""
        return {name for columns in self.by_relation.values() for names in columns.values() for name in names}

    def of(self, relation: int, columns: Iterable[Column | ColumnFacts]) -> dict[str, tuple[ColumnName, ...]]:
        """Return all names of those of `columns` that have had several, by their current name."""
        known = self.by_relation.get(relation)
        if not known:
            return {}
        found = {column.name: known.get(_key(column), ()) for column in columns}
        return {name: names for name, names in found.items() if names}

    def after(self, before: Facts | None, facts: Facts) -> Renames:
        """Return the names after a table's facts changed from `before` to `facts`."""
        known = dict(self.by_relation.get(facts.relation, {}))
        for column in facts.columns:
            if column.number and (names := known.get(_key(column))):
                known[_key(column)] = _joined(names, (_named(facts, column),))
        if before is None or before.relation != facts.relation:
            return self._with(facts.relation, known)
        numbers = {column.number for column in facts.columns if column.number}
        there = {column.name for column in facts.columns}
        gone = [
            column
            for column in before.columns
            if column.number and column.number not in numbers and column.name not in there
        ]
        for column in facts.columns:
            held = before.column(column.number)
            if held is None and column.number:
                # Its number was not known before.
                held = next((c for c in before.columns if c.name == column.name and not c.number), None)
            came = held is None and not column.number and all(c.name != column.name for c in before.columns)
            for old in [held] if held is not None else gone if came else []:
                former = known.get(_key(old), ()) or (_named(before, old),)
                names_now = _joined(known.get(_key(column), ()), former, (_named(facts, column),))
                if len(names_now) > 1:
                    known[_key(column)] = names_now
        return self._with(facts.relation, known)

    def with_columns(self, names: Mapping[int, Mapping[int, ColumnName]]) -> Renames:
        """Return the names after adding the columns' current `names`, by relation and number."""
        known = dict(self.by_relation)
        for relation, columns in names.items():
            held = known.get(relation, {})
            now = {str(n): _joined(held.get(str(n), ()), (name,)) for n, name in columns.items()}
            known[relation] = {**held, **now}
        return self if known == self.by_relation else Renames(known)

    def with_names(self, facts: Facts, names: Mapping[int, ColumnName]) -> Renames:
        """Return the names after adding a table's current column `names`, by number."""
        known = dict(self.by_relation.get(facts.relation, {}))
        for column in facts.columns:
            now = names.get(column.number)
            if column.number and now is not None:
                joined = _joined(known.get(_key(column), ()), (_named(facts, column), now))
                if len(joined) > 1:
                    known[_key(column)] = joined
        return self._with(facts.relation, known)

    def as_json(self) -> dict[str, Any]:
        """Return the object that `from_json` reads."""
        return {
            str(oid): {key: [list(name) for name in names] for key, names in columns.items()}
            for oid, columns in self.by_relation.items()
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the names that `as_json` wrote.

        :raises ValueError: if `content` does not have that form.
        """
        try:
            return cls(
                {
                    int(oid): {
                        key: tuple((str(schema), str(table), str(name)) for schema, table, name in names)
                        for key, names in columns.items()
                    }
                    for oid, columns in content.items()
                }
            )
        except (AttributeError, TypeError) as error:
            raise ValueError("not a list of names of columns") from error

    def _with(self, relation: int, known: dict[str, tuple[ColumnName, ...]]) -> Renames:
        if known == self.by_relation.get(relation, {}):
            return self
        return Renames({**self.by_relation, relation: known})


def renames_in(schema_frames: Iterable[bytes]) -> Renames:
    """Return the names that columns have had, from the facts frames among `schema_frames`, in log order.

    :raises TailraceError: `PROTOCOL_VIOLATION` if a facts frame is malformed.
    """
    renames, last = Renames(), dict[int, Facts]()
    for frame in schema_frames:
        if frame[KIND_AT] == CONTROL:
            facts = Facts.from_json(control_json(frame))
            renames = renames.after(last.get(facts.relation), facts)
            last[facts.relation] = facts
    return renames


def _key(column: Column | ColumnFacts) -> str:
    return str(column.number) if column.number else column.name


def _named(facts: Facts, column: ColumnFacts) -> ColumnName:
    return facts.schema, facts.table, column.name


def _joined(*parts: tuple[ColumnName, ...]) -> tuple[ColumnName, ...]:
    return tuple(dict.fromkeys(name for part in parts for name in part))
