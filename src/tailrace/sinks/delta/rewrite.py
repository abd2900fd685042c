"""Rewrites files to another schema, on executors: a table's data files, and files of changes.

Files are read and written in batches, so memory is bounded whatever their size. New files are in
the staging folder, and have no effect before the driver commits them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.changelog import durable
from tailrace.model import Relation
from tailrace.sinks.contract import required
from tailrace.sinks.delta.evolution import refuse_value
from tailrace.sinks.delta.folder import AddedFile
from tailrace.sinks.delta.shapes import ShapeStep, Unfit, reshaped
from tailrace.sinks.files.parquet import ParquetWriter
from tailrace.sinks.write_job import BUFFERED_BYTES_MAX, StagedFile, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.sinks.delta.sink import TableWork

Item = TypeVar("Item")

#: Most rows that are read at a time; fewer if they have more than `BUFFERED_BYTES_MAX`.
BATCH_ROWS = 1 << 16
#: Most bytes of a table's files that one task merges.
TASK_BYTES = 128 << 20
#: Most bytes that this process rewrites itself: a Spark job takes longer to start. With more, the size of a
#: Spark task's part of the files of changes: a migration leaves hundreds, one for each schema version.
IN_PROCESS_BYTES_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class RewriteTask:
    """Files at `paths` with one schema, to be rewritten as one file at `out` with the schema of `steps`.

    `kept`: Tailrace's own columns that follow the table's, with their types.
    """

    paths: tuple[str, ...]
    steps: tuple[ShapeStep, ...]
    kept: tuple[tuple[str, pa.DataType], ...]
    out: str
    context: tuple[tuple[str, str], ...]


def conform(work: RewriteTask) -> dict[str, Any]:
    """Write the new file; return its facts with its `rows` and `bytes`.

    :raises TailraceError: `SINK_SCHEMA_REFUSED` if a value does not fit.
    """
    writer = ParquetWriter(work.out, "zstd")
    kept = dict(work.kept)
    for path in work.paths:
        # Spark's OPTIMIZE writes INT96, which by default is read as nanoseconds: years 1677 to 2262.
        with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as held:
            for batch in held.iter_batches(batch_size=_rows_at_once(held.metadata)):
                rows = pa.Table.from_batches([batch])
                there = {name: kind for name, kind in kept.items() if name in rows.column_names}
                try:
                    made = reshaped(rows, work.steps, there)
                except Unfit as unfit:
                    refuse_value(unfit.args[0], dict(work.context))
                for part in made.combine_chunks().to_batches():
                    writer.write_batch(part)
    if writer.rows == 0:
        there = {name: kind for name, kind in kept.items() if _has(work.paths, name)}
        writer.write_table(_nothing(work.steps, there))
    facts = writer.close()
    durable.sync_file(work.out)
    return {**facts, "rows": writer.rows, "bytes": os.stat(work.out).st_size}


def _rows_at_once(metadata: pq.FileMetaData) -> int:
    size: int = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    fitting: int = BUFFERED_BYTES_MAX * metadata.num_rows // max(1, size)
    return max(1, min(BATCH_ROWS, fitting))


def _conform_each(tasks: Sequence[RewriteTask]) -> list[dict[str, Any]]:
    return [conform(task) for task in tasks]


def conformed(
    spark: SparkSession | None, work: TableWork,
    plans: Sequence[tuple[StagedFile, Relation, Sequence[ShapeStep] | None]],
    kept: Sequence[tuple[str, pa.DataType]],
) -> list[StagedFile]:  # fmt: skip
    """Return files of changes, each rewritten to its relation's schema; steps None: it is not rewritten.

    :raises TailraceError: as `conform`.
    """
    context = tuple(work.folder.context.items())
    tasks, sizes = [], []
    for file, _, steps in plans:
        if steps is not None:
            out = work.staged(file.directory, _renamed(file.name))
            path = work.staged(file.directory, file.name)
            tasks.append(RewriteTask((path,), tuple(steps), tuple(kept), out, context))
            sizes.append(file.bytes)
    if sum(sizes) <= IN_PROCESS_BYTES_MAX:
        spark = None
    portions = _portions(tasks, sizes, IN_PROCESS_BYTES_MAX)
    done = itertools.chain.from_iterable(run(spark, portions, _conform_each, work.folder.sink))
    return [
        file if steps is None else _replaced(file, relation, steps, next(done))
        for file, relation, steps in plans
    ]


def reshape_table(
    spark: SparkSession | None,
    work: TableWork,
    steps: Sequence[ShapeStep],
    kept: Sequence[tuple[str, pa.DataType]],
    schema: pa.Schema,
) -> None:
    """Rewrite the table's rows to the schema of `steps`, in one commit.

    :param schema: of the table afterwards.
    :raises TailraceError: `SINK_SCHEMA_REFUSED` before anything is changed; `SINK_WRITE_FAILED`.
    """
    paths = sorted(work.folder.data_files())
    sizes = [os.stat(path).st_size for path in paths]
    # The whole table is read and written.
    spark = required(spark) if sum(sizes) > IN_PROCESS_BYTES_MAX else None
    context = tuple(work.folder.context.items())
    stem = f"reshaped-{work.version:016x}"
    tasks = [
        RewriteTask(
            tuple(portion),
            tuple(steps),
            tuple(kept),
            work.staged(work.folder.path.name, f"{stem}-{number:05d}.parquet"),
            context,
        )
        for number, portion in enumerate(_portions(paths, sizes, TASK_BYTES))
    ]
    done = run(spark, tasks, conform, work.folder.sink)
    files = []
    for task, facts in zip(tasks, done, strict=True):
        if facts["rows"]:
            # A unique name: a commit that raised an error may have happened nevertheless.
            name = f"{stem}-{os.urandom(6).hex()}.parquet"
            Path(task.out).replace(work.folder.path / name)
            files.append(AddedFile(name, facts["rows"], facts["bytes"], facts))
    work.folder.reshape(files, schema)


def _portions(items: Sequence[Item], sizes: Sequence[int], limit: int) -> list[list[Item]]:
    """Return successive items in groups of up to `limit` bytes; a larger item is a group by itself."""
    portions: list[list[Item]] = []
    filled = 0
    for item, size in zip(items, sizes, strict=True):
        if not portions or filled + size > limit:
            portions.append([])
            filled = 0
        portions[-1].append(item)
        filled += size
    return portions


def _replaced(
    file: StagedFile, relation: Relation, steps: Sequence[ShapeStep], facts: dict[str, Any]
) -> StagedFile:
    names = {step.source: step.field.name for step in steps if step.source is not None}
    changed = {**file.facts, **{name: facts[name] for name in ("lowest", "highest", "nulls")}}
    if "open" in changed:
        changed["open"] = [names[name] for name in changed["open"] if name in names]
    if "special" in changed:
        changed["special"] |= any(step.is_marked for step in steps)
    return replace(
        file,
        relation=relation,
        name=_renamed(file.name),
        bytes=facts["bytes"],
        schema=facts["schema"],
        facts=changed,
    )


def _renamed(name: str) -> str:
    stem, suffix = os.path.splitext(name)
    return f"{stem}-c{suffix}"


def _has(paths: Sequence[str], name: str) -> bool:
    return any(name in pq.read_schema(path).names for path in paths)


def _nothing(steps: Sequence[ShapeStep], kept: dict[str, pa.DataType]) -> pa.Table:
    fields = [step.field for step in steps] + [pa.field(name, kind) for name, kind in kept.items()]
    return pa.schema(fields).empty_table()
