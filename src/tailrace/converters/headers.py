"""The values of records' headers, as Kafka has them."""

from __future__ import annotations

import pyarrow as pa

from tailrace.converters.cells.connect_values import of_array
from tailrace.converters.cells.json_values import json_texts
from tailrace.converters.debezium_types import arrow_mapping, debezium_modes
from tailrace.model import OWN_FORMS


def header_texts(values: pa.Array) -> pa.Array:
    """Return a header's values as texts or bytes; numbers and flags become texts; structs, lists and maps
    become JSON, as in a record's value; null stays null.

    :raises TailraceError: `DECODE_FAILED` if a text in a struct, list or map is not UTF-8.
    """
    kind = values.type
    if pa.types.is_nested(kind):
        return json_texts(of_array(values, arrow_mapping(kind, debezium_modes(OWN_FORMS))))
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return values if is_text or is_bytes else values.cast(pa.large_string())
