"""Headers of records, and their values as texts or bytes for Kafka."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tailrace.converters.cells.connect_values import of_array
from tailrace.converters.cells.json_values import json_texts
from tailrace.converters.debezium_types import arrow_mapping, debezium_modes
from tailrace.decode.values.texts import texts_of
from tailrace.model import OWN_FORMS
from tailrace.records.events import NEW_KEY, OLD_KEY
from tailrace.records.group import Group, Places


def headers_of(group: Group) -> pa.StructArray | None:
    """Return the headers of a group's records; None if there are none."""
    found = group.headers
    return found if pa.types.is_struct(found.type) else None


def with_other_keys(
    headers: pa.StructArray | None, keys: pa.Array | None, group: Group, rows: Places | None = None
) -> pa.StructArray | None:
    """Return headers extended, for an update of the key that is two records, by the other record's key.

    :param keys: of the group's events, as texts; None: they have none.
    :param rows: as in `Converted`.
    """
    is_pair = group.index[1:] == group.index[:-1]
    if group.is_second is None or keys is None or not is_pair.any():
        return headers
    is_old, is_new = np.append(is_pair, False), np.append(False, is_pair)
    places = np.arange(len(group))
    events = places if rows is None else np.searchsorted(rows, places)
    of_records = keys.take(pa.array(np.minimum(events, len(keys) - 1)))
    others = {NEW_KEY: (places + 1, is_old), OLD_KEY: (places - 1, is_new)}
    arrays = {} if headers is None else dict(zip(headers.type.names, headers.flatten(), strict=True))
    for name, (other, has_other) in others.items():
        found = of_records.take(pa.array(other, mask=~has_other))
        arrays[name] = found if rows is None else found.take(pa.array(rows))
    return pa.StructArray.from_arrays(list(arrays.values()), list(arrays))


def with_json(headers: pa.StructArray) -> pa.StructArray:
    """Return headers with structs, lists and maps as JSON in bytes, as in a record's value.

    Other types are unchanged, and null stays null.
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
    """Return a header's values as texts or bytes; other types become PostgreSQL's texts; null stays null.

    :param values: not of a nested type: see `with_json`.
    """
    kind = values.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return values if is_text or is_bytes else texts_of(values)
