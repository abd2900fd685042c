"""The mapping `predicates`: conditions by name, which choose the records of transformations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tailrace.config.fields import Extension, Section
from tailrace.config.patterns import Patterns
from tailrace.config.transformations.options import AnyTransformation
from tailrace.config.transformations.steps import Expression, Regex, WithExpressions, one_of
from tailrace.extensions import PREDICATES as GROUP


class PredicateConfig(Section):
    """Settings of all predicates."""

    type: str = Field(default="", description="Kind of the predicate.")


class TablePredicate(PredicateConfig):
    """Chooses the records of tables."""

    tables: Patterns = Field(description="Tables, by patterns as in `source.tables`.")


_OPERATIONS = {"read": "r", "create": "c", "update": "u", "delete": "d", "truncate": "t", "message": "m"}
Operation = Literal["read", "create", "update", "delete", "truncate", "message"]


class OperationPredicate(PredicateConfig):
    """Chooses changes by their operation."""

    operations: Annotated[tuple[Operation, ...], Field(min_length=1)] = Field(
        description="`read` (a row of a snapshot), `create`, `update`, `delete`, `truncate`, `message`."
    )

    @property
    def letters(self) -> str:
        """The operations as letters of `op`."""
        return "".join(_OPERATIONS[operation] for operation in self.operations)


class TopicPredicate(PredicateConfig):
    """Chooses the records of topics."""

    pattern: Regex = Field(description="Regular expression that must match the whole topic.")


class HeaderPredicate(PredicateConfig):
    """Chooses records that have a header."""

    name: Annotated[str, Field(min_length=1)] = Field(description="Name of the header.")


class TombstonePredicate(PredicateConfig):
    """Chooses tombstones: records whose value is null."""


class ExpressionPredicate(PredicateConfig, WithExpressions):
    """Chooses the records for which an expression is true."""

    where: Expression = Field(description="Condition.")


class ThirdPartyPredicate(PredicateConfig, Extension):
    """A predicate of another package."""


PREDICATES: dict[str, type[PredicateConfig]] = {
    "table": TablePredicate,
    "operation": OperationPredicate,
    "topic": TopicPredicate,
    "has_header": HeaderPredicate,
    "tombstone": TombstonePredicate,
    "expression": ExpressionPredicate,
}

if TYPE_CHECKING:
    AnyPredicate = PredicateConfig
else:
    AnyPredicate = one_of(PREDICATES, ThirdPartyPredicate, GROUP)


class WithTransformations(Section):
    """Settings of what has transformations, with predicates for them."""

    transformations: Annotated[tuple[AnyTransformation, ...], Field(max_length=100)] = Field(
        default=(),
        description="Transformations of changes, in their order: each sink first applies those of the file, "
        "then its own; those of `engine` are for handlers. See [Transformations](transformations.md).",
    )
    predicates: dict[str, AnyPredicate] = Field(
        default={},
        description="Predicates for transformations, by name; a sink can use those of the file, too.",
    )
