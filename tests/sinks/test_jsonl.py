"""JSON Lines: lines are made in parts, as many at a time as fit into memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailrace.changelog.reader import LogReader
from tailrace.decode.changes import TableChanges
from tailrace.decode.json.debezium import SourceInfo
from tailrace.ranges.batches import VALUES_MAX
from tailrace.ranges.changes import decoded_batches
from tailrace.ranges.plan import input_splits
from tailrace.sinks.files.jsonl import JsonlWriter
from tests.support.sinks.rig import relation
from tests.support.spark.wire import INT8, HandmadeLog, insert


def test_lines_of_a_wide_table_are_made_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns, rows = 1590, 600
    made: list[int] = []
    lines = TableChanges.json_lines

    def noted(self: TableChanges, *given: object) -> object:
        made.append(self.count * columns)
        return lines(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(TableChanges, "json_lines", noted)
    with HandmadeLog(tmp_path / "log") as log:
        shape = relation(1, "public.wide", {"id": INT8, **{f"c{n}": INT8 for n in range(columns - 1)}})
        end = log.commit(shape, *[insert(1, number, *[None] * (columns - 1)) for number in range(rows)])
    with LogReader.open(log.path, "0") as reader:
        found = input_splits("0", reader.blocks(0, end), 0, end)
    writer = JsonlWriter(str(tmp_path / "lines"), "0", SourceInfo("shop", "shop", "1"))
    for split in found:
        for decoded in decoded_batches(log.path, split):
            for changes in decoded.changes:
                writer.write(changes)
    writer.close()
    assert writer.rows == rows
    assert len(made) > 1
    assert max(made) <= VALUES_MAX
    ids = [json.loads(line)["after"]["id"] for line in (tmp_path / "lines").read_text().splitlines()]
    assert ids == list(range(rows))
