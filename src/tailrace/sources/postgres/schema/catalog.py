"""Reads published tables from the catalogue, and makes the frames that describe them in the log.

Before a table's snapshot rows, the log has a Type frame for each type that is not built in and a
Relation frame, both in pgoutput's format: the same columns, in the same order, with the same
flags that the server will send when the table changes. A facts frame has what pgoutput does not
send, such as the primary key and the names of the columns' types.

All names are data: they are quoted in SQL, and never parsed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.config.source.column_policy import ColumnRoles
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.model import Column, Relation, ReplicaIdentity
from tailrace.protocol import frames
from tailrace.protocol.pgoutput import relation_message, type_message
from tailrace.sources.postgres.connection.quoting import quote_literal, quote_table
from tailrace.sources.postgres.connection.session import Row, Session
from tailrace.sources.postgres.schema.published_tables import (
    GENERATED_VERSION_MIN,
    published,
    row_filters,
    terms,
)
from tailrace.sources.postgres.schema.table_facts import CatalogTable, KnownFacts, facts_of, versioned
from tailrace.sources.postgres.schema.table_metadata import catalog_tables

#: First oid of types that are not built in, for which pgoutput sends a Type message.
FIRST_OID_NOT_BUILT_IN = 10_000

#: Number of tables that are described by one query.
TABLES_AT_ONCE = 1000

_TABLES = """
WITH RECURSIVE {published}
SELECT c.oid AS oid, n.nspname AS schema, c.relname AS table, c.relkind AS kind,
       c.relreplident AS identity, c.reltuples::bigint AS estimate,
       {numbers} AS numbers, {filtered} AS filtered, p.generated AS generated
  FROM published t CROSS JOIN publication p
  JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace {join}
 WHERE true {condition}
 ORDER BY 2, 3
"""
_MEANT = """
SELECT c.oid AS oid, n.nspname AS schema, c.relname AS table, c.relkind AS kind,
       c.relreplident AS identity, c.reltuples::bigint AS estimate,
       NULL AS numbers, false AS filtered, true AS generated
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid IN ({oids})
 ORDER BY 2, 3
"""

#: A digest of a relation's name and columns: `c` of `pg_class`, `n` of `pg_namespace`.
SHAPE = """md5(concat_ws(' ', n.nspname, c.relname, c.relkind, (
         SELECT string_agg(concat_ws(' ', a.attnum, a.attname, a.atttypid, a.atttypmod), ','
                           ORDER BY a.attnum)
           FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)))"""

_ROOTS = """
SELECT n.nspname AS schema, c.relname AS table, rn.nspname AS root_schema, r.relname AS root
  FROM pg_class r JOIN pg_namespace rn ON rn.oid = r.relnamespace
  CROSS JOIN pg_partition_tree(r.oid) t
  JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE r.oid = ANY ('{{{oids}}}'::oid[]) AND c.oid <> r.oid
"""

_RELATION = f"""
SELECT n.nspname AS schema, c.relname AS table, {SHAPE} AS shape, c.relfilenode AS file
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = {{oid}}
"""  # noqa: S608 - a constant


@dataclass(frozen=True, slots=True)
class PublishedColumn:
    """A column that the publication sends."""

    name: str
    type_oid: int
    type_modifier: int
    declared: str  # the type in SQL's notation
    base_oid: int  # a domain's base type; else the type itself
    base_name: tuple[str, str]  # with its schema
    in_identity: bool
    required: bool
    left_out: bool  # by the settings: no reader gets its values, so no snapshot reads them


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table that the publication sends, with the columns that the server sends."""

    oid: int
    schema: str
    name: str
    partitioned: bool
    identity: str  # pg_class.relreplident
    rows_estimated: int
    row_filter: str | None
    columns: tuple[PublishedColumn, ...]
    primary_key: tuple[str, ...]
    catalog: CatalogTable  # the source of the facts

    @property
    def qualified_name(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def key(self) -> tuple[PublishedColumn, ...]:
        """Columns that identify rows in the stream, in the key's order; empty if none do."""
        if self.identity == "f":
            named = set(self.primary_key)
        else:
            named = {column.name for column in self.columns if column.in_identity}
        chosen = [column for column in self.columns if column.name in named and not column.left_out]
        if len(chosen) < len(named):
            return ()
        places = {name: place for place, name in enumerate(self.primary_key)}
        return tuple(sorted(chosen, key=lambda column: places.get(column.name, len(places))))

    def schema_frames(self, lsn: int, server_time_us: int) -> bytes:
        """Return the Type frames and the Relation frame as of `lsn`; the time is in µs since 2000."""
        messages = [
            type_message(column.type_oid, *column.base_name)
            for column in {c.type_oid: c for c in self.columns}.values()
            if column.type_oid >= FIRST_OID_NOT_BUILT_IN
        ]
        identity = ReplicaIdentity(self.identity)
        sent = self._sent(full=identity is ReplicaIdentity.FULL)
        messages.append(relation_message(Relation(self.oid, self.schema, self.name, identity, sent)))
        return b"".join(frames.xlog_frame(lsn, lsn, server_time_us, message) for message in messages)

    def facts_frame(
        self,
        lsn: int,
        in_force: KnownFacts | None = None,
        name_of: Callable[[int], tuple[str, str] | None] = lambda _: None,
    ) -> bytes:
        """Return the facts frame as of `lsn`; equal facts have equal JSON.

        :param in_force: facts in force at the frame's place in the log: the table's version follows theirs.
        :param name_of: as for `versioned`.
        """
        known = in_force or KnownFacts()
        name = (self.schema, self.name)
        facts = facts_of(self._sent(), name, self.catalog, known.get(self.oid), relation=self.oid, xid=None)
        facts = versioned(facts, known, reshaped=False, name_of=name_of)
        return frames.control_frame(frames.FACTS, lsn, 0, facts.as_json())

    def _sent(self, *, full: bool = False) -> tuple[Column, ...]:
        return tuple(
            Column(column.name, column.type_oid, column.type_modifier, full or column.in_identity)
            for column in self.columns
        )


def published_tables(session: Session, source: PostgresSource) -> list[PublishedTable]:
    """Return the tables of `source`'s publication, by name, as the session's snapshot sees them.

    Only tables with a row filter are locked meanwhile, briefly.
    """
    return _tables(session, source, _listed(session, source))


def published_table(
    session: Session, source: PostgresSource, oid: int, *, with_filter: bool = True
) -> PublishedTable | None:
    """Return one of the publication's tables as the session's snapshot sees it; None if it is not in it.

    :param with_filter: with its row filter; a table that has one must be locked for that.
    """
    rows = _listed(session, source, f"AND c.oid = {oid}")
    found = _tables(session, source, rows if with_filter else [Row(row, filtered="f") for row in rows])
    return found[0] if found else None


def meant_tables(session: Session, source: PostgresSource, oids: Sequence[int]) -> list[PublishedTable]:
    """Return tables as the publication, which need not exist, would send them, by name."""
    if not oids:
        return []
    rows = session.run(_MEANT.format(oids=", ".join(map(str, oids))), "look at the tables")
    return _tables(session, source, rows)


def published_oids(session: Session, source: PostgresSource) -> dict[tuple[str, str], int]:
    """Return the oids of the publication's tables by schema and name. One query."""
    return {row.name: row.number("oid") for row in _listed(session, source)}


def published_roots(session: Session, published: Iterable[int]) -> dict[str, str]:
    """Return, by the qualified name of each partition, that of the published table to which it belongs.

    :param published: the oids of the published tables.
    """
    rows = session.run(_ROOTS.format(oids=",".join(map(str, published))), "look for partitions")
    return {".".join(row.name): f"{row.text('root_schema')}.{row.text('root')}" for row in rows}


def is_partitioned(session: Session, schema: str, name: str) -> bool:
    """Return whether a table is partitioned."""
    table = quote_literal(quote_table(schema, name))
    query = f"SELECT 1 AS found FROM pg_class WHERE oid = to_regclass({table}) AND relkind = 'p'"  # noqa: S608
    return bool(session.run(query, "look at a table"))


def relation_row(session: Session, oid: int) -> Row | None:
    """Return a relation as the session's snapshot sees it, None if it was dropped: its name; as `shape` a
    digest of name and columns; and as `file` the number of the file that holds its rows.

    A statement that rewrites or truncates the table gives it another file.
    """
    rows = session.run(_RELATION.format(oid=oid), "look at a table")
    return rows[0] if rows else None


def _tables(session: Session, source: PostgresSource, rows: list[Row]) -> list[PublishedTable]:
    filtered = [row.number("oid") for row in rows if row.flag("filtered")]
    filters = row_filters(session, source.publication, filtered)
    tables = []
    for at in range(0, len(rows), TABLES_AT_ONCE):
        some = rows[at : at + TABLES_AT_ONCE]
        found = catalog_tables(session, [row.number("oid") for row in some])
        tables += [
            _table(session, source, row, catalog, filters.get(catalog.oid))
            for row in some
            if (catalog := found.get(row.number("oid"))) is not None
        ]
    return tables


def _listed(session: Session, source: PostgresSource, condition: str = "") -> list[Row]:
    join, numbers, filtered = terms(session.server_version)
    command = _TABLES.format(
        published=published(source.publication, session.server_version),
        join=join,
        numbers=numbers,
        filtered=filtered,
        condition=condition,
    )
    return session.run(command, "read the publication")


def _table(
    session: Session, source: PostgresSource, row: Row, catalog: CatalogTable, row_filter: str | None
) -> PublishedTable:
    there = [each for each in catalog.columns if not each["dropped"]]
    listed = None if row["numbers"] is None else frozenset(json.loads(row["numbers"]))
    kinds = ("", "s") if session.server_version >= GENERATED_VERSION_MIN and row.flag("generated") else ("",)
    names = {each["number"]: each["name"] for each in there}
    primary_key = tuple(names[number] for number in catalog.key_numbers)
    identity = frozenset(each["name"] for each in there if each["in_identity"])
    left_out: frozenset[str] = frozenset()
    if source.leaves_columns_out:  # these need not be read, because no reader gets their values
        is_full = row["identity"] == "f"
        roles = ColumnRoles(tuple(names.values()), identity, full=is_full, primary_key=frozenset(primary_key))
        left_out = source.left_out(catalog.schema, catalog.table, roles) - identity
    columns = tuple(
        _column(each, left_out=each["name"] in left_out)
        for each in there
        if (each["generated"] in kinds if listed is None else each["number"] in listed)
    )
    if lost := identity - {column.name for column in columns}:
        name = f"{catalog.schema}.{catalog.table}"
        reason = f"its column list for {name} leaves out key columns"
        if listed is None:
            reason = f"it does not send the generated columns of the key of {name}"
        raise TailraceError(
            Kind.PUBLICATION_MISMATCH,
            f"read the publication: {reason}, without which rows can't be identified",
            "publish the columns of the replica identity, too"
            if listed is not None or session.server_version >= GENERATED_VERSION_MIN
            else f"ALTER TABLE {quote_table(catalog.schema, catalog.table)} REPLICA IDENTITY FULL",
            {"table": name, "columns": ", ".join(sorted(lost))},
        )
    return PublishedTable(
        oid=catalog.oid,
        schema=catalog.schema,
        name=catalog.table,
        partitioned=row["kind"] == "p",
        identity=row["identity"] or "d",
        rows_estimated=max(0, row.number("estimate")),
        row_filter=row_filter,
        columns=columns,
        primary_key=primary_key,
        catalog=catalog,
    )


def _column(held: dict[str, Any], *, left_out: bool) -> PublishedColumn:
    base_oid, _, *base_name = held["base"]
    return PublishedColumn(
        name=held["name"],
        type_oid=held["type_oid"],
        type_modifier=held["type_modifier"],
        declared=held["type"],
        base_oid=base_oid,
        base_name=tuple(base_name),
        in_identity=held["in_identity"],
        required=held["not_null"],
        left_out=left_out,
    )
