"""Files brought to another shape, by executors: a table's data files, and files of changes.

Files are read and written in batches, so memory is bounded whatever their size. What comes out
lies in the staging folder, and counts for nothing before the driver commits it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.model import Relation
from tailrace.sinks.contract import required
from tailrace.sinks.delta.evolution import refuse_value
from tailrace.sinks.delta.folder import AddedFile
from tailrace.sinks.delta.shapes import ShapeStep, Unfit, reshaped
from tailrace.sinks.files.parquet import ParquetWriter
from tailrace.sinks.write_job import StagedFile, run, sync_file

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.sinks.delta.sink import TableWork

BATCH_ROWS = 1 << 16
#: Files of a table are put together up to this size.
TASK_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class RewriteTask:
    """Files at `paths`, of rows alike, to be made one at `out`, in the shape of `steps`.

    `kept`: columns of our own that stay after them, with their types.
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
        with pq.ParquetFile(path) as held:
            for batch in held.iter_batches(batch_size=BATCH_ROWS):
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
    sync_file(work.out)
    return {**facts, "rows": writer.rows, "bytes": os.stat(work.out).st_size}


def conformed(
    spark: SparkSession | None, work: TableWork,
    plans: Sequence[tuple[StagedFile, Relation, Sequence[ShapeStep] | None]],
    kept: Sequence[tuple[str, pa.DataType]],
) -> list[StagedFile]:  # fmt: skip
    """Return files of changes, each brought to its relation's shape; steps None: it stays.

    :raises TailraceError: as `conform`.
    """
    context = tuple(work.folder.context.items())
    tasks = []
    for file, _, steps in plans:
        if steps is not None:
            out = work.staged(file.directory, _renamed(file.name))
            tasks.append(
                RewriteTask(
                    (work.staged(file.directory, file.name),), tuple(steps), tuple(kept), out, context
                )
            )
    done = iter(run(spark, tasks, conform, work.folder.sink))
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
    """Bring the rows that the table has into the shape of `steps`, in one commit.

    :param schema: of the table afterwards.
    :raises TailraceError: `SINK_SCHEMA_REFUSED` before anything is changed; `SINK_WRITE_FAILED`.
    """
    # The whole table is read and written: nothing for this process.
    spark = required(spark)
    context = tuple(work.folder.context.items())
    stem = f"reshaped-{work.version:016x}"
    tasks = [
        RewriteTask(paths, tuple(steps), tuple(kept), work.staged(work.folder.path.name, name), context)
        for paths, name in _portions(work.folder.data_files(), stem)
    ]
    done = run(spark, tasks, conform, work.folder.sink)
    files = []
    for task, facts in zip(tasks, done, strict=True):
        if facts["rows"]:
            # A unique name: a commit that failed may have happened nevertheless.
            name = f"{stem}-{os.urandom(6).hex()}.parquet"
            Path(task.out).replace(work.folder.path / name)
            files.append(AddedFile(name, facts["rows"], facts["bytes"], facts))
    work.folder.reshape(files, schema)


def _portions(paths: Sequence[str], stem: str) -> list[tuple[tuple[str, ...], str]]:
    portions: list[list[str]] = []
    size = 0
    for path in sorted(paths):
        bytes_ = os.stat(path).st_size
        if not portions or size + bytes_ > TASK_BYTES:
            portions.append([])
            size = 0
        portions[-1].append(path)
        size += bytes_
    return [(tuple(held), f"{stem}-{number:05d}.parquet") for number, held in enumerate(portions)]


def _replaced(
    file: StagedFile, relation: Relation, steps: Sequence[ShapeStep], facts: dict[str, Any]
) -> StagedFile:
    names = {step.source: step.field.name for step in steps if step.source is not None}
    changed = {**file.facts, **{name: facts[name] for name in ("lowest", "highest", "nulls")}}
    if "open" in changed:
        changed["open"] = [names[name] for name in changed["open"] if name in names]
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
