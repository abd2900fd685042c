"""Predicates, which choose records of a group, and the transformations that keep or drop records."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.config.patterns import matches_any
from tailrace.config.transformations import options
from tailrace.config.transformations.steps import ROOTS
from tailrace.expressions.computing import Expression
from tailrace.records.group import Flags, Group
from tailrace.transforms.groups.rows import GroupRows, fitting_expression, root_column
from tailrace.transforms.groups.values import flags_of


@dataclass(frozen=True, slots=True)
class Tables:
    """Chooses records of tables."""

    patterns: tuple[str, ...]

    def matches(self, group: Group) -> Flags:
        """Return which records belong to one of the tables; decodes nothing."""
        relation = group.relation
        if relation is not None:
            return _all(group, matches_any(self.patterns, relation.schema, relation.table))
        rows = GroupRows(group, "null")
        schema, table = (_texts(rows.column(("source", name))) for name in ("schema", "table"))
        pairs = pc.binary_join_element_wise(schema, table, "\0").dictionary_encode()
        fits = [matches_any(self.patterns, *pair.split("\0", 1)) for pair in pairs.dictionary.to_pylist()]
        found: Flags = np.array([*fits, False])[pairs.indices.fill_null(len(fits)).to_numpy()]
        return found


def _texts(values: pa.Array) -> pa.Array:
    return values.cast(pa.string())


@dataclass(frozen=True, slots=True)
class Operations:
    """Chooses changes by `op`; `letters` are those of `model.Op`."""

    letters: str

    def matches(self, group: Group) -> Flags:
        """Return which changes are one of the operations; decodes nothing."""
        wire = group.wire
        if wire is not None:
            return np.isin(wire.op, np.frombuffer(self.letters.encode(), np.uint8))
        wanted = pa.array(list(self.letters), pa.string())
        return flags_of(pc.is_in(_texts(group.column("op")), value_set=wanted))


@dataclass(frozen=True, slots=True)
class TopicChoice:
    """Chooses records by their topic."""

    pattern: str

    def matches(self, group: Group) -> Flags:
        """Return which records have a topic that matches the pattern: all or none."""
        return _all(group, re.fullmatch(self.pattern, group.topic) is not None)


@dataclass(frozen=True, slots=True)
class HasHeader:
    """Chooses records with a header."""

    name: str

    def matches(self, group: Group) -> Flags:
        """Return which records have the header."""
        headers = root_column(group, "headers")
        if not pa.types.is_struct(headers.type) or headers.type.get_field_index(self.name) < 0:
            return _all(group, False)
        return flags_of(pc.is_valid(pc.struct_field(headers, self.name)))


@dataclass(frozen=True, slots=True)
class Tombstones:
    """Chooses records whose value is null."""

    def matches(self, group: Group) -> Flags:
        """Return which records are tombstones; a change is not one."""
        return _all(group, False) if group.is_change else flags_of(pc.is_null(group.column("value")))


@dataclass(frozen=True, slots=True)
class Where:
    """Chooses records for which an expression is true."""

    expression: Expression
    missing: str = "error"

    def matches(self, group: Group) -> Flags:
        """Return for which records the expression is true.

        :raises TailraceError: `TRANSFORM_FAILED` if the expression does not fit the records.
        """
        with fitting_expression(group, "choose records"):
            return self.expression.chosen(GroupRows(group, self.missing))


def _all(group: Group, answer: bool) -> Flags:
    return np.full(len(group), answer, np.bool_)


@dataclass(frozen=True, slots=True)
class Filter:
    """Keeps the records for which an expression is true."""

    given: options.FilterConfig
    where: Expression

    @classmethod
    def of(cls, given: options.FilterConfig) -> Filter:
        return cls(given, Expression(given.where, ROOTS))

    def apply(self, group: Group) -> list[Group]:
        """Return the records that are kept.

        :raises TailraceError: `TRANSFORM_FAILED` if the expression does not fit the records.
        """
        with fitting_expression(group, "filter records"):
            found = self.where.truths(GroupRows(group, self.given.missing))
        kept = flags_of(pc.fill_null(found, self.given.nulls == "keep"))
        rows = np.flatnonzero(kept)
        return [group.take(rows)] if len(rows) else []


@dataclass(frozen=True, slots=True)
class Drop:
    """Drops all records that its predicate chooses."""

    def apply(self, group: Group) -> list[Group]:
        """Return nothing."""
        return []
