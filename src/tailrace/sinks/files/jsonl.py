"""JSON Lines files: one line per change, in Debezium's payload form with its position."""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa

from tailrace.decode.changes import TableChanges
from tailrace.decode.json.debezium import SourceInfo
from tailrace.model import Relation
from tailrace.ranges.batches import VALUES_MAX
from tailrace.sinks.names import as_it_is
from tailrace.sinks.write_job import FileFormat


class JsonlWriter:
    """A writer of one JSON Lines file. Writes the kernel's lines, many at a time."""

    def __init__(self, path: str, task: str, source: SourceInfo) -> None:
        self._file = pa.OSFile(path, "wb")
        self._task = task
        self._source = source
        self.rows = 0

    def write(self, changes: TableChanges) -> None:
        columns = 1 if changes.relation is None else len(changes.relation.columns)
        rows = max(1, VALUES_MAX // max(1, columns))
        for first in range(0, changes.count, rows):
            self._write(changes.part(first, min(first + rows, changes.count)))

    def _write(self, changes: TableChanges) -> None:
        lines = changes.json_lines(self._task, self._source)
        first, last = lines.offset, lines.offset + len(lines)
        offsets = memoryview(lines.buffers()[1]).cast("q")
        self._file.write(lines.buffers()[2].slice(offsets[first], offsets[last] - offsets[first]))
        self.rows += len(lines)

    def close(self) -> dict[str, Any]:
        self._file.close()
        return {}


def open_jsonl(path: str, _relation: Relation, task: str, source: SourceInfo) -> JsonlWriter:
    """Return a writer for a new file at `path`."""
    return JsonlWriter(path, task, source)


#: The format of a sink's JSON Lines files: one line per change.
JSONL = FileFormat("jsonl", as_it_is, lambda origin, task: partial(open_jsonl, task=task, source=origin))
