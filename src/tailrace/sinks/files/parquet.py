"""Writes Parquet files, for the sink `parquet` and the Delta sinks."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.decode.changes import TableChanges
from tailrace.decode.types import OLD_KEY
from tailrace.model import Relation
from tailrace.sinks.names import as_files
from tailrace.sinks.write_job import ArrowBuffer, FileFormat

ROW_GROUP_ROWS_MAX = 1 << 20


class ParquetWriter:
    """A writer of one Parquet file of typed rows, all of one schema.

    Its facts: `schema`, the Arrow schema, serialised; `lowest` and `highest` by column, for whole
    numbers; `nulls` by column, for a table format's own statistics.
    """

    def __init__(self, path: str, compression: str) -> None:
        self._path = path
        self._compression = compression
        self._buffer = ArrowBuffer()
        self._writer: pq.ParquetWriter | None = None
        self.rows = 0

    def write(self, changes: TableChanges) -> None:
        self.write_batch(changes.rows().append_column(OLD_KEY, changes.old_key_texts()))

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.num_rows
        if self._buffer.add(batch):
            self._flush()

    def write_table(self, table: pa.Table) -> None:
        self.rows += table.num_rows
        self._write(table)

    def close(self) -> dict[str, Any]:
        self._flush()
        assert self._writer is not None, "a file is opened for its first change"
        self._writer.close()
        # Not by `metadata_collector`: if a write fails, it raises once more, when the object is collected.
        schema, metadata = self._writer.schema, self._writer.writer.metadata
        return {"schema": schema.serialize().to_pybytes(), **_statistics(schema, metadata)}

    def _flush(self) -> None:
        table = self._buffer.take()
        if table is not None:
            self._write(table)

    def _write(self, table: pa.Table) -> None:
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._path,
                table.schema,
                compression=self._compression,
                use_dictionary=_repeating(table),
            )
        self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS_MAX)


def _repeating(table: pa.Table) -> list[str]:
    """Return the columns that a dictionary makes smaller, estimated from the first rows.

    Building a dictionary that is not used takes as long as writing the column.
    """
    sample = table.slice(0, 4096)
    names: list[str] = []
    for field in sample.schema:
        if pa.types.is_nested(field.type):
            names.append(field.name)
        elif pc.count_distinct(sample[field.name]).as_py() * 4 < max(sample.num_rows, 4):
            names.append(field.name)
    return names


def _statistics(schema: pa.Schema, metadata: Any) -> dict[str, Any]:
    # Bounds of whole numbers only: dates and times may be outside of the range of Python's types.
    flat = {field.name for field in schema if not pa.types.is_nested(field.type)}
    whole = {field.name for field in schema if pa.types.is_integer(field.type)}
    lowest: dict[str, int] = {}
    highest: dict[str, int] = {}
    nulls: dict[str, int] = {}
    for group, index in itertools.product(range(metadata.num_row_groups), range(metadata.num_columns)):
        column = metadata.row_group(group).column(index)
        name = column.path_in_schema
        if name not in flat or column.statistics is None or not column.statistics.has_null_count:
            continue
        nulls[name] = nulls.get(name, 0) + column.statistics.null_count
        if name in whole and column.statistics.has_min_max:
            lowest[name] = min(column.statistics.min, lowest.get(name, column.statistics.min))
            highest[name] = max(column.statistics.max, highest.get(name, column.statistics.max))
    return {"lowest": lowest, "highest": highest, "nulls": nulls}


def open_parquet(path: str, _relation: Relation, compression: str = "snappy") -> ParquetWriter:
    """Return a writer for a new file at `path`."""
    return ParquetWriter(path, compression)


def parquet_format(compression: str = "snappy") -> FileFormat:
    """Return the format of a sink's Parquet files: one row per change.

    :param compression: `none`, `snappy` or `zstd`.
    """
    open_writer = partial(open_parquet, compression=compression)
    return FileFormat("parquet", as_files, lambda _origin, _task: open_writer)
