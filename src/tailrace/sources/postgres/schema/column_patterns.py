"""Checks that column patterns match a column: with a mistyped one, it would not be masked or left out.

A pattern that names one column must match when it is first used with the log. Other patterns may match
nothing, and so may one that was used before: its column may have been dropped since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import structlog

from tailrace.config.source.column_policy import ColumnPolicy
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.renames import ColumnName, Renames
from tailrace.sources.postgres.connection.quoting import quote_literal
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.column_selection import TableColumns, table_columns
from tailrace.sources.postgres.schema.published_tables import partitions
from tailrace.sources.postgres.schema.source_tables import Name, SourceTable, matching_tables

log = structlog.get_logger(__name__)


#: Maximum number of columns that an error names.
_NAMED_MAX = 50

_TABLE_COLUMNS = """
SELECT a.attname AS name, c.relkind = 'p' AND EXISTS (
         SELECT FROM {partitions} p WHERE p.oid = ANY ('{{{oids}}}'::oid[])) AS in_parts
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = {schema} AND c.relname = {table} AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY a.attnum
"""


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A pattern that matches no column of a captured table; `refused`: capture must not start with it."""

    message: str
    repair: str
    refused: bool


def unmatched_patterns(
    session: Session,
    source: PostgresSource,
    columns: Collection[TableColumns],
    kept: ColumnPolicy,
    renames: Renames,
) -> Iterator[Unmatched]:
    """Yield the column patterns that match no column, neither its present nor a former name.

    :param columns: of the selected tables.
    :param kept: the settings with which the log was last used.
    :param renames: the stored names of the log's columns.
    """
    names = {
        (*name, column)
        for each in columns
        for name in _row_names(source, each.table)
        for column in each.columns.names
    }
    names |= renames.names()
    for place, pattern, one in source.unmatched_patterns(names, kept):
        if one is None:
            message = f"{place}: no column of a captured table matches {pattern!r}"
            yield Unmatched(message, f"correct {place}", refused=False)
        else:
            yield _named(session, source, place, pattern, one, [each.table for each in columns])


def require_columns(session: Session, source: PostgresSource, kept: ColumnPolicy, renames: Renames) -> None:
    """Check that each pattern that names one column matches it; warn of other patterns without a match.

    :param kept: and `renames`: as for `unmatched_patterns`.
    :raises TailraceError: `CONFIG_INVALID`.
    """
    if not source.column_patterns():
        return
    columns = table_columns(session, matching_tables(session, source))
    for found in unmatched_patterns(session, source, columns, kept, renames):
        if found.refused:
            raise TailraceError(Kind.CONFIG_INVALID, f"look for the columns of {found.message}", found.repair)
        log.warning("a pattern matches no column", found=found.message)


def _named(
    session: Session,
    source: PostgresSource,
    place: str,
    pattern: str,
    one: ColumnName,
    tables: Collection[SourceTable],
) -> Unmatched:
    schema, name, column = one
    root = _root_of((schema, name), tables) if source.publish_via_partition_root else None
    if root is not None:
        return Unmatched(
            f"{place}: {pattern!r} names a partition, whose rows come under the name of "
            f"{root.qualified_name}",
            f"name {root.qualified_name}.{column}",
            refused=True,
        )
    command = _TABLE_COLUMNS.format(
        schema=quote_literal(schema),
        table=quote_literal(name),
        partitions=partitions("c.oid"),
        oids=",".join(str(table.oid) for table in tables),
    )
    rows = session.run(command, "look for a column")
    there = [row.text("name") for row in rows]
    if column in there and rows[0]["in_parts"] == "t":
        return Unmatched(
            f"{place}: {pattern!r} names a partitioned table, whose rows come under the names of its "
            "partitions",
            f"name the column in its partitions, by a pattern such as {schema}.*.{column}",
            refused=True,
        )
    if column in there:
        message = f"{place}: {pattern!r} names a column of a table that source.tables does not mean"
        return Unmatched(message, f"correct {place}, or leave it so", refused=False)
    if there:
        message = f"{place}: {pattern!r} names no column of the table"
        columns = ", ".join(there[:_NAMED_MAX]) + (", …" if len(there) > _NAMED_MAX else "")
        repair = f"the columns of {schema}.{name} are: {columns}; correct {place}"
    else:
        message = f"{place}: {pattern!r} names a column of a table that does not exist"
        repair = f"correct {place}, or create the table first"
    repair += "; a pattern with * or a /regular expression/ may name what is not there yet"
    return Unmatched(message, repair, refused=True)


def _row_names(source: PostgresSource, table: SourceTable) -> list[Name]:
    """Return the table names under which the server sends rows of a table."""
    if table.partitioned and not source.publish_via_partition_root:
        return [part.full_name for part in table.parts]
    return [table.full_name]


def _root_of(name: Name, tables: Iterable[SourceTable]) -> SourceTable | None:
    """Return the captured table whose partition has this name."""
    return next((table for table in tables if name != table.full_name and name in table.names), None)
