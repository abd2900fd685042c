"""Mirrors of tables without a key: rows are identified by all their values, and equal rows are counted.

Under `REPLICA IDENTITY FULL` a delete and an update send the whole old row. So a range is a
list of added and removed rows. Equal rows cancel out; of the others, added rows are inserted, and
for each removed row one of the target's equal rows is deleted; it does not matter which. Each row
of the target has the log offset of the change that inserted it in its guard column, which no other
row has, so one of several equal rows can be selected.
"""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from tailrace.decode.changes import TableChanges
from tailrace.errors import Kind, TailraceError
from tailrace.model import Op, Relation
from tailrace.sinks.delta.mirror.files import POSITION
from tailrace.sinks.delta.mirror.merge import (
    committing,
    comparable,
    literal_path,
    maps_of,
    quoted,
)
from tailrace.sinks.delta.mirror.net_changes import LOG_OFFSET, SPECIAL, UPSERT
from tailrace.sinks.files.parquet import ParquetWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tailrace.sinks.delta.folder import DeltaFolder

_FLOATS = {"float", "double", "array<float>", "array<double>"}
_RANK, _MORE = quoted("~rank"), quoted("~more")  # no column of a mirror has such a name; see `names`


class WholeRowWriter:
    """Writes the added and removed rows of one table and split, in log order.

    A file without `_upsert` has only added rows. Facts as `files.NetWriter`.
    """

    def __init__(self, path: str, relation: Relation) -> None:
        self.rows = 0
        self._path = path
        self._own = [column.name for column in relation.columns]
        self._rows: list[pa.Table] = []
        self._truncated = False

    def write(self, changes: TableChanges) -> None:
        self.rows += changes.count
        rows = changes.rows()
        op = changes.op
        came = rows.filter(pa.array(np.isin(op, [ord(Op.READ), ord(Op.CREATE), ord(Op.UPDATE)])))
        went = rows.filter(pa.array(op == ord(Op.DELETE)))
        self._rows.append(self._signed(came, True))
        self._rows.append(self._signed(went, False))
        if (old := changes.old_rows()) is not None:
            self._rows.append(self._signed(old, False))
        truncates = changes.log_offset[op == ord(Op.TRUNCATE)]
        if len(truncates):
            self._truncated = True
            since = int(truncates[-1])
            self._rows = [rows.filter(_offsets(rows) > since) for rows in self._rows]

    def close(self) -> dict[str, Any]:
        data = pa.concat_tables(self._rows)
        schema = data.drop_columns([UPSERT]).schema
        plain = bool(data[UPSERT].to_numpy().all())
        writer = ParquetWriter(self._path, "zstd")
        writer.write_table(data.drop_columns([UPSERT]) if plain else data)
        return {
            **writer.close(),
            "schema": schema.serialize().to_pybytes(),
            "net_rows": len(data),
            "plain": plain,
            "truncated": self._truncated,
        }

    def _signed(self, rows: pa.RecordBatch, came: bool) -> pa.Table:
        position = pa.StructArray.from_arrays(
            [rows.column(LOG_OFFSET), rows.column(SPECIAL)], names=["log_offset", "special"]
        )
        columns = {name: rows.column(name) for name in self._own}
        return pa.table({**columns, POSITION: position, UPSERT: pa.array(np.full(len(rows), came))})


def _offsets(rows: pa.Table) -> np.ndarray[Any, np.dtype[np.int64]]:
    offsets: np.ndarray[Any, np.dtype[np.int64]] = (
        rows[POSITION].combine_chunks().field("log_offset").to_numpy()
    )
    return offsets


def merge_rows(
    spark: SparkSession | None,
    folder: DeltaFolder,
    paths: list[str],
    columns: list[str],
    version: int,
    *,
    from_empty: bool,
) -> None:
    """Merge the added and removed rows, in files at `paths`, into the table, in one commit.

    :param from_empty: the table was emptied before the first of them.
    :raises TailraceError: `SPARK_FAILED` if nothing was committed; `SINK_DAMAGED` if the mirror lacks a
        removed row.
    """
    with committing(spark, folder, version) as (session, target):
        changes = session.read.option("mergeSchema", "true").parquet(*map(literal_path, paths))
        if UPSERT not in changes.columns:
            changes = changes.selectExpr("*", f"true as {UPSERT}")
        changes = changes.selectExpr(*map(quoted, columns), POSITION, f"coalesce({UPSERT}, true) as {UPSERT}")
        ranked = _ranked(changes, columns)
        came = ranked.where(f"{UPSERT} and {_RANK} <= {_MORE}")
        came = came.select(*map(quoted, columns), POSITION, UPSERT)
        source = came
        if not from_empty:
            went = ranked.where(f"not {UPSERT} and {_RANK} <= - {_MORE}")
            source = came.unionByName(_victims(went, target.toDF(), columns))
        written = Path(paths[0]).with_name(f"rows-{Path(paths[0]).name}")
        source.write.parquet(str(written))
        source = session.read.parquet(literal_path(str(written)))
        if source.where(f"{POSITION}.log_offset is null").limit(1).count():
            raise _unknown_row(folder)
        merging = (
            target.alias("t")
            .merge(source.alias("s"), "t._position.log_offset = s._position.log_offset")
            .whenMatchedDelete(f"not s.{UPSERT}")
            .whenNotMatchedInsert(
                f"s.{UPSERT}", {quoted(name): f"s.{quoted(name)}" for name in (*columns, POSITION)}
            )
        )
        (merging.whenNotMatchedBySourceDelete() if from_empty else merging).execute()


def _ranked(rows: DataFrame, columns: list[str]) -> DataFrame:
    """Return `rows` with `_RANK`, which numbers equal added rows from 1, and equal removed rows likewise;
    and `_MORE`, the number of added rows minus that of removed ones.
    """
    alike = _alike(rows, columns)
    return rows.selectExpr(
        "*",
        f"row_number() over (partition by {alike}, {UPSERT} order by {POSITION}.log_offset desc) as {_RANK}",
        f"sum(case when {UPSERT} then 1 else -1 end) over (partition by {alike}) as {_MORE}",
    )


def _alike(rows: DataFrame, columns: list[str]) -> str:
    """Return the SQL expressions that are equal in equal rows."""
    return ", ".join(_identified(rows, columns, ""))


def _identified(rows: DataFrame, columns: list[str], side: str) -> list[str]:
    """Return the SQL expressions that identify a row of one side, such as `t.`.

    Floating-point numbers as text: rows with 0 and -0 are different rows, but equal to Spark.
    """
    maps = maps_of(rows)
    floats = {
        field.name: "array<double>" if kind.startswith("array") else "double"
        for field in rows.schema
        if (kind := field.dataType.simpleString()) in _FLOATS
    }
    own = [
        f"cast(cast({side}{quoted(name)} as {floats[name]}) as string)"
        if name in floats
        else comparable(f"{side}{quoted(name)}", name, maps)
        for name in columns
    ]
    return [*own, _texts(side + POSITION)]


def _texts(position: str) -> str:
    """Return an SQL expression for a row's special texts as text, because maps can't be compared."""
    return f"cast(array_sort(map_entries({position}.special)) as string)"


def _victims(went: DataFrame, target: DataFrame, columns: list[str]) -> DataFrame:
    """Return, for each removed row, the position of one of the target's equal rows; null if none is left."""
    from pyspark.sql.functions import expr

    alike = _alike(target, columns)
    numbered = target.selectExpr(
        "*", f"row_number() over (partition by {alike} order by {POSITION}.log_offset) as {_RANK}"
    )
    sides = zip(_identified(went, columns, "g."), _identified(target, columns, "o."), strict=True)
    terms = [*(f"{gone} <=> {there}" for gone, there in sides), f"g.{_RANK} = o.{_RANK}"]
    condition = reduce(lambda first, second: first & second, map(expr, terms))
    nulls = [
        expr(f"cast(null as {field.dataType.simpleString()})").alias(field.name)
        for field in went.schema
        if field.name in columns
    ]
    return (
        went.alias("g")
        .join(numbered.alias("o"), condition, "left")
        .select(*nulls, expr(f"o.{POSITION}").alias(POSITION), expr("false").alias(UPSERT))
    )


def _unknown_row(folder: DeltaFolder) -> TailraceError:
    return TailraceError(
        Kind.SINK_DAMAGED,
        "mirror a table by whole rows: a row was removed that the mirror does not have",
        "a column was added with a default, or the mirror began without a snapshot: give the sink a "
        "new, empty path and a log with a snapshot; or give the table a primary key, without which a table "
        "of MySQL with a `float` can't be mirrored",
        {"sink": folder.sink, "table": folder.table},
    )
