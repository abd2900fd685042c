"""Which columns of the captured tables the publication is to send.

Where the server can keep a column back, with a column list, it never leaves the server. It can't
before PostgreSQL 15, nor of a table with `REPLICA IDENTITY FULL`: PostgreSQL refuses updates and
deletes of one whose published columns lack some of its replica identity. There the column is
dropped when the log is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tailrace.config.source.column_policy import ColumnRoles
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.sources.postgres.connection.session import Row, Session, quote_identifier
from tailrace.sources.postgres.schema.published_tables import (
    COLUMN_LISTS_VERSION_MIN,
    GENERATED_VERSION_MIN,
    in_identity,
    partitions,
)

# `identity` is the table's own replica identity; `needed` that of any partition of it.
_COLUMNS = f"""
SELECT a.attrelid AS oid, a.attname AS name, a.attgenerated AS generated, c.relreplident AS replident,
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
 WHERE a.attrelid IN ({{oids}}) AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY a.attrelid, a.attnum
"""  # noqa: S608 - a constant


@dataclass(frozen=True, slots=True)
class TableColumns:
    """A table's columns as the catalogue has them.

    `sendable` are those that a column list may hold, `generated` all that are computed; `needed`
    those that PostgreSQL must publish if it is to accept updates and deletes; `full_somewhere`:
    these are all, at least in a partition.
    """

    schema: str
    name: str
    columns: ColumnRoles
    sendable: tuple[str, ...]
    generated: frozenset[str]
    needed: frozenset[str]
    full_somewhere: bool

    def left_out(self, source: PostgresSource) -> frozenset[str]:
        """Return the columns that readers of the log do not get."""
        return source.left_out(self.schema, self.name, self.columns)

    def column_list(self, source: PostgresSource, server_version: int) -> str:
        """Return the column list of the table in the publication, with a space before it; empty
        if the table is to be published whole.
        """
        left_out = self.left_out(source) - self.needed
        if not left_out or self.full_somewhere or server_version < COLUMN_LISTS_VERSION_MIN:
            return ""
        names = (quote_identifier(name) for name in self.sendable if name not in left_out)
        return f" ({', '.join(names)})"


def columns_of(session: Session, tables: Iterable[tuple[int, str, str]]) -> dict[int, TableColumns]:
    """Return the columns of tables, given as oid, schema and name, by oid."""
    known = {oid: (schema, name) for oid, schema, name in tables}
    if not known:
        return {}
    command = _COLUMNS.format(oids=", ".join(map(str, known)))
    rows = session.run(command, "read the tables' columns")
    by_oid: dict[int, list[Row]] = {oid: [] for oid in known}
    for row in rows:
        by_oid[row.number("oid")].append(row)
    return {oid: _columns(*known[oid], found, session.server_version) for oid, found in by_oid.items()}


def _columns(schema: str, name: str, rows: list[Row], server_version: int) -> TableColumns:
    kinds = ("", "s") if server_version >= GENERATED_VERSION_MIN else ("",)
    return TableColumns(
        schema=schema,
        name=name,
        columns=ColumnRoles(
            names=tuple(row.text("name") for row in rows),
            identity=_those(rows, "identity"),
            full=any(row["replident"] == "f" for row in rows),
            primary_key=_those(rows, "in_primary_key"),
        ),
        sendable=tuple(row.text("name") for row in rows if row["generated"] in kinds),
        generated=frozenset(row.text("name") for row in rows if row["generated"]),
        needed=_those(rows, "identity") | _those(rows, "needed"),
        full_somewhere=any(row.flag("full_somewhere") for row in rows),
    )


def _those(rows: list[Row], fact: str) -> frozenset[str]:
    return frozenset(row.text("name") for row in rows if row[fact] == "t")


def require_disclosable(source: PostgresSource, tables: Iterable[TableColumns]) -> None:
    """Check that the settings of columns, masks and keys can hold for `tables`.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    for table in tables:
        for conflict in source.conflicts(table.schema, table.name, table.columns):
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"look at the tables' columns: {conflict.message}",
                conflict.repair,
                {"table": f"{table.schema}.{table.name}"},
            )
