"""Debezium's topics in Avro with a schema registry: extraction for the merge, and whole documents.

Confluent's wire format: a zero, four bytes of the schema's id, and Avro's binary form. For the merge only the
members that are used are decoded; the others are skipped.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa

from tailrace.config.converters import RegistryAddress
from tailrace.converters.registry import Registry
from tailrace.errors import Kind, TailraceError
from tailrace.join.extraction import DATA, TRANSACTION, Transactions, data_rows, ended
from tailrace.join.merge import DataRows

#: Size of the zero and the schema's id.
_HEADER_BYTES = 5


class DebeziumAvro:
    """Extraction from the topics that Debezium and Tailrace write as Avro (`extraction.Extraction`)."""

    def __init__(self, options: RegistryAddress) -> None:
        self._registry = Registry(options)
        self._schemas: dict[tuple[int, str], tuple[Any, Any]] = {}

    def data(self, messages: pa.RecordBatch) -> DataRows:
        """As `extraction.DebeziumJson.data`."""
        return data_rows(messages, self._members(messages, DATA, "data"))

    def transactions(self, messages: pa.RecordBatch) -> Transactions:
        """As `extraction.DebeziumJson.transactions`."""
        return ended(messages, self._members(messages, TRANSACTION, "transactions"))

    def _members(
        self, messages: pa.RecordBatch, fields: Sequence[tuple[str, pa.DataType]], side: str
    ) -> dict[str, pa.Array]:
        found: list[dict[str, Any]] = []
        for place, value in enumerate(messages.column("value").to_pylist()):
            if value is None:
                found.append({})
                continue
            if (number := _schema_number(value)) is None:
                raise _violation("one is not in the wire format of a schema registry", messages, place)
            written, wanted = self._schema(number, fields, side)
            try:
                record = fastavro.schemaless_reader(io.BytesIO(value[_HEADER_BYTES:]), written, wanted)
            except Exception:  # noqa: BLE001 - of any kind; its message may quote what was read
                raise _violation(f"one is not as its schema {number} says", messages, place) from None
            found.append(record)  # type: ignore[arg-type]
        try:
            return _columns(found, fields)
        except (pa.ArrowInvalid, pa.ArrowTypeError):  # its message quotes what was read
            place = next(at for at, record in enumerate(found) if not _has_types(record, fields))
            raise _violation("one has members of other types than Debezium's", messages, place) from None

    def _schema(self, number: int, fields: Sequence[tuple[str, pa.DataType]], side: str) -> tuple[Any, Any]:
        if (number, side) not in self._schemas:
            schema = json.loads(_avro_schema(self._registry, number))
            if not isinstance(schema, dict) or schema.get("type") != "record":
                raise _wrong_schema(number, "no record")
            self._schemas[number, side] = _parsed(schema, number), _projection(schema, dict(fields))
        return self._schemas[number, side]


def _columns(
    records: Sequence[dict[str, Any]], fields: Sequence[tuple[str, pa.DataType]]
) -> dict[str, pa.Array]:
    return {name: pa.array([record.get(name) for record in records], kind) for name, kind in fields}


def _has_types(record: dict[str, Any], fields: Sequence[tuple[str, pa.DataType]]) -> bool:
    try:
        _columns([record], fields)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return False
    return True


class AvroDocuments:
    """Documents in Avro in the form of Kafka Connect's JSON, except that bytes stay bytes. One thread."""

    def __init__(self, options: RegistryAddress) -> None:
        self._registry = Registry(options)
        self._schemas: dict[int, tuple[Any, Mapping[str, Any]]] = {}

    def __call__(self, message: bytes) -> tuple[Mapping[str, Any], Any]:
        """Return the schema and the payload.

        :raises ValueError: the message is not in the wire format, or does not match its schema.
        :raises TailraceError: `JOIN_VIOLATED` if the schema is not an Avro schema; `REGISTRY_REFUSED`,
            `REGISTRY_UNREACHABLE`.
        """
        if (number := _schema_number(message)) is None:
            raise ValueError
        if number not in self._schemas:
            # Values of logical types keep Kafka Connect's form.
            text = _avro_schema(self._registry, number)
            parsed = _parsed(json.loads(text, object_hook=_without_logic), number)
            self._schemas[number] = parsed, _connect_schema(parsed, {})
        written, schema = self._schemas[number]
        try:
            return schema, fastavro.schemaless_reader(io.BytesIO(message[_HEADER_BYTES:]), written, None)
        except Exception:  # noqa: BLE001 - of any kind; its message may quote what was read
            raise ValueError from None


def _schema_number(message: bytes) -> int | None:
    if len(message) <= _HEADER_BYTES or message[0]:
        return None
    return int.from_bytes(message[1:_HEADER_BYTES], "big")


def _avro_schema(registry: Registry, number: int) -> str:
    text, kind = registry.schema_of(number)
    if kind != "AVRO":
        raise _wrong_schema(number, f"{kind}, not AVRO")
    return text


def _parsed(schema: Any, number: int) -> Any:
    try:
        return fastavro.parse_schema(schema)
    except (ValueError, fastavro.schema.SchemaParseException):
        raise _wrong_schema(number, "not complete in itself, or no schema of Avro") from None


def _wrong_schema(number: int, found: str) -> TailraceError:
    return TailraceError(
        Kind.JOIN_VIOLATED,
        f"read messages: schema {number} of the registry is {found}",
        "see which converter writes the topic; without `registry` JSON is read",
        {"schema": number},
    )


def _without_logic(schema: dict[str, Any]) -> dict[str, Any]:
    schema.pop("logicalType", None)
    return schema


#: Kafka Connect's names of Avro's types, if they differ.
_CONNECT_TYPES = {"int": "int32", "long": "int64", "record": "struct", "fixed": "bytes", "enum": "string"}


def _connect_schema(schema: Any, known: dict[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a parsed schema in the form of Kafka Connect's JSON.

    :param known: records by their full name: each is described at its first occurrence.
    """
    if isinstance(schema, list):
        return _connect_schema(next((each for each in schema if each != "null"), "null"), known)
    if isinstance(schema, str):
        return known.get(schema) or {"type": _CONNECT_TYPES.get(schema, schema)}
    kind = schema["type"]
    if not isinstance(kind, str):
        return _connect_schema(kind, known)
    found: dict[str, Any] = {
        "type": schema.get("connect.type") or _CONNECT_TYPES.get(kind, kind),
        "name": schema.get("connect.name"),
        "parameters": schema.get("connect.parameters") or {},
    }
    for inner in ("items", "values"):
        if inner in schema:
            found[inner] = _connect_schema(schema[inner], known)
    if kind == "record":
        known[schema["name"]] = found
        found["fields"] = [
            {**_connect_schema(field["type"], known), "field": field["name"]} for field in schema["fields"]
        ]
    return found


def _projection(schema: Any, fields: dict[str, pa.DataType]) -> Any:
    """Return the schema with only these members, so that the others are skipped."""
    members = []
    for field in schema.get("fields", ()):
        kind = fields.get(field["name"])
        if kind is None:
            continue
        if not pa.types.is_struct(kind):
            members.append(field)
            continue
        inner = {child.name: child.type for child in kind}
        branches = field["type"] if isinstance(field["type"], list) else [field["type"]]
        of_type = [_projection(each, inner) if isinstance(each, dict) else each for each in branches]
        members.append({**field, "type": of_type if isinstance(field["type"], list) else of_type[0]})
    return {**schema, "fields": members}


def _violation(found: str, messages: pa.RecordBatch, place: int) -> TailraceError:
    return TailraceError(
        Kind.JOIN_VIOLATED,
        f"read messages: {found}",
        "see that both topics hold Debezium's messages in Avro, or leave out `registry`",
        {"offset": int(np.asarray(messages.column("offset"))[place])},
    )
