"""How a table's columns in a target are brought to another shape, without a row being lost.

A `ShapeStep` makes one column of the new shape: from a column of the old one, renamed or cast, or of
one value. Steps are worked out by the driver (`evolution`) and done by executors (`conform`), on
data files of the target and on files of changes alike; so a row that was written before a change
of schema is the same whichever way it went.

Pure: Arrow tables in, Arrow tables out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode.values.stamps import stamp_texts
from tailrace.sinks.delta.type_changes import SAME, Coercion

#: PostgreSQL's infinities are the outermost values of their types.
_OUTERMOST_DAYS = pa.array([2**31 - 1, -(2**31)], pa.int32())
_OUTERMOST_US = (2**63 - 1, -(2**63))

#: What makes an array's item stand in quotes.
_QUOTED = re.compile(r'[{},"\\\s]')

UNCHANGED, SPECIAL, POSITION, ORIGIN = "_unchanged", "_special", "_position", "_origin"
_TEXTS_BY_NAME = (SPECIAL, "_old_key")


@dataclass(frozen=True, slots=True)
class ShapeStep:
    """One column of the new shape.

    `source`: the old column, None if there is none; `fill`: what rows then have, as an array of
    one value, None: NULL. `lenient`: a value that the new type can't hold becomes NULL instead of
    stopping. `unknown`: rows have a value there that nobody sent; it is marked as such. `text`: what
    rows have in PostgreSQL, where the column can't hold it. `coerced`: what becomes of texts.
    """

    field: pa.Field
    source: str | None
    fill: pa.Array | None = None
    lenient: bool = False
    unknown: bool = False
    text: str | None = None
    coerced: Coercion = SAME

    @property
    def is_marked(self) -> bool:
        """Return whether rows have something for the column among their special texts."""
        return self.unknown or self.text is not None


class Unfit(Exception):  # noqa: N818 - the caller knows what to say
    """A value does not fit the new type of its column; `args[0]` names the column."""


def reshaped(rows: pa.Table, steps: Sequence[ShapeStep], kept: Mapping[str, pa.DataType]) -> pa.Table:
    """Return `rows` in the shape of `steps`, then their columns named in `kept`, as they are.

    Lists of names (`_unchanged`) and texts by name (`_special`, also in `_position` and `_origin`)
    follow the renaming; what belongs to a column that is gone goes with it.

    :raises Unfit: if a value does not fit, and its step is not lenient.
    """
    names = {step.source: step.field.name for step in steps if step.source is not None}
    columns: list[pa.Array | pa.ChunkedArray] = [_made(rows, step) for step in steps]
    fields = [step.field.remove_metadata() for step in steps]
    for name, kind in kept.items():
        column = rows[name] if name in rows.column_names else pa.nulls(len(rows), kind)
        columns.append(_followed(name, _one(column), names, steps))
        fields.append(pa.field(name, columns[-1].type))
    return pa.table(columns, schema=pa.schema(fields))


def _made(rows: pa.Table, step: ShapeStep) -> pa.Array | pa.ChunkedArray:
    kind = step.field.type
    if step.source is None or step.source not in rows.column_names:
        if step.fill is None:
            return pa.nulls(len(rows), kind)
        return step.fill.cast(kind).take(pa.array(np.zeros(len(rows), np.int64)))
    return _cast(rows[step.source], step)


def _cast(values: Any, step: ShapeStep) -> Any:
    """Return values of the step's old column as its new one has them.

    :raises Unfit: as `cast_exactly`.
    """
    how = step.coerced
    if how != SAME:
        values = pc.cast(values, pa.string())  # a MERGE of delta-rs writes views of texts
    if how.trimmed:
        values = pc.utf8_rtrim(values, characters=" ")
    if how.padded is not None:
        values = pc.utf8_rpad(values, how.padded, " ")
    if how.cut is not None:
        values = pc.utf8_slice_codeunits(values, 0, how.cut)
    return cast_exactly(values, step.field.type, step.field.name, lenient=step.lenient)


def cast_exactly(values: Any, kind: pa.DataType, name: str, *, lenient: bool = False) -> Any:
    """Return `values` as `kind`. Decimals lose digits after the point as in PostgreSQL: rounded,
    halves away from zero.

    :raises Unfit: if one of them does not fit, unless `lenient`: then it becomes NULL.
    """
    if values.type == kind:
        return values
    if pa.types.is_decimal(values.type) and (pa.types.is_decimal(kind) or pa.types.is_integer(kind)):
        digits = kind.scale if pa.types.is_decimal(kind) else 0
        if digits < values.type.scale:
            # One digit more before the point: 9.9 becomes 10.
            room = pa.decimal256(values.type.precision + 1, values.type.scale)
            values = pc.round(pc.cast(values, room), digits, "half_towards_infinity")
    if lenient and pa.types.is_string(kind):
        return _texts(_one(values))
    if pa.types.is_date32(values.type) and pa.types.is_timestamp(kind):
        values = _one(values)
        outermost = pc.is_in(pc.cast(values, pa.int32()), _OUTERMOST_DAYS)
        if pc.any(outermost).as_py():
            finite = cast_exactly(
                pc.if_else(outermost, pa.scalar(None, values.type), values), kind, name, lenient=lenient
            )
            late = pc.greater(pc.cast(values, pa.int32()), 0)
            return pc.if_else(
                outermost,
                pc.if_else(late, *(pa.scalar(us, pa.int64()).cast(kind) for us in _OUTERMOST_US)),
                finite,
            )
    try:
        return pc.cast(values, kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        if not lenient:
            raise Unfit(name) from error
    return _each(_one(values), kind)


def _texts(values: pa.Array) -> pa.Array:
    """Return values as text: bytes, times and arrays as PostgreSQL writes them, others as Arrow does."""
    if pa.types.is_binary(values.type):
        return pa.array(
            [None if value is None else f"\\x{value.hex()}" for value in values.to_pylist()], pa.string()
        )
    if pa.types.is_list(values.type):
        items = _texts(values.flatten()).to_pylist()
        ends = pc.cumulative_sum(pc.fill_null(values.value_lengths(), 0)).to_pylist()
        return pa.array(
            [
                "{" + ",".join(map(_item, items[start:end])) + "}" if there else None
                for start, end, there in zip([0, *ends], ends, values.is_valid().to_pylist(), strict=False)
            ],
            pa.string(),
        )
    if pa.types.is_date32(values.type) or pa.types.is_timestamp(values.type):
        return stamp_texts(values)
    return pc.cast(values, pa.string())


def _item(text: str | None) -> str:
    if text is None:
        return "NULL"
    if text and text.upper() != "NULL" and not _QUOTED.search(text):
        return text
    return '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _each(values: pa.Array, kind: pa.DataType) -> pa.Array:
    # Values that don't fit are found by halving; usually there are few.
    if len(values) == 0:
        return pa.nulls(0, kind)
    try:
        return pc.cast(values, kind)
    except pa.ArrowNotImplementedError:
        return pa.nulls(len(values), kind)
    except pa.ArrowInvalid:
        if len(values) == 1:
            return pa.nulls(1, kind)
        middle = len(values) // 2
        return pa.concat_arrays([_each(values.slice(0, middle), kind), _each(values.slice(middle), kind)])


def _one(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _followed(name: str, column: pa.Array, names: Mapping[str, str], steps: Sequence[ShapeStep]) -> pa.Array:
    """Return a column of our own, with the names in it as they are in the new shape."""
    if name == UNCHANGED:
        return _lists(column, names)
    if name in _TEXTS_BY_NAME:
        return _maps(column, names)
    if name == POSITION:
        special = _maps(column.field("special"), names)
        special = _marked(special, {step.field.name: step.text for step in steps if step.is_marked})
        return pa.StructArray.from_arrays(
            [column.field("log_offset"), special], fields=list(column.type), mask=column.is_null()
        )
    if name == ORIGIN:
        return _origins(column, names, steps)
    return column


def _lists(column: pa.ListArray, names: Mapping[str, str]) -> pa.ListArray:
    if len(column.flatten()) == 0:
        return column
    return pa.array(
        [
            None if held is None else [names[name] for name in held if name in names]
            for held in column.to_pylist()
        ],
        column.type,
    )


def _maps(column: pa.MapArray, names: Mapping[str, str]) -> pa.MapArray:
    if column.null_count == len(column):
        return column
    return pa.array(
        [
            [(names[name], text) for name, text in held or () if name in names] or None
            for held in column.to_pylist()
        ],
        column.type,
    )


def _marked(column: pa.MapArray, marks: Mapping[str, str | None]) -> pa.MapArray:
    """Return the texts of rows with `marks` added; a null: the value was never sent."""
    if not marks:
        return column
    if column.null_count < len(column):
        return pa.array(
            [list({**dict(held or ()), **marks}.items()) for held in column.to_pylist()], column.type
        )
    each = np.tile(np.arange(len(marks)), len(column))
    keys = pa.array(list(marks), pa.string()).take(pa.array(each))
    texts = pa.array(list(marks.values()), pa.string()).take(pa.array(each))
    offsets = pa.array(np.arange(0, len(each) + 1, len(marks), dtype=np.int32))
    return pa.MapArray.from_arrays(offsets, keys, texts).cast(column.type)


def _origins(column: pa.StructArray, names: Mapping[str, str], steps: Sequence[ShapeStep]) -> pa.StructArray:
    """Return the keys that rows came from; those have the columns that the key has there."""
    kinds = {step.field.name: step for step in steps}
    arrays, fields = [], []
    for field in column.type:
        if field.name == SPECIAL:
            arrays.append(_maps(column.field(SPECIAL), names))
            fields.append(field)
        elif field.name in names:
            step = kinds[names[field.name]]
            arrays.append(_cast(column.field(field.name), step))
            fields.append(pa.field(step.field.name, step.field.type))
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=column.is_null())
