"""Delta tables that hold every change as a row: the history of each source table.

The files are those of the Parquet sink. A commit adds a range's files of one table. Columns that
the source has got since, and types that hold more, come in a commit of their own just before.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from tailrace.decode.types import METADATA, OLD_KEY
from tailrace.sinks.delta.evolution import history_plan
from tailrace.sinks.delta.rewrite import conformed, reshape_table
from tailrace.sinks.files.parquet import open_parquet
from tailrace.sinks.names import as_history
from tailrace.sinks.write_job import FileFormat

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.sinks.delta.sink import TableWork


class DeltaAppend:
    """Implements `delta_sink.DeltaMode`."""

    kind = "append"
    commits_at_once = 8
    follows_names = False
    format = FileFormat(
        "parquet", as_history, lambda _origin, _task: partial(open_parquet, compression="zstd")
    )

    def __init__(self, on_type_change: str = "stop") -> None:
        """:param on_type_change: `stop`, or `follow`: what no other type holds becomes text."""
        self._follow = on_type_change == "follow"

    def commit(self, spark: SparkSession | None, work: TableWork) -> None:
        """As `DeltaMode.commit`.

        :raises TailraceError: `SINK_SCHEMA_REFUSED` before anything is changed.
        """
        folder = work.folder
        schemas = [_schema(file.schema) for file in work.files]
        plan = history_plan(folder.schema(), schemas, follow=self._follow, context=folder.context)
        kept = {name for name, _ in _KEPT}
        files = [
            (file, file.relation, steps and [step for step in steps if step.source not in kept])
            for file, steps in zip(work.files, plan.files, strict=True)
        ]
        placed = [work.place(file) for file in conformed(spark, work, files, _KEPT)]
        if not folder.exists():
            folder.create(plan.schema, placed, work.version)
            return
        if plan.rewrite is not None:
            reshape_table(spark, work, plan.rewrite, (), plan.schema)
        folder.add_columns(plan.added)
        folder.append(placed, work.version)


#: Columns of ours whose content names columns of the table.
_KEPT = tuple((field.name, field.type) for field in (*METADATA[-2:], OLD_KEY))


def _schema(serialized: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(serialized))
