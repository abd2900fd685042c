"""The converter `json`: Debezium's events, as Kafka Connect's JSON converter writes them.

Values have `before`, `after`, `source`, `transaction`, `op`, `ts_ms`, `ts_us`, `ts_ns`; logical messages
`op`, `ts_ms`, `source`, `transaction`, `message`. If a group has the wire's bytes, JSON is written directly
from them.

Source: Debezium 3.6, Envelope, PostgresSourceInfoStructMaker, LogicalDecodingMessageMonitor.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tailrace.config.converters import JsonOptions
from tailrace.converters import connect_schemas as schemas
from tailrace.converters.cells.change_table import ChangeTable, required_columns, row_schema
from tailrace.converters.cells.from_columns import change_table_of
from tailrace.converters.cells.plain import convert_plain, plain_values
from tailrace.converters.cells.row_image import Field
from tailrace.converters.connect_schemas import EventSchemas, Schema
from tailrace.converters.event_columns import EventColumns, key_columns, plain_columns, value_columns
from tailrace.converters.event_plan import (
    Planned,
    beside_schema,
    facts_of,
    is_filled,
    key_headers,
    plan_events,
    source_of,
    transaction_of,
    with_times,
    write_values,
)
from tailrace.converters.factory import checked
from tailrace.decode.json.debezium import MS, NS, US, SourceInfo
from tailrace.decode.json.json_kernel import AFTER, BEFORE, OP_LETTER
from tailrace.decode.json.templates import Part, Slot, Text
from tailrace.model import ReplicaIdentity
from tailrace.records.events import Converted, EventKeys
from tailrace.records.group import Group


class JsonConverter:
    """A converter to Debezium's JSON.

    :param now_ns: returns the time since 1970 in nanoseconds; used if `event_time` is `processing`, and for
        messages without a transaction, which have no time of their own.
    :param options: of `config.converters.JsonOptions`.
    :raises TailraceError: `CONFIG_INVALID` for unknown or wrong options.
    """

    def __init__(self, *, now_ns: Callable[[], int] = time.time_ns, **options: Any) -> None:
        self._options = checked(JsonOptions, "json", options)
        self._now_ns = now_ns

    def convert(self, group: Group) -> Converted:
        """Return keys and values as JSON, in arrays of texts."""
        if not group.is_change:
            name = self._facts(group).name
            return convert_plain(group, name, with_schema=self._options.schemas_enable)
        table = change_table_of(group)
        return self._events(group, table, self._own_schemas(table, group), filled=self._fills)

    def keys(self, group: Group) -> EventKeys:
        """As `KeysFirst.keys`."""
        if not group.is_change:
            found = self.convert(group)
            return EventKeys(found.keys, found.rows)
        table = change_table_of(group)
        planned = self._planned(table, self._own_schemas(table, group))
        return EventKeys(planned.keys, planned.rows)

    def payloads(self, group: Group) -> tuple[Converted, EventSchemas]:
        """Return events without schemas, and their schemas separately, for use with a schema registry.

        Each object has all members of its schema, in the same order.
        """
        if not group.is_change:
            found = plain_values(group, self._facts(group).name)
            return found.json(), found.schemas
        table = change_table_of(group)
        events = self._events(group, table, None, filled=True)
        return events, self._schemas(table, group, filled=True)

    def columns(self, group: Group, *, with_keys: bool) -> tuple[EventColumns, EventSchemas]:
        """Return events as columns of values, and their schemas.

        :param with_keys: whether keys are columns, too; otherwise they are JSON.
        """
        name = self._facts(group).name
        if not group.is_change:
            return plain_columns(plain_values(group, name), with_keys=with_keys)
        table = change_table_of(group)
        tombstones = self._options.tombstones_on_delete
        in_headers = group.is_second is not None
        planned = plan_events(table, None, tombstones=tombstones, with_keys=in_headers or not with_keys)
        now_ns = functools.cache(self._now_ns)
        event = self._event(table, self._facts(group), now_ns)
        values = value_columns(table, planned, event, with_times(table, now_ns))
        keys = key_columns(table, planned) if with_keys else planned.keys
        events = EventColumns(keys, values, key_headers(planned, group), planned.rows)
        return events, self._schemas(table, group, filled=True)

    def payload_schemas(self, group: Group) -> EventSchemas:
        """Return only the schemas that `payloads` returns for a group of changes, which may be empty."""
        return self._schemas(change_table_of(group), group, filled=True)

    def close(self) -> None:
        """Do nothing: the converter holds no resources."""

    def _facts(self, group: Group) -> SourceInfo:
        return facts_of(group, self._options.topic_prefix)

    @property
    def _fills(self) -> bool:
        return is_filled(self._options.rows_in_part, with_schema=self._options.schemas_enable)

    def _own_schemas(self, table: ChangeTable, group: Group) -> EventSchemas | None:
        # The schemas that events include; None: they include none.
        return self._schemas(table, group, filled=self._fills) if self._options.schemas_enable else None

    def _schemas(self, table: ChangeTable, group: Group, *, filled: bool) -> EventSchemas:
        single = table.key if table.key is not None and table.key.is_single else None
        key = None if table.key is None or single is not None else tuple(table.key.fields)
        if table.is_message:
            return _message_schemas(tuple(table.fields), key is not None)
        facts = self._facts(group)
        is_full = group.relation is not None and group.relation.identity is ReplicaIdentity.FULL
        of = f"{facts.name}.{table.schema}" if table.schema else facts.name
        own = schemas.SOURCE_WITH_SHARD if facts.has_shards else schemas.SOURCE
        source = own if table.source is None else table.source[1]
        name = f"{of}.{table.table}"
        required = required_columns(table, group)
        found = _table_schemas(name, tuple(table.fields), key, source, filled or is_full, required)
        return found if single is None else replace(found, key=single.fields[0].how.schema)

    def _events(
        self, group: Group, table: ChangeTable, schemas: EventSchemas | None, *, filled: bool
    ) -> Converted:
        planned = self._planned(table, schemas)
        now_ns = functools.cache(self._now_ns)  # one time for all events of the group
        value_schema = None if schemas is None else schemas.value_text
        event = beside_schema(self._event(table, self._facts(group), now_ns), value_schema)
        values = write_values(table, planned, event, filled=filled, now_ns=now_ns)
        return Converted(planned.keys, values, key_headers(planned, group), planned.rows)

    def _planned(self, table: ChangeTable, schemas: EventSchemas | None) -> Planned:
        key_schema = None if schemas is None or schemas.key is None else schemas.key_text
        return plan_events(table, key_schema, tombstones=self._options.tombstones_on_delete)

    def _event(self, table: ChangeTable, facts: SourceInfo, now_ns: Callable[[], int]) -> dict[str, Part]:
        source = source_of(table, facts)
        has_transaction = self._options.provide_transaction_metadata and table.source is None
        transaction = transaction_of(facts) if has_transaction and not table.is_snapshot else None
        op, times = Text((OP_LETTER,)), own_times(self._options.event_time, now_ns)
        if table.is_message:
            first = {"op": op, "ts_ms": times["ts_ms"]}
            return {**first, "source": source, "transaction": transaction, "message": Slot(AFTER)}
        images = {"before": Slot(BEFORE), "after": Slot(AFTER)}
        return {**images, "source": source, "transaction": transaction, "op": op, **times}


def own_times(event_time: str, now_ns: Callable[[], int]) -> dict[str, Slot | int]:
    """Return an event's `ts_*` members: the commit's time, or that of processing."""
    if event_time == "commit":
        return {"ts_ms": Slot(MS), "ts_us": Slot(US), "ts_ns": Slot(NS)}
    return {"ts_ms": now_ns() // 1_000_000, "ts_us": now_ns() // 1000, "ts_ns": now_ns()}


@functools.lru_cache(maxsize=16)
def _message_schemas(fields: tuple[Field, ...], has_key: bool) -> EventSchemas:
    members = [field.how.schema.document(optional=True, field=field.name) for field in fields]
    return EventSchemas(schemas.message(members), schemas.MESSAGE_KEY if has_key else None)


@functools.lru_cache(maxsize=256)
def _table_schemas(
    name: str,
    fields: tuple[Field, ...],
    key: tuple[Field, ...] | None,
    source: Schema,
    all_there: bool,
    required: tuple[frozenset[str], frozenset[str]],
) -> EventSchemas:
    of_keys, of_rows = required
    row = row_schema(f"{name}.Value", fields, all_there=all_there, required=of_rows)
    value = schemas.envelope(name, row, source)
    if key is None:
        return EventSchemas(value, None)
    return EventSchemas(value, row_schema(f"{name}.Key", key, all_there=True, required=of_keys))
