"""Delta tables with one row per change: the history of each source table.

The files are like those of the Parquet sink. A commit adds a range's files of one table. New
columns of the source, and wider types, are added in a separate commit just before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import pyarrow as pa

from tailrace.decode.types import METADATA, OLD_KEY
from tailrace.errors import Kind, TailraceError
from tailrace.sinks.delta.evolution import same_type
from tailrace.sinks.delta.rewrite import conformed, reshape_table
from tailrace.sinks.delta.shapes import ShapeStep
from tailrace.sinks.files.parquet import open_parquet
from tailrace.sinks.names import as_history, beside
from tailrace.sinks.write_job import FileFormat
from tailrace.spark.schema import widened

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.sinks.delta.sink import TableWork


class DeltaAppend:
    """The mode `append` of the sink `delta` (`delta.sink.DeltaMode`)."""

    kind = "append"
    commits_at_once = 8
    follows_names = False
    format = FileFormat(
        "parquet", as_history, lambda _origin, _task: partial(open_parquet, compression="zstd")
    )

    def __init__(self, on_type_change: str = "stop") -> None:
        """:param on_type_change: `stop`, or `follow`: a column becomes text if no other type fits."""
        self._follow = on_type_change == "follow"

    def commit(self, spark: SparkSession | None, work: TableWork) -> None:
        """As `DeltaMode.commit`.

        :raises TailraceError: `SINK_SCHEMA_REFUSED` before anything is changed.
        """
        folder = work.folder
        schemas = [_schema(file.schema) for file in work.files]
        plan = _history_plan(folder.schema(), schemas, follow=self._follow, context=folder.context)
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


#: Tailrace's own columns whose values contain names of the table's columns.
_KEPT = tuple((field.name, field.type) for field in (*METADATA[-2:], OLD_KEY))


def _schema(serialized: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(serialized))


@dataclass(frozen=True, slots=True)
class _HistoryPlan:
    """How files with several schema versions are added to a table of changes.

    `schema`: its columns afterwards. `rewrite`: steps for its existing rows, None if they stay.
    `added`: columns that it lacks. `files`: for each file its steps, None if it already fits.
    """

    schema: pa.Schema
    rewrite: list[ShapeStep] | None
    added: list[pa.Field]
    files: list[list[ShapeStep] | None]


def _history_plan(
    have: pa.Schema, files: Sequence[pa.Schema], *, follow: bool, context: dict[str, str]
) -> _HistoryPlan:
    """Return how to add files with these schemas.

    Columns are matched by name. Two different types are replaced by one that has the values of both;
    if there is none, by text under `follow`, and otherwise the change is refused.

    :param have: the table's columns; empty: there is no table.
    :raises TailraceError: `SINK_SCHEMA_REFUSED`.
    """
    target = {field.name: field for field in have}
    places: list[dict[str, str]] = []  # for each file: its column's name to the table's
    for schema in files:
        place = {}
        for field in schema:
            name = _place(field.name, target)
            place[field.name] = name
            if name not in target:
                target[name] = pa.field(name, field.type)
            elif not same_type(target[name].type, field.type):
                kind = _common_type(target[name].type, field.type)
                if kind is None and not follow:
                    _refuse_history(name, target[name].type, field.type, context)
                target[name] = target[name].with_type(pa.string() if kind is None else kind)
        places.append(place)
    widened_ones = [field.name for field in have if not same_type(field.type, target[field.name].type)]
    rewrite = None
    if widened_ones:
        rewrite = [
            ShapeStep(field, name if name in have.names else None, lenient=follow)
            for name, field in target.items()
        ]
    return _HistoryPlan(
        schema=pa.schema(list(target.values())),
        rewrite=rewrite,
        added=[field for name, field in target.items() if name not in have.names],
        files=[
            _file_steps(schema, place, target, follow=follow)
            for schema, place in zip(files, places, strict=True)
        ],
    )


def _place(name: str, target: dict[str, pa.Field]) -> str:
    """Return the table's column for a file's column: with another name if only the case differs."""
    if name in target:
        return name
    taken = any(other.lower() == name.lower() for other in target)
    return beside(name) if taken else name


def _file_steps(
    schema: pa.Schema, place: dict[str, str], target: dict[str, pa.Field], *, follow: bool
) -> list[ShapeStep] | None:
    if all(
        name == place[name] and same_type(schema.field(name).type, target[name].type) for name in schema.names
    ):
        return None
    return [ShapeStep(target[place[name]], name, lenient=follow) for name in schema.names]


def _common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return a type that has all values of both types unchanged; None if there is none."""
    found = widened(one, other)
    if not pa.types.is_string(found):
        return found
    return pa.timestamp("us") if {one, other} == {pa.date32(), pa.timestamp("us")} else None


def _refuse_history(name: str, old: pa.DataType, new: pa.DataType, context: dict[str, str]) -> NoReturn:
    raise TailraceError(
        Kind.SINK_SCHEMA_REFUSED,
        f"follow a change of schema: column {name!r} is {old} in the target and {new} in the source now, and "
        "no type holds both",
        "choose: set `on_type_change: follow` for the sink and start again: the column becomes text, with "
        "all its values; or give the sink a new, empty path and let it begin where the log has the new type "
        "(`tailrace log schemas`, `tailrace replay --from`); or leave the table out of the sink's `tables`",
        {**context, "column": name},
    )
