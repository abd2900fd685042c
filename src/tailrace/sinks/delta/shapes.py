"""Converts rows of a target to another schema, without losing a row.

A `ShapeStep` makes one column of the new schema: from a column of the old one, renamed or cast, or from
one value. The driver computes the steps (`evolution`), and executors apply them (`conform`) to data
files of the target and to files of changes alike; so a row that was written before a schema change
has the same content in both.

Pure: Arrow tables in, Arrow tables out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode.values.texts import texts_of
from tailrace.sinks.delta.type_changes import SAME, Coercion

#: PostgreSQL's infinities, in days and microseconds: the highest and lowest values of their types.
_OUTERMOST_DAYS = pa.array([2**31 - 1, -(2**31)], pa.int32())
_OUTERMOST_US = (2**63 - 1, -(2**63))

UNCHANGED, SPECIAL, POSITION, ORIGIN = "_unchanged", "_special", "_position", "_origin"
_TEXTS_BY_NAME = (SPECIAL, "_old_key")


@dataclass(frozen=True, slots=True)
class ShapeStep:
    """One column of the new schema.

    `source`: the old column, None if there is none; `fill`: the value of rows in that case, as an array of
    one value, None: NULL. `lenient`: a value that does not fit the new type becomes NULL instead of an
    error. `unknown`: rows have a value in PostgreSQL that was not sent; it is marked as such. `text`:
    PostgreSQL's text of the rows' value if the column can't represent it. `coerced`: conversion of texts.
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
        """Whether rows get an entry for the column among their special texts."""
        return self.unknown or self.text is not None


class Unfit(Exception):  # noqa: N818 - the caller turns it into an error
    """A value does not fit the new type of its column; `args[0]` names the column."""


def reshaped(rows: pa.Table, steps: Sequence[ShapeStep], kept: Mapping[str, pa.DataType]) -> pa.Table:
    """Return `rows` with the schema of `steps`, followed by their columns in `kept`.

    Lists of names (`_unchanged`) and texts by name (`_special`, also in `_position` and `_origin`) get the
    new names, without entries for dropped columns. The text of a value that a column could not represent
    becomes the column's value when the column becomes text.

    :raises Unfit: if a value does not fit, and its step is not lenient.
    """
    names = {step.source: step.field.name for step in steps if step.source is not None}
    special = _special_of(rows)
    columns: list[pa.Array | pa.ChunkedArray] = [_made(rows, step, special) for step in steps]
    fields = [step.field.remove_metadata() for step in steps]
    texts = {
        step.source
        for step in steps
        if step.source in rows.column_names and _becomes_text(rows[step.source].type, step)
    }
    for name, kind in kept.items():
        column = rows[name] if name in rows.column_names else pa.nulls(len(rows), kind)
        columns.append(_followed(name, _one(column), names, texts, steps))
        fields.append(pa.field(name, columns[-1].type))
    if texts and SPECIAL in names:  # in a history, Tailrace's own columns have steps, too
        at = next(at for at, step in enumerate(steps) if step.source == SPECIAL)
        columns[at] = _maps(_one(columns[at]), {name: name for name in names}, texts)
    return pa.table(columns, schema=pa.schema(fields))


def _special_of(rows: pa.Table) -> pa.MapArray | None:
    """Return the texts of values that the rows' columns can't represent, by column."""
    if SPECIAL in rows.column_names:
        return _one(rows[SPECIAL])
    return _one(rows[POSITION]).field("special") if POSITION in rows.column_names else None


def _becomes_text(held: pa.DataType, step: ShapeStep) -> bool:
    is_text = pa.types.is_string(held) or pa.types.is_large_string(held) or pa.types.is_string_view(held)
    return step.lenient and pa.types.is_string(step.field.type) and not is_text


def _with_special(texts: Any, special: pa.MapArray | None, name: str) -> pa.Array:
    """Return `texts`, with the texts of values that the column `name` could not represent instead of them."""
    texts = _one(texts)
    if special is None or special.null_count == len(special):
        return texts
    return pc.coalesce(pc.map_lookup(special, pa.scalar(name, pa.string()), "last"), texts)


def _made(rows: pa.Table, step: ShapeStep, special: pa.MapArray | None) -> pa.Array | pa.ChunkedArray:
    kind = step.field.type
    if step.source is None or step.source not in rows.column_names:
        if step.fill is None:
            return pa.nulls(len(rows), kind)
        return step.fill.cast(kind).take(pa.array(np.zeros(len(rows), np.int64)))
    values = rows[step.source]
    found = _cast(values, step)
    return _with_special(found, special, step.source) if _becomes_text(values.type, step) else found


def _cast(values: Any, step: ShapeStep) -> Any:
    """Return values of the step's old column converted to its new one.

    :raises Unfit: as `cast_exactly`.
    """
    how = step.coerced
    if how != SAME:
        values = pc.cast(values, pa.string())  # a MERGE of delta-rs writes the type string_view
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
    if pa.types.is_integer(values.type) and pa.types.is_decimal(kind):
        values = pc.cast(values, pa.decimal128(19, 0))  # its own cast requires digits for every integer
    if pa.types.is_decimal(values.type) and (pa.types.is_decimal(kind) or pa.types.is_integer(kind)):
        digits = kind.scale if pa.types.is_decimal(kind) else 0
        if digits < values.type.scale:
            # Rounding may need one more digit before the point: 9.9 becomes 10.
            room = pa.decimal256(values.type.precision + 1, values.type.scale)
            values = pc.round(pc.cast(values, room), digits, "half_towards_infinity")
    if lenient and pa.types.is_string(kind):
        return texts_of(_one(values))
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


def _each(values: pa.Array, kind: pa.DataType) -> pa.Array:
    # Values that don't fit are found by bisection; usually there are few.
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


def _followed(
    name: str,
    column: pa.Array,
    names: Mapping[str, str],
    texts: Collection[str | None],
    steps: Sequence[ShapeStep],
) -> pa.Array:
    """Return one of Tailrace's own columns, with the new names of columns in its values.

    :param texts: old columns that became text, so that they have their special texts as values.
    """
    if name == UNCHANGED:
        return _lists(column, names)
    if name in _TEXTS_BY_NAME:
        return _maps(column, names, texts if name == SPECIAL else ())
    if name == POSITION:
        special = _maps(column.field("special"), names, texts)
        special = _marked(special, {step.field.name: step.text for step in steps if step.is_marked})
        return pa.StructArray.from_arrays(
            [column.field("log_offset"), special], fields=list(column.type), mask=column.is_null()
        )
    if name == ORIGIN:
        return _origins(column, names, texts, steps)
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


def _maps(column: pa.MapArray, names: Mapping[str, str], texts: Collection[str | None] = ()) -> pa.MapArray:
    if column.null_count == len(column):
        return column
    return pa.array(
        [
            [
                (names[name], text)
                for name, text in held or ()
                if name in names and (text is None or name not in texts)
            ]
            or None
            for held in column.to_pylist()
        ],
        column.type,
    )


def _marked(column: pa.MapArray, marks: Mapping[str, str | None]) -> pa.MapArray:
    """Return the special texts of rows with `marks` added; null: the value was never sent."""
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


def _origins(
    column: pa.StructArray,
    names: Mapping[str, str],
    texts: Collection[str | None],
    steps: Sequence[ShapeStep],
) -> pa.StructArray:
    """Return the keys that rows came from, with the key's columns renamed and converted."""
    kinds = {step.field.name: step for step in steps}
    special = column.field(SPECIAL) if column.type.get_field_index(SPECIAL) >= 0 else None
    arrays, fields = [], []
    for field in column.type:
        if field.name == SPECIAL:
            arrays.append(_maps(column.field(SPECIAL), names, texts))
            fields.append(field)
        elif field.name in names:
            step = kinds[names[field.name]]
            values = column.field(field.name)
            found = _cast(values, step)
            if _becomes_text(values.type, step):
                found = _with_special(found, special, field.name)
            arrays.append(found)
            fields.append(pa.field(step.field.name, step.field.type))
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=column.is_null())
