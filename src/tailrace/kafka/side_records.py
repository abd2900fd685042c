"""Records that are no changes of rows, in Debezium's form: boundaries of transactions, heartbeats.

They are groups like others, so that whatever converter the sink has writes them; the names of their
schemas stand in the fields' metadata (`converters.given`).

Source: Debezium 3.6, TransactionStructMaker, SchemaFactory (`transactionKeySchema`, `transactionValueSchema`,
`heartbeatKeySchema`, `heartbeatValueSchema`).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tailrace.converters.given import named_field
from tailrace.decode.debezium import SourceFacts
from tailrace.kafka.boundaries import Ended
from tailrace.protocol.frames import Numbers
from tailrace.records.group import Group

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


def transactions(topic: str, ended: Ended, origin: SourceFacts) -> Group:
    """Return two records for each transaction, BEGIN and END, in the order of commits.

    Ids are `<xid>:<LSN>`: that of the first change for BEGIN, and that of the commit for END.
    """
    count = len(ended)
    lsn = np.stack([ended.first_lsn, ended.commit_lsn], axis=1).reshape(-1)
    xid = np.repeat(ended.xid, 2)
    ids = pa.array([f"{x}:{p}" for x, p in zip(xid.tolist(), lsn.tolist(), strict=True)], pa.string())
    ends = np.tile([False, True], count)
    # Rows of the lists and counts: none for BEGIN.
    of_end = pa.array(np.repeat(np.arange(count), 2), mask=~ends)
    values = [
        pa.array(["BEGIN", "END"] * count, pa.string()),
        ids,
        pa.array(ended.events).take(of_end),
        ended.tables.take(of_end).cast(_TRANSACTION_VALUE.type.field("data_collections").type),
        pa.array(np.repeat(ended.time_us // 1000, 2)),
    ]
    return _group(topic, _TRANSACTION_KEY, [ids], _TRANSACTION_VALUE, values, origin)


def heartbeat(topic: str, ms: int, origin: SourceFacts) -> Group:
    """Return one heartbeat of that time, in milliseconds since 1970."""
    return _group(
        topic,
        _HEARTBEAT_KEY,
        [pa.array([origin.name], pa.string())],
        _HEARTBEAT_VALUE,
        [pa.array([ms], pa.int64())],
        origin,
    )


def _group(
    topic: str,
    key: pa.Field,
    of_key: list[pa.Array],
    value: pa.Field,
    of_value: list[pa.Array],
    origin: SourceFacts,
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
