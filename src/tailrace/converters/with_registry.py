"""The converters `avro` and `json_schema`: Debezium's events, with their schemas in a registry.

Keys and values have the content that the converter `json` writes, in the order of their schemas; each is
preceded by a zero byte and the four bytes of its schema's id (Confluent's wire format). An id is requested
when its schema first occurs; after that a group needs no request.

Source: Confluent Schema Registry, "Wire format" and "Subject name strategy".
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from tailrace.config.converters import AvroOptions, JsonSchemaOptions, RegistryOptions
from tailrace.converters.avro.encoder import Members, encoded
from tailrace.converters.avro.schema import ADJUSTMENTS, UUID_NAME, avro_schema
from tailrace.converters.connect_schemas import Document, Schema, json_schema, written
from tailrace.converters.debezium import JsonConverter
from tailrace.converters.event_columns import EventColumns
from tailrace.converters.factory import checked
from tailrace.converters.registry import Registry
from tailrace.errors import Kind, TailraceError
from tailrace.records.events import Converted
from tailrace.records.group import Group, Places

#: Limit of a converter's cache of topics' schemas; when full, it is cleared, which only costs requests.
_KNOWN_MAX = 4096

_NIL = str(UUID(int=0))

#: A function that writes keys or values, each preceded by a schema id.
Write = Callable[[Any, int], pa.Array]


@dataclass(frozen=True, slots=True)
class _Form:
    """The differences between the two converters.

    :param kind: the registry's name of the format.
    :param describe: returns, for a schema, its text in the registry, its name there (empty: none), and the
        function that writes its values.
    :param is_columns: whether values are written from columns; otherwise from JSON.
    """

    kind: str
    describe: Callable[[Schema], tuple[str, str, Write]]
    is_columns: bool


class _RegistryConverter:
    """A converter to events with their schemas' ids.

    :param given: the options before validation, for pickling.
    :param now_ns: as in `JsonConverter`.
    """

    def __init__(
        self, options: RegistryOptions, given: dict[str, Any], form: _Form, now_ns: Callable[[], int]
    ) -> None:
        self._given = given
        self._options = options
        self._form = form
        self._json = JsonConverter(
            now_ns=now_ns,
            topic_prefix=options.topic_prefix,
            event_time=options.event_time,
            tombstones_on_delete=options.tombstones_on_delete,
            provide_transaction_metadata=options.provide_transaction_metadata,
        )
        self._registry: Registry | None = None
        self._lock = threading.Lock()
        self._known: dict[tuple[str, bool, str], Callable[[pa.Array], pa.Array]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), **self._given), ()

    def convert(self, group: Group) -> Converted:
        """Return keys and values in the converter's format, each preceded by its schema's id.

        :raises TailraceError: `CONVERSION_FAILED` if a value does not fit its schema; `SCHEMA_REFUSED`,
            `REGISTRY_UNREACHABLE`, `REGISTRY_REFUSED`, `SECRET_MISSING`.
        """
        topic, is_same = group.topic, self._options.keys == "same"
        rows = None
        try:
            events: EventColumns | Converted
            if self._form.is_columns:
                events, schemas = self._json.columns(group, with_keys=is_same)
            else:
                events, schemas = self._json.payloads(group)
            rows, keys = events.rows, events.keys
            values = self._writer(topic, schemas.value, schemas.value_text, is_key=False)(events.values)
            if keys is not None and schemas.key is not None and is_same:
                keys = self._writer(topic, schemas.key, schemas.key_text, is_key=True)(keys)
        except TailraceError as error:
            raise _placed(error, rows, topic) from error
        return Converted(keys, values, events.headers, rows)

    def _writer(
        self, topic: str, schema: Schema, text: str, *, is_key: bool
    ) -> Callable[[pa.Array], pa.Array]:
        at = topic, is_key, text
        if (known := self._known.get(at)) is not None:
            return known
        with self._lock:  # one request to the registry, however many threads wait for the same id
            if (known := self._known.get(at)) is not None:
                return known
            described, name, write = self._form.describe(schema)
            registry, subject = self._opened(), self._subject(topic, name, is_key=is_key)
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
                registry.forget()
            writer = functools.partial(
                _written_by, write, registry.id_of(subject, described, self._form.kind)
            )
            self._known[at] = writer
            return writer

    def check(self) -> None:
        """As `contract.ChecksAhead.check`: sends a request to the registry."""
        with self._lock:
            self._opened().require_reachable()

    def check_shape(self, group: Group) -> None:
        """As `contract.ChecksAhead.check_shape`, without registering a schema."""
        schemas = self._json.payload_schemas(group)
        key = schemas.key if self._options.keys == "same" else None
        for schema, is_key in ((schemas.value, False), (key, True)):
            if schema is None:
                continue
            described, name, _ = self._form.describe(schema)
            subject = self._subject(group.topic, name, is_key=is_key)
            with self._lock:
                self._opened().check(subject, described, self._form.kind)

    def close(self) -> None:
        """Close the connections to the registry."""
        # Without the lock: the thread that holds it may be waiting for the registry.
        registry, self._registry = self._registry, None
        if registry is not None:
            registry.close()

    def _subject(self, topic: str, name: str, *, is_key: bool) -> str:
        strategy = self._options.key_subject if is_key else self._options.value_subject
        return subject_of(strategy, topic, name, is_key=is_key)

    def _opened(self) -> Registry:
        if self._registry is None:
            self._registry = Registry(self._options)
        return self._registry


class AvroConverter(_RegistryConverter):
    """A converter to Avro, with schemas in a registry.

    :param now_ns: returns the time since 1970 in nanoseconds, for changes without a time of their own.
    :param options: of `config.converters.AvroOptions`.
    :raises TailraceError: `CONFIG_INVALID` for unknown or wrong options.
    """

    def __init__(self, *, now_ns: Callable[[], int] = time.time_ns, **options: Any) -> None:
        found = checked(AvroOptions, "avro", options)
        describe = functools.partial(
            _as_avro, adjustment=found.name_adjustment, logical_types=found.logical_types == "avro"
        )
        super().__init__(found, options, _Form("AVRO", describe, is_columns=True), now_ns)


class JsonSchemaConverter(_RegistryConverter):
    """A converter to JSON, with JSON Schemas in a registry.

    :param now_ns: as in `AvroConverter`.
    :param options: of `config.converters.JsonSchemaOptions`.
    :raises TailraceError: `CONFIG_INVALID` for unknown or wrong options.
    """

    def __init__(self, *, now_ns: Callable[[], int] = time.time_ns, **options: Any) -> None:
        found = checked(JsonSchemaOptions, "json_schema", options)
        super().__init__(found, options, _Form("JSON", _as_json_schema, is_columns=False), now_ns)


def subject_of(strategy: str, topic: str, name: str, *, is_key: bool) -> str:
    """Return the subject of a schema.

    :param strategy: `topic`, `record` or `topic_record`.
    :param name: of the schema; empty: it has none.
    :raises TailraceError: `CONVERSION_FAILED` if the strategy needs a name, and there is none.
    """
    if strategy == "topic":
        return f"{topic}-{'key' if is_key else 'value'}"
    if not name:
        raise TailraceError(
            Kind.CONVERSION_FAILED,
            f"name a subject: the {'key' if is_key else 'value'} is not a record, whose name would be used",
            f"choose {'key' if is_key else 'value'}_subject: topic for such records",
            {"topic": topic},
        )
    return name if strategy == "record" else f"{topic}-{name}"


def _as_avro(schema: Schema, *, adjustment: str, logical_types: bool) -> tuple[str, str, Write]:
    document = schema.document()
    found = avro_schema(document, ADJUSTMENTS[adjustment], logical_types=logical_types)
    name = ""
    if isinstance(found, dict) and found["type"] == "record":
        name = ".".join(filter(None, [found["namespace"], found["name"]]))

    def write(values: Any, schema_id: int) -> pa.Array:
        return encoded(_with_nil_uuids(values, document) if logical_types else values, document, schema_id)

    return written(found), name, write


def _with_nil_uuids(values: Any, document: Document) -> Any:
    """Return events with the nil UUID in place of the empty text that stands for an unsent one: readers of
    Avro's `uuid` accept no other text.
    """
    if isinstance(values, Members):
        fields = {field["field"]: field for field in document["fields"]}
        filled = {name: _with_nil_uuids(value, fields[name]) for name, value in values.values.items()}
        return replace(values, values=filled)
    is_required = document.get("name") == UUID_NAME and not document["optional"]
    if not is_required or not isinstance(values, pa.Array):
        return values
    return pc.if_else(pc.equal(values, pa.scalar("", values.type)), pa.scalar(_NIL, values.type), values)


def headed(texts: pa.Array, schema_id: int) -> pa.LargeBinaryArray:
    """Return documents, each preceded by its schema's id; null stays null."""
    header = pa.scalar(bytes([0]) + schema_id.to_bytes(4, "big"), pa.large_binary())
    nothing = pa.scalar(b"", pa.large_binary())
    return pc.binary_join_element_wise(header, texts.cast(pa.large_binary()), nothing)


def _as_json_schema(schema: Schema) -> tuple[str, str, Write]:
    return written(json_schema(schema.document())), schema.name or "", headed


def _written_by(write: Write, schema_id: int, values: Any) -> pa.Array:
    return write(values, schema_id)


def _placed(error: TailraceError, rows: Places | None, topic: str) -> TailraceError:
    # The index of an event becomes that of its record.
    row = error.context.get("row")
    place = {"row": int(rows[row])} if isinstance(row, int) and rows is not None else {}
    return error.changed({"topic": topic, **place})
