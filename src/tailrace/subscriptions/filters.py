"""The filter of a subscription: changes of some tables for which an expression is true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tailrace.config import is_exact, matches
from tailrace.config.patterns import check_pattern, is_regular_expression
from tailrace.config.transformations.steps import ROOTS
from tailrace.decode.changes import TableChanges
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.log.inspection import truths
from tailrace.protocol.frames import Numbers
from tailrace.records.group import Group
from tailrace.transforms.groups.rows import GroupRows

if TYPE_CHECKING:
    from tailrace.expressions.computing import Expression


@dataclass(frozen=True, slots=True)
class ChangeFilter:
    """A filter of changes. Equal filters select the same changes.

    `tables`: patterns as in a pipeline's file, but no regular expressions; none: every table, and logical
    messages. `where`: an expression as in predicates; empty: every change.
    """

    tables: tuple[str, ...] = ()
    where: str = ""

    @property
    def exact_tables(self) -> tuple[str, ...] | None:
        """The tables, if no pattern can match others; None: a pattern may match other tables."""
        exact = self.tables and all(is_exact(each) and '"' not in each for each in self.tables)
        return self.tables if exact else None

    def means(self, changes: TableChanges) -> bool:
        """Return whether changes are of a table that the filter selects."""
        if not self.tables:
            return True
        relation = changes.relation
        return relation is not None and any(
            matches(each, relation.schema, relation.table) for each in self.tables
        )

    def rows(self, changes: TableChanges) -> Numbers:
        """Return the indexes of the selected changes, in increasing order.

        :raises TailraceError: `CONFIG_INVALID` if the expression does not fit the table.
        """
        if not self.means(changes):
            return np.empty(0, np.int64)
        if not self.where:
            return np.arange(changes.count)
        return np.flatnonzero(truths(changes, expression(self.where)))

    def check(self, changes: TableChanges) -> None:
        """Check the expression against a table, even if `changes` has no rows.

        :raises TailraceError: `CONFIG_INVALID` if the table has no such column, or one of another type.
        """
        from tailrace.expressions.computing import NoColumnError  # loads DuckDB
        from tailrace.expressions.sql import inputs_of

        assert changes.relation is not None
        name = changes.relation.qualified_name
        table = GroupRows(Group.of_changes(name, np.arange(changes.count), changes))
        try:
            for kind, path, _ in inputs_of(self.where, ROOTS) if self.where else ():
                getattr(table, kind)(path)
        except NoColumnError as error:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"subscribe where {self.where!r}: {error}",
                "correct the name",
                {"table": name},
            ) from None
        self.rows(changes)


def parsed(tables: list[str], where: str) -> ChangeFilter:
    """Return the filter of a client's parameters.

    :raises TailraceError: `CONFIG_INVALID`, with the problem.
    """
    for each in tables:
        if problem := _problem(each):
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"subscribe to tables: {each!r} {problem}",
                "write schema.table, such as public.orders; * stands for any run of characters",
            )
    if where:
        expression(where)
    return ChangeFilter(tuple(sorted(set(tables))), where)


def _problem(table: str) -> str:
    """Return why a client may not subscribe to this pattern; empty: it may."""
    if is_regular_expression(table):
        return "is a regular expression, with which a client could delay others"
    try:
        check_pattern(table)
    except ValueError:
        return "is not of the form schema.table"
    return ""


def expression(text: str) -> Expression:
    """Return an expression over changes.

    :raises TailraceError: `CONFIG_INVALID`, with the problem and its place.
    """
    from tailrace.expressions.computing import Expression  # loads DuckDB
    from tailrace.expressions.language import ExpressionError

    try:
        return Expression(text, ROOTS)
    except ExpressionError as error:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"subscribe where {error}",
            "docs/transformations.md has the expressions; columns are after.NAME, before.NAME, key.NAME",
        ) from None
