"""Records that are no changes of rows: boundaries of transactions, heartbeats, shapes of tables.

They are groups like others, so that whatever converter the sink has writes them; the names of their
schemas stand in the fields' metadata (`converters.given`). Debezium has no records of shapes for
PostgreSQL, whose stream has no DDL: that form is our own, with its words where it has some.

Source: Debezium 3.6, TransactionStructMaker, SchemaFactory (`transactionKeySchema`, `transactionValueSchema`,
`heartbeatKeySchema`, `heartbeatValueSchema`).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.converters.debezium_types import named_field
from tailrace.kafka.events.boundaries import Ended
from tailrace.kafka.events.table_schemas import ShapeChange
from tailrace.model import Column
from tailrace.protocol.frames import Numbers
from tailrace.records.group import Group
from tailrace.sources.postgres.decode.json.debezium import SourceInfo
from tailrace.sources.postgres.decode.postgres_types import OIDS

_COMMON = "io.debezium.connector.common"

_ID = pa.field("id", pa.string(), nullable=False)
_TRANSACTION_KEY = named_field("key", pa.struct([_ID]), f"{_COMMON}.TransactionMetadataKey", 1)
_COLLECTION = pa.struct(
    [
        pa.field("data_collection", pa.string(), nullable=False),
        pa.field("event_count", pa.int64(), nullable=False),
    ]
)
_TRANSACTION_VALUE = named_field(
    "value",
    pa.struct(
        [
            pa.field("status", pa.string(), nullable=False),
            _ID,
            pa.field("event_count", pa.int64()),
            pa.field("data_collections", pa.list_(named_field("item", _COLLECTION, "event.collection", 1))),
            pa.field("ts_ms", pa.int64(), nullable=False),
        ]
    ),
    f"{_COMMON}.TransactionMetadataValue",
    1,
)
_HEARTBEAT_KEY = named_field(
    "key",
    pa.struct([pa.field("serverName", pa.string(), nullable=False)]),
    f"{_COMMON}.ServerNameKey",
    1,
)
_HEARTBEAT_VALUE = named_field(
    "value", pa.struct([pa.field("ts_ms", pa.int64(), nullable=False)]), f"{_COMMON}.Heartbeat", 1
)


_NOT_NULL_TEXT, _NOT_NULL_INT = (
    {"type": pa.string(), "nullable": False},
    {"type": pa.int32(), "nullable": False},
)
_TYPE_NAMES = {oid: name for name, oid in OIDS.items()}

_SHAPE_KEY = named_field(
    "key",
    pa.struct([pa.field(name, **_NOT_NULL_TEXT) for name in ("databaseName", "schemaName", "tableName")]),
    "tailrace.SchemaChangeKey",
    1,
)
_COLUMN = pa.struct(
    [
        pa.field("name", **_NOT_NULL_TEXT),
        pa.field("position", **_NOT_NULL_INT),
        pa.field("typeOid", pa.int64(), nullable=False),
        pa.field("typeModifier", **_NOT_NULL_INT),
        pa.field("typeName", pa.string()),
        pa.field("optional", pa.bool_(), nullable=False),
        pa.field("identity", pa.bool_(), nullable=False),
    ]
)
_SHAPE_VALUE = named_field(
    "value",
    pa.struct(
        [
            pa.field("type", **_NOT_NULL_TEXT),
            pa.field("lsn", pa.int64()),
            pa.field("databaseName", **_NOT_NULL_TEXT),
            pa.field("schemaName", **_NOT_NULL_TEXT),
            pa.field("tableName", **_NOT_NULL_TEXT),
            pa.field("relationOid", pa.int64(), nullable=False),
            pa.field("version", **_NOT_NULL_INT),
            pa.field("replicaIdentity", **_NOT_NULL_TEXT),
            pa.field("keyColumnNames", pa.list_(pa.field("item", **_NOT_NULL_TEXT)), nullable=False),
            pa.field(
                "columns",
                pa.list_(named_field("item", _COLUMN, "tailrace.SchemaChangeColumn", 1)),
                nullable=False,
            ),
        ]
    ),
    "tailrace.SchemaChange",
    1,
)


def transactions(topic: str, ended: Ended, origin: SourceInfo) -> Group:
    """Return two records for each transaction, BEGIN and END, in the order of commits.

    Ids are `<xid>:<LSN>`: that of the first change for BEGIN, and that of the commit for END.
    """
    count = len(ended)
    lsn = np.stack([ended.first_lsn, ended.commit_lsn], axis=1).reshape(-1)
    xid = np.repeat(ended.xid, 2)
    ids = pc.binary_join_element_wise(
        pa.array(xid).cast(pa.string()), pa.array(lsn).cast(pa.string()), pa.scalar(":")
    )
    ends = np.tile([False, True], count)
    # Rows of the lists and counts: none for BEGIN.
    of_end = pa.array(np.repeat(np.arange(count), 2), mask=~ends)
    values = [
        pa.array(["BEGIN", "END"], pa.string()).take(pa.array(np.tile([0, 1], count))),
        ids,
        pa.array(ended.events).take(of_end),
        ended.tables.take(of_end).cast(_TRANSACTION_VALUE.type.field("data_collections").type),
        pa.array(np.repeat(ended.time_us // 1000, 2)),
    ]
    return _group(topic, _TRANSACTION_KEY, [ids], _TRANSACTION_VALUE, values, origin)


def heartbeat(topic: str, ms: int, origin: SourceInfo) -> Group:
    """Return one heartbeat of that time, in milliseconds since 1970."""
    return _group(
        topic,
        _HEARTBEAT_KEY,
        [pa.array([origin.name], pa.string())],
        _HEARTBEAT_VALUE,
        [pa.array([ms], pa.int64())],
        origin,
    )


def shape(topic: str, change: ShapeChange, origin: SourceInfo) -> Group:
    """Return the record of a table's new shape."""
    relation = change.relation
    place = {"databaseName": origin.database, "schemaName": relation.schema, "tableName": relation.table}
    value = {
        "type": change.what,
        "lsn": change.lsn or None,
        **place,
        "relationOid": relation.oid,
        "version": relation.version,
        "replicaIdentity": relation.identity.name.lower(),
        "keyColumnNames": list(relation.key),
        "columns": [_column(column, number) for number, column in enumerate(relation.columns, 1)],
    }
    columns = pa.RecordBatch.from_arrays(
        [pa.array([place], _SHAPE_KEY.type), pa.array([value], _SHAPE_VALUE.type)],
        schema=pa.schema([_SHAPE_KEY, _SHAPE_VALUE]),
    )
    return Group.of_columns(topic, np.zeros(1, np.int64), columns, origin=origin)


def _column(column: Column, number: int) -> dict[str, object]:
    own = column.value_type.name if column.value_type else ""
    return {
        "name": column.name,
        "position": number,
        "typeOid": column.type_oid,
        "typeModifier": column.type_modifier,
        "typeName": own or _TYPE_NAMES.get(column.type_oid),
        "optional": not column.not_null,
        "identity": column.in_identity,
    }


def _group(
    topic: str,
    key: pa.Field,
    of_key: list[pa.Array],
    value: pa.Field,
    of_value: list[pa.Array],
    origin: SourceInfo,
) -> Group:
    columns = pa.RecordBatch.from_arrays(
        [
            pa.StructArray.from_arrays(of_key, fields=list(key.type)),
            pa.StructArray.from_arrays(of_value, fields=list(value.type)),
        ],
        schema=pa.schema([key, value]),
    )
    places: Numbers = np.arange(columns.num_rows, dtype=np.int64)
    return Group.of_columns(topic, places, columns, origin=origin)
