"""Decodes a log and folds it to the state of its tables, without Spark and sinks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tailrace.changelog.reader import LogReader
from tailrace.decode.changes import decode_block
from tailrace.protocol import frames

Row = dict[str, str | None]
Key = tuple[str | None, ...]


@dataclass
class Folded:
    """The rows that a table's changes lead to, and counts of the changes.

    `rows` is by key. A table without a key keeps all of its rows in `bag`, a multiset; its `reads` and
    `creates` are counted by the first column.
    """

    rows: dict[Key, Row] = field(default_factory=dict)
    bag: Counter[tuple[tuple[str, str | None], ...]] = field(default_factory=Counter)
    reads: Counter[Key] = field(default_factory=Counter)
    creates: Counter[Key] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)

    @property
    def values(self) -> list[tuple[str | None, ...]]:
        """Rows in the order of their keys, as tuples of texts."""
        return sorted(tuple(row.values()) for row in self.rows.values())


def fold(path: Path) -> dict[str, Folded]:
    """Return the state of each table in the log at `path`, by name without its schema.

    Asserts that (commit LSN, ordinal) rises from change to change, and that decoding gives the changes
    of each table in log order.
    """
    found: dict[str, Folded] = {}
    last = (0, -1)
    with LogReader.open(path, "0") as reader:
        for ref in reader.blocks(reader.start, reader.end().offset):
            changes: list[dict[str, Any]] = []
            ends: dict[int, int] = {}
            raw = reader.read(ref)
            for table in decode_block(
                raw, ref.header.log_offset, ref.header.open_at_start, reader.schema_before(ref)
            ):
                names = [c.name for c in table.relation.columns] if table.relation else []
                offsets = table.log_offset.tolist()
                oid = table.relation.oid if table.relation else 0
                assert ends.get(oid, -1) < offsets[0], "a table's changes are not in log order"
                ends[oid] = offsets[-1]
                changes += [change | {"columns": names} for change in table.envelope("0").to_pylist()]
            for change in sorted(changes, key=lambda change: change["log_offset"]):
                assert last < (last := (change["commit_lsn"], change["ordinal"]))
                _apply(found.setdefault(change["table"], Folded()), change)
    return found


def units(path: Path) -> list[dict[str, Any]]:
    """Return the first frame of each unit of the snapshot, parsed, in log order."""
    found = []
    with LogReader.open(path, "0") as reader:
        for ref in reader.blocks(reader.start, reader.end().offset):
            for _, frame in frames.each_frame(reader.read(ref)):
                if frame[5:6] == b"x" and frame[6:7] == frames.SNAPSHOT_BEGIN:
                    found.append(frames.control_json(frame))
    return found


def _apply(table: Folded, change: dict[str, Any]) -> None:
    op = change["op"]
    table.ops[op] += 1
    key, before, after = (dict(change[name] or ()) for name in ("key", "before", "after"))
    if op == "t":
        table.rows.clear()
        table.bag.clear()
        return
    place = tuple(key.values()) or tuple(after.values())[:1]
    if op in "rc":
        (table.reads if op == "r" else table.creates)[place] += 1
    if not key:
        if op in "ud":
            _take_out(table.bag, before)
        if op in "rcu":
            table.bag[tuple(after.items())] += 1
        return
    if op == "d":
        table.rows.pop(place, None)
        return
    old = {}
    if op == "u":
        old_place = tuple(before.get(name, value) for name, value in key.items())
        old = table.rows.pop(old_place, {})
    merged = {**old, **after}
    table.rows[place] = {name: merged.get(name) for name in change["columns"]}


def _take_out(bag: Counter[tuple[tuple[str, str | None], ...]], row: Row) -> None:
    entry = tuple(row.items())
    assert bag[entry] > 0, f"a row that was not there was changed: {sorted(row)}"
    bag[entry] -= 1
