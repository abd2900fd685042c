"""Preflight of the settings of columns, masks and keys against the tables and the publication."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator

from tailrace.changelog.directory import TASK
from tailrace.changelog.disclosure import kept_disclosure, kept_renames
from tailrace.config import ColumnPolicy, PostgresSource, matches, matches_any
from tailrace.decode.column_policy import TablePolicy
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.renames import Renames
from tailrace.sources.findings import Finding, error, from_failure, warning
from tailrace.sources.postgres.connection.quoting import quote_identifier, quote_literal
from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.preflight.checked_source import CheckedSource
from tailrace.sources.postgres.schema.column_lists import (
    SentColumns,
    list_command,
    published_columns,
    widening_command,
)
from tailrace.sources.postgres.schema.column_patterns import unmatched_patterns
from tailrace.sources.postgres.schema.column_selection import TableColumns
from tailrace.sources.postgres.schema.published_tables import COLUMN_LISTS_VERSION_MIN
from tailrace.sources.postgres.schema.source_tables import Name, SourceTable

#: Minimum length of a salt: a shorter one can be found by brute force, and with it the values.
SALT_LENGTH_MIN = 16


# The columns that a filter uses are recorded only in its expression tree.
_FILTERS = r"""
SELECT n.nspname AS schema, c.relname AS table, json_agg(DISTINCT a.attname)::text AS names
  FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
  JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 CROSS JOIN LATERAL regexp_matches(r.prqual::text, ':varattno (\d+)', 'g') AS used(number)
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = used.number[1]::int
 WHERE p.pubname = {name} AND (p.pubupdate OR p.pubdelete) GROUP BY 1, 2
"""


def column_findings(checked: CheckedSource, columns: Collection[TableColumns]) -> Iterator[Finding]:
    """Yield the problems of columns, masks and keys of the selected tables.

    :param columns: of these tables.
    """
    session, source = checked.session, checked.source
    yield from _secret_findings(source)
    yield from _pattern_findings(checked, columns)
    published: dict[Name, SentColumns] = {}
    filters: dict[Name, set[str]] = {}
    if session.server_version >= COLUMN_LISTS_VERSION_MIN:
        published = published_columns(session, source.publication)
        filters = _filters(session, source.publication)
    for found in columns:
        table = found.table
        used = filters.get(table.full_name, set())
        yield from _filter_findings(source, found, used)
        yield from _conflict_findings(source, found)
        yield from _unchanged_findings(source, table)
        if unsent := found.needed - frozenset(found.sendable):
            full = identity_repair(source, table, [table.sql, *(part.sql for part in table.parts)])
            yield error(
                Kind.SOURCE_MISCONFIGURED,
                f"the table's replica identity has the generated columns {', '.join(sorted(unsent))}, which "
                "PostgreSQL sends since version 18: rows can't be identified",
                f"{full}; or leave the table out: source.tables_exclude",
                table.qualified_name,
            )
        if table.partitioned and source.publish_via_partition_root:
            yield from _partition_findings(source, found)
        if (sent := published.get(table.full_name)) is not None:
            yield from _published_findings(checked, found, sent)
            continue
        leaving = found.left_out(source) - found.needed
        if leaving and not found.column_list(source, session.server_version):
            yield _leaving(checked, found, leaving, "")


def _secret_findings(source: PostgresSource) -> Iterator[Finding]:
    try:
        TablePolicy.of(source.disclosure)
    except TailraceError as failure:
        yield from_failure(failure)
        return
    for number, mask in enumerate(source.masks):
        if mask.salt is not None and len(mask.salt.resolve()) < SALT_LENGTH_MIN:
            yield warning(
                Kind.CONFIG_INVALID,
                f"source.masks[{number}]: the salt {mask.salt} is shorter than {SALT_LENGTH_MIN} characters, "
                "so it can be guessed by brute force, and with it the values",
                "use a longer one, before the first run: hashes change with it",
            )


def _pattern_findings(checked: CheckedSource, columns: Collection[TableColumns]) -> Iterator[Finding]:
    source, log = checked.source, checked.log
    kept = ColumnPolicy() if log is None else kept_disclosure(log, TASK)
    renames = (None if log is None else kept_renames(log, TASK)) or Renames()
    for found in unmatched_patterns(checked.session, source, columns, kept, renames):
        if found.refused:
            yield error(Kind.CONFIG_INVALID, found.message, found.repair)
        else:
            yield warning(Kind.TABLE_MISSING, found.message, found.repair)
    for pattern in source.message_keys:
        if not any(matches(pattern, each.table.schema, each.table.name) for each in columns):
            yield warning(
                Kind.TABLE_MISSING,
                f"source.message_keys: no captured table matches {pattern!r}",
                "correct source.message_keys",
            )


def _conflict_findings(source: PostgresSource, columns: TableColumns) -> Iterator[Finding]:
    table = columns.table
    for conflict in source.conflicts(table.schema, table.name, columns.columns):
        repair = conflict.repair
        if conflict.needs_full and table.may_be_full:
            repair = (
                f"{identity_repair(source, table, [part.sql for part in table.parts])}; or {conflict.repair}"
            )
        yield error(Kind.CONFIG_INVALID, conflict.message, repair, table.qualified_name)


def _unchanged_findings(source: PostgresSource, table: SourceTable) -> Iterator[Finding]:
    partial = [part for part in table.parts if part.identity != "f"]
    if not source.skip_unchanged_updates or not partial:
        return
    names = [*(part.sql for part in partial), *([table.sql] if table.partitioned else [])]
    repair = identity_repair(source, table, names)
    if not source.identity_of(table.schema, table.name):
        repair += "; or name it in source.replica_identity"
    yield warning(
        Kind.SOURCE_MISCONFIGURED,
        "source.skip_unchanged_updates leaves out no update of the table: without REPLICA IDENTITY FULL they "
        "don't send the old row",
        repair if table.may_be_full else "leave it so",
        table.qualified_name,
    )


def _partition_findings(source: PostgresSource, columns: TableColumns) -> Iterator[Finding]:
    table = columns.table
    partial = [part for part in table.parts if part.identity != "f"]
    if columns.columns.full and partial:
        # The server fills an old row that it declares complete from a key only: the other columns are NULL.
        yield error(
            Kind.SOURCE_MISCONFIGURED,
            "the root has REPLICA IDENTITY FULL, but partitions have not: their old rows would be received "
            "with NULL instead of values that were not sent",
            f"{identity_repair(source, table, [part.sql for part in partial])};"
            if table.may_be_full
            else f"ALTER TABLE {table.sql} REPLICA IDENTITY DEFAULT;",
            table.qualified_name,
        )
    for part in table.parts:
        if matches_any(source.tables_exclude, part.schema, part.name):
            yield warning(
                Kind.CONFIG_INVALID,
                f"source.tables_exclude matches the partition {part.schema}.{part.name}, whose rows are "
                "still captured with its root",
                "remove it from source.tables_exclude, or set source.publish_via_partition_root: false and "
                "name the partitions in source.tables",
                table.qualified_name,
            )


def _filters(session: Session, publication: str) -> dict[Name, set[str]]:
    """Return the columns that the publication's row filters use, by table."""
    rows = session.run(_FILTERS.format(name=quote_literal(publication)), "look at the row filters")
    return {row.name: set(json.loads(row["names"] or "[]")) for row in rows}


def _filter_findings(source: PostgresSource, columns: TableColumns, used: set[str]) -> Iterator[Finding]:
    table = columns.table
    unknown = used - columns.columns.identity
    if unknown and not columns.columns.full:
        names = ", ".join(map(repr, sorted(unknown)))
        repair = f"{identity_repair(source, table, [table.sql, *(part.sql for part in table.parts)])};"
        if not table.may_be_full:
            repair = "remove the filter from the publication, or make its columns part of the key"
        yield error(
            Kind.PUBLICATION_MISMATCH,
            f"the row filter of the table in the publication {source.publication!r} uses {names}, which are "
            "not in its replica identity: PostgreSQL refuses updates and deletes of the table",
            repair,
            table.qualified_name,
        )


def identity_repair(
    source: PostgresSource, table: SourceTable, names: Iterable[str], identity: str = "full"
) -> str:
    """Return what changes the replica identity of a table, or of partitions of it: SQL, or the setting that
    would undo it at the next start.

    :param names: their quoted names.
    :param identity: `default` or `full`, which sends whole old rows.
    """
    if source.identity_of(table.schema, table.name):
        return f"name {table.qualified_name} with {identity} in source.replica_identity, as its first entry"
    return "; ".join(
        f"ALTER TABLE {name} REPLICA IDENTITY {identity.upper()}" for name in dict.fromkeys(names)
    )


def _published_findings(
    checked: CheckedSource, columns: TableColumns, sent: SentColumns
) -> Iterator[Finding]:
    session, source, table = checked.session, checked.source, columns.table
    needed = frozenset(columns.sendable) if columns.full_somewhere else columns.needed
    fit = f"{list_command(session, source, columns)};"
    if lost := needed - sent.names:
        generated = f"ALTER PUBLICATION {quote_identifier(source.publication)} SET "
        generated += "(publish_generated_columns = stored);"
        names = ", ".join(map(repr, sorted(lost)))
        yield error(
            Kind.PUBLICATION_MISMATCH,
            f"the publication {source.publication!r} does not send {names}, which the table's replica "
            "identity needs: PostgreSQL refuses updates and deletes of the table",
            generated if lost <= columns.generated else fit,
            table.qualified_name,
        )
    elif columns.full_somewhere and sent.listed:
        yield error(
            Kind.PUBLICATION_MISMATCH,
            f"the publication {source.publication!r} has a column list for the table, which has REPLICA "
            "IDENTITY FULL: PostgreSQL refuses updates and deletes of the table, whatever the list has",
            fit,
            table.qualified_name,
        )
    if late := frozenset(columns.sendable) - columns.generated - sent.names - columns.left_out(source) - lost:
        names = ", ".join(map(repr, sorted(late)))
        yield warning(
            Kind.PUBLICATION_MISMATCH,
            f"the publication {source.publication!r} does not send the columns {names}",
            widening_command(session, source, columns) if checked.has_captured else fit,
            table.qualified_name,
        )
    if leaving := (columns.left_out(source) & sent.names) - columns.needed:
        yield _leaving(checked, columns, leaving, fit)


def _leaving(checked: CheckedSource, columns: TableColumns, leaving: frozenset[str], sql: str) -> Finding:
    table = columns.table
    names = ", ".join(map(repr, sorted(leaving)))
    if columns.full_somewhere:
        why = "the table has REPLICA IDENTITY FULL, under which PostgreSQL must send all columns"
        full = [part.sql for part in table.parts if part.identity == "f"]
        sql = identity_repair(checked.source, table, full, "default")
        sql += f"; if it has a primary key, before the first run; else leave it: {names} are in the log only"
    elif checked.session.server_version < COLUMN_LISTS_VERSION_MIN:
        why = "PostgreSQL before 15 sends all columns"
        sql = "upgrade the server, or leave it"
    else:
        why = "the publication has them"
    return warning(
        Kind.PUBLICATION_MISMATCH,
        f"the columns {names} are left out, but leave the server and get into the log, because {why}",
        sql,
        table.qualified_name,
    )
