"""Determines which columns of the captured tables the publication should send.

If possible, a column list keeps an excluded column on the server. That is impossible before
PostgreSQL 15, and for a table with `REPLICA IDENTITY FULL`: PostgreSQL rejects updates and deletes
of a table whose published columns lack some of its replica identity. Then the column is dropped
when the log is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from tailrace.config.source.column_policy import ColumnRoles
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.model import ValueType
from tailrace.sources.postgres.connection.quoting import quote_identifier
from tailrace.sources.postgres.connection.session import Row, Session
from tailrace.sources.postgres.schema.published_tables import (
    COLUMN_LISTS_VERSION_MIN,
    GENERATED_VERSION_MIN,
    bases,
    in_identity,
    partitions,
)
from tailrace.sources.postgres.schema.source_tables import SourceTable

# `type`, `modifier`: of a domain, those of the type below it. `identity`: the column is in the table's
# replica identity; `needed`: in that of any of its partitions.
_COLUMNS = f"""
SELECT a.attrelid AS oid, a.attname AS name, a.attgenerated AS generated, c.relreplident AS replident,
       t.oid AS type, t.modifier AS modifier,
       {in_identity("c", "a")} AS identity,
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = a.attrelid AND i.indisprimary AND i.indimmediate
                AND array_position(i.indkey::int2[], a.attnum) < i.indnkeyatts) AS in_primary_key,
       CASE WHEN c.relkind = 'p' THEN EXISTS (
         SELECT FROM {partitions("c.oid")} p
                 JOIN pg_class pc ON pc.oid = p.oid
                 JOIN pg_attribute pa ON pa.attrelid = p.oid AND pa.attname = a.attname
                WHERE {in_identity("pc", "pa")}) END AS needed,
       c.relreplident = 'f' OR c.relkind = 'p' AND EXISTS (
         SELECT FROM {partitions("c.oid")} p JOIN pg_class pc ON pc.oid = p.oid
          WHERE pc.relreplident = 'f') AS full_somewhere
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
 CROSS JOIN LATERAL ({bases("a")}
   SELECT oid, modifier FROM base ORDER BY depth DESC LIMIT 1) t
 WHERE a.attrelid IN ({{oids}}) AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY a.attrelid, a.attnum
"""  # noqa: S608 - a constant


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The columns of `table` in the catalogue.

    `types`: of the columns, by name; `sendable`: those that a column list may contain; `generated`: all
    computed ones; `needed`: those that must be published so that PostgreSQL accepts updates and deletes;
    `full_somewhere`: that is all of them, at least for one partition.
    """

    table: SourceTable
    columns: ColumnRoles
    types: Mapping[str, ValueType]
    sendable: tuple[str, ...]
    generated: frozenset[str]
    needed: frozenset[str]
    full_somewhere: bool

    @property
    def key(self) -> frozenset[str]:
        """The columns that identify rows in the stream; empty: none do."""
        return self.columns.identity or (self.columns.primary_key if self.columns.full else frozenset())

    def left_out(self, source: PostgresSource) -> frozenset[str]:
        """Return the columns that are left out for readers of the log."""
        return source.left_out(self.table.schema, self.table.name, self.columns)

    def column_list(self, source: PostgresSource, server_version: int) -> str:
        """Return the table's column list for the publication, with a space before it; empty if all columns
        are published.
        """
        left_out = self.left_out(source) - self.needed
        if not left_out or self.full_somewhere or server_version < COLUMN_LISTS_VERSION_MIN:
            return ""
        names = (quote_identifier(name) for name in self.sendable if name not in left_out)
        return f" ({', '.join(names)})"


def table_columns(session: Session, tables: Collection[SourceTable]) -> list[TableColumns]:
    """Return the columns of tables, in the order of `tables`."""
    rows: dict[int, list[Row]] = {table.oid: [] for table in tables}
    if not rows:
        return []
    for row in session.run(_COLUMNS.format(oids=", ".join(map(str, rows))), "read the tables' columns"):
        rows[row.number("oid")].append(row)
    return [_columns(table, rows[table.oid], session.server_version) for table in tables]


def _columns(table: SourceTable, rows: list[Row], server_version: int) -> TableColumns:
    kinds = ("", "s") if server_version >= GENERATED_VERSION_MIN else ("",)
    return TableColumns(
        table=table,
        columns=ColumnRoles(
            names=tuple(row.text("name") for row in rows),
            identity=_those(rows, "identity"),
            full=any(row["replident"] == "f" for row in rows),
            primary_key=_those(rows, "in_primary_key"),
        ),
        types={row.text("name"): ValueType(row.number("type"), row.number("modifier")) for row in rows},
        sendable=tuple(row.text("name") for row in rows if row["generated"] in kinds),
        generated=frozenset(row.text("name") for row in rows if row["generated"]),
        needed=_those(rows, "identity") | _those(rows, "needed"),
        full_somewhere=any(row.flag("full_somewhere") for row in rows),
    )


def _those(rows: list[Row], fact: str) -> frozenset[str]:
    return frozenset(row.text("name") for row in rows if row[fact] == "t")


def require_disclosable(source: PostgresSource, tables: Iterable[TableColumns]) -> None:
    """Check that the settings of columns, masks and keys can be applied to `tables`.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    for each in tables:
        for conflict in source.conflicts(each.table.schema, each.table.name, each.columns):
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"check the tables' columns: {conflict.message}",
                conflict.repair,
                {"table": each.table.qualified_name},
            )
