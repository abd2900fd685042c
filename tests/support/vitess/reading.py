"""Reads the frames that a shard's transcoder made: changes in log order, every value as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tailrace.decode.changes import decode_block
from tailrace.protocol import frames
from tailrace.protocol.frames import Bytes
from tailrace.protocol.metadata_frames import kept_frames

#: In place of a value that was not sent.
UNCHANGED = "(unchanged)"


@dataclass(frozen=True, slots=True)
class ChangeRead:
    """A change in the log, every value as text."""

    table: str
    op: str
    row: dict[str, str | None]
    position: int = field(compare=False, default=0)
    time_us: int = field(compare=False, default=0)


def read(data: Bytes, in_force: dict[str, bytes] | None = None, position: int = 1) -> list[ChangeRead]:
    """Return the changes in whole frames, in order; the frames are scanned as the log does it."""
    schema = {} if in_force is None else in_force
    state = frames.new_state(position)
    summary = frames.summarise(data, state)
    assert summary.open_at_end is None
    found = []
    known = [frame for key, frame in schema.items() if not key.startswith("S")]
    for changes in decode_block(data, 0, None, known):
        assert changes.relation is not None
        names = [column.name for column in changes.relation.columns]
        rows = changes.rows(as_text=names).to_pylist()
        found += [(row["_log_offset"], _change(changes.relation.qualified_name, names, row)) for row in rows]
    schema.update(kept_frames(data))
    return [change for _, change in sorted(found, key=lambda each: each[0])]


def _change(table: str, names: Sequence[str], row: dict[str, Any]) -> ChangeRead:
    values = {name: UNCHANGED if name in row["_unchanged"] else row[name] for name in names}
    time_us = int(row["_commit_ts"].timestamp() * 1_000_000)
    return ChangeRead(table, row["_op"], values, row["_commit_lsn"], time_us)
