"""Sets headers from values of records, and fields from headers. Changing only headers decodes no rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from tailrace.config.transformations import options
from tailrace.config.transformations.steps import ROOTS
from tailrace.expressions.computing import Expression
from tailrace.records.group import Group
from tailrace.transforms.fields import ROW, field_names
from tailrace.transforms.groups.columns import with_added, without_columns
from tailrace.transforms.groups.rows import GroupRows, computed
from tailrace.transforms.groups.values import members, struct_of
from tailrace.transforms.keys import require_held


def with_headers(group: Group, added: Mapping[str, pa.Array]) -> Group:
    """Return records with headers added; one of the same name is replaced."""
    known = group.headers
    found = members(known) if pa.types.is_struct(known.type) else {}
    return group.with_headers(struct_of({**found, **added}, None, len(group)))


@dataclass(frozen=True, slots=True)
class SetHeaders:
    """Sets headers to the values of expressions; null sets none."""

    given: options.SetHeadersConfig
    expressions: Mapping[str, Expression]

    @classmethod
    def of(cls, given: options.SetHeadersConfig) -> SetHeaders:
        return cls(given, {name: Expression(text, ROOTS) for name, text in given.headers.items()})

    def meant(self, names: Iterable[str]) -> list[str]:
        """Return those of the columns that are removed because they are moved to headers."""
        if self.given.operation != "move":
            return []
        moved = {found.path[1] for found in self.expressions.values() if found.path is not None}
        return [name for name in names if name in moved]

    def apply(self, group: Group) -> list[Group]:
        """Return the records with the headers.

        :raises TailraceError: `TRANSFORM_FAILED` if an expression does not fit the records, or if a column is
            moved whose type can't hold one of its values.
        """
        added = computed(group, self.expressions, self.given.missing, "set the header")
        moved = self.meant(field_names(group, ROW))
        if moved:
            require_held(group, "after" if group.is_change else "value", moved)
        return [without_columns(with_headers(group, added), ROW, moved)]


@dataclass(frozen=True, slots=True)
class DropHeaders:
    """Removes headers."""

    given: options.DropHeadersConfig

    def apply(self, group: Group) -> list[Group]:
        """Return the records without the headers."""
        return [_without_headers(group, self.given.headers)]


def _without_headers(group: Group, names: Collection[str]) -> Group:
    known = group.headers
    if not pa.types.is_struct(known.type):
        return group
    left = {name: values for name, values in members(known).items() if name not in names}
    return group.with_headers(struct_of(left, None, len(group)) if left else pa.nulls(len(group)))


@dataclass(frozen=True, slots=True)
class FieldsFromHeaders:
    """Copies or moves headers to columns."""

    given: options.FieldsFromHeadersConfig

    def meant(self, names: Iterable[str]) -> list[str]:
        """Return those of the columns that are replaced."""
        return [name for name in names if name in self.given.fields]

    def apply(self, group: Group) -> list[Group]:
        """Return the records with the columns; null where a record does not have the header."""
        rows, headers = GroupRows(group, "null"), self.given.fields
        added = {name: rows.column(("headers", header)) for name, header in headers.items()}
        made = with_added(group, self.given.apply_to, added)
        return [_without_headers(made, headers.values()) if self.given.operation == "move" else made]
