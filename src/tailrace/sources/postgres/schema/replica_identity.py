"""Sets the replica identities of `source.replica_identity`, at each start, if the tables have others.

The replica identity determines the old rows in a table's changes, and whether the server accepts
updates and deletes once the table is published. One under which it would reject them is never set. Each
partition has its own identity: all of them are set like the table, and the table itself last.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

import structlog

from tailrace.config.patterns import is_exact, matches
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.sources.postgres.connection.errors import LOCK_NOT_AVAILABLE
from tailrace.sources.postgres.connection.quoting import quote_identifier, quote_literal, quote_table
from tailrace.sources.postgres.connection.session import Row, Session
from tailrace.sources.postgres.schema.column_selection import TableColumns
from tailrace.sources.postgres.schema.publication import published_names, run_or_delegate
from tailrace.sources.postgres.schema.published_tables import tree
from tailrace.sources.postgres.schema.source_tables import Name, Part, SourceTable, matching_tables

log = structlog.get_logger(__name__)

#: Lock timeout, in seconds, of `ALTER TABLE … REPLICA IDENTITY`: readers of the table wait behind it.
LOCK_WAIT_S = 1.0
_LOCK_WAIT = f"SET LOCAL lock_timeout = {LOCK_WAIT_S * 1000:.0f}; "

_LETTERS = {"default": "d", "full": "f", "index": "i"}

# `wanted` has each table with the name of the index to be its identity, or an empty string. A partition's
# index is the child of the root's.
_MEMBERS = f"""
WITH RECURSIVE wanted(root, index) AS (VALUES {{wanted}}), {tree("oid IN (SELECT root FROM wanted)")},
indexes(oid) AS (
    SELECT c.oid FROM wanted w JOIN pg_index i ON i.indrelid = w.root
      JOIN pg_class c ON c.oid = i.indexrelid AND c.relname = w.index
  UNION ALL
    SELECT h.inhrelid FROM indexes x JOIN pg_inherits h ON h.inhparent = x.oid
), fit AS (
    SELECT i.indrelid, i.indexrelid, c.relname AS name, i.indisreplident,
           (SELECT json_agg(a.attname ORDER BY a.attnum) FROM pg_attribute a
             WHERE a.attrelid = i.indrelid
               AND array_position(i.indkey::int2[], a.attnum) < i.indnkeyatts) AS columns
      FROM indexes x JOIN pg_index i ON i.indexrelid = x.oid JOIN pg_class c ON c.oid = i.indexrelid
     WHERE i.indisunique AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
       AND NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = i.indrelid AND NOT a.attnotnull
                          AND array_position(i.indkey::int2[], a.attnum) < i.indnkeyatts)
)
SELECT t.root, n.nspname AS schema, c.relname AS table, c.relkind = 'p' AS partitioned,
       c.relreplident AS identity, pg_has_role(current_user, c.relowner, 'usage') AS owned,
       f.name AS index, f.indisreplident AS index_set, f.columns AS index_columns,
       EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attgenerated = 'v'
                  AND NOT a.attisdropped) AS computes,
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate)
         AS has_primary_key,
       EXISTS (SELECT FROM pg_publication_rel r
                WHERE r.prrelid IN (SELECT c.oid UNION ALL SELECT relid FROM pg_partition_ancestors(c.oid))
                  AND (to_jsonb(r) ->> 'prattrs' IS NOT NULL OR to_jsonb(r) ->> 'prqual' IS NOT NULL))
         AS bound
  FROM tree t JOIN pg_class c ON c.oid = t.oid AND c.relkind IN ('r', 'p')
  JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN fit f ON f.indrelid = c.oid
 ORDER BY t.root, c.oid = t.root, 2, 3
"""  # noqa: S608 - a constant


@dataclass(frozen=True, slots=True)
class IdentityChange:
    """A table whose replica identity differs from the setting.

    `commands`: the SQL, by the table or partition that it alters; `refused`: why it is not run, empty if it
    is; `named`: the setting names exactly this table; `columns`: those of the wanted index.
    """

    table: SourceTable
    wanted: str
    commands: dict[Name, str]
    owned: bool
    refused: str
    named: bool
    columns: frozenset[str]

    @property
    def sql(self) -> str:
        """The SQL that sets it."""
        return "; ".join(self.commands.values()) + ";"

    @property
    def letter(self) -> str:
        """The wanted identity as a value of `pg_class.relreplident`."""
        return _LETTERS[self.wanted.partition(" ")[0]]

    @property
    def happens(self) -> bool:
        """Whether the next start sets it."""
        return self.owned and not self.refused

    @property
    def failure(self) -> TailraceError:
        """The error for a change that can't be made."""
        attempted = f"set the replica identity of {self.table.qualified_name} to {self.wanted}"
        if self.refused:
            hint = "correct source.replica_identity, or the table"
            return TailraceError(Kind.SOURCE_MISCONFIGURED, f"{attempted}: {self.refused}", hint)
        return TailraceError(
            Kind.SOURCE_PRIVILEGE_MISSING,
            f"{attempted}: the role does not own the table",
            f"have its owner run: {self.sql}",
        )


def identity_changes(
    session: Session, source: PostgresSource, tables: Iterable[SourceTable]
) -> list[IdentityChange]:
    """Return the changes for those of `tables` whose replica identity differs from the setting."""
    asked = {table.oid: table for table in tables if source.identity_of(table.schema, table.name)}
    if not asked:
        return []
    wanted = {oid: source.identity_of(table.schema, table.name) for oid, table in asked.items()}
    values = ", ".join(f"({oid}::oid, {quote_literal(_index(text))})" for oid, text in wanted.items())
    members: dict[int, list[Row]] = {oid: [] for oid in asked}
    for row in session.run(_MEMBERS.format(wanted=values), "look at the replica identities"):
        members[row.number("root")].append(row)
    found = (_change(source, asked[oid], wanted[oid], rows) for oid, rows in members.items())
    return [change for change in found if change.commands]


def _index(wanted: str) -> str:
    return wanted.partition(" ")[2]


def _change(source: PostgresSource, table: SourceTable, wanted: str, members: list[Row]) -> IdentityChange:
    letter = _LETTERS[wanted.partition(" ")[0]]
    differing = [
        row for row in members if row["identity"] != letter or (letter == "i" and not row.flag("index_set"))
    ]
    names = [pattern for pattern in source.replica_identity if matches(pattern, table.schema, table.name)]
    own = next((row for row in members if row.name == table.full_name), None)
    return IdentityChange(
        table,
        wanted,
        {row.name: _command(row, letter) for row in differing},
        owned=all(row.flag("owned") for row in differing),
        refused=next(filter(None, (_refusal(row, wanted) for row in differing)), ""),
        named=is_exact(names[0]),
        columns=frozenset(json.loads(own["index_columns"] or "[]") if own else ()),
    )


def _command(row: Row, letter: str) -> str:
    how = {"d": "DEFAULT", "f": "FULL", "i": f"USING INDEX {quote_identifier(row.text('index'))}"}[letter]
    return f"ALTER TABLE {quote_table(*row.name)} REPLICA IDENTITY {how}"


def _refusal(row: Row, wanted: str) -> str:
    """Return why the server would reject the command, or writes after it; empty if neither."""
    name = f"{row['schema']}.{row['table']}"
    if row.flag("bound"):
        return (
            f"a publication has a column list or a row filter for {name}, which its replica identity must "
            "fit, or PostgreSQL refuses updates and deletes"
        )
    if wanted == "full" and row.flag("computes"):
        return (
            f"{name} has a virtual generated column, with which PostgreSQL refuses updates and deletes under "
            "FULL"
        )
    if wanted == "default" and not row.flag("has_primary_key") and not row.flag("partitioned"):
        return f"{name} has no primary key that is not deferrable, without which DEFAULT identifies no row"
    if wanted.startswith("index ") and row["index"] is None:
        return (
            f"{name} has no index {_index(wanted)!r} that is unique, neither partial nor deferrable, and of "
            "columns that are NOT NULL"
        )
    return ""


def set_identities(session: Session, source: PostgresSource, *, begins: bool) -> None:
    """Set the replica identities of `source.replica_identity`.

    A table that matches a pattern for several tables, and can't have the identity, is only warned of.

    :param begins: nothing is captured yet: all selected tables are checked, and a change that can't be made
        is an error. If False, only published tables are, with a warning; the next start tries again.
    :raises TailraceError: `SOURCE_PRIVILEGE_MISSING`, `SOURCE_MISCONFIGURED`, both with the SQL or the
        reason; `SOURCE_UNREACHABLE` if another session has locked a table.
    """
    if not source.replica_identity:
        return
    tables = matching_tables(session, source)
    if not begins:
        published = published_names(session, source.publication)
        tables = [table for table in tables if table.is_among(published)]
    for change in identity_changes(session, source, tables):
        try:
            if not change.happens:
                raise change.failure
            for (schema, name), command in change.commands.items():
                attempted = f"set the replica identity of {schema}.{name}"
                run_or_delegate(session, command, attempted, before=_LOCK_WAIT)
        except TailraceError as error:
            if begins and not (change.refused and not change.named):
                raise
            log.warning(
                "a replica identity is not set", table=change.table.qualified_name, reason=error.message,
                sql=change.sql,
            )  # fmt: skip
            if error.context.get("sqlstate") == LOCK_NOT_AVAILABLE:
                return  # the stream waits meanwhile, so no lock on a further table is waited for
            if error.kind is Kind.SOURCE_UNREACHABLE:
                raise
        else:
            log.info("set a replica identity", table=change.table.qualified_name, sql=change.sql)


def tables_as_set(tables: Iterable[SourceTable], changes: Iterable[IdentityChange]) -> list[SourceTable]:
    """Return `tables` as they will be after the changes that the next start makes."""
    by_oid = {change.table.oid: change for change in changes if change.happens}
    return [
        replace(table, parts=tuple(_part_as_set(part, by_oid[table.oid]) for part in table.parts))
        if table.oid in by_oid
        else table
        for table in tables
    ]


def _part_as_set(part: Part, change: IdentityChange) -> Part:
    if part.full_name not in change.commands:
        return part
    return replace(part, identity=change.letter, keyless=False)


def columns_as_set(columns: Iterable[TableColumns], changes: Iterable[IdentityChange]) -> list[TableColumns]:
    """Return `columns`, of tables from `tables_as_set`, as they will be after the next start's changes."""
    by_oid = {change.table.oid: change for change in changes if change.happens}
    return [
        _columns_as_set(each, by_oid[each.table.oid]) if each.table.oid in by_oid else each
        for each in columns
    ]


def _columns_as_set(columns: TableColumns, change: IdentityChange) -> TableColumns:
    full = change.wanted == "full"
    identity = frozenset() if full else change.columns or columns.columns.primary_key
    return replace(
        columns,
        columns=replace(columns.columns, full=full, identity=identity),
        needed=columns.needed | identity,
        full_somewhere=full or any(part.identity == "f" for part in columns.table.parts),
    )
