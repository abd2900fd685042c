"""Schemas of Kafka Connect, as its JSON converter writes them, and as JSON Schema (draft 7).

JSON Schema is the same as that of Confluent's converter, except where Confluent's schema would not fit its
own data: a decimal, which is base64, is a string.

Source: Apache Kafka, org.apache.kafka.connect.json.JsonConverter (order of members); Confluent Schema
Registry, JsonSchemaData (`fromConnectSchema`, the properties `connect.*`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema of Kafka Connect.

    :param inside: the documents of `items`, or of `keys` and `values`, or of `fields`.
    :param name: of the semantic type.
    """

    type: str
    name: str | None = None
    version: int | None = None
    doc: str | None = None
    parameters: tuple[tuple[str, str], ...] = ()
    default: str | None = None
    inside: tuple[tuple[str, Any], ...] = ()

    def __hash__(self) -> int:
        return hash((self.type, self.name, self.version, self.parameters))

    def document(self, *, optional: bool = False, field: str | None = None) -> Document:
        """Return the schema as a JSON object.

        :param optional: whether the value may be null; `field`: the field that has this schema, if any.
        """
        found: Document = {"type": self.type, **dict(self.inside), "optional": optional}
        members = {
            "name": self.name,
            "version": self.version,
            "doc": self.doc,
            "parameters": dict(self.parameters) or None,
            "default": self.default,
            "field": field,
        }
        return found | {name: value for name, value in members.items() if value is not None}


@dataclass(frozen=True)
class EventSchemas:
    """The schemas of a group's values and keys; `key` is None if it has no keys."""

    value: Schema
    key: Schema | None

    @functools.cached_property
    def value_text(self) -> str:
        """The value's schema as JSON."""
        return written(self.value.document())

    @functools.cached_property
    def key_text(self) -> str:
        """The key's schema as JSON; `null` if there is no key."""
        return "null" if self.key is None else written(self.key.document())


def array(items: Document) -> Schema:
    """Return the schema of arrays."""
    return Schema("array", inside=(("items", items),))


def mapping(keys: Document, values: Document) -> Schema:
    """Return the schema of maps."""
    return Schema("map", inside=(("keys", keys), ("values", values)))


def struct(fields: Sequence[Document], name: str | None = None, version: int | None = None) -> Schema:
    """Return the schema of structs; each document of `fields` has a `field`."""
    return Schema("struct", name, version, inside=(("fields", list(fields)),))


def written(value: object) -> str:
    """Return JSON as Debezium writes it: without spaces, and with non-ASCII characters unescaped."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


STRING, INT64 = Schema("string"), Schema("int64")

_SNAPSHOT = Schema(
    "string",
    "io.debezium.data.Enum",
    1,
    parameters=(
        ("allowed", "true,first,first_in_data_collection,last_in_data_collection,last,false,incremental"),
    ),
    default="false",
)

_SOURCE_OF_ANY = [
    STRING.document(field="version"),
    STRING.document(field="connector"),
    STRING.document(field="name"),
    INT64.document(field="ts_ms"),
    _SNAPSHOT.document(optional=True, field="snapshot"),
    STRING.document(field="db"),
    STRING.document(optional=True, field="sequence"),
    INT64.document(optional=True, field="ts_us"),
    INT64.document(optional=True, field="ts_ns"),
]

#: Debezium's `source` for PostgreSQL.
SOURCE = struct(
    [
        *_SOURCE_OF_ANY,
        STRING.document(field="schema"),
        STRING.document(field="table"),
        INT64.document(optional=True, field="txId"),
        INT64.document(optional=True, field="lsn"),
        INT64.document(optional=True, field="xmin"),
        STRING.document(optional=True, field="origin"),
        INT64.document(optional=True, field="origin_lsn"),
    ],
    "io.debezium.connector.postgresql.Source",
    1,
)

#: Debezium's `source` for Vitess.
SOURCE_WITH_SHARD = struct(
    [
        *_SOURCE_OF_ANY,
        *(STRING.document(field=name) for name in ("keyspace", "table", "shard", "vgtid")),
    ],
    "io.debezium.connector.vitess.Source",
    1,
)

_TRANSACTION_OF_ANY = [
    STRING.document(field="id"),
    INT64.document(field="total_order"),
    INT64.document(field="data_collection_order"),
]
_TRANSACTION = struct(_TRANSACTION_OF_ANY, "event.block", 1)

#: The schema of a transaction's rank within its shard's epoch.
RANK = Schema("bytes", "org.apache.kafka.connect.data.Decimal", 1, parameters=(("scale", "0"),))

_TRANSACTION_WITH_RANK = struct(
    [
        *_TRANSACTION_OF_ANY,
        INT64.document(field="transaction_epoch"),
        RANK.document(field="transaction_rank"),
    ],
    "event.block",
    1,
)


def envelope(name: str, row: Schema, source: Schema) -> Schema:
    """Return the schema of a change; `name` is the table's full name: topic prefix, schema and table."""
    transaction = _TRANSACTION_WITH_RANK if source is SOURCE_WITH_SHARD else _TRANSACTION
    return struct(
        [
            row.document(optional=True, field="before"),
            row.document(optional=True, field="after"),
            source.document(optional=source.type != "struct", field="source"),  # there may be none
            transaction.document(optional=True, field="transaction"),
            STRING.document(field="op"),
            *(INT64.document(optional=True, field=unit) for unit in ("ts_ms", "ts_us", "ts_ns")),
        ],
        f"{name}.Envelope",
        2,
    )


def message(fields: Sequence[Document]) -> Schema:
    """Return the schema of a logical message; `fields` are those of its prefix and content."""
    block = struct(fields, "io.debezium.connector.postgresql.Message", 1)
    return struct(
        [
            STRING.document(field="op"),
            INT64.document(optional=True, field="ts_ms"),
            SOURCE.document(field="source"),
            _TRANSACTION.document(optional=True, field="transaction"),
            block.document(field="message"),
        ],
        "io.debezium.connector.postgresql.MessageValue",
        1,
    )


#: The schema of a logical message's key.
MESSAGE_KEY = struct(
    [STRING.document(optional=True, field="prefix")], "io.debezium.connector.postgresql.MessageKey", 1
)


DRAFT = "http://json-schema.org/draft-07/schema#"

_TYPES = {
    "int8": ("integer", "int8"),
    "int16": ("integer", "int16"),
    "int32": ("integer", "int32"),
    "int64": ("integer", "int64"),
    "float": ("number", "float32"),
    "double": ("number", "float64"),
    "boolean": ("boolean", None),
    "string": ("string", None),
    "bytes": ("string", "bytes"),
}


def json_schema(schema: Document) -> dict[str, Any]:
    """Return the JSON Schema of a value that is not null itself."""
    return {"$schema": DRAFT, **_of({**schema, "optional": False})}


def _of(schema: Document, index: int | None = None) -> dict[str, Any]:
    found = {**_shape(schema), **_properties(schema)}
    if not schema["optional"]:
        return found if index is None else {**found, "connect.index": index}
    either: dict[str, Any] = {"oneOf": [{"type": "null"}, found]}
    if schema.get("default") is not None:
        either["default"] = schema["default"]
    return either if index is None else {**either, "connect.index": index}


def _shape(schema: Document) -> dict[str, Any]:
    kind = schema["type"]
    if kind == "struct":
        members = {field["field"]: _of(field, place) for place, field in enumerate(schema["fields"])}
        needed = [field["field"] for field in schema["fields"] if not field["optional"]]
        shape: dict[str, Any] = {"type": "object", "properties": members}
        return {**shape, "required": needed} if needed else shape
    if kind == "array":
        return {"type": "array", "items": _of(schema["items"])}
    if kind == "map":
        return {"type": "object", "connect.type": "map", "additionalProperties": _of(schema["values"])}
    name, connect = _TYPES[kind]
    if connect in ("float32", "float64"):
        # Values that are not JSON numbers are strings: "NaN", "Infinity", "-Infinity".
        return {"type": [name, "string"], "connect.type": connect}
    return {"type": name} if connect is None else {"type": name, "connect.type": connect}


def _properties(schema: Document) -> dict[str, Any]:
    found = {
        "title": schema.get("name"),
        "connect.version": schema.get("version"),
        "description": schema.get("doc"),
        "connect.parameters": schema.get("parameters"),
    }
    return {name: value for name, value in found.items() if value is not None}
