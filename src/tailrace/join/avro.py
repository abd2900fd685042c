"""What the merge compares, taken from Debezium's topics in Avro, with a schema registry.

Confluent's wire format: a zero, four bytes of the schema's id, and Avro's binary form. Of each message only
the members that are used are decoded; the others are passed over.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa

from tailrace.config.converters import RegistryAddress
from tailrace.converters.registry import Registry
from tailrace.errors import Kind, TailraceError
from tailrace.join.extraction import DATA, TRANSACTION, Transactions, data_rows, ended
from tailrace.join.merge import DataRows

#: A zero, and the schema's id.
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
            if len(value) <= _HEADER_BYTES or value[0]:
                raise _violation("one is not in the wire format of a schema registry", messages, place)
            number = int.from_bytes(value[1:_HEADER_BYTES], "big")
            written, wanted = self._schema(number, fields, side)
            try:
                record = fastavro.schemaless_reader(io.BytesIO(value[_HEADER_BYTES:]), written, wanted)
            except Exception:  # noqa: BLE001 - whatever it meets; its words may quote what it read
                raise _violation(f"one is not as its schema {number} says", messages, place) from None
            found.append(record)  # type: ignore[arg-type]
        columns = {name: [record.get(name) for record in found] for name, _ in fields}
        return {name: pa.array(columns[name], kind) for name, kind in fields}

    def _schema(self, number: int, fields: Sequence[tuple[str, pa.DataType]], side: str) -> tuple[Any, Any]:
        if (number, side) not in self._schemas:
            text, kind = self._registry.schema_of(number)
            if kind != "AVRO":
                raise TailraceError(
                    Kind.JOIN_VIOLATED,
                    f"read messages: schema {number} of the registry is {kind}, not AVRO",
                    "see which converter writes the topic; without `registry` JSON is read",
                    {"schema": number},
                )
            written = fastavro.parse_schema(json.loads(text))
            self._schemas[number, side] = written, _projection(json.loads(text), dict(fields))
        return self._schemas[number, side]


def _projection(schema: Any, fields: dict[str, pa.DataType]) -> Any:
    """Return the schema with these members alone, so that the others are passed over."""
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
