"""A history of changes as texts, read from the log by Tailrace's decoder or from files without it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tailrace.changelog.reader import LogReader
from tailrace.decode.changes import TableChanges
from tailrace.protocol import frames
from tailrace.ranges import plan
from tailrace.ranges.changes import decoded_batches

Row = dict[str, str | None]


@dataclass(frozen=True, slots=True)
class Change:
    """One change; values are PostgreSQL's texts.

    :ivar columns: of the table, as the change's relation has them; `after` lacks those that were
        not sent.
    :ivar identity: columns that tell the old row; empty where there are none.
    :ivar types: PostgreSQL's oids of the columns' types.
    :ivar message: (prefix, content) of a logical message, which belongs to no table.
    """

    log_offset: int
    commit_lsn: int
    ordinal: int
    op: str
    table: int = 0
    name: str = ""
    columns: tuple[str, ...] = ()
    identity: tuple[str, ...] = ()
    before: Row | None = None
    after: Row | None = None
    message: tuple[str, Any] | None = None
    types: dict[str, int] = field(default_factory=dict, compare=False)


def read_log(path: Path, *, start: int | None = None, end: int | None = None) -> list[Change]:
    """Return the changes of the log in its order, from boundary to boundary."""
    with LogReader.open(path, "0") as reader:
        begin = reader.start if start is None else start
        until = reader.end().offset if end is None else end
        splits = plan.input_splits("0", reader.blocks(begin, until), begin, until)
    found = [
        change
        for split in splits
        for decoded in decoded_batches(path, split)
        for changes in decoded.changes
        for change in _changes(changes)
    ]
    return sorted(found, key=lambda change: change.log_offset)


def snapshot_end(path: Path) -> int:
    """Return the log offset after the last rows of a snapshot, or unit without rows."""
    with LogReader.open(path, "0") as reader:
        ends = [
            ref.header.log_offset + at
            for ref in reader.blocks(reader.start, reader.end().offset)
            for at, frame in frames.each_frame(reader.read(ref))
            if frame[5:7] == b"x" + frames.SNAPSHOT_END
        ]
    return max(ends, default=0)


def _changes(changes: TableChanges) -> list[Change]:
    relation = changes.relation
    found = []
    for row in changes.envelope("0").to_pylist():
        place = (row["log_offset"], row["commit_lsn"], row["ordinal"], row["op"])
        if relation is None:
            content = row["message_content"]
            is_ours = row["message_prefix"] in {"tx", "ddl"}
            found.append(
                Change(*place, message=(row["message_prefix"], json.loads(content) if is_ours else content))
            )
            continue
        found.append(
            Change(
                *place,
                relation.oid,
                relation.qualified_name,
                tuple(column.name for column in relation.columns),
                tuple(column.name for column in relation.columns if column.in_identity),
                None if row["before"] is None else dict(row["before"]),
                None if row["after"] is None else dict(row["after"]),
                types={column.name: column.type_oid for column in relation.columns},
            )
        )
    return found
