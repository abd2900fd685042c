"""Columns in other types, and fields of struct columns.

To text a cast goes as PostgreSQL writes it, to all else as in an expression. Fields are what a row or a key
is made of; the struct's own nulls stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode.values.texts import texts_of
from tailrace.expressions import computing
from tailrace.expressions.language import ExpressionError

TEXT = "VARCHAR"


def cast(values: pa.Array, to: str) -> pa.Array:
    """Return values in another type; a null stays one.

    :param to: as `expressions.language.require_type` returns it.
    :raises ExpressionError: if there is no such cast, or a value does not fit.
    """
    if to != TEXT:
        return computing.cast(values, to)
    try:
        return texts_of(values)
    except pa.ArrowNotImplementedError:
        raise ExpressionError(f"{values.type} has no text", to, 0) from None


def members(values: pa.StructArray) -> dict[str, pa.Array]:
    """Return the fields by name; a field of a null struct is null."""
    return dict(zip([field.name for field in values.type], values.flatten(), strict=True))


def struct_of(found: Mapping[str, pa.Array], absent: pa.Array | None, count: int) -> pa.Array:
    """Return a struct of fields; null where `absent`. Without any field it is empty, not null."""
    if not found:
        return _empty(absent, count)
    fields = [pa.field(name, values.type) for name, values in found.items()]
    return pa.StructArray.from_arrays(list(found.values()), fields=fields, mask=absent)


def _empty(absent: pa.Array | None, count: int) -> pa.Array:
    validity = None
    if absent is not None:
        there = ~absent.to_numpy(zero_copy_only=False)
        validity = pa.py_buffer(np.packbits(there, bitorder="little"))
    return pa.Array.from_buffers(pa.struct([]), count, [validity])


def edited(values: pa.Array, edit: Callable[[dict[str, pa.Array]], Mapping[str, pa.Array]]) -> pa.Array:
    """Return a struct with what `edit` makes of its fields; another column stays as it is."""
    if not pa.types.is_struct(values.type):
        return values
    absent = pc.is_null(values) if values.null_count else None
    return struct_of(edit(members(values)), absent, len(values))


def either(condition: npt.NDArray[np.bool_], first: pa.Array, second: pa.Array) -> pa.Array:
    """Return `first` where the condition is true, else `second`: structs, with the fields of both.

    :raises pyarrow.ArrowTypeError: if a field has a type in each, and no type holds both.
    """
    if first.type != second.type:
        columns = [pa.schema([("row", values.type)]) for values in (second, first)]
        shared = pa.unify_schemas(columns, promote_options="permissive").field(0).type
        first, second = first.cast(shared), second.cast(shared)
    # Structs are taken by place, whatever their fields are.
    count = len(first)
    places = np.arange(count) + np.where(condition, 0, count)
    return pa.concat_arrays([first, second]).take(pa.array(places))
