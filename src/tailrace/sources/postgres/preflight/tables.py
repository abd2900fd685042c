"""Preflight of the publication and each table, after that of the server and the slot."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tailrace.changelog.directory import TASK
from tailrace.changelog.reader import LogReader
from tailrace.config import PipelineConfig, PostgresSource, is_exact
from tailrace.config.source.postgres import postgres_source
from tailrace.decode.types import rounded_by
from tailrace.errors import Kind, TailraceError
from tailrace.sources.findings import Finding, Severity, error, from_failure, warning
from tailrace.sources.postgres.connection.quoting import quote_identifier, quote_table
from tailrace.sources.postgres.connection.session import Row, Session
from tailrace.sources.postgres.preflight.checked_source import CheckedSource
from tailrace.sources.postgres.preflight.columns import column_findings, identity_repair
from tailrace.sources.postgres.preflight.server import server_findings, slot_findings
from tailrace.sources.postgres.schema.column_selection import TableColumns, table_columns
from tailrace.sources.postgres.schema.publication import (
    add_command,
    all_operations_command,
    create_command,
    not_meant,
    operations_left_out,
    partition_warnings,
    publication_row,
    published_names,
    read_only,
    refusal,
    refusal_repair,
    require_publication,
    snapshot_command,
    split_refused,
    unmatched,
    why_missing,
)
from tailrace.sources.postgres.schema.replica_identity import (
    IdentityChange,
    columns_as_set,
    identity_changes,
    tables_as_set,
)
from tailrace.sources.postgres.schema.source_tables import Name, SourceTable, matching_tables
from tailrace.sources.postgres.slot.way_out import with_way_out
from tailrace.sources.postgres.snapshot.requests import check_condition
from tailrace.sources.postgres.streaming.reconcile import CapturePhase
from tailrace.sources.postgres.streaming.task_log import capture_state

_TABLES = """
SELECT n.nspname AS schema, c.relname AS table,
       pg_has_role(current_user, c.relowner, 'usage') AS owned,
       has_schema_privilege(n.oid, 'USAGE') AS may_use_schema,
       has_table_privilege(c.oid, 'SELECT') AS may_select,
       row_security_active(c.oid) AS row_security
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p')
"""


def source_findings(checked: CheckedSource, gate: threading.Lock) -> Iterator[Finding]:
    """Yield the problems of the source.

    :param gate: allows only one source of a server at a time to use a WAL sender for its checks.
    :raises TailraceError: if the source can't be queried.
    """
    session, source = checked.session, checked.source
    yield from server_findings(checked)
    yield from slot_findings(checked, gate)
    tables = matching_tables(session, source)
    yield from _pattern_findings(checked, tables)
    rows = {row.name: row for row in session.run(_TABLES, "look at the tables")}
    changes = identity_changes(session, source, tables)
    yield from _identity_findings(checked.server, changes)
    tables = tables_as_set(tables, changes)
    published = published_names(session, source.publication)
    tables, left = split_refused(source, tables, published)
    publish = publication_row(session, source.publication) is not None
    for table in left:
        repair = refusal_repair(session, source, table, publish=publish)
        yield (warning if tables else error)(
            Kind.SOURCE_MISCONFIGURED, refusal(table), repair, table.qualified_name
        )
    if not tables:
        return
    yield from _publication_findings(checked, tables, rows)
    columns = columns_as_set(table_columns(session, tables), changes)
    yield from column_findings(checked, columns)
    for each in columns:
        yield from _condition_findings(session, source, each.table)
        yield from _table_findings(checked, each, rows)


def _identity_findings(server: Row, changes: list[IdentityChange]) -> Iterator[Finding]:
    for change in changes:
        if not change.happens:
            found = from_failure(change.failure)
            severity = Severity.WARNING if change.refused and not change.named else Severity.ERROR
            yield replace(found, severity=severity, table=change.table.qualified_name)
        elif server.flag("standby"):
            yield error(
                Kind.SOURCE_MISCONFIGURED,
                f"source.replica_identity asks for {change.wanted}, and a standby can't set it",
                f"on the primary: {change.sql}",
                change.table.qualified_name,
            )


def _pattern_findings(checked: CheckedSource, tables: list[SourceTable]) -> Iterator[Finding]:
    source = checked.source
    for pattern in unmatched(source.tables, tables):
        if is_exact(pattern):
            yield error(
                Kind.TABLE_MISSING,
                f"source.tables: {why_missing(checked.session, source, pattern)}",
                "create the table, or correct source.tables",
            )
        else:
            yield (warning if tables else error)(
                Kind.TABLE_MISSING,
                f"source.tables: no table matches {pattern!r}",
                "create the table, or correct source.tables",
            )
    for number, sink in enumerate(checked.pipeline.sinks):
        for pattern in unmatched(sink.tables or (), tables):
            missing = warning(
                Kind.TABLE_MISSING,
                f"sinks[{number}].tables: no captured table matches {pattern!r}",
                f"correct sinks[{number}].tables",
            )
            yield replace(missing, everywhere=True)


def _publication_findings(
    checked: CheckedSource, tables: list[SourceTable], rows: dict[Name, Row]
) -> Iterator[Finding]:
    session, server, source = checked.session, checked.server, checked.source
    name, begun = source.publication, checked.has_captured
    publication = publication_row(session, name)
    if publication is None:
        if begun:
            try:
                require_publication(session, name)
            except TailraceError as failure:
                yield from_failure(with_way_out(failure, checked.pipeline))
        elif server["read_only"] == "on":
            command = create_command(session, source, tables)
            yield from_failure(read_only(f"create the publication {name!r}", command))
        elif not server.flag("superuser"):
            yield from _may_publish(checked, tables, rows)
        return
    if left_out := operations_left_out(publication):
        yield warning(
            Kind.PUBLICATION_MISMATCH,
            f"the publication {name!r} leaves out {', '.join(left_out)}",
            f"{all_operations_command(name)};",
        )
    published = published_names(session, name)
    adds = _begins_again(checked)
    for table in tables:
        if not table.is_among(published) and not adds:
            add = f"{add_command(session, source, [table])};"
            again = f" -- then, for its rows: {snapshot_command(table.schema, table.name)}"
            # An error before the first start. Later, capture of the other tables continues without it.
            yield (warning if begun else error)(
                Kind.PUBLICATION_MISMATCH,
                f"the publication {name!r} does not have this table" + ": it is not captured" * begun,
                add + again * begun,
                table.qualified_name,
            )
    for schema, table_name in not_meant(published, tables):
        yield warning(
            Kind.PUBLICATION_MISMATCH,
            f"the publication {name!r} has this table, but source.tables does not; it is captured, too",
            "name it in source.tables, or remove it from the publication",
            f"{schema}.{table_name}",
        )
    if publication.flag("via_root") != source.publish_via_partition_root and any(
        table.partitioned for table in tables
    ):
        wanted = str(source.publish_via_partition_root).lower()
        yield warning(
            Kind.PUBLICATION_MISMATCH,
            f"the publication {name!r} has publish_via_partition_root = "
            f"{str(publication.flag('via_root')).lower()}, the configuration says {wanted}; the "
            "publication takes precedence",
            f"before the first run: ALTER PUBLICATION {quote_identifier(name)} SET "
            f"(publish_via_partition_root = {wanted}); later: set source.publish_via_partition_root to the "
            "publication's value",
        )


def _begins_again(checked: CheckedSource) -> bool:
    """Return whether the next start begins again, and adds missing tables to the publication."""
    if (log := checked.log) is None or (state := capture_state(log)) is None:
        return False
    if state.phase is not CapturePhase.BEGINNING or not state.own_publication:
        return False
    if not checked.has_captured:
        return True
    with LogReader.open(log, TASK) as reader:
        return reader.end().position == 0


def _may_publish(
    checked: CheckedSource, tables: list[SourceTable], rows: dict[Name, Row]
) -> Iterator[Finding]:
    server, source = checked.server, checked.source
    role = quote_identifier(server.text("role"))
    command = f"{create_command(checked.session, source, tables)};"
    if not server.flag("may_create"):
        yield error(
            Kind.SOURCE_PRIVILEGE_MISSING,
            f"the role {server['role']!r} may not create the publication {source.publication!r} in this "
            "database",
            f"GRANT CREATE ON DATABASE {quote_identifier(server['database'] or '')} TO {role}; "
            f"or let its owner create it: {command}",
        )
    for table in tables:
        if not rows[table.full_name].flag("owned"):
            yield error(
                Kind.SOURCE_PRIVILEGE_MISSING,
                f"the role {server['role']!r} does not own the table, so it can't add it to a publication",
                f"ALTER TABLE {table.sql} OWNER TO {role}; or let a superuser run: {command}",
                table.qualified_name,
            )


def _condition_findings(session: Session, source: PostgresSource, table: SourceTable) -> Iterator[Finding]:
    if where := source.snapshot_condition(table.schema, table.name):
        try:
            check_condition(session, table.schema, table.name, where)
        except TailraceError as failure:
            yield from_failure(failure)


def _table_findings(
    checked: CheckedSource, columns: TableColumns, rows: dict[Name, Row]
) -> Iterator[Finding]:
    source, table = checked.source, columns.table
    name = table.qualified_name
    if source.snapshot != "never":
        # The snapshot reads each partition by itself, for which a privilege on the root does not count.
        for each in dict.fromkeys([table.full_name, *(part.full_name for part in table.parts)]):
            if (row := rows.get(each)) is not None:
                yield from _reading_findings(checked.server, row)
    for concern in partition_warnings(table):
        yield warning(Kind.SOURCE_MISCONFIGURED, concern.message, concern.repair, name)
    if table.refused:
        yield warning(
            Kind.SOURCE_MISCONFIGURED,
            "once it is published, PostgreSQL refuses updates and deletes of the table, because "
            f"{table.refused}",
            f"{table.identity_repair}; or give it a primary key",
            name,
        )
    key = source.key_of(table.schema, table.name) or columns.key
    yield from _rounded_findings(columns, sorted(key), checked.pipeline)
    if not key:
        if source.snapshot == "when_needed":
            yield warning(
                Kind.SINK_KEY_MISSING,
                "snapshot: when_needed stops once changes are lost, because the table has no key by which "
                "rows that are read again could be identified",
                f"ALTER TABLE {table.sql} ADD PRIMARY KEY (…); or name columns that identify its rows in "
                "source.message_keys",
                name,
            )
        yield from _keyless_findings(table, name, checked.pipeline)


def _reading_findings(server: Row, row: Row) -> Iterator[Finding]:
    schema, table = row.name
    name, role = f"{schema}.{table}", quote_identifier(server.text("role"))
    if not row.flag("may_use_schema"):
        yield error(
            Kind.SOURCE_PRIVILEGE_MISSING,
            f"the role {server['role']!r} may not use the schema {schema!r}",
            f"GRANT USAGE ON SCHEMA {quote_identifier(schema)} TO {role};",
            name,
        )
    if not row.flag("may_select"):
        yield error(
            Kind.SOURCE_PRIVILEGE_MISSING,
            f"the role {server['role']!r} may not read the table, which the snapshot needs",
            f"GRANT SELECT ON {quote_table(schema, table)} TO {role};",
            name,
        )
    if row.flag("row_security"):
        yield error(
            Kind.SOURCE_PRIVILEGE_MISSING,
            f"row security would hide rows of the table from the role {server['role']!r}",
            f"ALTER ROLE {role} BYPASSRLS;",
            name,
        )


def _rounded_findings(
    columns: TableColumns, key: Sequence[str], pipeline: PipelineConfig
) -> Iterator[Finding]:
    source, table = postgres_source(pipeline.source), columns.table
    for number, sink in enumerate(pipeline.sinks):
        # Transformations may cast the column.
        if getattr(sink, "mode", "") != "mirror" or sink.transformations:
            continue
        for name in key if sink.wants(table.schema, table.name) else ():
            masked = source.disclosure.mask_of(table.schema, table.name, name) is not None
            setting = "" if masked else rounded_by(columns.types[name], source.value_modes)
            if setting:
                yield error(
                    Kind.SINK_SCHEMA_REFUSED,
                    f"sinks[{number}] is a mirror, and {setting} rounds the key column {name!r}, so that "
                    "different rows could have the same key",
                    f"cast it to text in transformations of sinks[{number}]: {{type: cast, fields: "
                    f"{{{name}: text}}}}; or choose another {setting}, or none",
                    table.qualified_name,
                )


def _keyless_findings(table: SourceTable, name: str, pipeline: PipelineConfig) -> Iterator[Finding]:
    for number, sink in enumerate(pipeline.sinks):
        refuses = getattr(sink, "mode", "") == "mirror" and getattr(sink, "keyless", "") == "refuse"
        if refuses and sink.wants(table.schema, table.name):
            repair = f"ALTER TABLE {table.sql} ADD PRIMARY KEY (…);"
            if table.may_be_full:
                full = identity_repair(postgres_source(pipeline.source), table, [table.sql])
                repair += (
                    " or name columns that identify its rows in source.message_keys, or set keyless: "
                    f"full_row in sinks[{number}], and {full};"
                )
            yield error(
                Kind.SINK_KEY_MISSING,
                f"sinks[{number}] is a mirror, and the table has no key to mirror it by (a deferrable one "
                "does not count)",
                repair,
                name,
            )
