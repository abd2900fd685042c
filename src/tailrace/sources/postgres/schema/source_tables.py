"""Tables of the source that may be captured, with their partitions and replica identities."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tailrace.config.source.postgres import PostgresSource
from tailrace.sources.postgres.connection.quoting import quote_table
from tailrace.sources.postgres.connection.session import Row, Session
from tailrace.sources.postgres.schema.published_tables import tree

#: Schema and name.
Name = tuple[str, str]

# The replica identity decides which part of the old row a change has. Each table that holds rows has
# its own: that of a partition is independent of its root's.
_TABLES = f"""
WITH RECURSIVE {tree("relkind IN ('r', 'p')")}, parts AS (
  SELECT t.root, json_agg(json_build_array(ln.nspname, l.relname, l.relreplident,
             l.relreplident = 'n'
             OR l.relreplident = 'd' AND l.oid NOT IN (
               SELECT indrelid FROM pg_index WHERE indisprimary AND indimmediate)
             OR l.relreplident = 'i' AND l.oid NOT IN (
               SELECT indrelid FROM pg_index WHERE indisreplident),
             l.oid IN (SELECT attrelid FROM pg_attribute WHERE attgenerated = 'v' AND NOT attisdropped),
             l.oid IN (SELECT indrelid FROM pg_index WHERE indisprimary AND indimmediate),
             l.relpersistence = 'u')
             ORDER BY ln.nspname, l.relname) FILTER (WHERE l.relkind = 'r') AS parts,
         json_agg(json_build_array(ln.nspname, l.relname)) FILTER (WHERE l.relkind = 'f') AS foreign_parts
    FROM tree t JOIN pg_class l ON l.oid = t.oid AND l.relkind IN ('r', 'f')
    JOIN pg_namespace ln ON ln.oid = l.relnamespace
   GROUP BY t.root
)
SELECT n.nspname AS schema, c.relname AS table, c.oid AS oid, c.relkind = 'p' AS partitioned,
       c.relhassubclass AND c.relkind = 'r' AS has_children,
       CASE WHEN c.relispartition THEN (
         SELECT string_agg(a.relid::oid::text, ' ') FROM pg_partition_ancestors(c.oid) AS a
          WHERE a.relid <> c.oid) END AS ancestors,
       p.parts AS parts, p.foreign_parts AS foreign_parts
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN parts p ON p.root = c.oid
 WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
   AND n.nspname <> 'information_schema' AND n.nspname NOT LIKE 'pg\\_%'
 ORDER BY 1, 2
"""  # noqa: S608 - a constant


@dataclass(frozen=True, slots=True)
class Part:
    """A table that holds rows: the table itself, or a partition of it."""

    schema: str
    name: str
    identity: str  # pg_class.relreplident
    keyless: bool  # nothing identifies its rows
    computes: bool  # it has virtual generated columns
    has_primary_key: bool  # one that may be a replica identity
    unlogged: bool

    @property
    def full_name(self) -> Name:
        return self.schema, self.name

    @property
    def refused(self) -> str:
        """The reason why the server rejects updates and deletes of it once it is published; empty: it
        accepts them.
        """
        if self.keyless:
            return "it has no replica identity"
        if self.identity == "f" and self.computes:
            return "it has REPLICA IDENTITY FULL and a virtual generated column, which is never published"
        return ""

    @property
    def identity_repair(self) -> str:
        """The SQL that sets a replica identity with which updates and deletes are accepted."""
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
    """A table of the source that the settings select for capture."""

    oid: int
    schema: str
    name: str
    partitioned: bool
    has_children: bool  # by inheritance
    parts: tuple[Part, ...]
    foreign: tuple[Name, ...]  # its partitions that are foreign tables

    @property
    def full_name(self) -> Name:
        return self.schema, self.name

    @property
    def names(self) -> frozenset[Name]:
        """Its name, and those of its partitions."""
        return frozenset([self.full_name, *(part.full_name for part in self.parts)])

    @property
    def qualified_name(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def sql(self) -> str:
        """Return its name as SQL holds it."""
        return quote_table(self.schema, self.name)

    @property
    def refused(self) -> str:
        """The reason why the server rejects updates and deletes of some of its rows once it is published;
        empty: it accepts all.
        """
        for part in self.parts:
            if part.refused:
                where = "" if part.full_name == self.full_name else f" ({part.sql})"
                return part.refused + where
        return ""

    @property
    def identity_repair(self) -> str:
        """The SQL after which updates and deletes of all its rows are accepted."""
        return "; ".join(part.identity_repair for part in self.parts if part.refused)

    @property
    def may_be_full(self) -> bool:
        """Whether updates and deletes are accepted under `REPLICA IDENTITY FULL`."""
        return not any(part.computes for part in self.parts)

    def is_among(self, names: frozenset[Name]) -> bool:
        """Return whether `names` contain its name, or those of all its partitions."""
        if self.full_name in names:
            return True
        return bool(self.parts) and names.issuperset(part.full_name for part in self.parts)


def matching_tables(session: Session, source: PostgresSource) -> list[SourceTable]:
    """Return the tables that `source` selects, by name; a partition only if no ancestor is selected."""
    rows = session.run(_TABLES, "list the tables")
    meant = [row for row in rows if source.captures(*row.name)]
    oids = {row["oid"] for row in meant}
    return [_table(row) for row in meant if oids.isdisjoint(row.text("ancestors").split())]


def _table(row: Row) -> SourceTable:
    return SourceTable(
        oid=row.number("oid"),
        schema=row.text("schema"),
        name=row.text("table"),
        partitioned=row.flag("partitioned"),
        has_children=row.flag("has_children"),
        parts=tuple(Part(*part) for part in json.loads(row["parts"] or "[]")),
        foreign=tuple((schema, name) for schema, name in json.loads(row["foreign_parts"] or "[]")),
    )
