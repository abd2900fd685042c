"""Records that are no changes any more (flattened, outbox events): keys and values as JSON by their
Arrow types, where they are still a table's columns as the table's are given.
"""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.converters.cells.from_columns import field_of, field_texts
from tailrace.converters.cells.specials import Specials
from tailrace.converters.cells.texts import json_texts, struct_texts
from tailrace.converters.connect_schemas import STRING, EventSchemas, Schema, struct
from tailrace.converters.debezium_types import TypeMapping, debezium_modes, given_arrow, given_name
from tailrace.model import OWN_FORMS
from tailrace.records.events import Converted
from tailrace.records.group import Group
from tailrace.sources.postgres.decode.values import forms

_NOTHING = TypeMapping(forms.QUOTED, STRING, '""')


def convert_plain(group: Group, prefix: str, *, with_schema: bool) -> Converted:
    """Return keys and values of a group of records as JSON, one event each; a null value is a tombstone.

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    if with_schema:
        events, schemas = plain_payloads(group, prefix)
        keys = None if events.keys is None else _enveloped(events.keys, schemas.key_text)
        return replace(events, keys=keys, values=_enveloped(events.values, schemas.value_text))
    keys = plain_documents(group, group.column("key"))
    return _events(group, keys, plain_documents(group, group.column("value")))


def plain_payloads(group: Group, prefix: str) -> tuple[Converted, EventSchemas]:
    """Return keys and values as `convert_plain` writes them beside their schemas, and those.

    A schema's name is that of the field's metadata (`given.named_field`), or the topic's.
    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    name = group.topic if group.topic.startswith(f"{prefix}.") else f"{prefix}.{group.topic}"
    keys, key = _payloads(group, "key", f"{name}.Key")
    values, value = _payloads(group, "value", f"{name}.Value")
    events = _events(group, keys, values)
    return events, EventSchemas(value, None if events.keys is None else key)


def plain_documents(group: Group, array: pa.Array) -> pa.Array:
    """Return values as JSON; null stays null."""
    return _given(group, array)[1]


def _payloads(group: Group, column: str, schema_name: str) -> tuple[pa.Array, Schema]:
    how, texts = _given(group, _as_text(group.column(column)))
    schema = how.schema
    if schema.type == "struct":
        found = group.columns.schema.field(column) if column in group.columns.schema.names else None
        told = None if found is None else given_name(found)
        schema = struct(dict(schema.inside)["fields"], *(told or (schema_name, None)))
    return texts, schema


def _events(group: Group, keys: pa.Array, values: pa.Array) -> Converted:
    headers = group.column("headers")
    return Converted(
        None if keys.null_count == len(keys) else keys,
        values,
        headers if pa.types.is_struct(headers.type) else None,
    )


def _enveloped(texts: pa.Array, schema: str) -> pa.Array:
    # A value that is null has no envelope either.
    opening = pa.scalar(f'{{"schema":{schema},"payload":', pa.large_string())
    closing, nothing = (pa.scalar(text, pa.large_string()) for text in ("}", ""))
    return pc.binary_join_element_wise(opening, texts.cast(pa.large_string()), closing, nothing)


def _as_text(array: pa.Array) -> pa.Array:
    # What JSON within JSON holds no schema can say: beside a schema it is a text.
    if isinstance(array.type, pa.JsonType):
        return array.storage
    if not pa.types.is_struct(array.type):
        return array
    parts = [_as_text(array.field(place)) for place in range(array.type.num_fields)]
    fields = [field.with_type(part.type) for field, part in zip(array.type, parts, strict=True)]
    return pa.StructArray.from_arrays(parts, fields=fields, mask=array.is_null()) if parts else array


def _given(group: Group, array: pa.Array) -> tuple[TypeMapping, pa.Array]:
    relation = group.relation
    if pa.types.is_null(array.type):
        return _NOTHING, pa.nulls(len(array), pa.large_string())
    modes = debezium_modes(relation.modes if relation else OWN_FORMS)
    if relation is None or not pa.types.is_struct(array.type):
        how = given_arrow(array.type, modes)
        return how, json_texts(array, how)
    fields = [field_of(relation, field.name, field.type, modes) for field in array.type]
    specials = Specials(group.column("special"))
    texts = [field_texts(relation, field, array, specials, "value.")[0] for field in fields]
    documents = [field.how.schema.document(optional=True, field=field.name) for field in fields]
    return TypeMapping(forms.RAW, struct(documents), "{}"), struct_texts(array, texts)
