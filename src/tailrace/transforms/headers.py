"""Headers from what records hold, and fields from headers. Headers alone leave the wire as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from tailrace.config.transformations import options
from tailrace.config.transformations.steps import ROOTS
from tailrace.expressions.computing import Expression
from tailrace.records.group import Group
from tailrace.transforms.fields import BOTH
from tailrace.transforms.groups.columns import DropFields, with_added
from tailrace.transforms.groups.rows import GroupRows, fitting_expression
from tailrace.transforms.groups.values import members, struct_of


def with_headers(group: Group, added: Mapping[str, pa.Array]) -> Group:
    """Return records with headers put in or added."""
    known = group.headers
    found = members(known) if pa.types.is_struct(known.type) else {}
    return group.with_headers(struct_of({**found, **added}, None, len(group)))


@dataclass(frozen=True, slots=True)
class SetHeaders:
    """Makes headers of what expressions say; a null is no header.

    :param moved: columns of the row that go once they are headers.
    """

    headers: Mapping[str, Expression]
    moved: tuple[str, ...] = ()
    missing: str = "error"

    @classmethod
    def of(cls, given: options.SetHeadersConfig) -> SetHeaders:
        headers = {name: Expression(text, ROOTS) for name, text in given.headers.items()}
        paths = [found.path for found in headers.values() if given.operation == "move"]
        return cls(headers, tuple(path[1] for path in paths if path is not None), given.missing)

    def apply(self, group: Group) -> list[Group]:
        """Return the records with the headers.

        :raises TailraceError: `TRANSFORM_FAILED` if an expression does not fit.
        """
        rows = GroupRows(group, self.missing)
        added = {name: _value(group, name, found, rows) for name, found in self.headers.items()}
        found = with_headers(group, added)
        if not self.moved:
            return [found]
        return DropFields(self.moved, keeps=False).apply(found)


def _value(group: Group, name: str, expression: Expression, rows: GroupRows) -> pa.Array:
    with fitting_expression(group, f"set the header {name!r}"):
        return expression.values(rows)


@dataclass(frozen=True, slots=True)
class DropHeaders:
    """Takes headers away."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, given: options.DropHeadersConfig) -> DropHeaders:
        return cls(given.headers)

    def apply(self, group: Group) -> list[Group]:
        """Return the records without the headers."""
        known = group.headers
        if not pa.types.is_struct(known.type):
            return [group]
        left = {name: values for name, values in members(known).items() if name not in self.names}
        return [group.with_headers(struct_of(left, None, len(group)) if left else pa.nulls(len(group)))]


@dataclass(frozen=True, slots=True)
class FieldsFromHeaders:
    """Makes columns of headers.

    :param fields: by column: the header.
    """

    fields: Mapping[str, str]
    moves: bool
    part: str = BOTH

    @classmethod
    def of(cls, given: options.FieldsFromHeadersConfig) -> FieldsFromHeaders:
        return cls(given.fields, given.operation == "move", given.apply_to)

    def apply(self, group: Group) -> list[Group]:
        """Return the records with the columns; null where a record lacks the header."""
        rows = GroupRows(group, "null")
        added = {name: rows.column(("headers", header)) for name, header in self.fields.items()}
        made = with_added(group, self.part, added)
        return DropHeaders(tuple(self.fields.values())).apply(made) if self.moves else [made]
