"""JSON Lines files: one change a line, in Debezium's payload form with its position."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tailrace import __version__
from tailrace.config.source.column_policy import ColumnPolicy
from tailrace.model import OWN_FORMS, Relation, ValueModes
from tailrace.ranges.batches import VALUES_MAX
from tailrace.sinks.files.sink import FileSink
from tailrace.sinks.target_names import as_it_is
from tailrace.sinks.write_job import OpenWriter
from tailrace.sources.postgres.decode.changes import TableChanges
from tailrace.sources.postgres.decode.json.debezium import SourceInfo
from tailrace.transforms.tables import NO_STEPS, TableChain

if TYPE_CHECKING:
    from tailrace.changelog.directory import LogIdentity


class JsonlWriter:
    """One JSON Lines file. Lines are written as the kernel made them, many at a time."""

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


def jsonl_sink(
    name: str,
    path: Path,
    tables: tuple[str, ...] | None,
    rules: ColumnPolicy | None = None,
    modes: ValueModes = OWN_FORMS,
    chain: TableChain = NO_STEPS,
) -> FileSink:
    """Return a sink that writes JSON Lines files, a folder a table, every change a line.

    :param rules: what of the tables is let out; None: everything.
    :param modes: how values are given.
    :param chain: what is done to the changes.
    """

    def opener(log: LogIdentity, pipeline: str, task: str) -> OpenWriter:
        source = SourceInfo(pipeline, log.source.database, __version__, log.source.type)
        return partial(open_jsonl, task=task, source=source)

    return FileSink(name, "jsonl", path, tables, opener, as_it_is, rules or ColumnPolicy(), modes, chain)
