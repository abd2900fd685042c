"""Column lists of the publication: which columns it sends of each table, and which it should send."""

from __future__ import annotations

import json

import structlog

from tailrace.config.source.postgres import PostgresSource
from tailrace.sources.postgres.connection.session import Session, quote_identifier, quote_literal
from tailrace.sources.postgres.schema.column_selection import TableColumns, require_disclosable
from tailrace.sources.postgres.schema.publication import matching_tables, snapshot_command, table_columns
from tailrace.sources.postgres.schema.published_tables import COLUMN_LISTS_VERSION_MIN, published, terms
from tailrace.sources.postgres.schema.source_tables import Name

log = structlog.get_logger(__name__)

_SENT_COLUMNS = """
WITH RECURSIVE {published}
SELECT n.nspname AS schema, c.relname AS table, json_agg(a.attname)::text AS names
  FROM published t JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace
  CROSS JOIN publication p {join}
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
   AND CASE WHEN r.prattrs IS NOT NULL THEN a.attnum = ANY (r.prattrs::int2[])
            ELSE a.attgenerated = '' OR a.attgenerated = 's' AND p.generated END
 GROUP BY 1, 2
"""

# Of this table alone: `pg_publication_tables` would lock all that are published.
_FILTER = """
SELECT pg_get_expr(r.prqual, r.prrelid) AS filter
  FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
  JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE p.pubname = {publication} AND n.nspname = {schema} AND c.relname = {table}
"""
_LISTED = """
SELECT n.nspname AS schema, c.relname AS table
  FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prattrs IS NOT NULL
  JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE p.pubname = {name}
"""


def check_disclosure(session: Session, source: PostgresSource) -> None:
    """Check that the settings of columns, masks and keys can hold for the tables that are meant,
    and log which columns leave the server although they are left out, and which are not published.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    if source.discloses_all:
        return
    tables = table_columns(session, matching_tables(session, source))
    require_disclosable(source, tables.values())
    if session.server_version < COLUMN_LISTS_VERSION_MIN:
        return
    columns = published_columns(session, source.publication)
    for table in tables.values():
        sent = columns.get((table.schema, table.name))
        if sent is None:
            continue
        if late := set(table.sendable) - table.generated - sent - table.left_out(source):
            log.warning(
                "columns of a table are not published: they were added after its column list was made",
                table=f"{table.schema}.{table.name}",
                columns=sorted(late),
                sql=widening_command(session, source, table),
            )
        if leaving := table.left_out(source) & sent:
            log.warning(
                "columns that are left out leave the server; they are dropped when the log is read",
                table=f"{table.schema}.{table.name}",
                columns=sorted(leaving),
            )


def list_command(session: Session, source: PostgresSource, table: TableColumns) -> str:
    """Return the SQL that gives a table in the publication the column list that it should have. A row filter
    stays what it is.
    """
    name = f"{quote_identifier(table.schema)}.{quote_identifier(table.name)}"
    alter = f"ALTER PUBLICATION {quote_identifier(source.publication)}"
    columns = table.column_list(source, session.server_version)
    rows = session.run(
        _FILTER.format(
            publication=quote_literal(source.publication),
            schema=quote_literal(table.schema),
            table=quote_literal(table.name),
        ),
        "look at the row filter",
    )
    where = f" WHERE ({rows[0]['filter']})" if rows and rows[0]["filter"] else ""
    return f"BEGIN; {alter} DROP TABLE {name}; {alter} ADD TABLE {name}{columns}{where}; COMMIT"


def widening_command(session: Session, source: PostgresSource, table: TableColumns) -> str:
    """Return what gives a table the columns that its column list lacks, also in rows from before."""
    then = snapshot_command(table.schema, table.name)
    return f"{list_command(session, source, table)}; -- then, for the rows that it has by now: {then}"


def listed_tables(session: Session, publication: str) -> frozenset[Name]:
    """Return the tables that have a column list in the publication. PostgreSQL 15 and later."""
    rows = session.run(_LISTED.format(name=quote_literal(publication)), "look at the column lists")
    return frozenset(row.name for row in rows)


def published_columns(session: Session, publication: str) -> dict[Name, set[str]]:
    """Return which columns the publication sends of each table. PostgreSQL 15 and later."""
    join, _, _ = terms(session.server_version)
    command = _SENT_COLUMNS.format(published=published(publication, session.server_version), join=join)
    rows = session.run(command, "read the publication")
    return {row.name: set(json.loads(row["names"] or "[]")) for row in rows}
