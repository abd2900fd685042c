"""Delta tables with the current state of the source's tables, updated by MERGE.

Executors reduce each split to its net changes (`files`); files of several splits are
reduced once more; then one Delta commit moves a table from one transaction boundary to a later
one. A new table, or one that was truncated in the range, needs no merge: its rows after the
range are those of the net changes, and become its content in one commit of delta-rs.

Otherwise Spark executes a MERGE (delta-rs a small one), whose source is existing files, so it can't
change between Spark's two readings of it. A value that was not sent is taken from the target's
row. The guard `_position.log_offset` keeps a replay from setting a row back to an older state.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tailrace.model import Relation
from tailrace.sinks.contract import required
from tailrace.sinks.delta.evolution import (
    ExistingColumn,
    added_only,
    changes_nothing,
    described,
    held_columns,
    held_in_file,
    mirror_steps,
)
from tailrace.sinks.delta.folder import AddedFile
from tailrace.sinks.delta.key_bounds import apart, beyond
from tailrace.sinks.delta.mirror.files import (
    KEPT,
    POSITION,
    POSITION_TYPE,
    Composition,
    NetWriter,
    bounds_of,
    compose,
    open_net,
)
from tailrace.sinks.delta.mirror.merge import NetSource, merge
from tailrace.sinks.delta.mirror.small_merge import (
    IN_PROCESS_TARGET_BYTES_MAX,
    SmallMerge,
    is_small,
    merge_small,
)
from tailrace.sinks.delta.mirror.whole_rows import WholeRowWriter, merge_rows
from tailrace.sinks.delta.rewrite import conformed, reshape_table
from tailrace.sinks.delta.shapes import ShapeStep
from tailrace.sinks.names import as_mirror
from tailrace.sinks.write_job import FileFormat, StagedFile, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.sinks.delta.sink import TableWork

#: Most net changes of a table, and most bytes of them in memory, that one executor reduces at a time.
BUCKET_ROWS, BUCKET_BYTES = 2_000_000, 512 << 20


class DeltaMirror:
    """The mode `mirror` of the sink `delta` (`delta.sink.DeltaMode`)."""

    kind = "mirror"
    commits_at_once = 3
    follows_names = True

    def __init__(
        self, keyless: str = "refuse", on_type_change: str = "stop", *, reads_once: bool = False
    ) -> None:
        """Create the mode.

        :param keyless: `refuse` tables without a key, or mirror them by `full_row`.
        :param on_type_change: `stop`, or `follow`: after a change that can't be followed exactly,
            rows have their old values cast to the new type, or NULL.
        :param reads_once: the source's snapshots have each key once.
        """
        opener = open_by_key_or_row if keyless == "full_row" else open_net
        opened = partial(opener, reads_once=reads_once)
        self.format = FileFormat("parquet", as_mirror, lambda _origin, _task: opened)
        self._follow = on_type_change == "follow"

    def commit(self, spark: SparkSession | None, work: TableWork) -> None:
        """As `DeltaMode.commit`; one commit for each key that the table has within the range.

        :raises TailraceError: `SINK_SCHEMA_REFUSED` before anything is changed; `SPARK_FAILED`.
        """
        files = _since_truncate(work.files)
        # A table that was dropped and created again begins empty, like one that was truncated.
        other = work.folder.relation() not in (0, files[-1].relation.oid)
        from_empty = bool(files[0].facts["truncated"]) or not work.folder.exists() or other
        by_key = [tuple(held) for _, held in groupby(files, lambda file: key_of(file.relation))]
        for number, alike in enumerate(by_key):
            if number > 0:
                work.folder.committed()  # reads the table again: executors or Spark may have committed to it
            last = number + 1 == len(by_key)
            version = work.version if last else by_key[number + 1][0].first
            part = replace(work, files=alike, version=version)
            self._commit_alike(spark, part, from_empty=from_empty and number == 0)

    def _commit_alike(self, spark: SparkSession | None, work: TableWork, *, from_empty: bool) -> None:
        """Commit files whose rows have the same key columns, with the schema of the last of them."""
        relation = work.files[-1].relation
        own = _own_schema(work.files[-1])
        plans = []
        for file in work.files:
            have = held_in_file(file.relation, _own_schema(file))
            follow = self._follow or not file.facts["net_rows"]  # no row has a value of the old type
            plans.append((file, relation, _steps(have, relation, own, work, follow)))
        files = conformed(spark, work, plans, KEPT)
        schema = own.append(pa.field(POSITION, POSITION_TYPE))
        if not from_empty:
            self._reshape(spark, work, own, schema)
        if not relation.key:
            _commit_whole_rows(spark, work, files, schema, from_empty=from_empty)
        elif from_empty:
            _begin(work, schema, _rows(spark, work, files, schema))
        elif _all_new(files, work):
            work.folder.append(
                [_placed(work, file) for file in files if file.facts["net_rows"]], work.version
            )
        else:
            source = _net(spark, work, files, schema)
            if source.rows and not _merged_small(spark, work, source, schema):
                merge(spark, work.folder, source, work.version)

    def _reshape(
        self, spark: SparkSession | None, work: TableWork, own: pa.Schema, schema: pa.Schema
    ) -> None:
        """Give the table the current columns of its relation, and its rows the values for them."""
        relation, folder = work.files[-1].relation, work.folder
        have = [column for column in held_columns(folder.schema()) if column.name != POSITION]
        follow = self._follow or not folder.bytes()
        steps = mirror_steps(have, relation, own, follow=follow, context=folder.context)
        stays = changes_nothing(have, steps)
        if stays and not folder.unnoted(described(own, relation)):
            return
        work.note_columns(next(file.first for file in work.files if file.relation == relation))
        added = [] if stays else added_only(have, steps)
        if added is not None:
            folder.add_columns(added)
            folder.note_columns(described(own, relation))
            return
        kept = ((POSITION, POSITION_TYPE),)
        reshape_table(spark, work, steps, kept, described(schema, relation))


def key_of(relation: Relation) -> tuple[object, ...]:
    """Return the numbers of the key's columns, which stay when they are renamed; () if there is no key."""
    numbers = {column.name: column.number for column in relation.columns}
    return tuple(numbers[name] or name for name in relation.key)


def _steps(
    have: Sequence[ExistingColumn], relation: Relation, own: pa.Schema, work: TableWork, follow: bool
) -> list[ShapeStep] | None:
    steps = mirror_steps(have, relation, own, follow=follow, context=work.folder.context)
    return None if changes_nothing(have, steps) else steps


def _all_new(files: Sequence[StagedFile], work: TableWork) -> bool:
    """Return whether the range only has rows whose keys the target certainly does not have."""
    column = files[-1].relation.key[0]
    facts = [file.facts for file in files]
    return (
        all(each["plain"] for each in facts)
        and any(each["net_rows"] for each in facts)
        and apart(facts, column)
        and beyond(facts, column, work.folder.highest(column))
    )


def _merged_small(spark: SparkSession | None, work: TableWork, source: NetSource, schema: pa.Schema) -> bool:
    size = work.folder.bytes()
    if not is_small(source, schema, size):
        return False
    if size > IN_PROCESS_TARGET_BYTES_MAX:
        spark = required(spark)
    small = SmallMerge(str(work.folder.path), work.folder.application, work.version, work.table, source)
    return all(run(spark, [small], merge_small, work.folder.sink))


def open_by_key_or_row(path: str, relation: Relation, *, reads_once: bool) -> NetWriter | WholeRowWriter:
    """Return a writer of net changes, by whole rows for a table without a key."""
    if relation.key:
        return open_net(path, relation, reads_once=reads_once)
    return WholeRowWriter(path, relation)


def _begin(work: TableWork, schema: pa.Schema, files: Sequence[AddedFile]) -> None:
    """Replace the table's content by `files`, or create the table with them."""
    schema = described(schema, work.files[-1].relation)
    if work.folder.exists():
        work.folder.replace(files, work.version, schema)
    else:
        work.folder.create(schema, files, work.version)


def _commit_whole_rows(
    spark: SparkSession | None,
    work: TableWork,
    files: Sequence[StagedFile],
    schema: pa.Schema,
    *,
    from_empty: bool,
) -> None:
    if from_empty and all(file.facts["plain"] for file in files):
        _begin(work, schema, [_placed(work, file) for file in files if file.facts["net_rows"]])
        return
    schema = described(schema, work.files[-1].relation)
    if not work.folder.exists():
        work.folder.create(schema, [], 0)
    elif from_empty and not work.folder.has_columns(schema):
        work.note_columns(work.version - 1)  # the next range has to end with the rows of this one
        work.folder.reshape([], schema)
    paths = [work.staged(file.directory, file.name) for file in files if file.facts["net_rows"]]
    columns = [name for name in schema.names if name != POSITION]
    if paths:
        merge_rows(spark, work.folder, paths, columns, work.version, from_empty=from_empty)


def _since_truncate(files: Sequence[StagedFile]) -> Sequence[StagedFile]:
    """Return the files from the last one with a truncate on: earlier files have no effect."""
    last = max((at for at, file in enumerate(files) if file.facts["truncated"]), default=0)
    return files[last:]


def _own_schema(file: StagedFile) -> pa.Schema:
    """Return the table's own columns in a file."""
    whole = pa.ipc.read_schema(pa.py_buffer(file.schema))
    return pa.schema([whole.field(column.name) for column in file.relation.columns])


def _rows(
    spark: SparkSession | None, work: TableWork, files: Sequence[StagedFile], schema: pa.Schema
) -> list[AddedFile]:
    """Return data files with the rows of a table that was empty before `files`."""
    snapshots = {file.facts["snapshot"] for file in files if file.rows}
    disjoint = (len(snapshots) == 1 and None not in snapshots) or apart(
        [file.facts for file in files], files[-1].relation.key[0]
    )
    disjoint = disjoint or len(files) == 1
    if disjoint and all(file.facts["plain"] for file in files):
        return [_placed(work, file) for file in files if file.facts["net_rows"]]
    added = []
    for number, facts in enumerate(_composed(spark, work, files, schema, rows_only=True)):
        stem = os.path.splitext(files[0].name)[0]
        name = work.move(Path(facts["path"]), f"{stem}-net-{number:03d}.parquet")
        added.append(AddedFile(name, facts["rows"], facts["bytes"], facts))
    return [file for file in added if file.rows]


def _placed(work: TableWork, file: StagedFile) -> AddedFile:
    added = work.place(file)
    return AddedFile(added.name, file.facts["net_rows"], added.bytes, added.facts)


def _net(
    spark: SparkSession | None, work: TableWork, files: Sequence[StagedFile], schema: pa.Schema
) -> NetSource:
    """Return the net changes of all `files`, in files with one event per key."""
    key = files[-1].relation.key
    if len(files) == 1 or apart([file.facts for file in files], key[0]):
        found = [
            {**file.facts, "path": work.staged(file.directory, file.name), "rows": file.facts["net_rows"]}
            for file in files
        ]
    else:
        found = _composed(spark, work, files, schema, rows_only=False)
    nulls = frozenset(name for each in found for name in key if each["nulls"].get(name))
    return NetSource(
        paths=tuple(each["path"] for each in found if each["rows"]),
        rows=sum(each["rows"] for each in found),
        bytes=sum(each["net_bytes"] for each in found),
        columns=tuple(name for name in schema.names if name != POSITION),
        key=key,
        open=frozenset(name for each in found for name in each["open"]),
        moved=any(each["moved"] for each in found),
        null_keys=bool(nulls),
        special=any(each["special"] for each in found),
        # Also of an `xid8` that its column can't hold: it is null there.
        texts=tuple(name for name in key if name in nulls or _may_be_special(schema.field(name).type)),
    )


def _composed(
    spark: SparkSession | None,
    work: TableWork,
    files: Sequence[StagedFile],
    schema: pa.Schema,
    *,
    rows_only: bool,
) -> list[dict[str, Any]]:
    relation = files[-1].relation
    paths = tuple(work.staged(file.directory, file.name) for file in files)
    rows, size = (sum(file.facts[fact] for file in files) for fact in ("net_rows", "net_bytes"))
    buckets = max(1, -(-rows // BUCKET_ROWS), -(-size // BUCKET_BYTES))
    divided_by, bounds = "", None
    plain = [name for name in relation.key if not pa.types.is_nested(schema.field(name).type)]
    # Events of a row whose key changed may be in different buckets of keys.
    if buckets > 1 and plain and not any(file.facts["moved"] for file in files):
        fact = "net_rows" if rows * BUCKET_BYTES > size * BUCKET_ROWS else "net_bytes"
        largest = max(zip((file.facts[fact] for file in files), paths, strict=True))[1]
        divided_by, bounds = bounds_of(largest, plain, buckets)
    row_bytes = tuple(file.facts["net_bytes"] // max(1, file.facts["net_rows"]) + 1 for file in files)
    serialized = schema.serialize().to_pybytes()
    # With the table's folder and version: a range may have two tables with one name, and two commits of one.
    stem = f"net-{work.version:016x}"
    compositions = [
        Composition(
            relation, paths, row_bytes, serialized, rows_only, bucket, buckets, divided_by, bounds,
            work.staged(work.folder.path.name, f"{stem}-{bucket:05d}.parquet"),
        )
        for bucket in range(buckets)
    ]  # fmt: skip
    return run(spark, compositions, compose, work.folder.sink)


def _may_be_special(kind: pa.DataType) -> bool:
    """Return whether a column of this type can have values that only their text distinguishes."""
    return bool(pa.types.is_decimal(kind) or pa.types.is_temporal(kind) or pa.types.is_nested(kind))
