"""The converter `cloudevents`: CloudEvents 1.0 with Debezium's attributes, in JSON.

Source: Debezium 3.6, CloudEventsConverter, PostgresCloudEventsMaker, VitessCloudEventsMaker; CloudEvents
1.0.2, "JSON Event Format".
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tailrace.config.converters import CloudEventsOptions
from tailrace.converters.cells.change_table import ChangeTable, required_columns, row_schema
from tailrace.converters.cells.from_columns import change_table_of, plain_change_table_of
from tailrace.converters.cells.plain import convert_plain, given, plain_keys
from tailrace.converters.cells.row_image import Field
from tailrace.converters.connect_schemas import struct, written
from tailrace.converters.event_plan import (
    Planned,
    beside_schema,
    facts_of,
    is_filled,
    key_headers,
    plan_events,
    transaction_of,
    write_values,
)
from tailrace.converters.factory import checked
from tailrace.decode.json.debezium import COMMIT_LSN, LSN, MS, XID, SourceInfo, source_members
from tailrace.decode.json.documents import Plan
from tailrace.decode.json.json_kernel import AFTER, AS_ISO, AS_TEXT, BEFORE, CELL, CODED, OP_LETTER
from tailrace.decode.json.shard_texts import VGTID_TEXT
from tailrace.decode.json.templates import Part, Slot, Text, Unless
from tailrace.errors import Kind, TailraceError
from tailrace.model import ReplicaIdentity
from tailrace.records.events import Converted, EventKeys
from tailrace.records.group import Group


class CloudEventsConverter:
    """A converter to CloudEvents.

    :param now_ns: returns the time since 1970 in nanoseconds, for changes without a time of their own.
    :param options: of `config.converters.CloudEventsOptions`.
    :raises TailraceError: `CONFIG_INVALID` for unknown or wrong options.
    """

    def __init__(self, *, now_ns: Callable[[], int] = time.time_ns, **options: Any) -> None:
        self._options = checked(CloudEventsOptions, "cloudevents", options)
        self._now_ns = now_ns

    def convert(self, group: Group) -> Converted:
        """Return keys and whole events as JSON.

        Records without a source (heartbeats, boundaries of transactions) are not CloudEvents: they are plain
        JSON.
        :raises TailraceError: `CONFIG_INVALID` if the source is not PostgreSQL.
        """
        options = self._options
        facts = facts_of(group, options.topic_prefix)
        if not group.is_change and "source" not in group.columns.schema.names:
            return convert_plain(group, facts.name, with_schema=options.schemas_enable)
        table, planned = self._planned(group)
        if table.source is not None:
            raise _no_postgres(group)
        filled = is_filled(options.rows_in_part, with_schema=options.schemas_enable)
        now_ns = functools.cache(self._now_ns)  # the same time for all changes of the group
        event = self._event(table, group, facts)
        values = write_values(table, planned, event, filled=filled, now_ns=now_ns)
        return Converted(planned.keys, values, key_headers(planned, group), planned.rows)

    def keys(self, group: Group) -> EventKeys:
        """As `KeysFirst.keys`."""
        _, planned = self._planned(group)
        return EventKeys(planned.keys, planned.rows)

    def close(self) -> None:
        """Do nothing: the converter holds no resources."""

    def _planned(self, group: Group) -> tuple[ChangeTable, Planned]:
        if group.is_change:
            table = change_table_of(group)
            return table, plan_events(table, None, tombstones=self._options.tombstones_on_delete)
        how, values = given(group, "value", has_schema=self._options.schemas_enable)
        table, there = plain_change_table_of(group, how, values)
        rows = np.arange(len(table), dtype=np.int64)
        op = np.where(there, table.op, 0).astype(np.uint8)
        keys = plain_keys(group)
        plan = Plan(rows, op, table.choice, table.wanted)
        return table, Planned(plan, None if keys.null_count == len(keys) else keys)

    def _event(self, table: ChangeTable, group: Group, facts: SourceInfo) -> Part:
        options = self._options
        place = Text(
            (f"name:{facts.name};lsn:", LSN, ";txId:", XID, ';sequence:["', COMMIT_LSN, '","', LSN, '"]')
        )
        if facts.has_shards:
            place = Text((f"name:{facts.name};vgtid:", CODED - VGTID_TEXT))
        context: dict[str, Part] = {
            "id": place,
            "source": f"/debezium/{facts.connector}/{facts.name}",
            "specversion": "1.0",
            "type": f"io.debezium.connector.{facts.connector}.DataChangeEvent",
            "time": Slot(AS_ISO | MS),
            "datacontenttype": "application/json",
        }
        if options.extension_attributes_enable:
            wanted = options.provide_transaction_metadata
            context |= _extensions(facts, table.schema, table.table, table.is_snapshot, wanted)
        schema = None
        if options.schemas_enable:
            filled = is_filled(options.rows_in_part, with_schema=True)
            schema = _schema(table, group, facts, filled=filled)
        return {**context, "data": beside_schema(_data(table), schema)}


def _data(table: ChangeTable) -> Part:
    if table.is_plain:
        return Slot(CELL)
    return Slot(AFTER) if table.is_message else {"before": Slot(BEFORE), "after": Slot(AFTER)}


@functools.lru_cache(maxsize=256)
def _extensions(
    facts: SourceInfo, schema: str, table: str, is_snapshot: bool, transaction: bool
) -> dict[str, Part]:
    source = source_members(facts, schema, table, is_snapshot=is_snapshot)
    members = {"op": Text((OP_LETTER,)), **source}
    of_transaction = transaction_of(facts) if transaction and not is_snapshot else None
    for name in ("id", "total_order", "data_collection_order"):
        members[f"tx_{name}"] = _member(of_transaction, name)
    return {f"iodebezium{name.replace('_', '')}": _as_text(part) for name, part in members.items()}


def _member(of: Part, name: str) -> Part:
    if isinstance(of, Unless):
        return Unless(of.row, _member(of.value, name))
    return of[name] if isinstance(of, dict) else None


def _as_text(part: Part) -> Part:
    # Attributes of CloudEvents can't be 64-bit integers, so they are texts.
    if isinstance(part, Unless):
        return Unless(part.row, _as_text(part.value))
    return Slot(AS_TEXT | part.number) if isinstance(part, Slot) else part


def _schema(table: ChangeTable, group: Group, facts: SourceInfo, *, filled: bool) -> str:
    if table.is_plain:
        return written(table.row.fields[0].how.schema.document())
    if table.is_message:
        return _message_schema(tuple(table.fields))
    is_full = group.relation is not None and group.relation.identity is ReplicaIdentity.FULL
    name = f"{facts.name}.{table.schema}.{table.table}.Value"
    _, required = required_columns(table, group)
    return _data_schema(facts.connector, name, tuple(table.fields), required, filled or is_full)


@functools.lru_cache(maxsize=256)
def _data_schema(
    connector: str,
    name: str,
    fields: tuple[Field, ...],
    required: frozenset[str],
    all_there: bool,
) -> str:
    row = row_schema(name, fields, all_there=all_there, required=required)
    images = [row.document(optional=True, field=image) for image in ("before", "after")]
    return written(struct(images, f"io.debezium.connector.{connector}.Data").document())


@functools.lru_cache(maxsize=16)
def _message_schema(fields: tuple[Field, ...]) -> str:
    members = [field.how.schema.document(optional=True, field=field.name) for field in fields]
    return written(struct(members, "io.debezium.connector.postgresql.Message", 1).document())


def _no_postgres(group: Group) -> TailraceError:
    return TailraceError(
        Kind.CONFIG_INVALID,
        "convert records to CloudEvents: their `source` is not PostgreSQL's, from which ids are derived",
        "use the converter json or python for this source",
        {"topic": group.topic},
    )
