"""Decodes a log and folds it to the state of its tables, without Spark and sinks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa

from tailrace.changelog.reader import LogReader
from tailrace.decode.changes import TableChanges, decode_block
from tailrace.protocol import frames

Row = dict[str, str | None]
Key = tuple[str | None, ...]

NAMES = ("op", "table", "commit_lsn", "ordinal", "log_offset", "key", "before", "after")


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
                offsets = table.log_offset.tolist()
                oid = table.relation.oid if table.relation else 0
                assert ends.get(oid, -1) < offsets[0], "a table's changes are not in log order"
                ends[oid] = offsets[-1]
                changes += _changes(table)
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


def _changes(table: TableChanges) -> Iterator[dict[str, Any]]:
    # Column by column: Arrow makes the objects of a row one by one, in ten times the time.
    envelope = table.envelope("0")
    columns = [
        _texts(envelope[name]) if name in ("key", "before", "after") else envelope[name].to_pylist()
        for name in NAMES
    ]
    names = [c.name for c in table.relation.columns] if table.relation else []
    for values in zip(*columns, strict=True):
        yield {**dict(zip(NAMES, values, strict=True)), "columns": names}


def _texts(maps: pa.MapArray) -> list[Row]:
    names, texts, ends = maps.keys.to_pylist(), maps.items.to_pylist(), maps.offsets.to_pylist()
    return [dict(zip(names[first:end], texts[first:end], strict=True)) for first, end in pairwise(ends)]


def _apply(table: Folded, change: dict[str, Any]) -> None:
    op = change["op"]
    table.ops[op] += 1
    key, before, after = change["key"], change["before"], change["after"]
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
