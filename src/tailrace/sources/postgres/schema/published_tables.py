"""Queries for the tables that a publication sends, and for partitions, that read only the catalogue.

PostgreSQL's own functions for both (`pg_publication_tables`, `pg_partition_tree`) lock every table that
they list, and so wait for a command that rewrites one of them. A SELECT from the catalogue does not wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.sources.postgres.connection.quoting import quote_literal
from tailrace.sources.postgres.connection.session import Session

#: The first version whose publications have column lists, row filters and schemas.
COLUMN_LISTS_VERSION_MIN = 150000
#: The first version that can publish stored generated columns.
GENERATED_VERSION_MIN = 180000

# A partition whose DETACH … CONCURRENTLY has begun is excluded; the column exists since version 14.
_ATTACHED = "to_jsonb(i) ->> 'inhdetachpending' IS DISTINCT FROM 'true'"

_TREE = f"""tree(root, oid) AS (
    SELECT oid, oid FROM pg_class WHERE {{roots}}
  UNION ALL
    SELECT t.root, i.inhrelid FROM tree t JOIN pg_class p ON p.oid = t.oid AND p.relkind = 'p'
      JOIN pg_inherits i ON i.inhparent = p.oid AND {_ATTACHED}
)"""  # noqa: S608 - a constant

_PARTITIONS = f"""(WITH RECURSIVE tree(oid) AS (
    SELECT {{oid}}::oid
  UNION ALL
    SELECT i.inhrelid FROM tree t JOIN pg_class p ON p.oid = t.oid AND p.relkind = 'p'
      JOIN pg_inherits i ON i.inhparent = p.oid AND {_ATTACHED}
) SELECT oid FROM tree)"""  # noqa: S608 - a constant

_IN_IDENTITY = """EXISTS (
         SELECT FROM pg_index i
          WHERE i.indrelid = {table}.oid AND i.indisvalid
            AND array_position(i.indkey::int2[], {column}.attnum) < i.indnkeyatts
            AND CASE {table}.relreplident WHEN 'd' THEN i.indisprimary AND i.indimmediate
                                          WHEN 'i' THEN i.indisreplident ELSE false END)"""

_BASES = """WITH RECURSIVE base(oid, modifier, depth) AS (
            SELECT {column}.atttypid, {column}.atttypmod, 0
          UNION ALL
            SELECT d.typbasetype, d.typtypmod, b.depth + 1 FROM base b JOIN pg_type d ON d.oid = b.oid
             WHERE d.typtype = 'd')"""

_SENDABLE = "c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384"

_PUBLISHED = f"""publication AS MATERIALIZED (
    SELECT p.oid, puballtables, pubviaroot, {{generated}} AS generated FROM pg_publication p
     WHERE pubname = {{name}}
), named(oid) AS MATERIALIZED (
    SELECT r.prrelid FROM pg_publication_rel r JOIN publication p ON p.oid = r.prpubid
  UNION
    SELECT c.oid FROM pg_class c JOIN publication p ON p.puballtables WHERE {_SENDABLE}
  {{of_schemas}}
), below(top, oid) AS (
    SELECT oid, oid FROM named
  UNION ALL
    SELECT b.top, i.inhrelid FROM below b JOIN pg_class p ON p.oid = b.oid AND p.relkind = 'p'
      JOIN pg_inherits i ON i.inhparent = p.oid AND {_ATTACHED}
), published(oid) AS MATERIALIZED (
    SELECT b.oid FROM below b JOIN pg_class c ON c.oid = b.oid AND c.relkind <> 'p'
      JOIN publication p ON NOT p.pubviaroot
  UNION
    SELECT n.oid FROM named n JOIN publication p ON p.pubviaroot
     WHERE n.oid NOT IN (SELECT oid FROM below WHERE oid <> top)
)"""  # noqa: S608 - a constant

_OF_SCHEMAS = f"""UNION
    SELECT c.oid FROM pg_class c JOIN pg_publication_namespace s ON s.pnnspid = c.relnamespace
      JOIN publication p ON p.oid = s.pnpubid WHERE {_SENDABLE}"""  # noqa: S608 - a constant

# A table's own terms apply only if the publication names it, not if it names its schema or all tables.
_TERMS = """LEFT JOIN pg_publication_rel r ON r.prrelid = c.oid AND NOT p.puballtables AND r.prpubid = p.oid
       AND NOT EXISTS (SELECT FROM pg_publication_namespace s
                        WHERE s.pnpubid = p.oid AND s.pnnspid = c.relnamespace)"""

# To return a filter as SQL, the server locks its table; `pg_publication_tables` locks all published tables.
_FILTERS = """
SELECT r.prrelid AS oid, pg_get_expr(r.prqual, r.prrelid) AS filter
  FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
 WHERE p.pubname = {publication} AND r.prrelid IN ({oids}) AND r.prqual IS NOT NULL
"""

# What determines how changes are sent: the publication's terms, its tables, partitions, columns and keys.
_TERMS_DIGEST = """
WITH RECURSIVE {published}, facts(said) AS (
    SELECT to_jsonb(p)::text FROM pg_publication p WHERE pubname = {name}
  UNION ALL
    SELECT to_jsonb(r)::text FROM pg_publication_rel r JOIN publication p ON p.oid = r.prpubid
  UNION ALL
    SELECT concat_ws(' ', c.oid, c.relname, c.relnamespace, c.relkind, c.relreplident, c.relpersistence, (
             SELECT string_agg(concat_ws(' ', a.attnum, a.attname, a.atttypid, a.atttypmod, a.attisdropped,
                                         a.attgenerated), ',' ORDER BY a.attnum)
               FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0), (
             SELECT string_agg(concat_ws(' ', i.indexrelid, i.indisprimary, i.indimmediate, i.indisreplident,
                                         i.indisvalid, i.indkey), ',' ORDER BY i.indexrelid)
               FROM pg_index i WHERE i.indrelid = c.oid))
      FROM pg_class c WHERE c.oid IN (SELECT oid FROM below)
)
SELECT md5(string_agg(said, chr(10) ORDER BY said)) AS digest FROM facts
"""


def in_identity(table: str, column: str) -> str:
    """Return an expression for whether a column belongs to the index that is its table's replica identity;
    `table` and `column` are the query's aliases of `pg_class` and `pg_attribute`.
    """
    return _IN_IDENTITY.format(table=table, column=column)


def bases(column: str) -> str:
    """Return a CTE `base` of a column's type and, if it is a domain, of the types below it, by `depth`;
    `column` is the query's alias of `pg_attribute`.
    """
    return _BASES.format(column=column)


def tree(roots: str) -> str:
    """Return a CTE for WITH RECURSIVE: for each relation of `pg_class` that meets the condition `roots`, as
    `root`, the relation itself and its partitions at any level, as `oid`.
    """
    return _TREE.format(roots=roots)


def partitions(oid: str) -> str:
    """Return a subquery for the relation with the SQL expression `oid` and its partitions at any level, as
    `oid`.
    """
    return _PARTITIONS.format(oid=oid)


def leaves(oid: str) -> str:
    """Return a subquery for those of `partitions` that have no partitions."""
    return (
        f"(SELECT oid FROM {partitions(oid)} t "  # noqa: S608 - an expression of ours
        "WHERE NOT EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = t.oid))"
    )


def published(publication: str, server_version: int) -> str:
    """Return CTEs for WITH RECURSIVE: `published`, with the `oid` of each relation under whose name the
    publication sends rows, and `publication`, with one row or none.

    The result is the same as that of `pg_get_publication_tables`.
    """
    return _PUBLISHED.format(
        name=quote_literal(publication),
        generated="pubgencols = 's'" if server_version >= GENERATED_VERSION_MIN else "false",
        of_schemas=_OF_SCHEMAS if server_version >= COLUMN_LISTS_VERSION_MIN else "",
    )


def terms(server_version: int) -> tuple[str, str, str]:
    """Return SQL for a query over `published` (with `pg_class` as `c`) and `publication` (as `p`): a join, an
    expression for the numbers of a table's column list as JSON or NULL, and one for whether the table has a
    row filter.
    """
    if server_version < COLUMN_LISTS_VERSION_MIN:
        return "", "NULL", "false"
    return _TERMS, "array_to_json(r.prattrs::int2[])::text", "r.prqual IS NOT NULL"


def row_filters(session: Session, publication: str, oids: Iterable[int]) -> dict[int, str]:
    """Return the publication's row filters, as SQL, by the oid of the tables that have one, which are briefly
    locked. PostgreSQL 15 and later.
    """
    listed = ", ".join(map(str, oids))
    if not listed:
        return {}
    command = _FILTERS.format(publication=quote_literal(publication), oids=listed)
    rows = session.run(command, "read the publication's row filters")
    return {row.number("oid"): row.text("filter") for row in rows}


def terms_digest(session: Session, publication: str) -> str:
    """Return a digest of what determines how the publication sends changes, as the session sees it."""
    command = _TERMS_DIGEST.format(
        published=published(publication, session.server_version), name=quote_literal(publication)
    )
    return session.run(command, "look at the publication and its tables")[0]["digest"] or ""
