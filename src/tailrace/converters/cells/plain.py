"""Converts records that are no longer changes (flattened, outbox events): keys and values become JSON
according to their Arrow types, or, for unmodified columns of a table, according to the table's types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.converters.cells.connect_values import of_parts
from tailrace.converters.cells.from_columns import field_of, field_values, single_values
from tailrace.converters.cells.json_values import Values, json_texts
from tailrace.converters.cells.row_image import Field
from tailrace.converters.connect_schemas import STRING, EventSchemas, Schema, struct
from tailrace.converters.debezium_types import TypeMapping, debezium_modes, schema_name_of
from tailrace.converters.headers import headers_of, with_other_keys
from tailrace.decode.rows import specials
from tailrace.decode.values import forms
from tailrace.model import OWN_FORMS
from tailrace.records.events import Converted
from tailrace.records.group import Group

_NOTHING = TypeMapping(forms.QUOTED, STRING, '""')


@dataclass(frozen=True, slots=True, eq=False)
class PlainValues:
    """Keys and values of records, one event each; a null value is a tombstone.

    :param keys: None: no record has a key.
    """

    keys: Values | None
    values: Values
    headers: pa.StructArray | None
    schemas: EventSchemas

    def json(self) -> Converted:
        """Return keys and values as JSON.

        :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
        """
        keys = None if self.keys is None else json_texts(self.keys)
        return Converted(keys, json_texts(self.values), self.headers)


def convert_plain(group: Group, prefix: str, *, with_schema: bool) -> Converted:
    """Return keys and values of a group of records as JSON.

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    found = plain_values(group, prefix, has_schema=with_schema)
    events = found.json()
    if not with_schema:
        return events
    keys = None if events.keys is None else _enveloped(events.keys, found.schemas.key_text)
    values = _enveloped(events.values, found.schemas.value_text)
    return replace(events, keys=keys, values=values, headers=with_other_keys(events.headers, keys, group))


def plain_values(group: Group, prefix: str, *, has_schema: bool = True) -> PlainValues:
    """Return keys and values of a group of records, and their schemas.

    A schema's name is that in the field's metadata (`debezium_types.named_field`), or the topic's.

    :param has_schema: whether values must be limited to those that a schema can describe.
    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    name = group.topic if group.topic.startswith(f"{prefix}.") else f"{prefix}.{group.topic}"
    keys, key = _described(group, "key", f"{name}.Key", has_schema)
    values, value = _described(group, "value", f"{name}.Value", has_schema)
    has_keys = keys.odd is not None or keys.array.null_count < len(keys.array)
    return PlainValues(
        keys if has_keys else None,
        values,
        with_other_keys(headers_of(group), json_texts(keys) if group.is_second is not None else None, group),
        EventSchemas(value, key if has_keys else None),
    )


def plain_keys(group: Group) -> pa.Array:
    """Return keys as JSON; null stays null."""
    return json_texts(given(group, "key", has_schema=False)[1])


def _described(group: Group, column: str, name: str, has_schema: bool) -> tuple[Values, Schema]:
    how, values = given(group, column, has_schema=has_schema)
    schema = how.schema
    if schema.type == "struct":
        found = group.columns.schema.field(column) if column in group.columns.schema.names else None
        named = None if found is None else schema_name_of(found)
        schema = struct(dict(schema.inside)["fields"], *(named or (name, None)))
    return values, schema


def _enveloped(texts: pa.Array, schema: str) -> pa.Array:
    # A null value has no envelope.
    opening = pa.scalar(f'{{"schema":{schema},"payload":', pa.large_string())
    closing, nothing = (pa.scalar(text, pa.large_string()) for text in ("}", ""))
    return pc.binary_join_element_wise(opening, texts.cast(pa.large_string()), closing, nothing)


def _as_text(array: pa.Array) -> pa.Array:
    # A schema can't describe the content of JSON within JSON: with a schema it is a text.
    if isinstance(array.type, pa.JsonType):
        return array.storage
    if not pa.types.is_struct(array.type):
        return array
    parts = [_as_text(array.field(place)) for place in range(array.type.num_fields)]
    fields = [field.with_type(part.type) for field, part in zip(array.type, parts, strict=True)]
    return pa.StructArray.from_arrays(parts, fields=fields, mask=array.is_null()) if parts else array


def given(group: Group, column: str, *, has_schema: bool) -> tuple[TypeMapping, Values]:
    """Return the column `key` or `value` and its mapping; `has_schema` as for `plain_values`."""
    relation, array = group.relation_of(column), group.column(column)
    if has_schema:
        array = _as_text(array)
    if pa.types.is_null(array.type):
        return _NOTHING, Values(array)
    modes = debezium_modes(relation.modes if relation else OWN_FORMS)
    if relation is None or not pa.types.is_struct(array.type):
        field, values = single_values(relation, array, modes)
        return field.how, values
    fields = [field_of(relation, field.name, field.type, modes) for field in array.type]
    noted = specials(group.column("special"))
    parts = [field_values(relation, field, array, noted, f"{column}.").values for field in fields]
    required = _required(group, column, fields)
    documents = [
        field.how.schema.document(optional=field.name not in required, field=field.name) for field in fields
    ]
    return TypeMapping(forms.RAW, struct(documents), "{}"), of_parts(array, parts)


def _required(group: Group, column: str, fields: Sequence[Field]) -> set[str]:
    """Return the fields that are never null: those of the table's key, as in events."""
    rows, keys = group.relation, group.relation_of("key")
    assert rows is not None
    assert keys is not None
    # The key that the settings chose may have columns that can be null.
    found = {
        field.name
        for field in fields
        if field.name in keys.key and (field.not_null or field.name not in keys.chosen_key)
    }
    if column == "key" or keys is rows:
        return found
    # A transformation changed columns in rows alone, or in keys alone.
    return found & {each.name for each in set(rows.columns) & set(keys.columns)}
