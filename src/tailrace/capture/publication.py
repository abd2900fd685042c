"""The publication: which tables it should have, and which it has.

The publication is created before the slot, because the server looks for it as of each change.
One that exists is never altered: what is missing in it is said, with the SQL. Only to one that an
interrupted beginning made, and nothing was read by, tables are added that came since.

With `publish_via_partition_root` a partitioned table is published as itself, under its root's
name and columns; without it each partition is a table of its own, also those that come later.
Children by inheritance are tables of their own always.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from tailrace.capture.columns import (
    COLUMN_LISTS_VERSION_MIN,
    GENERATED_VERSION_MIN,
    TableColumns,
    columns_of,
    require_disclosable,
)
from tailrace.capture.session import Row, Session, quote_identifier, quote_literal
from tailrace.config.patterns import is_exact, matches
from tailrace.config.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError

log = structlog.get_logger(__name__)

#: SQLSTATE of a write where nothing may be written.
READ_ONLY = "25006"

#: A table's name: schema and name, as the catalogue holds them.
Name = tuple[str, str]

# What a change may lack of the old row is decided by each table that holds rows: a partition's
# replica identity is its own, whatever its root's.
_TABLES = """
SELECT n.nspname AS schema, c.relname AS table, c.oid AS oid, c.relkind = 'p' AS partitioned,
       c.relhassubclass AND c.relkind = 'r' AS has_children,
       (SELECT string_agg(a.relid::oid::text, ' ') FROM pg_partition_ancestors(c.oid) AS a
         WHERE a.relid <> c.oid) AS ancestors,
       (SELECT json_agg(json_build_array(ln.nspname, l.relname, l.relreplident,
                 l.relreplident = 'n'
                 OR l.relreplident = 'd' AND NOT EXISTS (
                   SELECT FROM pg_index i WHERE i.indrelid = l.oid AND i.indisprimary AND i.indimmediate)
                 OR l.relreplident = 'i' AND NOT EXISTS (
                   SELECT FROM pg_index i WHERE i.indrelid = l.oid AND i.indisreplident)) ORDER BY 1, 2)
          FROM pg_class l JOIN pg_namespace ln ON ln.oid = l.relnamespace
         WHERE l.relkind = 'r'
           AND l.oid IN (SELECT c.oid UNION SELECT relid::oid FROM pg_partition_tree(c.oid))) AS parts
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
   AND n.nspname <> 'information_schema' AND n.nspname NOT LIKE 'pg\\_%'
 ORDER BY 1, 2
"""

# With `publish_via_partition_root` the server sends the Relation message of a partition, too, beside
# that of the table under whose name its rows come: both are in the log.
_LEFT_OUT = """
WITH published AS MATERIALIZED (SELECT relid FROM pg_get_publication_tables({name}))
SELECT n.nspname AS schema, c.relname AS table
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = ANY ({oids})
   AND EXISTS (SELECT FROM pg_publication WHERE pubname = {name})
   AND c.oid NOT IN (SELECT relid FROM published)
   AND NOT EXISTS (SELECT FROM pg_partition_ancestors(c.oid) a
                    WHERE a.relid <> c.oid
                      AND (a.relid IN (SELECT relid FROM published) OR a.relid = ANY ({oids})))
   AND (c.relkind <> 'p' OR EXISTS (SELECT FROM pg_partition_tree(c.oid) p
                                     WHERE p.isleaf AND p.relid NOT IN (SELECT relid FROM published)))
 ORDER BY 1, 2
"""

_PUBLISHED = """
SELECT t.schemaname AS schema, t.tablename AS table
  FROM pg_publication_tables t WHERE t.pubname = {name}
UNION
SELECT n.nspname, c.relname
  FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
  JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE p.pubname = {name}
"""

_OTHER_THINGS = """
SELECT n.nspname AS schema, c.relname AS name, c.relkind AS kind, c.relpersistence AS persistence
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('v', 'm', 'f', 'S') OR c.relkind IN ('r', 'p') AND c.relpersistence <> 'p'
"""
_KINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence"}
_PERSISTENCES = {"u": "an unlogged table", "t": "a temporary table"}


@dataclass(frozen=True, slots=True)
class Part:
    """A table that holds rows: the table itself, or a partition of it."""

    schema: str
    name: str
    identity: str  # pg_class.relreplident
    keyless: bool  # updates and deletes of it can't be published

    @property
    def sql(self) -> str:
        """Return its name as SQL holds it."""
        return f"{quote_identifier(self.schema)}.{quote_identifier(self.name)}"


@dataclass(frozen=True, slots=True)
class Table:
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
        return f"{quote_identifier(self.schema)}.{quote_identifier(self.name)}"

    @property
    def keyless(self) -> bool:
        """Whether updates and deletes of some of its rows can't be published."""
        return any(part.keyless for part in self.parts)

    @property
    def identity_repair(self) -> str:
        """Return the SQL that lets updates and deletes of all its rows be published."""
        return "; ".join(
            f"ALTER TABLE {part.sql} REPLICA IDENTITY FULL" for part in self.parts if part.keyless
        )

    def is_among(self, published: frozenset[Name]) -> bool:
        """Tell whether it is published, by its own name or by those of all its partitions."""
        if (self.schema, self.name) in published:
            return True
        parts = {(part.schema, part.name) for part in self.parts}
        return bool(parts) and parts <= published


def matching_tables(session: Session, source: PostgresSource) -> list[Table]:
    """Return the tables that `source` means, by name; a partition only if no ancestor is meant."""
    rows = session.run(_TABLES, "list the tables")
    meant = [row for row in rows if source.captures(row["schema"] or "", row["table"] or "")]
    oids = {row["oid"] for row in meant}
    return [_table(row) for row in meant if oids.isdisjoint((row["ancestors"] or "").split())]


def _table(row: Row) -> Table:
    return Table(
        oid=int(row["oid"] or 0),
        schema=row["schema"] or "",
        name=row["table"] or "",
        partitioned=row["partitioned"] == "t",
        has_children=row["has_children"] == "t",
        parts=tuple(Part(*part) for part in json.loads(row["parts"] or "[]")),
    )


def require_matches(session: Session, source: PostgresSource, tables: Iterable[Table]) -> None:
    """Check that each pattern of `source.tables` that names one table found it; tell of others.

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


def unmatched(patterns: Iterable[str], tables: Iterable[Table]) -> list[str]:
    """Return those of `patterns` that mean none of `tables` nor of their partitions."""
    names = [(table.schema, table.name) for table in tables]
    names += [(part.schema, part.name) for table in tables for part in table.parts]
    return [pattern for pattern in patterns if not any(matches(pattern, *name) for name in names)]


def why_missing(session: Session, source: PostgresSource, pattern: str) -> str:
    """Return in words why a pattern of `source.tables` found no table."""
    for row in session.run(_OTHER_THINGS, "look for the table"):
        if matches(pattern, row["schema"] or "", row["name"] or ""):
            kind = row["kind"] or ""
            what = _KINDS.get(kind) or _PERSISTENCES.get(row["persistence"] or "", "no table")
            return f"{pattern!r} is {what}, which PostgreSQL does not replicate"
    if source.tables_exclude:
        return f"no table matches {pattern!r}, or source.tables_exclude leaves it out"
    return f"no table matches {pattern!r}"


def publication_exists(session: Session, publication: str) -> bool:
    """Tell whether there is a publication of this name."""
    rows = session.run(
        f"SELECT pubname FROM pg_publication WHERE pubname = {quote_literal(publication)}",  # noqa: S608 - quoted
        "look for the publication",
    )
    return bool(rows)


def require_publication(session: Session, publication: str) -> None:
    """Make sure that the publication is still there.

    :raises TailraceError: `PUBLICATION_MISSING`.
    """
    if not publication_exists(session, publication):
        raise TailraceError(
            Kind.PUBLICATION_MISSING,
            f"resume: the publication {publication!r} does not exist any more",
            "the server can't decode without it; if it was dropped, begin a new log with a new snapshot: "
            "set log.path to a new directory and drop the slot",
            {"publication": publication},
        )


def uncaptured(session: Session, source: PostgresSource) -> list[tuple[Table, str]]:
    """Return the tables that match and are not published, each with what to run; none is added silently."""
    published = published_names(session, source.publication)
    found = []
    for table in matching_tables(session, source):
        if not table.is_among(published):
            then = f"then, for the rows that it has by now: {snapshot_command(table.schema, table.name)}"
            found.append((table, f"{add_command(session, source, [table])}; -- {then}"))
    return found


def snapshot_command(schema: str, name: str) -> str:
    """Return the command that has the rows of a published table read beside the stream."""
    return shlex.join(["tailrace", "snapshot", "FILE", "--table", f"{schema}.{name}"])


def warn_of_new_tables(session: Session, source: PostgresSource) -> None:
    """Say which tables match by now and are not published."""
    for table, repair in uncaptured(session, source):
        log.warning(
            "a table matches source.tables and is not captured", table=table.qualified_name, sql=repair
        )


def left_out(session: Session, publication: str, oids: Iterable[int]) -> list[Name]:
    """Return the names of those of the tables `oids` that exist and that the publication does not have.

    None at all if there is no such publication: the stream says that by itself. A partition that
    is published through a table above it is not left out, nor is a table whose partitions all are
    published; of a table that is left out, its partitions are not named beside it.
    """
    listed = ",".join(str(oid) for oid in oids)
    if not listed:
        return []
    command = _LEFT_OUT.format(oids=f"'{{{listed}}}'::oid[]", name=quote_literal(publication))
    rows = session.run(command, "compare the publication with what is captured")
    return [(row["schema"] or "", row["table"] or "") for row in rows]


def create_publication(session: Session, source: PostgresSource) -> None:
    """Create the publication for the tables that `source` means. Before the slot is created.

    :raises TailraceError: as `require_matches`; `SOURCE_PRIVILEGE_MISSING`; `CONFIG_INVALID`.
    """
    tables = matching_tables(session, source)
    require_matches(session, source, tables)
    _publish(session, source, tables, create_command, "create the publication")
    log.info("created the publication", publication=source.publication, tables=len(tables))


def complete_publication(session: Session, source: PostgresSource) -> None:
    """Add to the publication the tables that `source` means and that are not in it: it is what an
    interrupted beginning made, and they came since. Before the slot is created.

    :raises TailraceError: as `create_publication`.
    """
    meant = matching_tables(session, source)
    require_matches(session, source, meant)
    published = published_names(session, source.publication)
    tables = [table for table in meant if not table.is_among(published)]
    if not tables:
        return
    _publish(session, source, tables, add_command, "add tables to the publication")
    log.info(
        "added tables that came since the interrupted start to its publication",
        publication=source.publication,
        tables=[table.qualified_name for table in tables],
    )


def _publish(
    session: Session,
    source: PostgresSource,
    tables: list[Table],
    command_for: Callable[[Session, PostgresSource, list[Table]], str],
    attempted: str,
) -> None:
    for table in tables:
        if table.keyless:
            log.warning(
                "a table without a key is published: the server will refuse updates and deletes of it",
                table=table.qualified_name,
                sql=table.identity_repair,
            )
    if not source.discloses_all:
        require_disclosable(source, table_columns(session, tables).values())
    command = command_for(session, source, tables)
    try:
        session.run(command, attempted)
    except TailraceError as error:
        if error.context.get("sqlstate") == READ_ONLY:
            raise made_elsewhere(source, command) from None
        if error.kind is not Kind.SOURCE_PRIVILEGE_MISSING:
            raise
        raise TailraceError(
            error.kind, error.message, f"let somebody who may run: {command}", error.context
        ) from None


def made_elsewhere(source: PostgresSource, command: str) -> TailraceError:
    """Return the error for a server on which no publication can be made, as on a standby."""
    return TailraceError(
        Kind.SOURCE_MISCONFIGURED,
        f"create the publication {source.publication!r}: the server is read only, as a standby is",
        f"on the primary: {command};",
        {"publication": source.publication},
    )


def create_command(session: Session, source: PostgresSource, tables: Iterable[Table]) -> str:
    """Return the SQL that creates the publication for `tables`."""
    options = [f"publish_via_partition_root = {str(source.publish_via_partition_root).lower()}"]
    if session.server_version >= GENERATED_VERSION_MIN:
        options.append("publish_generated_columns = stored")
    return (
        f"CREATE PUBLICATION {quote_identifier(source.publication)} FOR TABLE "
        f"{_clauses(session, source, tables)} WITH ({', '.join(options)})"
    )


def add_command(session: Session, source: PostgresSource, tables: Iterable[Table]) -> str:
    """Return the SQL that adds `tables` to the publication."""
    return (
        f"ALTER PUBLICATION {quote_identifier(source.publication)} ADD TABLE "
        f"{_clauses(session, source, tables)}"
    )


def _clauses(session: Session, source: PostgresSource, tables: Iterable[Table]) -> str:
    tables = list(tables)
    lists: dict[int, str] = {}
    if source.leaves_columns_out:
        lists = {
            oid: columns.column_list(source, session.server_version)
            for oid, columns in table_columns(session, tables).items()
        }
    # Without ONLY the children of a table would come along, named in source.tables or not.
    return ", ".join(
        f"{'ONLY ' if table.has_children else ''}{table.sql}{lists.get(table.oid, '')}" for table in tables
    )


def table_columns(session: Session, tables: Iterable[Table]) -> dict[int, TableColumns]:
    """Return the columns of `tables` by the tables' oid."""
    return columns_of(session, [(table.oid, table.schema, table.name) for table in tables])


def check_disclosure(session: Session, source: PostgresSource) -> None:
    """Check that the settings of columns, masks and keys can hold for the tables that are meant,
    and tell what leaves the server all the same, or is not published by now.

    :raises TailraceError: `CONFIG_INVALID`.
    """
    if source.discloses_all:
        return
    tables = table_columns(session, matching_tables(session, source))
    require_disclosable(source, tables.values())
    if session.server_version < COLUMN_LISTS_VERSION_MIN:
        return
    published = published_columns(session, source.publication)
    for table in tables.values():
        sent = published.get((table.schema, table.name))
        if sent is None:
            continue
        if late := set(table.sendable) - table.generated - sent - table.left_out(source):
            log.warning(
                "columns of a table are not published: they were added after its column list was made",
                table=f"{table.schema}.{table.name}",
                columns=sorted(late),
                sql=list_command(session, source, table),
            )
        if leaving := table.left_out(source) & sent:
            log.warning(
                "columns that are left out leave the server; they are dropped when the log is read",
                table=f"{table.schema}.{table.name}",
                columns=sorted(leaving),
            )


def list_command(session: Session, source: PostgresSource, table: TableColumns) -> str:
    """Return the SQL that gives a table in the publication the column list that it should have."""
    name = f"{quote_identifier(table.schema)}.{quote_identifier(table.name)}"
    alter = f"ALTER PUBLICATION {quote_identifier(source.publication)}"
    columns = table.column_list(source, session.server_version)
    return f"BEGIN; {alter} DROP TABLE {name}; {alter} ADD TABLE {name}{columns}; COMMIT"


def published_columns(session: Session, publication: str) -> dict[Name, set[str]]:
    """Return which columns the publication sends of each table. PostgreSQL 15 and later."""
    rows = session.run(
        "SELECT schemaname AS schema, tablename AS table, array_to_json(attnames)::text AS names "  # noqa: S608 - quoted
        f"FROM pg_publication_tables WHERE pubname = {quote_literal(publication)}",
        "read the publication",
    )
    return {(row["schema"] or "", row["table"] or ""): set(json.loads(row["names"] or "[]")) for row in rows}


def check_publication(session: Session, source: PostgresSource) -> None:
    """Check that the publication, which somebody else made, has what `source` means.

    :raises TailraceError: `PUBLICATION_MISMATCH`, with the SQL; `TABLE_MISSING` if it is empty.
    """
    publication = source.publication
    tables = matching_tables(session, source)
    published = published_names(session, publication)
    missing = [table for table in tables if not table.is_among(published)]
    if missing:
        names = ", ".join(table.qualified_name for table in missing)
        raise TailraceError(
            Kind.PUBLICATION_MISMATCH,
            f"check the publication {publication!r}: it does not have {names}",
            add_command(session, source, missing),
            {"publication": publication},
        )
    if not published:
        raise TailraceError(
            Kind.TABLE_MISSING,
            f"check the publication {publication!r}: it has no table",
            "add tables to it, or drop it and let it be created",
            {"publication": publication},
        )
    if strange := not_meant(published, tables):
        log.warning(
            "the publication has tables that source.tables does not name; they are captured too",
            publication=publication,
            tables=[f"{schema}.{table}" for schema, table in strange],
        )


def published_names(session: Session, publication: str) -> frozenset[Name]:
    """Return the names under which the publication has tables, and those that it lists."""
    rows = session.run(_PUBLISHED.format(name=quote_literal(publication)), "read the publication")
    return frozenset((row["schema"] or "", row["table"] or "") for row in rows)


def not_meant(published: frozenset[Name], tables: Iterable[Table]) -> list[Name]:
    """Return what is published beside `tables` and their partitions, by name."""
    known = {(table.schema, table.name) for table in tables}
    known |= {(part.schema, part.name) for table in tables for part in table.parts}
    return sorted(published - known)
