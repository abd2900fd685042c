"""Records that go on, and those that do not. What is left of the wire's bytes stays as it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from tailrace.config.transformations import options
from tailrace.config.transformations.steps import ROOTS
from tailrace.expressions.computing import Expression
from tailrace.expressions.language import ExpressionError
from tailrace.records.group import Group
from tailrace.transforms.groups.rows import GroupRows, misfit


@dataclass(frozen=True, slots=True)
class Filter:
    """Keeps the records for which an expression is true."""

    where: Expression
    keeps_nulls: bool = False
    missing: str = "error"

    @classmethod
    def of(cls, given: options.FilterConfig) -> Filter:
        return cls(Expression(given.where, ROOTS), given.nulls == "keep", given.missing)

    def apply(self, group: Group) -> list[Group]:
        """Return the records that are kept.

        :raises TailraceError: `TRANSFORM_FAILED` if the expression does not fit them.
        """
        try:
            found = self.where.truths(GroupRows(group, self.missing))
        except ExpressionError as error:
            raise misfit("filter records", error, group) from error
        kept = pc.fill_null(found, self.keeps_nulls).to_numpy(zero_copy_only=False)
        rows = np.flatnonzero(kept)
        return [group.take(rows)] if len(rows) else []

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Keeps none: for the records that a predicate chooses."""

    def apply(self, group: Group) -> list[Group]:
        """Return nothing."""
        return []

    def close(self) -> None:
        """Nothing is held."""
