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
from tailrace.converters.cells.change_table import TABLE_ORDER, TOTAL_ORDER, ChangeTable, row_schema
from tailrace.converters.cells.from_columns import change_table_of, plain_change_table_of
from tailrace.converters.cells.plain import convert_plain, plain_keys
from tailrace.converters.cells.row_image import Field
from tailrace.converters.connect_schemas import struct, written
from tailrace.converters.event_plan import (
    Planned,
    facts_of,
    is_filled,
    key_headers,
    plan_events,
    write_values,
)
from tailrace.converters.factory import checked
from tailrace.decode.json.debezium import COMMIT_LSN, LSN, MS, NS, US, XID, SourceInfo
from tailrace.decode.json.documents import Plan, Template
from tailrace.decode.json.json_kernel import (
    AFTER,
    AS_ISO,
    AS_TEXT,
    BEFORE,
    CELL,
    CODED,
    NOTHING,
    OP_LETTER,
    UNLESS,
)
from tailrace.decode.json.shard_texts import SHARD_TEXT, VGTID_TEXT
from tailrace.errors import Kind, TailraceError
from tailrace.model import ReplicaIdentity
from tailrace.records.events import Converted, EventKeys
from tailrace.records.group import Group

_JSON = "application/json"

_NO_TRANSACTION = (
    ',"iodebeziumtxid":null,"iodebeziumtxtotalorder":null,"iodebeziumtxdatacollectionorder":null'
)


class CloudEventsConverter:
    """Writes CloudEvents.

    :param now_ns: gives the time since 1970 in nanoseconds, for what has no time of its own.
    :param options: of `config.converters.CloudEventsOptions`.
    :raises TailraceError: `CONFIG_INVALID` if there is no such option.
    """

    def __init__(self, *, now_ns: Callable[[], int] = time.time_ns, **options: Any) -> None:
        self._options = checked(CloudEventsOptions, "cloudevents", options)
        self._now_ns = now_ns

    def convert(self, group: Group) -> Converted:
        """Return keys and whole events as JSON.

        Records that tell no source at all (heartbeats, boundaries of transactions) are no events, and
        are JSON alone.
        :raises TailraceError: `CONFIG_INVALID` if the source is not PostgreSQL.
        """
        options = self._options
        facts = facts_of(group, options.topic_prefix)
        if not group.is_change and "source" not in group.columns.schema.names:
            return convert_plain(group, facts.name, with_schema=options.schemas_enable)
        table, planned = self._planned(group)
        if table.source is not None:
            raise _no_postgres(group)
        data = self._data(table, group, facts)
        filled = is_filled(options.rows_in_part, with_schema=options.schemas_enable)
        now_ns = functools.cache(self._now_ns)  # one time for all that a group has none for
        template = self._whole(table, facts, data)
        values = write_values(table, planned, template, filled=filled, now_ns=now_ns)
        return Converted(planned.keys, values, key_headers(planned, group), planned.rows)

    def keys(self, group: Group) -> EventKeys:
        """As `KeysFirst.keys`."""
        _, planned = self._planned(group)
        return EventKeys(planned.keys, planned.rows)

    def close(self) -> None:
        """Let go of nothing: there is nothing held."""

    def _planned(self, group: Group) -> tuple[ChangeTable, Planned]:
        if group.is_change:
            table = change_table_of(group)
            return table, plan_events(table, None, tombstones=self._options.tombstones_on_delete)
        table, there = plain_change_table_of(group)
        rows = np.arange(len(table), dtype=np.int64)
        op = np.where(there, table.op, 0).astype(np.uint8)
        keys = plain_keys(group)
        plan = Plan(rows, op, table.choice, table.wanted)
        return table, Planned(plan, None if keys.null_count == len(keys) else keys)

    def _data(self, table: ChangeTable, group: Group, facts: SourceInfo) -> Template:
        opening, closing = "", ""
        if self._options.schemas_enable:
            filled = is_filled(self._options.rows_in_part, with_schema=True)
            schema = _schema(table, group, facts, filled=filled)
            opening, closing = f'{{"schema":{schema},"payload":', "}"
        if table.is_plain:
            parts = [(opening, CELL)]
        elif table.is_message:
            parts = [(opening, AFTER)]
        else:
            parts = [(opening + '{"before":', BEFORE), (',"after":', AFTER), ("}", NOTHING)]
        return [*parts, (closing, NOTHING)]

    def _whole(self, table: ChangeTable, facts: SourceInfo, data: Template) -> Template:
        name = written(facts.name)[1:-1]
        place: Template = [
            (f'{{"id":"name:{name};lsn:', LSN),
            (";txId:", XID),
            (';sequence:[\\"', COMMIT_LSN),
            ('\\",\\"', LSN),
            ('\\"]', NOTHING),
        ]
        if facts.has_shards:
            place = [(f'{{"id":"name:{name};vgtid:', CODED - VGTID_TEXT)]
        context: Template = [
            *place,
            (f'","source":"/debezium/{facts.connector}/{name}","specversion":"1.0"', NOTHING),
            (f',"type":"io.debezium.connector.{facts.connector}.DataChangeEvent","time":', AS_ISO | MS),
            (f',"datacontenttype":"{_JSON}"', NOTHING),
        ]  # fmt: skip
        if self._options.extension_attributes_enable:
            context += _extensions(table, facts, transaction=self._options.provide_transaction_metadata)
        return [*context, (',"data":', NOTHING), *data, ("}", NOTHING)]


def _extensions(table: ChangeTable, facts: SourceInfo, *, transaction: bool) -> Template:
    # Attributes have no numbers of 64 bits, so these are texts.
    database = "" if facts.has_shards else facts.database
    second = {"snapshot": "true" if table.is_snapshot else "false", "db": database}
    if facts.has_shards:
        return _extensions_with_shard(table, facts, second, transaction=transaction)
    third = {"schema": table.schema, "table": table.table}
    first = {"version": facts.version, "connector": facts.connector, "name": facts.name}
    found: Template = [
        (',"iodebeziumop":"', OP_LETTER),
        (f'",{_prefixed(first)},"iodebeziumtsms":', AS_TEXT | MS),
        (f',{_prefixed(second)},"iodebeziumsequence":"[\\"', COMMIT_LSN),
        ('\\",\\"', LSN),
        ('\\"]","iodebeziumtsus":', AS_TEXT | US),
        (',"iodebeziumtsns":', AS_TEXT | NS),
        (f',{_prefixed(third)},"iodebeziumtxId":', AS_TEXT | XID),
        (',"iodebeziumlsn":', AS_TEXT | LSN),
        (',"iodebeziumxmin":null,"iodebeziumorigin":null,"iodebeziumoriginlsn":null', NOTHING),
    ]  # fmt: skip
    if not transaction or table.is_snapshot:
        return [*found, (_NO_TRANSACTION, NOTHING)]
    return [
        *found,
        (',"iodebeziumtxid":', UNLESS | 3 << 8 | XID),
        ('"', XID),
        (":", LSN),
        ('"', NOTHING),
        (',"iodebeziumtxtotalorder":', UNLESS | 1 << 8 | XID),
        ("", AS_TEXT | TOTAL_ORDER),
        (',"iodebeziumtxdatacollectionorder":', UNLESS | 1 << 8 | XID),
        ("", AS_TEXT | TABLE_ORDER),
    ]


def _extensions_with_shard(
    table: ChangeTable, facts: SourceInfo, second: dict[str, str], *, transaction: bool
) -> Template:
    first = {"version": facts.version, "connector": facts.connector, "name": facts.name}
    third = {"keyspace": table.schema, "table": table.table}
    found: Template = [
        (',"iodebeziumop":"', OP_LETTER),
        (f'",{_prefixed(first)},"iodebeziumtsms":', AS_TEXT | MS),
        (f',{_prefixed(second)},"iodebeziumsequence":null,"iodebeziumtsus":', AS_TEXT | US),
        (',"iodebeziumtsns":', AS_TEXT | NS),
        (f',{_prefixed(third)},"iodebeziumshard":"', CODED - SHARD_TEXT),
        ('","iodebeziumvgtid":"', CODED - VGTID_TEXT),
        ('"', NOTHING),
    ]
    if not transaction or table.is_snapshot:
        return [*found, (_NO_TRANSACTION, NOTHING)]
    return [
        *found,
        (',"iodebeziumtxid":"', CODED - VGTID_TEXT),
        ('","iodebeziumtxtotalorder":', AS_TEXT | TOTAL_ORDER),
        (',"iodebeziumtxdatacollectionorder":', AS_TEXT | TABLE_ORDER),
    ]


def _prefixed(values: dict[str, str]) -> str:
    return written({f"iodebezium{name}": value for name, value in values.items()})[1:-1]


def _schema(table: ChangeTable, group: Group, facts: SourceInfo, *, filled: bool) -> str:
    if table.is_plain:
        return written(table.row.fields[0].how.schema.document())
    if table.is_message:
        return _message_schema(tuple(table.fields))
    is_full = group.relation is not None and group.relation.identity is ReplicaIdentity.FULL
    key = frozenset(() if table.key is None else (field.name for field in table.key.fields))
    name = f"{facts.name}.{table.schema}.{table.table}.Value"
    return _data_schema(facts.connector, name, tuple(table.fields), key, filled or is_full)


@functools.lru_cache(maxsize=256)
def _data_schema(
    connector: str,
    name: str,
    fields: tuple[Field, ...],
    key: frozenset[str],
    all_there: bool,
) -> str:
    row = row_schema(name, fields, all_there=all_there, key=key)
    images = [row.document(optional=True, field=image) for image in ("before", "after")]
    return written(struct(images, f"io.debezium.connector.{connector}.Data").document())


@functools.lru_cache(maxsize=16)
def _message_schema(fields: tuple[Field, ...]) -> str:
    members = [field.how.schema.document(optional=True, field=field.name) for field in fields]
    return written(struct(members, "io.debezium.connector.postgresql.Message", 1).document())


def _no_postgres(group: Group) -> TailraceError:
    return TailraceError(
        Kind.CONFIG_INVALID,
        "convert records to CloudEvents: their `source` is not what PostgreSQL's is, which ids are made of",
        "use the converter json or python for this source",
        {"topic": group.topic},
    )
