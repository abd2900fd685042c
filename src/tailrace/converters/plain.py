"""Records that are no changes any more (flattened, outbox events): keys and values as JSON by their
Arrow types, where they are still a table's columns as the table's are given.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.converters.from_columns import field_of, field_texts
from tailrace.converters.given import Given, debezium_modes, given_arrow
from tailrace.converters.schemas import Schema, struct, written
from tailrace.converters.specials import Specials
from tailrace.converters.texts import json_texts, struct_texts
from tailrace.decode import forms
from tailrace.model import OWN_FORMS
from tailrace.records.events import Converted
from tailrace.records.group import Group


def convert_plain(group: Group, prefix: str, *, with_schema: bool) -> Converted:
    """Return keys and values of a group of records as JSON, one event each; a null value is a tombstone.

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    name = f"{prefix}.{group.topic}"
    keys = plain_documents(group, group.column("key"), f"{name}.Key" if with_schema else None)
    values = plain_documents(group, group.column("value"), f"{name}.Value" if with_schema else None)
    headers = group.column("headers")
    return Converted(
        None if pa.types.is_null(keys.type) or keys.null_count == len(keys) else keys,
        values,
        headers if pa.types.is_struct(headers.type) else None,
    )


def plain_documents(group: Group, array: pa.Array, schema_name: str | None) -> pa.Array:
    """Return values as JSON; null stays null.

    :param schema_name: what a struct is called in the schema that each value carries; None: in none.
    """
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), pa.large_string())
    how, texts = _given(group, array if schema_name is None else _as_text(array))
    if schema_name is None:
        return texts
    schema = how.schema
    if schema.type == "struct":
        schema = struct(dict(schema.inside)["fields"], schema_name)
    opening = pa.scalar(f'{{"schema":{_written(schema)},"payload":', pa.large_string())
    closing, nothing = (pa.scalar(text, pa.large_string()) for text in ("}", ""))
    return pc.binary_join_element_wise(opening, texts, closing, nothing)


def _as_text(array: pa.Array) -> pa.Array:
    # What JSON within JSON holds no schema can say: beside a schema it is a text.
    if isinstance(array.type, pa.JsonType):
        return array.storage
    if not pa.types.is_struct(array.type):
        return array
    parts = [_as_text(array.field(place)) for place in range(array.type.num_fields)]
    names = [field.name for field in array.type]
    return pa.StructArray.from_arrays(parts, names, mask=array.is_null()) if parts else array


def _written(schema: Schema) -> str:
    return written(schema.document())


def _given(group: Group, array: pa.Array) -> tuple[Given, pa.Array]:
    relation = group.relation
    modes = debezium_modes(relation.modes if relation else OWN_FORMS)
    if relation is None or not pa.types.is_struct(array.type):
        how = given_arrow(array.type, modes)
        return how, json_texts(array, how)
    fields = [field_of(relation, field.name, field.type, modes) for field in array.type]
    specials = Specials(group.column("special"))
    texts = [field_texts(relation, field, array, specials, "value.")[0] for field in fields]
    documents = [field.how.schema.document(optional=True, field=field.name) for field in fields]
    return Given(forms.RAW, struct(documents), "{}"), struct_texts(array, texts)
