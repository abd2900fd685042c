"""Plans the chunks of tables from the server's statistics and samples of keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import Kind, TailraceError
from tailrace.sources.postgres.connection.errors import LOCK_NOT_AVAILABLE, UNDEFINED_TABLE
from tailrace.sources.postgres.connection.quoting import quote_table
from tailrace.sources.postgres.connection.session import Row, Session
from tailrace.sources.postgres.schema import published_tables
from tailrace.sources.postgres.schema.catalog import SHAPE, PublishedTable
from tailrace.sources.postgres.snapshot.chunks import (
    PAGE_BYTES,
    ChunkedRelation,
    KeyColumn,
    chunks_wanted,
    page_bounds,
    sample_percent,
    sample_query,
)

#: Planned maximum size of a chunk on the server's disk, in bytes.
CHUNK_BYTES_MAX = 16 << 20

#: Timeout of a sampling query, in seconds: it reads some thousand pages and sorts their rows.
SAMPLE_DEADLINE_S = 600.0

#: First server version that scans a range of pages; older ones would read the whole table for each.
PAGE_RANGES_SINCE = 140000

_RELATIONS = f"""
WITH RECURSIVE {{tree}}
SELECT t.root AS root, c.oid AS oid, n.nspname AS schema, c.relname AS name, c.relkind AS kind,
       coalesce(pg_relation_size(c.oid), 0) AS main, coalesce(pg_table_size(c.oid), 0) AS size,
       c.reltuples::bigint AS rows, c.relpages AS pages, {SHAPE} AS shape
  FROM tree t JOIN pg_class c ON c.oid = t.oid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = t.root AND c.relkind <> 'p' OR NOT EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = c.oid)
 ORDER BY 3, 4
"""  # noqa: S608 - a constant

# Queries that read a table, or its size, wait for these locks; also for one on an index of the table.
_LOCKED = """
SELECT DISTINCT coalesce(i.indrelid, l.relation) AS oid
  FROM pg_locks l LEFT JOIN pg_index i ON i.indexrelid = l.relation
 WHERE locktype = 'relation' AND mode = 'AccessExclusiveLock'
   AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

# ORDER BY uses a type's own operators of any schema, a comparison only those of pg_catalog: chunks of keys
# that are sorted with others (ltree, citext) would overlap, or could not be read. PostgreSQL 18 can't plan
# an inequality of "char" ("cache lookup failed for collation 0").
_SORTED_BY_OTHERS = """
SELECT 1 AS found
  FROM pg_opclass c JOIN pg_am m ON m.oid = c.opcmethod
  JOIN pg_amop a ON a.amopfamily = c.opcfamily
       AND a.amoplefttype = c.opcintype AND a.amoprighttype = c.opcintype
  JOIN pg_operator o ON o.oid = a.amopopr
 WHERE m.amname = 'btree' AND c.opcdefault AND c.opcintype IN ({types})
   AND (o.oprnamespace <> 'pg_catalog'::regnamespace OR c.opcintype = '"char"'::regtype)
 LIMIT 1
"""

_OLDEST_RUNNING = "SELECT txid_snapshot_xmin(txid_current_snapshot()) % 4294967296 AS xid"

#: Assumed rows per page of a table without statistics.
_ROWS_A_PAGE = 60


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The bounds of a table's chunks, its estimated size, and the transaction since which they are valid."""

    relations: tuple[ChunkedRelation, ...]
    rows_estimated: int
    size_bytes: int  # on the server's disk, TOAST included
    since_xid: int  # changes that later snapshots see were written by this transaction or later ones

    @property
    def chunks(self) -> int:
        """The table's number of chunks."""
        return sum(relation.chunks for relation in self.relations)


def plan_table(session: Session, table: PublishedTable, source: PostgresSource) -> TablePlan:
    """Plan the chunks of a table as it is now.

    :raises TailraceError: the server's error.
    """
    return _plans(session, [table], source)[table.oid]


def plan_tables(
    session: Session,
    tables: Sequence[PublishedTable],
    source: PostgresSource,
    recover: Callable[[], object],
    *,
    skip_locked: bool = True,
) -> dict[int, TablePlan]:
    """Plan the chunks of tables as they are now, by oid. Dropped tables are left out, with `skip_locked`
    also those that another session has locked.

    :param recover: called after the server reported an error, before the next command.
    :raises TailraceError: the server's error.
    """
    locked = locked_relations(session) if skip_locked else frozenset()
    left = [table for table in tables if table.oid not in locked]
    try:
        return _plans(session, left, source)
    except TailraceError as error:
        passed_over = {UNDEFINED_TABLE, LOCK_NOT_AVAILABLE} if skip_locked else {UNDEFINED_TABLE}
        if error.context.get("sqlstate") not in passed_over:
            raise
        recover()
        if len(left) == 1:
            return {}
    plans: dict[int, TablePlan] = {}
    for table in left:
        plans |= plan_tables(session, [table], source, recover, skip_locked=skip_locked)
    return plans


def locked_relations(session: Session) -> frozenset[int]:
    """Return the oids of the relations that a session has locked against reading, or waits to lock."""
    return frozenset(row.number("oid") for row in session.run(_LOCKED, "look for locks"))


def _plans(
    session: Session, tables: Sequence[PublishedTable], source: PostgresSource
) -> dict[int, TablePlan]:
    if not tables:
        return {}
    since = session.run(_OLDEST_RUNNING, "ask for the oldest transaction")[0]["xid"]
    roots = f"oid IN ({', '.join(str(table.oid) for table in tables)})"
    rows: dict[int, list[Row]] = {table.oid: [] for table in tables}
    for row in session.run(_RELATIONS.format(tree=published_tables.tree(roots)), "measure the tables"):
        rows[row.number("root")].append(row)
    return {table.oid: _plan(session, table, rows[table.oid], int(since or 0), source) for table in tables}


def _plan(
    session: Session, table: PublishedTable, rows: Sequence[Row], since: int, source: PostgresSource
) -> TablePlan:
    if not rows:
        raise TailraceError(
            Kind.SOURCE_QUERY_FAILED,
            f"measure {table.qualified_name}: it no longer exists",
            "it was dropped meanwhile: start again",
            context={"sqlstate": UNDEFINED_TABLE},
        )
    relations = tuple(_relation(session, table, row, source) for row in rows)
    # An empty table has a page of an index; the pages of many such tables would add up to a large snapshot.
    size = sum(row.number("size") for row in rows if row.number("main"))
    return TablePlan(relations, sum(_rows(row) for row in rows), size, since)


def leaves(session: Session, table: PublishedTable) -> frozenset[int]:
    """Return the oids of the relations that hold the table's rows, as of now."""
    if not table.partitioned:
        return frozenset({table.oid})
    rows = session.run(
        published_tables.leaves(str(table.oid)), f"list the partitions of {table.qualified_name}"
    )
    return frozenset(row.number("oid") for row in rows) or frozenset({table.oid})


def facts_digest(table: PublishedTable) -> str:
    """Return a digest of the facts that a table's chunks depend on: if it changes, they can't be combined."""
    read = [c for c in table.columns if not c.left_out]
    columns = [(c.name, c.type_oid, c.type_modifier, c.declared, c.required) for c in read]
    key = [column.name for column in table.key]
    facts = repr((table.schema, table.name, table.identity, table.row_filter, columns, key))
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


def _relation(session: Session, table: PublishedTable, row: Row, source: PostgresSource) -> ChunkedRelation:
    oid = row.number("oid")
    # A domain's own type would bring its collation, which may be another one than the column's.
    key = tuple(KeyColumn(column.name, quote_table(*column.base_name)) for column in table.key)
    whole = ChunkedRelation(oid, row.text("schema"), row.text("name"), (), (), row.text("shape"))
    if row["kind"] != "r":
        return whole
    wanted = chunks_wanted(
        _rows(row),
        row.number("size"),
        rows_max=source.snapshot_chunk_rows,
        bytes_max=CHUNK_BYTES_MAX,
    )
    pages = -(-row.number("main") // PAGE_BYTES)
    if wanted == 1 or (not key and session.server_version < PAGE_RANGES_SINCE):
        return whole
    if not key:
        return ChunkedRelation(oid, whole.schema, whole.name, (), page_bounds(pages, wanted), whole.shape)
    types = ", ".join(str(column.base_oid) for column in table.key)
    attempted = f"look at the key's types of {table.qualified_name}"
    if session.run(_SORTED_BY_OTHERS.format(types=types), attempted):
        return whole
    cut = ChunkedRelation(oid, whole.schema, whole.name, key, (), whole.shape)
    sampled = session.run(
        sample_query(
            cut, sample_percent(pages, wanted), wanted, ascii_only=session.server_encoding != "UTF8"
        ),
        f"sample the keys of {table.qualified_name}",
        deadline_s=SAMPLE_DEADLINE_S,
    )
    bounds = tuple(tuple(bound[f"k{place}"] or "" for place in range(len(key))) for bound in sampled)
    return ChunkedRelation(oid, whole.schema, whole.name, key, tuple(dict.fromkeys(bounds)), whole.shape)


def _rows(row: Row) -> int:
    """Return a relation's estimated rows, from the server's statistics and its present size."""
    pages = -(-row.number("main") // PAGE_BYTES)
    counted, counted_pages = row.number("rows"), row.number("pages")
    if counted > 0 and counted_pages > 0:
        return counted * pages // counted_pages
    return pages * _ROWS_A_PAGE
