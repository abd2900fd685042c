"""Types and settings that transformations and predicates share: names, patterns, expressions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, Union

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from tailrace.config.fields import Extension, Name, Section
from tailrace.extensions import names

#: Names with which a path in an expression can begin.
ROOTS = ("op", "topic", "key", "before", "after", "value", "source", "headers")


def _expression(text: str) -> str:
    from tailrace.expressions.language import parsed  # loads DuckDB

    parsed(text, ROOTS)
    return text


def _type_name(text: str) -> str:
    from tailrace.expressions.language import require_type

    require_type(text)
    return text


def _names(found: tuple[str, ...]) -> tuple[str, ...]:
    if not found or "" in found or len(set(found)) != len(found):
        raise ValueError("must be a list of different names")
    return found


def python_regex(text: str) -> str:
    """Return a regular expression in Python's syntax; names of groups may be in Java's, `(?<name>…)`.

    :raises ValueError: if it is not a regular expression.
    """
    written = re.sub(r"\(\?<(?=[A-Za-z_])", "(?P<", text)
    try:
        re.compile(written)
    except re.error as error:
        raise ValueError(f"is not a regular expression that Python supports: {error.msg}") from None
    return written


#: Matches references to groups in a replacement: `$1`, `${name}`, and Python's `\1`, `\g<name>`.
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
Text = Annotated[str, Field(min_length=1)]
ROWS = ("after", "before", "value")


FIELDS = "Names of columns; `*` matches any run of characters."


class TransformationConfig(Section):
    """Settings of all transformations."""

    type: str = Field(
        default="", description="Kind of the transformation: one of those below, or an installed package's."
    )
    predicate: Name | None = Field(
        default=None, description="Name of a predicate: only records that it chooses are transformed."
    )
    negate: bool = Field(
        default=False, description="Whether to transform the records that `predicate` does not choose."
    )

    @model_validator(mode="after")
    def _has_predicate(self) -> Self:
        if self.negate and self.predicate is None:
            raise ValueError("negate needs a predicate")
        return self


Part = Literal["row", "key", "both"]
_PART = (
    "`row`: the rows before and after, or the value of a record that is no longer a change; `key`; `both`."
)


class OfKeyAndRow(TransformationConfig):
    """A transformation of columns, by default in rows and keys."""

    apply_to: Part = Field(default="both", description=_PART)


class OfRow(TransformationConfig):
    """A transformation of columns, by default only in rows."""

    apply_to: Part = Field(default="row", description=_PART)


class WithExpressions(Section):
    """Settings of what is computed by expressions."""

    missing: Literal["error", "null"] = Field(
        default="error",
        description="If a table does not have a column of the expression: `error` stops with the table's "
        "name; `null` uses NULL.",
    )


#: Metadata of a change: Debezium's names, and those of the log in addition.
METADATA = (
    "op", "topic", "ts_ms", "ts_us", "ts_ns", "version", "connector", "name", "snapshot", "db", "sequence",
    "schema", "table", "txId", "lsn", "xmin", "commit_lsn", "commit_time", "ordinal", "log_offset", "xid",
    "schema_version", "unchanged", "special", "shard", "vgtid", "gtid", "epoch", "rank", "watermark",
)  # fmt: skip


def _metadata(text: str) -> str:
    name = text.removeprefix("source.")
    if name not in METADATA:
        raise ValueError(f"must be one of {', '.join(METADATA)}, optionally with the prefix source.")
    return text


def _renamed_metadata(text: str) -> str:
    name, colon, other = text.partition(":")
    if colon and not other:
        raise ValueError("has no name after the colon")
    return _metadata(name) + colon + other


Metadata = Annotated[str, AfterValidator(_metadata)]
RenamedMetadata = Annotated[str, AfterValidator(_renamed_metadata)]


def one_of(models: Mapping[str, type[Section]], other: type[Extension], group: str) -> Any:
    """Return the type of an entry whose `type` chooses among `models`.

    :param other: the model of an entry whose type a package announces in the entry point group `group`.
    """

    def tag(value: Any) -> str:
        found = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if isinstance(value, Section) and not found:
            found = next((name for name, model in models.items() if type(value) is model), "")
        name = found if isinstance(found, str) else ""
        return _OTHER if name not in models and name in names(group) else f"<{name}>"

    tagged = [Annotated[model, Tag(f"<{name}>")] for name, model in models.items()]
    return Annotated[Union[(*tagged, Annotated[other, Tag(_OTHER)])], Discriminator(tag)]


#: Tag of an entry whose type another package provides. Tags are in angle brackets, so that `problems` can
#: distinguish them from keys of the file.
_OTHER = "<third party>"
