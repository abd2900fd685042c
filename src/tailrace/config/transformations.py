"""The lists `transformations` and `predicates`: what is done to records, and to which.

Each entry has a `type`. One that is not named here belongs to an installed package, which offers it
under the entry points `tailrace.transformations` or `tailrace.predicates`, and checks its settings itself.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from tailrace.config.fields import Extension, Section
from tailrace.config.patterns import Patterns
from tailrace.config.sections import Name
from tailrace.extensions import PREDICATES as PREDICATES_GROUP
from tailrace.extensions import TRANSFORMATIONS as TRANSFORMATIONS_GROUP
from tailrace.extensions import names
from tailrace.sql.parsing import parse, parse_type

#: What a path in an expression begins with.
ROOTS = ("op", "topic", "key", "before", "after", "value", "source", "headers")


def _expression(text: str) -> str:
    parse(text, ROOTS)
    return text


def _type_name(text: str) -> str:
    parse_type(text)
    return text


def _names(found: tuple[str, ...]) -> tuple[str, ...]:
    if not found or "" in found or len(set(found)) != len(found):
        raise ValueError("must be a list of names, each once")
    return found


def python_regex(text: str) -> str:
    """Return a regular expression whose groups may be named as Java does, `(?<name>…)`.

    :raises ValueError: if it is none.
    """
    written = re.sub(r"\(\?<(?=[A-Za-z_])", "(?P<", text)
    try:
        re.compile(written)
    except re.error as error:
        raise ValueError(f"is no regular expression that Python knows: {error.msg}") from None
    return written


#: In a replacement: `$1`, `${name}`, and Python's `\1`, `\g<name>`.
REFERENCE = re.compile(r"\$(\d+)|\$\{(\w+)\}|\\(\d+)|\\g<(\w+)>")


def check_references(regex: str, replacement: str) -> None:
    """:raises ValueError: if `replacement` refers to a group that `regex` does not have."""
    compiled = re.compile(python_regex(regex))
    for found in REFERENCE.finditer(replacement):
        name = next(filter(None, found.groups()))
        known = int(name) <= compiled.groups if name.isdigit() else name in compiled.groupindex
        if not known:
            raise ValueError(f"refers to the group {found[0]}, which the regular expression does not have")


Expression = Annotated[str, AfterValidator(_expression)]
TypeText = Annotated[str, AfterValidator(_type_name)]
Names = Annotated[tuple[str, ...], AfterValidator(_names)]
Regex = Annotated[str, AfterValidator(lambda text: (python_regex(text), text)[1])]
Part = Literal["row", "key", "both"]
_PART = (
    "`row`: the rows before and after, or the value of a record that is no change any more; `key`; `both`."
)
_FIELDS = "Names of columns; `*` is any run of characters."


class Step(Section):
    """What all transformations have in common."""

    predicate: Name | None = Field(
        default=None, description="Name of a predicate: only records that it chooses are transformed."
    )
    negate: bool = Field(default=False, description="Whether those that `predicate` does not choose are.")

    @model_validator(mode="after")
    def _has_predicate(self) -> Self:
        if self.negate and self.predicate is None:
            raise ValueError("negate needs a predicate")
        return self


_MISSING: Any = Field(
    default="error",
    description="A column of the expression that a table does not have: `error` stops with the table's "
    "name; `null` takes it for NULL.",
)
Missing = Literal["error", "null"]


class Filter(Step):
    """Keeps the records for which an expression is true."""

    type: Literal["filter"] = Field(default="filter", description="Kind of the transformation.")
    where: Expression = Field(description="Condition; a record for which it is false is dropped.")
    nulls: Literal["drop", "keep"] = Field(
        default="drop", description="What becomes of records for which the condition is NULL."
    )
    missing: Missing = _MISSING


class Drop(Step):
    """Drops every record, of those that the predicate chooses."""

    type: Literal["drop"] = Field(default="drop", description="Kind of the transformation.")


class Route(Step):
    """Gives records another topic: by its name, or by an expression."""

    type: Literal["route"] = Field(default="route", description="Kind of the transformation.")
    regex: Regex | None = Field(
        default=None, description="Regular expression that has to fit the whole topic; others stay."
    )
    replacement: str | None = Field(
        default=None, description="The new topic; `$1` and `${name}` are groups of `regex`."
    )
    topic: Expression | None = Field(
        default=None,
        description="Instead of `regex`: an expression whose value is the new topic; NULL keeps the old one.",
    )
    key_field: str | None = Field(
        default=None,
        min_length=1,
        description="Name of a field that is added to the keys of routed records and holds the former topic, "
        "so that keys of several tables stay apart.",
    )
    missing: Missing = _MISSING

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.regex is None) == (self.topic is None):
            raise ValueError("needs either regex or topic")
        if (self.regex is None) != (self.replacement is None):
            raise ValueError("regex and replacement belong together")
        if self.regex is not None and self.replacement is not None:
            check_references(self.regex, self.replacement)
        return self


class ThirdParty(Step, Extension):
    """A transformation of another package."""


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
    missing: Missing = _MISSING


class ThirdPartyPredicate(Extension):
    """A predicate of another package."""


# Tags are marked, so that `problems` can tell them from keys of the file.
_THIRD_PARTY = "<third party>"


def _tag_for(group: str, known: tuple[str, ...], value: Any) -> str:
    found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    name = found if isinstance(found, str) else ""
    return _THIRD_PARTY if name not in known and name in names(group) else f"<{name}>"


def _transformation_tag(value: Any) -> str:
    return _tag_for(TRANSFORMATIONS_GROUP, tuple(TRANSFORMATIONS), value)


def _predicate_tag(value: Any) -> str:
    return _tag_for(PREDICATES_GROUP, tuple(PREDICATES), value)


TRANSFORMATIONS: dict[str, type[Step]] = {
    "filter": Filter,
    "drop": Drop,
    "route": Route,
}
PREDICATES: dict[str, type[Section]] = {
    "table": TablePredicate,
    "operation": OperationPredicate,
    "topic": TopicPredicate,
    "has_header": HeaderPredicate,
    "tombstone": TombstonePredicate,
    "expression": ExpressionPredicate,
}

AnyTransformation = Annotated[
    Annotated[Filter, Tag("<filter>")]
    | Annotated[Drop, Tag("<drop>")]
    | Annotated[Route, Tag("<route>")]
    | Annotated[ThirdParty, Tag(_THIRD_PARTY)],
    Discriminator(_transformation_tag),
]
AnyPredicate = Annotated[
    Annotated[TablePredicate, Tag("<table>")]
    | Annotated[OperationPredicate, Tag("<operation>")]
    | Annotated[TopicPredicate, Tag("<topic>")]
    | Annotated[HeaderPredicate, Tag("<has_header>")]
    | Annotated[TombstonePredicate, Tag("<tombstone>")]
    | Annotated[ExpressionPredicate, Tag("<expression>")]
    | Annotated[ThirdPartyPredicate, Tag(_THIRD_PARTY)],
    Discriminator(_predicate_tag),
]
