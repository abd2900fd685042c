"""Casts columns of a group to text as PostgreSQL does.

The texts of a group that is not decoded yet are those that the source sent. Otherwise they are made from the
typed values, and from `special`, which has the text of a value that its column can't hold.
"""

from __future__ import annotations

import pyarrow as pa

from tailrace.decode.gather import replaced
from tailrace.decode.postgres_types import item_of
from tailrace.decode.rows import specials
from tailrace.decode.types import cast_as_sent, known_type
from tailrace.decode.values.texts import texts_of
from tailrace.model import Relation
from tailrace.records.group import Group


def column_texts(group: Group, image: str, name: str, values: pa.Array) -> pa.StringArray:
    """Return the texts of a field of `key`, `before`, `after` or `value` with the values `values`.

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
