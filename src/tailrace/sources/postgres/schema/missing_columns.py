"""Columns that a table has and the stream does not send, though nothing says that it should not.

PostgreSQL never uses a column's number twice, and keeps the numbers of dropped columns. So a
number that the log has, that a Relation message lacks and that the catalogue has not dropped was
left out by the publication's column list; or the server has lost sight of it. The latter happens
to a column that was added by a transaction which committed while the slot was being made: the
exported snapshot has it, the slot's own view of the catalogue has it not. Its values are then missing
from the stream without a word, and it must not be taken for a dropped one. A beginning is repeated when
that happens (`exporting.require_steady`); this is for slots that were made otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from tailrace.errors import Kind, TailraceError
from tailrace.model import Column, format_lsn
from tailrace.protocol.facts import ColumnFacts, Facts
from tailrace.sources.postgres.connection.session import Session, quote_literal
from tailrace.sources.postgres.schema.published_tables import COLUMN_LISTS_VERSION_MIN
from tailrace.sources.postgres.schema.table_metadata import CatalogTable

# A list may be that of a partitioned table above, whose numbers are not this one's.
_LISTS = """
SELECT array_to_json(r.prattrs::int2[])::text AS numbers, r.prrelid = {oid} AS own,
       r.xmin::text::bigint AS xid
  FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
 WHERE p.pubname = {publication}
   AND r.prrelid IN (SELECT {oid}::oid UNION SELECT relid::oid FROM pg_partition_ancestors({oid}))
"""


def unsent(
    sent: Sequence[Column], facts: Facts, table: CatalogTable | None, before: Facts | None, *, xid: int
) -> tuple[ColumnFacts, ...]:
    """Return the columns in `before` that `sent` lacks, and that `table` has as it had them then. Pure.

    Of a column that was changed since `xid`, only its name says whether it is what it was.

    :param facts: what was made of `sent`.
    """
    if before is None or table is None:
        return ()
    names = {column.name for column in sent}
    numbers = {column.number for column in facts.columns}
    there = {each["number"]: each for each in table.columns if not each["dropped"] and not each["generated"]}
    return tuple(
        column
        for column in before.columns
        if column.number in there
        and column.number not in numbers
        and (held := there[column.number])["name"] not in names
        and (held["name"] == column.name or not table.later(held["xid"], xid))
    )


def require_left_out(
    session: Session,
    publication: str,
    table: CatalogTable,
    columns: Sequence[ColumnFacts],
    *,
    xid: int,
    position: int,
) -> None:
    """Make sure that the publication's column list leaves `columns` out, or may have done so at `xid`.

    :raises TailraceError: `COLUMN_NOT_SENT`; as `Session.run`.
    """
    missing = [column.name for column in columns]
    if missing and session.server_version >= COLUMN_LISTS_VERSION_MIN:
        command = _LISTS.format(oid=table.oid, publication=quote_literal(publication))
        for row in session.run(command, "look at the publication's column list"):
            listed = json.loads(row["numbers"] or "null")
            if table.later(int(row["xid"] or 0), xid) or (listed is not None and row["own"] != "t"):
                return
            if listed is not None:
                missing = [column.name for column in columns if column.number in listed]
    if not missing:
        return
    names = ", ".join(map(repr, missing))
    raise TailraceError(
        Kind.COLUMN_NOT_SENT,
        f"follow the table {table.schema}.{table.table}: the server sends its rows without {names}, which "
        "was not dropped and which no column list of the publication leaves out",
        "PostgreSQL loses sight of a column that is added while a slot is being made, and its values of this "
        "time are not in the stream: begin a new log with a new snapshot",
        {"table": f"{table.schema}.{table.table}", "position": format_lsn(position)},
    )
