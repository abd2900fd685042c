"""Writes columns of Kafka Connect's values as JSON, according to their Arrow types: bytes as base64,
floating-point numbers as Java writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.converters.connect_schemas import written
from tailrace.decode.gather import replaced, text_cells
from tailrace.decode.json.documents import objects, render
from tailrace.decode.values import forms

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """A column of Kafka Connect's values.

    :param odd_rows: rows (ascending) of values that the type can't represent; `array` is undefined there.
    :param odd: the JSON of these values, as long as `odd_rows`.
    :param member: of structs: the path of a member that its type can't represent in the first of these rows.
    """

    array: pa.Array
    odd_rows: Rows = field(default_factory=lambda: NO_ROWS)
    odd: pa.Array | None = None
    member: str = ""


def json_texts(values: Values) -> pa.LargeStringArray:
    """Return each value as JSON; null stays null.

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8, or the texts are longer than 2 GiB.
    """
    texts = json_of(values.array)
    return texts if values.odd is None else replaced(texts, values.odd_rows, values.odd)


def json_of(array: pa.Array) -> pa.LargeStringArray:
    """Return Kafka Connect's values as JSON; null stays null."""
    arrow = array.type
    if isinstance(arrow, pa.JsonType):
        return array.storage.cast(pa.large_string())  # already JSON: the payload of an outbox
    if pa.types.is_map(arrow):
        return map_texts(array, render(text_cells(array.keys), forms.QUOTED), json_of(array.items))
    if is_listed(arrow):
        return list_texts(array, json_of(array.flatten()))
    if pa.types.is_struct(arrow):
        return struct_texts(array, [json_of(array.field(place)) for place in range(len(arrow))])
    if pa.types.is_boolean(arrow) or pa.types.is_integer(arrow) or pa.types.is_null(arrow):
        return array.cast(pa.large_string())
    if pa.types.is_floating(arrow):
        texts = array.cast(pa.string())
        for theirs, ours in (("nan", "NaN"), ("inf", "Infinity"), ("-inf", "-Infinity")):
            texts = pc.if_else(pc.equal(texts, theirs), ours, texts)
        style = forms.style_of(forms.JAVA, forms.REAL if pa.types.is_float32(arrow) else 0)
        return render(text_cells(texts), style)
    is_binary = pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow)
    return render(text_cells(array), forms.BASE64 if is_binary else forms.QUOTED)


# Nested values, from the texts of their parts.


def list_texts(array: pa.Array, items: pa.Array) -> pa.LargeStringArray:
    """Return lists as JSON; `items` are the texts of all their items."""
    return _bracketed("[", _joined(lengths_of(array), items.fill_null("null")), "]", array)


def map_texts(array: pa.MapArray, keys: pa.Array, items: pa.Array) -> pa.LargeStringArray:
    """Return maps as JSON; `keys` and `items` are the texts of all their entries."""
    entries = pc.binary_join_element_wise(keys, items.fill_null("null"), _scalar(":"))
    return _bracketed("{", _joined(lengths_of(array), entries), "}", array)


def struct_texts(array: pa.StructArray, texts: Sequence[pa.Array]) -> pa.LargeStringArray:
    """Return structs as JSON objects of these texts, one array for each field; null stays null."""
    names = [f"{',' if place else '{'}{written(member.name)}:" for place, member in enumerate(array.type)]
    constants = [*names, "}"] if names else ["{}"]
    there = [of.fill_null("null") if of.null_count else of for of in texts]
    return _null_where(array, objects(constants, there, len(array)))


def lengths_of(array: pa.Array) -> Rows:
    """Return each list's number of items, or each map's of entries; 0 for null."""
    if pa.types.is_map(array.type):
        lengths: Rows = np.diff(array.offsets.to_numpy()).astype(np.int64)
    else:
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int64)


def _joined(lengths: Rows, items: pa.Array) -> pa.Array:
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), items.cast(pa.string()))
    return pc.binary_join(lists, ",").cast(pa.large_string())


def _bracketed(opening: str, texts: pa.Array, closing: str, like_array: pa.Array) -> pa.Array:
    whole = pc.binary_join_element_wise(_scalar(opening), texts, _scalar(closing), _scalar(""))
    return _null_where(like_array, whole)


def _null_where(array: pa.Array, texts: pa.Array) -> pa.Array:
    # The texts, null where the array is null.
    if array.null_count == 0:
        return texts
    return pc.if_else(array.is_valid(), texts, pa.scalar(None, pa.large_string()))


def _scalar(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())


def is_listed(arrow: pa.DataType) -> bool:
    """Return whether values of a type are lists."""
    return bool(
        pa.types.is_list(arrow) or pa.types.is_large_list(arrow) or pa.types.is_fixed_size_list(arrow)
    )
