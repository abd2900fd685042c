"""Facts of the server from which a table's chunks are planned."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tailrace.capture.catalog import PublishedTable, shape_of
from tailrace.capture.chunks import (
    PAGE_BYTES,
    KeyColumn,
    Stretch,
    chunks_wanted,
    page_bounds,
    sample_percent,
    sample_query,
)
from tailrace.capture.session import Row, Session
from tailrace.config.postgres import PostgresSource

#: Sampling reads some thousand pages and sorts what it found.
SAMPLE_DEADLINE_S = 600.0

#: Ranges of pages are read as such since version 14; before, each would read the whole table.
PAGE_RANGES_SINCE = 140000

_STRETCHES = """
SELECT c.oid AS oid, n.nspname AS schema, c.relname AS name, c.relkind AS kind,
       coalesce(pg_relation_size(c.oid), 0) AS main, coalesce(pg_table_size(c.oid), 0) AS size,
       c.reltuples::bigint AS rows, c.relpages AS pages
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = {oid} AND c.relkind <> 'p'
    OR c.oid IN (SELECT relid FROM pg_partition_tree({oid}) WHERE isleaf)
 ORDER BY 2, 3
"""

_OLDEST_RUNNING = "SELECT txid_snapshot_xmin(txid_current_snapshot()) % 4294967296 AS xid"

_LEAVES = "SELECT relid::oid AS oid FROM pg_partition_tree({oid}) WHERE isleaf"

#: Rows that a page of a table without statistics is taken to hold.
_ROWS_A_PAGE = 60


@dataclass(frozen=True, slots=True)
class TablePlan:
    """Where a table is cut, how large it is thought to be, and from when on that was so."""

    stretches: tuple[Stretch, ...]
    rows_estimated: int
    size_bytes: int  # on the server's disk, with what is stored apart
    since_xid: int  # what later snapshots see changed was written by this transaction or later ones

    @property
    def chunks(self) -> int:
        """Into how many chunks the table is cut."""
        return sum(stretch.chunks for stretch in self.stretches)


def plan_table(session: Session, table: PublishedTable, source: PostgresSource) -> TablePlan:
    """Plan the chunks of a table as it is now.

    :raises TailraceError: what the server refused with.
    """
    since = session.run(_OLDEST_RUNNING, "ask for the oldest transaction")[0]["xid"]
    rows = session.run(_STRETCHES.format(oid=table.oid), f"measure {table.qualified_name}")
    stretches = [_stretch(session, table, row, source) for row in rows]
    if not stretches:  # a partitioned table without partitions has no rows, which is a chunk too
        shape = shape_of(session, table.oid) or ""
        stretches = [Stretch(table.oid, table.schema, table.name, (), (), shape)]
    size = sum(int(row["size"] or 0) for row in rows)
    return TablePlan(tuple(stretches), sum(_rows(row) for row in rows), size, int(since or 0))


def leaves(session: Session, table: PublishedTable) -> frozenset[int]:
    """Return the oids of the relations that hold the table's rows, as of now."""
    if not table.partitioned:
        return frozenset({table.oid})
    rows = session.run(_LEAVES.format(oid=table.oid), f"list the partitions of {table.qualified_name}")
    return frozenset(int(row["oid"] or 0) for row in rows) or frozenset({table.oid})


def facts_digest(table: PublishedTable) -> str:
    """Return a digest of all that a table's chunks rest on: equal while they can be put together."""
    columns = [(c.name, c.type_oid, c.type_modifier, c.declared, c.required) for c in table.columns]
    key = [column.name for column in table.key]
    facts = repr((table.schema, table.name, table.identity, table.row_filter, columns, key))
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


def _stretch(session: Session, table: PublishedTable, row: Row, source: PostgresSource) -> Stretch:
    oid = int(row["oid"] or 0)
    key = tuple(KeyColumn(column.name, column.declared) for column in table.key)
    whole = Stretch(oid, row["schema"] or "", row["name"] or "", (), (), shape_of(session, oid) or "")
    if row["kind"] != "r":
        return whole
    wanted = chunks_wanted(
        _rows(row),
        int(row["size"] or 0),
        rows_max=source.snapshot_chunk_rows,
        bytes_max=source.snapshot_chunk_bytes,
    )
    pages = -(-int(row["main"] or 0) // PAGE_BYTES)
    if wanted == 1 or (not key and session.server_version < PAGE_RANGES_SINCE):
        return whole
    if not key:
        return Stretch(oid, whole.schema, whole.name, (), page_bounds(pages, wanted), whole.shape)
    cut = Stretch(oid, whole.schema, whole.name, key, (), whole.shape)
    sampled = session.run(
        sample_query(cut, sample_percent(pages, wanted), wanted),
        f"sample the keys of {table.qualified_name}",
        deadline_s=SAMPLE_DEADLINE_S,
    )
    bounds = tuple(tuple(bound[f"k{place}"] or "" for place in range(len(key))) for bound in sampled)
    return Stretch(oid, whole.schema, whole.name, key, tuple(dict.fromkeys(bounds)), whole.shape)


def _rows(row: Row) -> int:
    """Return how many rows a relation has by the server's statistics and its size now."""
    pages = -(-int(row["main"] or 0) // PAGE_BYTES)
    counted, counted_pages = int(row["rows"] or 0), int(row["pages"] or 0)
    if counted > 0 and counted_pages > 0:
        return counted * pages // counted_pages
    return pages * _ROWS_A_PAGE
