"""The publication: which tables it should have, and which it has.

A partitioned table is published as itself, under its root's name and columns. The publication
is created before the slot, because the server looks for it as of each change. One that exists
is never altered: what is missing in it is said, with the SQL.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from tailrace.capture.session import Session, quote_identifier, quote_literal
from tailrace.config.patterns import matches, matches_any
from tailrace.errors import Kind, TailraceError

log = structlog.get_logger(__name__)

_TABLES = """
SELECT n.nspname AS schema, c.relname AS table, c.oid AS oid, c.relispartition AS partition,
       (SELECT string_agg(a.relid::oid::text, ' ') FROM pg_partition_ancestors(c.oid) AS a
         WHERE a.relid <> c.oid) AS ancestors,
       (c.relreplident = 'n' OR c.relreplident = 'd' AND NOT EXISTS (
         SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate)) AS keyless
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
   AND n.nspname <> 'information_schema' AND n.nspname NOT LIKE 'pg\\_%'
 ORDER BY 1, 2
"""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the source that a pattern means."""

    schema: str
    name: str
    keyless: bool  # updates and deletes of it can't be published

    @property
    def sql(self) -> str:
        """Return its name as SQL holds it."""
        return f"{quote_identifier(self.schema)}.{quote_identifier(self.name)}"


def matching_tables(session: Session, patterns: Iterable[str]) -> list[Table]:
    """Return the tables that `patterns` mean, by name; a partition only if no ancestor is meant."""
    rows = session.run(_TABLES, "list the tables")
    meant = [row for row in rows if matches_any(patterns, row["schema"] or "", row["table"] or "")]
    oids = {row["oid"] for row in meant}
    return [
        Table(row["schema"] or "", row["table"] or "", row["keyless"] == "t")
        for row in meant
        if oids.isdisjoint((row["ancestors"] or "").split())
    ]


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


def warn_of_new_tables(session: Session, publication: str, patterns: Iterable[str]) -> None:
    """Say which tables match by now and are not published; nothing is added silently."""
    published = _published(session, publication)
    for table in matching_tables(session, patterns):
        if (table.schema, table.name) not in published:
            log.warning(
                "a table matches source.tables and is not captured",
                table=f"{table.schema}.{table.name}",
                sql=f"ALTER PUBLICATION {quote_identifier(publication)} ADD TABLE {table.sql}",
            )


def create_publication(session: Session, publication: str, patterns: tuple[str, ...]) -> None:
    """Create the publication for the tables that `patterns` mean. Before the slot is created.

    :raises TailraceError: `TABLE_MISSING` if nothing matches, or a pattern without a star does
        not; `SOURCE_PRIVILEGE_MISSING`.
    """
    tables = matching_tables(session, patterns)
    for pattern in patterns:
        if "*" not in pattern and not any(matches(pattern, table.schema, table.name) for table in tables):
            raise TailraceError(
                Kind.TABLE_MISSING,
                f"create the publication: there is no table {pattern}",
                "create the table first, or correct source.tables",
                {"pattern": pattern},
            )
    if not tables:
        raise TailraceError(
            Kind.TABLE_MISSING,
            f"create the publication: no table matches {', '.join(patterns)}",
            "create the tables first, or correct source.tables",
        )
    for table in tables:
        if table.keyless:
            log.warning(
                "a table without a key is published: the server will refuse updates and deletes of it",
                table=f"{table.schema}.{table.name}",
                sql=f"ALTER TABLE {table.sql} REPLICA IDENTITY FULL",
            )
    command = (
        f"CREATE PUBLICATION {quote_identifier(publication)} FOR TABLE "
        + ", ".join(table.sql for table in tables)
        + " WITH (publish_via_partition_root = true)"
    )
    try:
        session.run(command, "create the publication")
    except TailraceError as error:
        if error.kind is not Kind.SOURCE_PRIVILEGE_MISSING:
            raise
        raise TailraceError(
            error.kind, error.message, f"let somebody who may run: {command}", error.context
        ) from None
    log.info("created the publication", publication=publication, tables=len(tables))


def check_publication(session: Session, publication: str, patterns: Iterable[str]) -> None:
    """Check that the publication, which somebody else made, has what `patterns` mean.

    :raises TailraceError: `PUBLICATION_MISMATCH`, with the SQL; `TABLE_MISSING` if it is empty.
    """
    tables = matching_tables(session, patterns)
    published = _published(session, publication)
    missing = [table for table in tables if (table.schema, table.name) not in published]
    if missing:
        names = ", ".join(f"{table.schema}.{table.name}" for table in missing)
        raise TailraceError(
            Kind.PUBLICATION_MISMATCH,
            f"check the publication {publication!r}: it does not have {names}",
            f"ALTER PUBLICATION {quote_identifier(publication)} ADD TABLE "
            + ", ".join(table.sql for table in missing),
            {"publication": publication},
        )
    if not published:
        raise TailraceError(
            Kind.TABLE_MISSING,
            f"check the publication {publication!r}: it has no table",
            "add tables to it, or drop it and let it be created",
            {"publication": publication},
        )
    strange = published - {(table.schema, table.name) for table in tables}
    if strange:
        log.warning(
            "the publication has tables that source.tables does not name; they are captured too",
            publication=publication,
            tables=sorted(f"{schema}.{table}" for schema, table in strange),
        )


def _published(session: Session, publication: str) -> set[tuple[str, str]]:
    rows = session.run(
        "SELECT schemaname, tablename FROM pg_publication_tables "  # noqa: S608 - quoted
        f"WHERE pubname = {quote_literal(publication)}",
        "read the publication",
    )
    return {(row["schemaname"] or "", row["tablename"] or "") for row in rows}
