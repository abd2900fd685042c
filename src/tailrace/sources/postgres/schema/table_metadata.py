"""Reads from the catalogue the metadata of tables that a Relation message lacks.

One query reads any number of tables. It takes no lock that affects users, and reads no row of a
user's table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tailrace.sources.postgres.connection.session import Session
from tailrace.sources.postgres.schema.published_tables import bases, in_identity, partitions
from tailrace.sources.postgres.schema.table_facts import CatalogTable, CatalogTables

#: Labels of an enumeration with more than this are not stored: renaming one is not noticed.
LABELS_MAX = 1000

# A deferrable key does not count: within a transaction, two rows may have the same one.
_TABLES = """
SELECT s.snapshot AS snapshot, t.*
  FROM (SELECT txid_current_snapshot()::text AS snapshot) s LEFT JOIN (
SELECT c.oid AS oid, n.nspname AS schema, c.relname AS table,
       CASE c.relkind WHEN 'p'
         THEN (SELECT sum(l.relfilenode::bigint) FROM {partitions} p JOIN pg_class l ON l.oid = p.oid)
         ELSE c.relfilenode::bigint END AS filenode, c.xmin::text::bigint AS xid,
       (SELECT json_build_object('xid', i.xmin::text::bigint,
                                 'numbers', array_to_json((i.indkey::int2[])[0:i.indnkeyatts - 1]))
          FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate) AS key,
       (SELECT json_agg(json_build_object(
            'number', a.attnum, 'name', a.attname, 'dropped', a.attisdropped,
            'type_oid', a.atttypid::bigint, 'type_modifier', a.atttypmod,
            'type', format_type(a.atttypid, a.atttypmod),
            'not_null', a.attnotnull AND NOT EXISTS (
                SELECT FROM pg_constraint v WHERE v.conrelid = c.oid AND v.contype = 'n'
                   AND NOT v.convalidated AND v.conkey[1] = a.attnum),
            'generated', a.attgenerated,
            'filled', a.atthasdef OR a.attidentity <> '' OR a.attnotnull OR t.typdefault IS NOT NULL,
            'in_identity', {in_identity}, 'xid', a.xmin::text::bigint, 'base', {base}, 'types', {types},
            'missing', {missing}) ORDER BY a.attnum)
          FROM pg_attribute a LEFT JOIN pg_type t ON t.oid = a.atttypid
         WHERE a.attrelid = c.oid AND a.attnum > 0) AS columns
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = ANY ('{{{oids}}}'::oid[])
) t ON true
"""

_BASE = f"""({bases("a")}
       SELECT json_build_array(b.oid::bigint, b.modifier, bn.nspname, y.typname)
         FROM base b JOIN pg_type y ON y.oid = b.oid JOIN pg_namespace bn ON bn.oid = y.typnamespace
        ORDER BY b.depth DESC LIMIT 1)"""  # noqa: S608 - a constant

# The components of a type that is not built in: a domain's base type, an array's items.
_TYPES = """CASE WHEN a.atttypid >= 10000 THEN (
       WITH RECURSIVE used(oid) AS (
           SELECT a.atttypid
         UNION
           SELECT CASE y.typtype WHEN 'd' THEN y.typbasetype ELSE y.typelem END
             FROM used u JOIN pg_type y ON y.oid = u.oid
            WHERE y.typtype = 'd' OR y.typoutput = 'pg_catalog.array_out'::regproc)
       SELECT json_object_agg(y.oid::text,
              CASE WHEN y.typtype = 'd' THEN json_build_object(
                     'name', y.typname, 'base', y.typbasetype::bigint, 'modifier', y.typtypmod)
                   WHEN y.typoutput = 'pg_catalog.array_out'::regproc THEN json_build_object(
                     'name', y.typname, 'item', y.typelem::bigint, 'delimiter', e.typdelim)
                   ELSE json_build_object('name', y.typname, 'kind', y.typtype, 'parts', {parts})
              END ORDER BY y.oid)
         FROM used u JOIN pg_type y ON y.oid = u.oid LEFT JOIN pg_type e ON e.oid = y.typelem
        WHERE y.oid >= 10000) END"""

# What can change the text of values while column and type stay the same: labels by oid, attributes by number.
_PARTS = """CASE y.typtype
       WHEN 'e' THEN (SELECT json_object_agg(l.oid::text, l.enumlabel ORDER BY l.oid) FROM pg_enum l
                       WHERE l.enumtypid = y.oid HAVING count(*) <= {labels_max})
       WHEN 'c' THEN (SELECT json_object_agg(f.attnum::text, f.atttypid || ' ' || f.atttypmod
                                             ORDER BY f.attnum) FROM pg_attribute f
                       WHERE f.attrelid = y.typrelid AND f.attnum > 0 AND NOT f.attisdropped) END"""

# Partitions have these values; their root, which has no rows, does not.
_MISSING = """COALESCE({own}, CASE WHEN c.relkind = 'p' THEN (
            SELECT {leaf} FROM {partitions} p
              JOIN pg_attribute m ON m.attrelid = p.oid AND m.attname = a.attname
                   AND NOT m.attisdropped AND m.atthasmissing LIMIT 1) END)"""
# An array of one item, quoted if its text needs it; the separator of items depends on the type.
_TEXT = """CASE WHEN {a}.atthasmissing THEN (
            SELECT CASE WHEN i.item LIKE '"%' THEN (('{{' || i.item || '}}')::text[])[1] ELSE i.item END
              FROM (SELECT substr(v.held, 2, length(v.held) - 2) AS item
                      FROM (SELECT {a}.attmissingval::text AS held) v) i) END"""

_QUERY = (
    _TABLES.replace("{base}", _BASE)
    .replace("{types}", _TYPES.replace("{parts}", _PARTS.replace("{labels_max}", str(LABELS_MAX))))
    .replace(
        "{missing}", _MISSING.replace("{own}", _TEXT.format(a="a")).replace("{leaf}", _TEXT.format(a="m"))
    )
    .replace("{partitions}", partitions("c.oid"))
    .replace("{in_identity}", in_identity("c", "a"))
)


def catalog_tables(session: Session, oids: Sequence[int]) -> CatalogTables:
    """Return the present catalogue rows of tables.

    :raises TailraceError: as `Session.run`.
    """
    command = _QUERY.replace("{{{oids}}}", "{" + ",".join(str(int(oid)) for oid in oids) + "}")
    rows = session.run(command, "look up changed tables")
    _, ceiling, running = rows[0].text("snapshot").split(":")
    next_xid = int(ceiling) % (1 << 32)
    found = {}
    for row in rows:
        if row["oid"] is None:
            continue  # a row with only the snapshot
        key = json.loads(row["key"] or "null") or {"xid": 0, "numbers": []}
        found[row.number("oid")] = CatalogTable(
            oid=row.number("oid"),
            schema=row.text("schema"),
            table=row.text("table"),
            xid=row.number("xid"),
            filenode=row.number("filenode"),
            columns=tuple(json.loads(row["columns"] or "[]")),
            key_numbers=tuple(key["numbers"]),
            key_xid=int(key["xid"]),
            next_xid=next_xid,
        )
    return CatalogTables(
        found, next_xid, frozenset(int(xid) % (1 << 32) for xid in running.split(",") if xid)
    )
