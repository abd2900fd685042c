"""Casts columns, and edits the fields of struct columns.

A cast to text writes values as PostgreSQL does; other casts are those of expressions. The fields of a struct
are the columns of a row or a key; the struct's own nulls stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.decode.gather import end_to_end, replaced
from tailrace.decode.postgres_types import item_of
from tailrace.decode.rows import specials
from tailrace.decode.types import cast_as_sent, known_type
from tailrace.decode.values.texts import texts_of
from tailrace.expressions import computing
from tailrace.expressions.language import ExpressionError
from tailrace.model import Relation
from tailrace.records.group import Flags, Group

TEXT = "VARCHAR"


def cast(values: pa.Array, to: str) -> pa.Array:
    """Return values cast to another type; null stays null.

    :param to: as `expressions.language.require_type` returns it.
    :raises ExpressionError: if there is no such cast, or a value does not fit the type.
    """
    if to != TEXT:
        return computing.cast(values, to)
    try:
        return texts_of(values)
    except pa.ArrowNotImplementedError:
        raise ExpressionError(f"{values.type} can't be cast to text", to, 0) from None


def flags_of(values: pa.BooleanArray) -> Flags:
    """Return a boolean array without nulls as a numpy array."""
    found: Flags = values.to_numpy(zero_copy_only=False)
    return found


def members(values: pa.StructArray) -> dict[str, pa.Array]:
    """Return the fields by name; a field of a null struct is null."""
    return dict(zip([field.name for field in values.type], values.flatten(), strict=True))


def struct_of(found: Mapping[str, pa.Array], absent: pa.Array | None, count: int) -> pa.Array:
    """Return a struct of fields; null where `absent`. Without fields it is an empty struct, not null."""
    if not found:
        return _empty(absent, count)
    fields = [pa.field(name, values.type) for name, values in found.items()]
    return pa.StructArray.from_arrays(list(found.values()), fields=fields, mask=absent)


def _empty(absent: pa.Array | None, count: int) -> pa.Array:
    validity = None
    if absent is not None:
        validity = pa.py_buffer(np.packbits(~flags_of(absent), bitorder="little"))
    return pa.Array.from_buffers(pa.struct([]), count, [validity])


def edited(values: pa.Array, edit: Callable[[dict[str, pa.Array]], Mapping[str, pa.Array]]) -> pa.Array:
    """Return a struct whose fields `edit` has replaced; a column of another type is returned unchanged."""
    if not pa.types.is_struct(values.type):
        return values
    absent = pc.is_null(values) if values.null_count else None
    return struct_of(edit(members(values)), absent, len(values))


def either(condition: Flags, first: pa.Array, second: pa.Array) -> pa.Array:
    """Return `first` where the condition is true, else `second`: structs, with the fields of both.

    :raises pyarrow.ArrowTypeError: if a field has different types in the two, and no type holds both.
    """
    # By `take`, which works for structs with any fields.
    count = len(first)
    places = np.arange(count) + np.where(condition, count, 0)
    return end_to_end([second, first]).take(pa.array(places))


def column_texts(group: Group, image: str, name: str, values: pa.Array) -> pa.StringArray:
    """Return the texts of a field of `key`, `before`, `after` or `value` with the values `values`.

    While a group is not decoded, they are those that the source sent. Otherwise they are made from the typed
    values, and from `special`, which has the text of a value that its column can't hold.

    :raises pyarrow.ArrowNotImplementedError: if the type can't be written as text, such as a map.
    """
    wire, relation = group.wire, group.relation_of(image)
    if wire is not None and relation is not None and name in cast_as_sent(relation):
        sent = wire.image_texts(image, name)
        if sent is not None:
            return sent
    texts = texts_of(values, _delimiter(relation, name))
    noted = specials(group.column("special"))
    found = noted.get(f"{image}.{name}")
    return texts if found is None else replaced(texts, *found)


def _delimiter(relation: Relation | None, name: str) -> str:
    columns = () if relation is None else relation.columns
    found = next((item_of(known_type(column)) for column in columns if column.name == name), None)
    return "," if found is None else found[1]
