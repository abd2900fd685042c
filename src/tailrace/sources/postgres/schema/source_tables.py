"""Tables of the source that may be captured: what holds their rows, and whether changes can be published."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tailrace.sources.postgres.connection.quoting import quote_table
from tailrace.sources.postgres.connection.session import Row

#: Schema and name.
Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Part:
    """A table that holds rows: the table itself, or a partition of it."""

    schema: str
    name: str
    identity: str  # pg_class.relreplident
    keyless: bool  # nothing identifies its rows
    computes: bool  # it has virtual generated columns
    has_primary_key: bool  # one that may be a replica identity

    @property
    def refused(self) -> str:
        """Return why the server refuses updates and deletes of it once it is published; empty if it does
        not.
        """
        if self.keyless:
            return "it has no replica identity"
        if self.identity == "f" and self.computes:
            return "it has REPLICA IDENTITY FULL and a virtual generated column, which is never published"
        return ""

    @property
    def identity_repair(self) -> str:
        """Return the SQL that gives it a replica identity with which updates and deletes are accepted."""
        if not self.computes:
            return f"ALTER TABLE {self.sql} REPLICA IDENTITY FULL"
        repair = f"ALTER TABLE {self.sql} REPLICA IDENTITY DEFAULT"
        return repair if self.has_primary_key else f"ALTER TABLE {self.sql} ADD PRIMARY KEY (…); {repair}"

    @property
    def sql(self) -> str:
        """Return its name as SQL holds it."""
        return quote_table(self.schema, self.name)


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table of the source that is meant to be captured."""

    oid: int
    schema: str
    name: str
    partitioned: bool
    has_children: bool  # by inheritance
    parts: tuple[Part, ...]

    @property
    def qualified_name(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def sql(self) -> str:
        """Return its name as SQL holds it."""
        return quote_table(self.schema, self.name)

    @property
    def refused(self) -> str:
        """Return why the server refuses updates and deletes of some of its rows once it is published; empty
        if it does not.
        """
        for part in self.parts:
            if part.refused:
                where = "" if part.name == self.name and part.schema == self.schema else f" ({part.sql})"
                return part.refused + where
        return ""

    @property
    def identity_repair(self) -> str:
        """Return the SQL that lets updates and deletes of all its rows be published."""
        return "; ".join(part.identity_repair for part in self.parts if part.refused)

    @property
    def may_be_full(self) -> bool:
        """Whether `REPLICA IDENTITY FULL` is to be had without refused updates and deletes."""
        return not any(part.computes for part in self.parts)

    def is_among(self, names: frozenset[Name]) -> bool:
        """Return whether it is among published tables, by its own name or by those of all its partitions."""
        if (self.schema, self.name) in names:
            return True
        parts = {(part.schema, part.name) for part in self.parts}
        return bool(parts) and parts <= names


def table_of(row: Row) -> SourceTable:
    """Return the table that a row of `publication.matching_tables` describes."""
    return SourceTable(
        oid=row.number("oid"),
        schema=row.text("schema"),
        name=row.text("table"),
        partitioned=row.flag("partitioned"),
        has_children=row.flag("has_children"),
        parts=tuple(Part(*part) for part in json.loads(row["parts"] or "[]")),
    )
