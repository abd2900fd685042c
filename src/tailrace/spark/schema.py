"""One schema for all versions of a table, and the conversion of rows of any version to it.

A table's columns and types change while its log is read. Rows read with the option `table` have
one schema: every column that any version has, in order of appearance. A column is null in rows of
a version that lacks it. A column whose type changed has a type that represents all its values
without loss; if there is no such type, it is PostgreSQL's text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode.changes import TableChanges
from tailrace.decode.column_policy import EVERYTHING, TablePolicy
from tailrace.decode.schemas import Catalog
from tailrace.decode.types import METADATA, row_schema
from tailrace.errors import Kind, TailraceError
from tailrace.model import OWN_FORMS, Relation, ValueModes
from tailrace.protocol.metadata_frames import schema_frames

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

_DECIMAL_DIGITS_MAX = 38
_INTEGERS = (pa.int16(), pa.int32(), pa.int64())
_IN_DOUBLE = {pa.int16(), pa.int32(), pa.float32(), pa.float64()}
_INTEGER_DIGITS = {pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}


def to_spark(schema: pa.Schema) -> StructType:
    """Return the Spark schema; timestamps without zone become TimestampNTZ."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def to_arrow(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark requires of batches with this schema."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def relations(
    frames: Sequence[bytes],
    in_force: int = 0,
    modes: ValueModes = OWN_FORMS,
    settled: Mapping[tuple[int, int], bytes] | None = None,
) -> list[Relation]:
    """Return every version of every table that schema frames describe, in log order.

    :param in_force: the number of frames, from the first, that are in force at the start: together
        they describe one version of each table.
    :param settled: see `Catalog`.
    """
    catalog = Catalog(frames[:in_force], modes, settled)
    found: dict[Relation, None] = {}
    for place, frame in enumerate(frames):
        if place >= in_force:
            catalog.apply(frame)
        for key, _ in schema_frames(np.frombuffer(frame, np.uint8)):
            # Facts precede their Relation message: with the message before them they describe no version.
            if key.startswith("R"):
                found[catalog.relation(int(key[1:]))] = None
    return list(found)


def table_schema(known: Sequence[Relation], table: str, table_policy: TablePolicy = EVERYTHING) -> pa.Schema:
    """Return the schema that covers every version of `table`, metadata columns last.

    :param table_policy: which columns are delivered, and how they are masked.
    :raises TailraceError: `TABLE_UNKNOWN`, naming tables of similar names; `CONFIG_INVALID` if tables of
        several schemas have this name, because of dots.
    """
    versions = [table_policy.relation(relation) for relation in known if relation.qualified_name == table]
    if not versions:
        names = sorted({relation.qualified_name for relation in known})
        near = difflib.get_close_matches(table, names, n=3) or names[:5]
        raise TailraceError(
            Kind.TABLE_UNKNOWN,
            f"read table {table!r} from the change log: this range of the log has no such table",
            f"similar or known here: {', '.join(near)}" if near else "the log has no table yet",
        )
    if len(schemas := {relation.schema for relation in versions}) > 1:
        raise in_several_schemas(table, schemas)
    columns: dict[str, pa.DataType] = {}
    own = len(METADATA)
    for relation in versions:
        for field in list(row_schema(relation))[:-own]:
            before = columns.get(field.name, field.type)
            columns[field.name] = widened(before, field.type)
    return pa.schema([*(pa.field(name, type_) for name, type_ in columns.items()), *METADATA])


def in_several_schemas(table: str, schemas: Iterable[str]) -> TailraceError:
    """Return the error of a name that tables of several schemas have, because of dots in names."""
    return TailraceError(
        Kind.CONFIG_INVALID,
        f"read table {table!r} from the change log: schemas {', '.join(sorted(schemas))} have such a table",
        "leave the option table out, and select by the columns schema and table of the envelopes",
    )


def widened(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return the narrowest type that represents the values of both exactly; string if there is none."""
    if one == other:
        return one
    if one in _INTEGERS and other in _INTEGERS:
        return max(one, other, key=_INTEGERS.index)
    pair = {one, other}
    if pair == {pa.int16(), pa.float32()}:
        return pa.float32()
    if pair <= _IN_DOUBLE:
        return pa.float64()
    shapes = (_decimal_shape(one), _decimal_shape(other))
    if None not in shapes:
        (whole, scale), (other_whole, other_scale) = shapes  # type: ignore[misc]
        whole, scale = max(whole, other_whole), max(scale, other_scale)
        return pa.decimal128(whole + scale, scale) if whole + scale <= _DECIMAL_DIGITS_MAX else pa.string()
    if pa.types.is_list(one) and pa.types.is_list(other):
        item = widened(one.value_type, other.value_type)
        if not pa.types.is_string(item):
            return pa.list_(item)
    return pa.string()


def _decimal_shape(type_: pa.DataType) -> tuple[int, int] | None:
    """Return (digits before, digits after the point) of a decimal or integer."""
    if pa.types.is_decimal(type_):
        return type_.precision - type_.scale, type_.scale
    return (_INTEGER_DIGITS[type_], 0) if type_ in _INTEGER_DIGITS else None


class Conformer:
    """Converts rows of any version of a table to one schema.

    :param target: the result of `table_schema` in the form that Spark requires (`to_arrow`).
    """

    def __init__(self, target: pa.Schema) -> None:
        self._target = target
        self._as_text: dict[Relation, frozenset[str]] = {}

    def rows(self, changes: TableChanges) -> pa.RecordBatch:
        """Return the typed rows in the target schema.

        :raises TailraceError: `SCHEMA_CHANGED` if this version has a column that the target
            lacks or can't represent; as `TableChanges.rows`.
        """
        relation = changes.relation
        assert relation is not None, "logical messages have no rows"
        if relation not in self._as_text:
            self._as_text[relation] = self._check(relation)
        batch = changes.rows(self._as_text[relation])
        if batch.schema.equals(self._target):
            return batch
        return pa.RecordBatch.from_arrays(
            [self._column(batch, field) for field in self._target], schema=self._target
        )

    def envelopes(self, decoded: Sequence[TableChanges], task: str) -> pa.RecordBatch:
        """Return the changes of all tables in a decode batch as envelopes, in log order.

        :raises TailraceError: as `TableChanges.envelope`.
        """
        batches = [changes.envelope(task) for changes in decoded]
        batch = batches[0]
        if len(batches) > 1:
            batch = pa.concat_batches(batches)
            batch = batch.take(pc.sort_indices(batch.column("log_offset")))
        return batch if batch.schema.equals(self._target) else batch.cast(self._target)

    def _column(self, batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
        at = batch.schema.get_field_index(field.name)
        if at < 0:
            return pa.nulls(batch.num_rows, field.type)
        column = batch.column(at)
        return column if column.type == field.type else pc.cast(column, field.type)

    def _check(self, relation: Relation) -> frozenset[str]:
        # Returns the columns to read as text.
        texts = set()
        for field in list(row_schema(relation))[: -len(METADATA)]:
            at = self._target.get_field_index(field.name)
            wanted = None if at < 0 else self._target.field(at).type
            if wanted is None or widened(wanted, field.type) != wanted:
                now = "new" if wanted is None else f"of type {field.type}, it was {wanted}"
                raise TailraceError(
                    Kind.SCHEMA_CHANGED,
                    f"read rows in the schema of the query: column {field.name!r} is {now}",
                    "start the query again, with the same checkpoint: it then reads the new schema and "
                    "continues where it stopped",
                    {"table": relation.qualified_name},
                )
            # A column that is text in this version, too, is converted by the handling modes.
            if pa.types.is_string(wanted) and not pa.types.is_string(field.type):
                texts.add(field.name)
        return frozenset(texts)
