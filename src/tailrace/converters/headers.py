"""The values of records' headers, as Kafka has them."""

from __future__ import annotations

import pyarrow as pa

from tailrace.converters.cells.connect_values import of_array
from tailrace.converters.cells.json_values import json_texts
from tailrace.converters.debezium_types import arrow_mapping, debezium_modes
from tailrace.model import OWN_FORMS
from tailrace.records.group import Group


def headers_of(group: Group) -> pa.StructArray | None:
    """Return the headers of a group's records; None if there are none."""
    found = group.headers
    return found if pa.types.is_struct(found.type) else None


def with_json(headers: pa.StructArray) -> pa.StructArray:
    """Return headers of which structs, lists and maps are JSON in bytes, as in a record's value.

    The others stay what they are, and null stays null.
    :raises TailraceError: `DECODE_FAILED` if a text in a struct, list or map is not UTF-8.
    """
    if not any(pa.types.is_nested(field.type) for field in headers.type):
        return headers
    values = [_json(each) if pa.types.is_nested(each.type) else each for each in headers.flatten()]
    return pa.StructArray.from_arrays(values, [field.name for field in headers.type])


def _json(values: pa.Array) -> pa.Array:
    mapping = arrow_mapping(values.type, debezium_modes(OWN_FORMS))
    return json_texts(of_array(values, mapping)).cast(pa.large_binary())


def header_texts(values: pa.Array) -> pa.Array:
    """Return a header's values as texts or bytes; numbers and flags become texts; null stays null.

    :param values: none of them nested: see `with_json`.
    """
    kind = values.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return values if is_text or is_bytes else values.cast(pa.large_string())
