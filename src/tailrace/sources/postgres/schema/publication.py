"""The publication: which tables it should have, and which it has.

Tables in which engines store their offsets are never captured: each commit would be a change, and each
change a commit.

The publication is created before the slot, because the server looks it up as of each change. An
existing one is never altered: what it lacks is reported with the SQL. The exception is one that an
interrupted start created and that was never used: new tables are added to it.

With `publish_via_partition_root`, rows of partitions are published under the root's name and
columns; without it, each partition is a separate table, also those that are created later. Child
tables by inheritance are always separate tables.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable

import structlog

from tailrace.config.patterns import is_exact, matches
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.sources.postgres.connection.quoting import quote_identifier, quote_literal, quote_table
from tailrace.sources.postgres.connection.session import Row, Session
from tailrace.sources.postgres.schema.column_selection import require_disclosable, table_columns
from tailrace.sources.postgres.schema.published_tables import (
    GENERATED_VERSION_MIN,
    leaves,
    published,
)
from tailrace.sources.postgres.schema.source_tables import Name, SourceTable, matching_tables
from tailrace.sources.progress import SourceWarning

log = structlog.get_logger(__name__)

#: SQLSTATE of a write in a read-only transaction or on a standby.
READ_ONLY = "25006"

_OPERATIONS = ("insert", "update", "delete", "truncate")

# With `publish_via_partition_root` the server sends the Relation message of a partition in addition to
# that of the table under whose name it sends the rows: both are in the log.
_LEFT_OUT = """
WITH RECURSIVE {published}
SELECT c.oid AS oid, n.nspname AS schema, c.relname AS table
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = ANY ({oids})
   AND EXISTS (SELECT FROM publication)
   AND c.oid NOT IN (SELECT oid FROM published)
   AND NOT EXISTS (SELECT FROM pg_partition_ancestors(c.oid) a
                    WHERE a.relid <> c.oid
                      AND (a.relid IN (SELECT oid FROM published) OR a.relid = ANY ({oids})))
   AND (c.relkind <> 'p' OR EXISTS (SELECT FROM {leaves} l WHERE l.oid NOT IN (SELECT oid FROM published)))
 ORDER BY 2, 3
"""

_PUBLISHED = """
WITH RECURSIVE {published}
SELECT c.oid AS oid, n.nspname AS schema, c.relname AS table
  FROM (SELECT oid FROM published UNION
        SELECT r.prrelid FROM pg_publication_rel r JOIN publication p ON r.prpubid = p.oid UNION
        SELECT d.oid FROM named d JOIN pg_class r ON r.oid = d.oid AND r.relkind = 'p') t
  JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace
"""

_PUBLICATION = """
SELECT pubinsert AS insert, pubupdate AS update, pubdelete AS delete, pubtruncate AS truncate,
       pubviaroot AS via_root
  FROM pg_publication WHERE pubname = {name}
"""
_NOT_REPLICATED = """
SELECT n.nspname AS schema, c.relname AS name, c.relkind AS kind, c.relpersistence AS persistence
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('v', 'm', 'f', 'S') OR c.relkind IN ('r', 'p') AND c.relpersistence <> 'p'
"""
_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence"}
_PERSISTENCES = {"u": "an unlogged table", "t": "a temporary table"}


def split_refused(
    source: PostgresSource, tables: Iterable[SourceTable], published: frozenset[Name] = frozenset()
) -> tuple[list[SourceTable], list[SourceTable]]:
    """Return those of `tables` that are to be captured, and those that are left out.

    If the server rejects updates and deletes of a table once it is published, that breaks the applications
    that write to it. So such a table is left out, unless it is named exactly or is already published.
    """
    tables = list(tables)
    left = [
        table
        for table in tables
        if table.refused
        and not table.is_among(published)
        and not any(is_exact(each) and matches(each, table.schema, table.name) for each in source.tables)
    ]
    return [table for table in tables if table not in left], left


def refusal(table: SourceTable) -> str:
    """Return the message about a table that is left out."""
    return (
        f"the table is left out: once it is published, PostgreSQL refuses its updates and deletes, because "
        f"{table.refused}"
    )


def refusal_repair(session: Session, source: PostgresSource, table: SourceTable, *, publish: bool) -> str:
    """Return the commands that include a table that was left out; `publish`: there is a publication."""
    repair = f"{table.identity_repair};"
    if publish:
        repair += f" {_adding(session, source, table)}"
    named = f"{_part(table.schema)}.{_part(table.name)}"
    return f"{repair.removesuffix(';')}; or, if it is only inserted into, name it in source.tables: {named}"


def _adding(session: Session, source: PostgresSource, table: SourceTable) -> str:
    then = f"then, for the rows that it has by now: {snapshot_command(table.schema, table.name)}"
    return f"{add_command(session, source, [table])}; -- {then}"


def _part(name: str) -> str:
    plain = name and not any(letter in name for letter in '."*/')
    return name if plain else quote_identifier(name)


def require_matches(session: Session, source: PostgresSource, tables: Iterable[SourceTable]) -> None:
    """Check that each pattern of `source.tables` that names one table found it; warn of other patterns.

    :param tables: as `matching_tables` returns them.
    :raises TailraceError: `TABLE_MISSING`.
    """
    tables = list(tables)
    for pattern in unmatched(source.tables, tables):
        if is_exact(pattern):
            raise TailraceError(
                Kind.TABLE_MISSING,
                f"look for the tables: {why_missing(session, source, pattern)}",
                "create the table first, or correct source.tables",
                {"pattern": pattern},
            )
        log.warning("no table matches a pattern of source.tables", pattern=pattern)
    if not tables:
        raise TailraceError(
            Kind.TABLE_MISSING,
            f"look for the tables: no table matches {', '.join(source.tables)}",
            "create the tables first, or correct source.tables",
        )


def warn_unmatched(session: Session, source: PostgresSource) -> None:
    """Warn of each pattern of `source.tables` without a table: it is mistyped, or its table was dropped."""
    for pattern in unmatched(source.tables, matching_tables(session, source)):
        log.warning("no table matches a pattern of source.tables", pattern=pattern)


def unmatched(patterns: Iterable[str], tables: Iterable[SourceTable]) -> list[str]:
    """Return those of `patterns` that match none of `tables` and none of their partitions."""
    names = [name for table in tables for name in table.names]
    return [pattern for pattern in patterns if not any(matches(pattern, *name) for name in names)]


def why_missing(session: Session, source: PostgresSource, pattern: str) -> str:
    """Return the message about a pattern of `source.tables` that matches no table."""
    for row in session.run(_NOT_REPLICATED, "look for the table"):
        if matches(pattern, row.text("schema"), row.text("name")):
            kind = row.text("kind")
            what = _KINDS.get(kind) or _PERSISTENCES.get(row.text("persistence"), "no table")
            return f"{pattern!r} is {what}, which PostgreSQL does not replicate"
    if source.tables_exclude:
        return f"no table matches {pattern!r}, or source.tables_exclude leaves it out"
    return f"no table matches {pattern!r}"


def publication_row(session: Session, publication: str) -> Row | None:
    """Return the operations that the publication publishes, and whether under the names of roots
    (`via_root`); None if it does not exist.
    """
    rows = session.run(_PUBLICATION.format(name=quote_literal(publication)), "look for the publication")
    return rows[0] if rows else None


def require_publication(session: Session, publication: str) -> None:
    """Check that the publication still exists.

    :raises TailraceError: `PUBLICATION_MISSING`.
    """
    if publication_row(session, publication) is None:
        raise TailraceError(
            Kind.PUBLICATION_MISSING,
            f"resume: the publication {publication!r} no longer exists",
            "the server can't decode without it. If source.publication or the pipeline's name was changed, "
            "restore it; if it was dropped, begin a new log with a new snapshot: set log.path to a new "
            "directory and drop the slot",
            {"publication": publication},
        )


def operations_left_out(publication: Row) -> list[str]:
    """Return the operations that a publication, given as its `publication_row`, does not publish."""
    return [name for name in _OPERATIONS if not publication.flag(name)]


def all_operations_command(publication: str) -> str:
    """Return the SQL that makes the publication publish every operation."""
    alter = f"ALTER PUBLICATION {quote_identifier(publication)}"
    return f"{alter} SET (publish = '{', '.join(_OPERATIONS)}')"


def snapshot_command(schema: str, name: str) -> str:
    """Return the command that reads the rows of a published table while streaming."""
    return shlex.join(["tailrace", "snapshot", "FILE", "--table", f"{schema}.{name}"])


def unlogged_warning(name: Name, captured_as: Name) -> SourceWarning:
    """Return the warning for an unlogged table, or a partition, whose rows have the name `captured_as`."""
    table = quote_table(*name)
    return SourceWarning(
        f"table_unlogged:{'.'.join(name)}",
        f"the table {table} is unlogged: PostgreSQL does not replicate it, and its changes are not captured",
        f"ALTER TABLE {table} SET LOGGED; -- then, for the changes made meanwhile: "
        f"{snapshot_command(*captured_as)}",
    )


def partition_warnings(table: SourceTable, *, via_root: bool = True) -> list[SourceWarning]:
    """Return warnings of partitions, or of the table itself, whose changes PostgreSQL does not replicate."""
    found = [
        unlogged_warning(part.full_name, table.full_name if via_root else part.full_name)
        for part in table.parts
        if part.unlogged
    ]
    return found + [
        SourceWarning(
            f"partition_foreign:{'.'.join(name)}",
            f"the partition {quote_table(*name)} of {table.sql} is a foreign table: a snapshot reads its "
            "rows, but PostgreSQL does not replicate it, and its changes are not captured",
            "detach the partition; or leave it so, if its rows do not change",
        )
        for name in table.foreign
    ]


def publication_warnings(
    session: Session, source: PostgresSource, captured: Collection[int] = ()
) -> list[SourceWarning]:
    """Return warnings of missing tables and operations, and of tables whose writes the server rejects.

    :param captured: oids of tables that the log has, which `left_out` checks.
    """
    name, tables = source.publication, matching_tables(session, source)
    publication, published = publication_row(session, name), published_names(session, name)
    missing = [table for table in tables if table.oid not in captured and not table.is_among(published)]
    kept, left = split_refused(source, missing)
    found = [
        SourceWarning(
            f"table_not_captured:{table.qualified_name}",
            f"the table {table.sql} matches source.tables and is not in the publication {name!r}: it is not "
            "captured",
            _adding(session, source, table),
        )
        for table in kept
    ]
    found += [
        SourceWarning(
            f"table_not_captured:{table.qualified_name}",
            f"{table.sql}: {refusal(table)}",
            refusal_repair(session, source, table, publish=True),
        )
        for table in left
    ]
    if publication is None:
        return found
    found += [
        warning
        for table in tables
        if table.is_among(published)
        for warning in partition_warnings(table, via_root=publication.flag("via_root"))
    ]
    if operations := operations_left_out(publication):
        found.append(
            SourceWarning(
                "operations_left_out",
                f"the publication {name!r} leaves out {', '.join(operations)}: they are not captured",
                f"{all_operations_command(name)}; -- then take a snapshot of each table",
            )
        )
    if publication.flag("update") or publication.flag("delete"):
        # Also if that is so only since they were published: a partition was added, or a key dropped.
        found += [
            SourceWarning(
                f"writes_refused:{table.qualified_name}",
                f"PostgreSQL refuses updates and deletes of the published table {table.sql}, because "
                f"{table.refused}",
                f"{table.identity_repair};",
            )
            for table in tables
            if table.refused and table.is_among(published)
        ]
    return found


def _warn_refused(table: SourceTable) -> None:
    log.warning(
        "a table is published, and the server refuses updates and deletes of it",
        table=table.qualified_name,
        reason=table.refused,
        sql=table.identity_repair,
    )


def left_out(session: Session, publication: str, oids: Iterable[int]) -> dict[int, Name]:
    """Return the names, by oid, of those of the tables `oids` that exist but are not in the publication.

    None if there is no such publication: the stream reports that. A partition that is published
    through an ancestor is not returned, nor a table whose partitions are all published; if a table
    is returned, its partitions are not.
    """
    listed = ",".join(str(oid) for oid in oids)
    if not listed:
        return {}
    command = _LEFT_OUT.format(
        oids=f"'{{{listed}}}'::oid[]",
        published=published(publication, session.server_version),
        leaves=leaves("c.oid"),
    )
    rows = session.run(command, "compare the publication with what is captured")
    return {row.number("oid"): row.name for row in rows}


#: SQLSTATEs of a name that already exists, before the command began or created while it ran.
_EXISTS = ("42710", "23505")


def prepare_publication(session: Session, source: PostgresSource, *, is_own: bool) -> None:
    """Create, complete or check the publication with the tables of `source`, before the slot is created.

    :param is_own: it does not exist, and is created; or an interrupted start created it, and new tables are
        added. Otherwise the user created it, and it is only checked.
    :raises TailraceError: as `require_matches`; `SOURCE_PRIVILEGE_MISSING`; `CONFIG_INVALID`. For one that
        the user created: `PUBLICATION_MISMATCH`, with the SQL; `TABLE_MISSING` if it is empty.
    """
    meant = matching_tables(session, source)
    require_matches(session, source, meant)
    publication = publication_row(session, source.publication)
    published = published_names(session, source.publication)
    tables = _without_refused(session, source, meant, published)
    missing = [table for table in tables if not table.is_among(published)]
    if publication is None:
        _create(session, source, tables)
    elif not is_own:
        _check(session, source, publication, published, missing)
        if strange := not_meant(published, meant):
            log.warning(
                "the publication has tables that source.tables does not name; they are captured too",
                publication=source.publication,
                tables=[f"{schema}.{table}" for schema, table in strange],
            )
    elif missing:
        _publish(session, source, missing, add_command, "add tables to the publication")
        log.info(
            "added tables that are new since the interrupted start to its publication",
            publication=source.publication,
            tables=[table.qualified_name for table in missing],
        )


def _create(session: Session, source: PostgresSource, tables: list[SourceTable]) -> None:
    try:
        _publish(session, source, tables, create_command, f"create the publication {source.publication!r}")
    except TailraceError as error:
        if error.context.get("sqlstate") not in _EXISTS:
            raise
        # The command of a killed start had waited for a lock, and was executed meanwhile.
        prepare_publication(session, source, is_own=True)
    else:
        log.info("created the publication", publication=source.publication, tables=len(tables))


def _check(
    session: Session,
    source: PostgresSource,
    publication: Row,
    published: frozenset[Name],
    missing: list[SourceTable],
) -> None:
    name = source.publication
    if missing:
        lacking = ", ".join(table.qualified_name for table in missing)
        raise TailraceError(
            Kind.PUBLICATION_MISMATCH,
            f"check the publication {name!r}: it does not have {lacking}",
            add_command(session, source, missing),
            {"publication": name},
        )
    if not published:
        raise TailraceError(
            Kind.TABLE_MISSING,
            f"check the publication {name!r}: it has no table",
            "add tables to it, or drop it and let it be created",
            {"publication": name},
        )
    if left := operations_left_out(publication):
        log.warning(
            "the publication leaves out operations: they are not captured",
            publication=name,
            operations=left,
            sql=all_operations_command(name),
        )


def _without_refused(
    session: Session,
    source: PostgresSource,
    tables: list[SourceTable],
    published: frozenset[Name],
) -> list[SourceTable]:
    """Return those of `tables` that are to be published; warn of those that are left out.

    :raises TailraceError: `TABLE_MISSING` if none remains.
    """
    kept, left = split_refused(source, tables, published)
    for table in left:
        repair = refusal_repair(session, source, table, publish=False)
        log.warning(refusal(table), table=table.qualified_name, sql=repair)
    if not kept:
        raise TailraceError(
            Kind.TABLE_MISSING,
            "look for the tables: PostgreSQL would refuse updates and deletes of every table that matches, "
            "once it is published",
            refusal_repair(session, source, left[0], publish=False),
            {"tables": ", ".join(table.qualified_name for table in left)},
        )
    return kept


def _publish(
    session: Session,
    source: PostgresSource,
    tables: list[SourceTable],
    command_for: Callable[[Session, PostgresSource, list[SourceTable]], str],
    attempted: str,
) -> None:
    for table in tables:
        if table.refused:
            _warn_refused(table)
    if not source.discloses_all:
        require_disclosable(source, table_columns(session, tables))
    command = command_for(session, source, tables)
    run_or_delegate(session, command, attempted)


def run_or_delegate(session: Session, command: str, attempted: str, *, before: str = "") -> None:
    """Run a command that changes the source; if the role may not run it, the error says who can.

    :param before: commands that are run before it, in the same transaction.
    :raises TailraceError: `SOURCE_MISCONFIGURED` on a standby, `SOURCE_PRIVILEGE_MISSING`, both with the
        command; the server's other errors.
    """
    try:
        session.run(before + command, attempted)
    except TailraceError as error:
        if error.context.get("sqlstate") == READ_ONLY:
            raise read_only(attempted, command) from None
        if error.kind is not Kind.SOURCE_PRIVILEGE_MISSING:
            raise
        hint = f"have a role with the privilege, such as the owner, run: {command};"
        raise error.changed(hint=hint) from None


def read_only(attempted: str, command: str) -> TailraceError:
    """Return the error for a command in a session whose transactions are read only."""
    return TailraceError(
        Kind.SOURCE_MISCONFIGURED,
        f"{attempted}: the role's transactions are read only here: the server is a standby, or "
        "default_transaction_read_only is on",
        f"on the primary, as a role whose transactions are not read only: {command};",
    )


def create_command(session: Session, source: PostgresSource, tables: Iterable[SourceTable]) -> str:
    """Return the SQL that creates the publication for `tables`."""
    options = [f"publish_via_partition_root = {str(source.publish_via_partition_root).lower()}"]
    if session.server_version >= GENERATED_VERSION_MIN:
        options.append("publish_generated_columns = stored")
    return (
        f"CREATE PUBLICATION {quote_identifier(source.publication)} FOR TABLE "
        f"{_clauses(session, source, tables)} WITH ({', '.join(options)})"
    )


def add_command(session: Session, source: PostgresSource, tables: Iterable[SourceTable]) -> str:
    """Return the SQL that adds `tables` to the publication."""
    return (
        f"ALTER PUBLICATION {quote_identifier(source.publication)} ADD TABLE "
        f"{_clauses(session, source, tables)}"
    )


def _clauses(session: Session, source: PostgresSource, tables: Iterable[SourceTable]) -> str:
    tables = list(tables)
    lists: dict[int, str] = {}
    if source.leaves_columns_out:
        lists = {
            each.table.oid: each.column_list(source, session.server_version)
            for each in table_columns(session, tables)
        }
    # Without ONLY, child tables would be included, even if source.tables does not name them.
    return ", ".join(
        f"{'ONLY ' if table.has_children else ''}{table.sql}{lists.get(table.oid, '')}" for table in tables
    )


def published_names(session: Session, publication: str) -> frozenset[Name]:
    """Return the names under which the publication sends tables, and those that it lists."""
    return frozenset(names_by_oid(session, publication).values())


def names_by_oid(session: Session, publication: str) -> dict[int, Name]:
    """Return the same names by oid."""
    command = _PUBLISHED.format(published=published(publication, session.server_version))
    rows = session.run(command, "read the publication")
    return {row.number("oid"): row.name for row in rows}


def not_meant(names: frozenset[Name], tables: Iterable[SourceTable]) -> list[Name]:
    """Return those of `names` that are neither of `tables` nor of their partitions."""
    return sorted(names.difference(*(table.names for table in tables)))
