"""Which shapes of tables are new in a range of the log: a function of the range alone.

A shape is new with the Relation message that stands in the range, if it differs from what was in
force before it. So the same range tells the same shapes, whoever reads it and how often, and nothing
need be kept: messages that a server sends anew, and those that are repeated at a segment's head, tell none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tailrace.changelog.reader import LogReader
from tailrace.errors import Kind, TailraceError
from tailrace.model import Relation, ValueModes
from tailrace.protocol.frames import schema_frames
from tailrace.ranges.changes import settled_facts, with_renames
from tailrace.ranges.plan import Piece
from tailrace.sources.postgres.decode.column_policy import TablePolicy
from tailrace.sources.postgres.decode.schemas import Catalog

#: What has become of a table: known for the first time, or another one.
CREATE, ALTER = "CREATE", "ALTER"

#: Where an XLogData frame has the LSN that its message is sent with.
_LSN_AT = 6


@dataclass(frozen=True, slots=True)
class ShapeChange:
    """A table's new shape, as it is let out.

    :param lsn: of the message, 0 where it has none.
    """

    what: str
    relation: Relation
    lsn: int


def shape_changes(
    log: LogReader | Path,
    pieces: Sequence[Piece],
    start: int,
    end: int,
    modes: ValueModes,
    table_policy: TablePolicy,
) -> Iterator[ShapeChange]:
    """Yield the shapes that are new in `[start, end)`, in log order.

    :param pieces: of a range that holds it.
    :raises TailraceError: `LOG_RANGE_GONE`, `LOG_CORRUPT`, and `CONFIG_INVALID` as `TablePolicy.shape`.
    """
    blocks = [block for piece in pieces for block in piece.blocks]
    if not any(block.header.has_schema for block in blocks):
        return
    reader = log if isinstance(log, LogReader) else LogReader.open(log, pieces[0].task)
    in_force = reader.schema_before(blocks[0])
    shaped = [block for block in blocks if block.header.has_schema]
    here = [frame for block in shaped for _, frame in schema_frames(reader.read(block))]
    settled = settled_facts(reader, blocks[0].header.log_offset, [*in_force, *here])
    table_policy = with_renames(table_policy, reader)  # names are kept before such facts are in the log
    catalog = Catalog(in_force, modes, settled)
    for block in blocks:
        if not block.header.has_schema:
            continue
        raw, first = reader.read(block), block.header.log_offset
        # A range may begin and end within a block, between two frames.
        begins = max(0, start - first)
        for _, frame in schema_frames(raw[:begins]):
            catalog.apply(frame)
        for key, frame in schema_frames(raw[begins : max(0, end - first)]):
            oid = int(key[1:])
            before = _in_force(catalog, oid)
            catalog.apply(frame)
            if key[0] != "R":
                continue  # types and facts come before the message that they are of
            relation = catalog.relation(oid)
            if before is None or table_policy.relation(before) != table_policy.relation(relation):
                lsn = int.from_bytes(frame[_LSN_AT : _LSN_AT + 8], "big")
                yield ShapeChange(ALTER if before else CREATE, table_policy.relation(relation), lsn)


def _in_force(catalog: Catalog, oid: int) -> Relation | None:
    try:
        return catalog.relation(oid)
    except TailraceError as error:
        if error.kind is not Kind.SCHEMA_MISSING:
            raise
        return None
