"""Column lists of the publication: which columns it sends of each table, and which it should send."""

from __future__ import annotations

import json
from dataclasses import dataclass

import structlog

from tailrace.config.source.postgres import PostgresSource
from tailrace.sources.postgres.connection.quoting import quote_identifier
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.column_selection import (
    TableColumns,
    require_disclosable,
    table_columns,
)
from tailrace.sources.postgres.schema.publication import snapshot_command
from tailrace.sources.postgres.schema.published_tables import (
    COLUMN_LISTS_VERSION_MIN,
    published,
    row_filters,
    terms,
)
from tailrace.sources.postgres.schema.source_tables import Name, matching_tables

log = structlog.get_logger(__name__)

_SENT_COLUMNS = """
WITH RECURSIVE {published}
SELECT n.nspname AS schema, c.relname AS table, json_agg(a.attname)::text AS names,
       {numbers} IS NOT NULL AS listed
  FROM published t JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace
  CROSS JOIN publication p {join}
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
   AND CASE WHEN r.prattrs IS NOT NULL THEN a.attnum = ANY (r.prattrs::int2[])
            ELSE a.attgenerated = '' OR a.attgenerated = 's' AND p.generated END
 GROUP BY 1, 2, 4
"""


@dataclass(frozen=True, slots=True)
class SentColumns:
    """The columns that the publication sends of a table; `listed`: those of a column list."""

    names: frozenset[str]
    listed: bool


def check_disclosure(session: Session, source: PostgresSource) -> None:
    """Check that the settings of columns, masks and keys can be applied to the selected tables, and log
    which excluded columns the server still sends, and which columns are not published.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    if source.discloses_all:
        return
    tables = table_columns(session, matching_tables(session, source))
    require_disclosable(source, tables)
    if session.server_version < COLUMN_LISTS_VERSION_MIN:
        return
    published = published_columns(session, source.publication)
    for columns in tables:
        table = columns.table
        sent = published.get(table.full_name)
        if sent is None:
            continue
        if late := set(columns.sendable) - columns.generated - sent.names - columns.left_out(source):
            log.warning(
                "columns of a table are not published: they were added after its column list was set",
                table=table.qualified_name,
                columns=sorted(late),
                sql=widening_command(session, source, columns),
            )
        if leaving := columns.left_out(source) & sent.names:
            log.warning(
                "the server sends columns that are left out; they are dropped when the log is read",
                table=table.qualified_name,
                columns=sorted(leaving),
            )


def list_command(session: Session, source: PostgresSource, columns: TableColumns) -> str:
    """Return the SQL that sets the column list that a table should have in the publication, and keeps its
    row filter.
    """
    table, name = columns.table, columns.table.sql
    alter = f"ALTER PUBLICATION {quote_identifier(source.publication)}"
    listed = columns.column_list(source, session.server_version)
    row_filter = row_filters(session, source.publication, [table.oid]).get(table.oid)
    where = f" WHERE ({row_filter})" if row_filter else ""
    return f"BEGIN; {alter} DROP TABLE {name}; {alter} ADD TABLE {name}{listed}{where}; COMMIT"


def widening_command(session: Session, source: PostgresSource, columns: TableColumns) -> str:
    """Return the commands that add the missing columns to a table's column list, and read earlier rows."""
    then = snapshot_command(columns.table.schema, columns.table.name)
    return f"{list_command(session, source, columns)}; -- then, for the rows that it has by now: {then}"


def published_columns(session: Session, publication: str) -> dict[Name, SentColumns]:
    """Return which columns the publication sends of each table. PostgreSQL 15 and later."""
    join, numbers, _ = terms(session.server_version)
    ctes = published(publication, session.server_version)
    command = _SENT_COLUMNS.format(published=ctes, join=join, numbers=numbers)
    return {
        row.name: SentColumns(frozenset(json.loads(row["names"] or "[]")), row.flag("listed"))
        for row in session.run(command, "read the publication")
    }
