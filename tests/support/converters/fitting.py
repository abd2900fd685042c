"""Checks that a document matches its schema."""

from __future__ import annotations

from typing import Any

SIMPLE = {"boolean": bool, "float": float, "double": float, "string": str, "bytes": str}


def require_fit(schema: dict[str, Any], value: Any) -> None:
    """Check a value as Kafka's JSON converter reads it."""
    if value is None:
        assert schema["optional"], schema
    elif schema["type"] == "struct":
        names = [field["field"] for field in schema["fields"]]
        assert list(value) == names
        for field in schema["fields"]:
            require_fit(field, value[field["field"]])
    elif schema["type"] == "array":
        for item in value:
            require_fit(schema["items"], item)
    elif schema["type"] == "map":
        for item in value.values():
            require_fit(schema["values"], item)
    else:
        assert type(value) is SIMPLE.get(schema["type"], int), (schema, value)
