"""Delta tables that hold every change as a row: the history of each source table.

The files are those of the Parquet sink. A commit adds a range's files of one table, and columns
that the source has got since come in a commit of their own just before.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from tailrace.sinks.delta_folder import united
from tailrace.sinks.parquet import open_parquet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.sinks.delta_sink import TableWork
    from tailrace.sinks.write_files import OpenWriter


class DeltaAppend:
    """Implements `delta_sink.DeltaMode`."""

    kind = "append"
    commits_at_once = 8

    def opener(self) -> OpenWriter:
        """As `DeltaMode.opener`."""
        return partial(open_parquet, compression="zstd")

    def commit(self, spark: SparkSession, work: TableWork) -> None:
        """As `DeltaMode.commit`.

        :raises TailraceError: `SINK_SCHEMA_REFUSED` before anything is changed.
        """
        context = {"table": work.table}
        schema = united((_schema(file.schema) for file in work.files), context)
        if work.folder.exists():
            work.folder.evolve(schema)
            work.folder.append([work.place(file) for file in work.files], work.version)
        else:
            work.folder.create(schema, [work.place(file) for file in work.files], work.version)


def _schema(serialized: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(serialized))
