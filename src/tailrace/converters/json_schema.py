"""Schemas of Kafka Connect as JSON Schema (draft 7), the way Confluent's converter translates them.

It differs where that one's schema would not fit its own data: a decimal, which is base64, is a string.

Source: Confluent Schema Registry, JsonSchemaData (`fromConnectSchema`, the properties `connect.*`).
"""

from __future__ import annotations

from typing import Any

from tailrace.converters.connect_schemas import Document

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
    found = {**_shape(schema), **_told(schema)}
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
        # What JSON has no number for is a text: "NaN", "Infinity", "-Infinity".
        return {"type": [name, "string"], "connect.type": connect}
    return {"type": name} if connect is None else {"type": name, "connect.type": connect}


def _told(schema: Document) -> dict[str, Any]:
    found = {
        "title": schema.get("name"),
        "connect.version": schema.get("version"),
        "description": schema.get("doc"),
        "connect.parameters": schema.get("parameters"),
    }
    return {name: value for name, value in found.items() if value is not None}
