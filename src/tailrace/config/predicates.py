"""The mapping `predicates`: by name, which records a transformation is for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from tailrace.config.fields import Extension, Section
from tailrace.config.patterns import Patterns
from tailrace.config.steps import MISSING, THIRD_PARTY, Expression, Missing, Regex, tag_by
from tailrace.extensions import PREDICATES as GROUP


class TablePredicate(Section):
    """Chooses the records of tables."""

    type: Literal["table"] = Field(default="table", description="Kind of the predicate.")
    tables: Patterns = Field(description="Tables, by patterns as in `source.tables`.")


_OPERATIONS = {"read": "r", "create": "c", "update": "u", "delete": "d", "truncate": "t", "message": "m"}
Operation = Literal["read", "create", "update", "delete", "truncate", "message"]


class OperationPredicate(Section):
    """Chooses changes by what they did."""

    type: Literal["operation"] = Field(default="operation", description="Kind of the predicate.")
    operations: Annotated[tuple[Operation, ...], Field(min_length=1)] = Field(
        description="`read` (a row of a snapshot), `create`, `update`, `delete`, `truncate`, `message`."
    )

    @property
    def letters(self) -> str:
        """The operations as `op` has them."""
        return "".join(_OPERATIONS[operation] for operation in self.operations)


class TopicPredicate(Section):
    """Chooses the records of topics."""

    type: Literal["topic"] = Field(default="topic", description="Kind of the predicate.")
    pattern: Regex = Field(description="Regular expression that has to fit the whole topic.")


class HeaderPredicate(Section):
    """Chooses records that have a header."""

    type: Literal["has_header"] = Field(default="has_header", description="Kind of the predicate.")
    name: Annotated[str, Field(min_length=1)] = Field(description="Name of the header.")


class TombstonePredicate(Section):
    """Chooses tombstones: records whose value is null."""

    type: Literal["tombstone"] = Field(default="tombstone", description="Kind of the predicate.")


class ExpressionPredicate(Section):
    """Chooses the records for which an expression is true."""

    type: Literal["expression"] = Field(default="expression", description="Kind of the predicate.")
    where: Expression = Field(description="Condition.")
    missing: Missing = MISSING


class ThirdPartyPredicate(Extension):
    """A predicate of another package."""


PREDICATES: dict[str, type[Section]] = {
    "table": TablePredicate,
    "operation": OperationPredicate,
    "topic": TopicPredicate,
    "has_header": HeaderPredicate,
    "tombstone": TombstonePredicate,
    "expression": ExpressionPredicate,
}

AnyPredicate = Annotated[
    Annotated[TablePredicate, Tag("<table>")]
    | Annotated[OperationPredicate, Tag("<operation>")]
    | Annotated[TopicPredicate, Tag("<topic>")]
    | Annotated[HeaderPredicate, Tag("<has_header>")]
    | Annotated[TombstonePredicate, Tag("<tombstone>")]
    | Annotated[ExpressionPredicate, Tag("<expression>")]
    | Annotated[ThirdPartyPredicate, Tag(THIRD_PARTY)],
    Discriminator(tag_by(GROUP, lambda: PREDICATES)),
]
