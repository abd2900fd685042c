"""What has changed from one schema to the next, in words that name fields."""

from __future__ import annotations

import json
from typing import Any

_WORDS_MAX = 80


def differences(old: str, new: str, kind: str) -> list[str]:
    """Return what was added, left out and changed, most telling first; empty if that can't be said.

    :param kind: `AVRO` or `JSON`: of both schemas.
    """
    try:
        before, after = json.loads(old), json.loads(new)
    except ValueError:
        return []
    fields = _avro_fields if kind == "AVRO" else _json_fields
    was, now = fields(before), fields(after)
    changed = [
        f"{name} was {was[name]}, is {now[name]}" for name in was if name in now and was[name] != now[name]
    ]
    added = [f"{name} is new{_without_default(now[name])}" for name in now if name not in was]
    gone = [f"{name} is gone ({was[name]})" for name in was if name not in now]
    return changed + added + gone


def _without_default(described: str) -> str:
    return f" ({described})" if described.endswith("or null") else f", without a default ({described})"


def _avro_fields(schema: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    records: dict[str, Any] = {}

    def visit(place: Any, path: str) -> None:
        if isinstance(place, list):
            for one in place:
                visit(one, path)
        elif isinstance(place, dict) and place.get("type") == "record":
            full = ".".join(filter(None, [place.get("namespace"), place.get("name")]))
            if full in records:
                return
            records[full] = place
            short = place.get("name", "")
            for field in place.get("fields", []):
                within = f"{short}.{field['name']}"
                found[within] = _avro_type(field["type"])
                visit(field["type"], within)
        elif isinstance(place, dict):
            for part in ("items", "values", "type"):
                visit(place.get(part), path)

    visit(schema, "")
    return found


def _avro_type(kind: Any) -> str:
    if isinstance(kind, list):
        others = [_avro_type(one) for one in kind if one != "null"]
        return " or ".join([*others, "null"] if "null" in kind else others)
    if not isinstance(kind, dict):
        return str(kind).rpartition(".")[2][:_WORDS_MAX]
    name = kind.get("logicalType") or kind.get("connect.name", "").rpartition(".")[2]
    if kind.get("type") == "record":
        return str(kind.get("name", "record"))
    sized = f"({kind['precision']},{kind['scale']})" if "precision" in kind else ""
    return f"{kind.get('type')}{f' {name}{sized}' if name else ''}"[:_WORDS_MAX]


def _json_fields(schema: Any, path: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    if not isinstance(schema, dict):
        return found
    for one in schema.get("oneOf", []):
        found |= _json_fields(one, path)
    for name, member in schema.get("properties", {}).items():
        within = f"{path}.{name}" if path else name
        found[within] = _json_type(member)
        found |= _json_fields(member, within)
    return found


def _json_type(schema: Any) -> str:
    if not isinstance(schema, dict):
        return str(schema)[:_WORDS_MAX]
    if "oneOf" in schema:
        others = [_json_type(one) for one in schema["oneOf"] if one.get("type") != "null"]
        return " or ".join([*others, "null"])
    kind = schema.get("type")
    name = schema.get("connect.type") or schema.get("title", "").rpartition(".")[2]
    text = " or ".join(kind) if isinstance(kind, list) else str(kind)
    return f"{text}{f' {name}' if name else ''}"[:_WORDS_MAX]
