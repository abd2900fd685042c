"""Avro's binary encoding, read by fastavro."""

from __future__ import annotations

import base64
import io
import struct
from typing import Any

import fastavro

from tailrace.converters.avro.encoder import HEADER_BYTES
from tailrace.converters.connect_schemas import Document


def decoded(value: bytes, schema: Any) -> Any:
    return fastavro.schemaless_reader(io.BytesIO(value[HEADER_BYTES:]), schema)


def as_python(value: Any, schema: Document) -> Any:
    """Return a JSON value as the Python value that fastavro would return for it."""
    if value is None:
        return None
    kind = schema["type"]
    if kind == "struct":
        return {field["field"]: as_python(value[field["field"]], field) for field in schema["fields"]}
    if kind == "array":
        return [as_python(one, schema["items"]) for one in value]
    if kind == "map":
        return {name: as_python(one, schema["values"]) for name, one in value.items()}
    if kind == "bytes":
        return base64.b64decode(value)
    if kind in ("float", "double"):
        return struct.unpack("f", struct.pack("f", float(value)))[0] if kind == "float" else float(value)
    return value
