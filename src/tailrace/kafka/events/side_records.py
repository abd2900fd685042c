"""Records other than row changes: boundaries of transactions, heartbeats, shapes of tables.

They are groups like those of changes, so that any converter can write them; the names of their schemas are
in the fields' metadata. Debezium has no records of shapes for PostgreSQL, whose stream has no DDL: their form
is Tailrace's own, with Debezium's terms where they exist.

A Relation message in a range yields a shape if it differs from the one in force before it. So each read of a
range yields the same shapes, and no state needs to be kept: messages that a server sends again, and those
that are repeated at a segment's head, yield none.

Source: Debezium 3.6, TransactionStructMaker, SchemaFactory (`transactionKeySchema`, `transactionValueSchema`,
`heartbeatKeySchema`, `heartbeatValueSchema`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.changelog.reader import LogReader
from tailrace.converters.debezium_types import named_field
from tailrace.decode.column_policy import TablePolicy
from tailrace.decode.json.debezium import SourceInfo
from tailrace.decode.json.shard_texts import NO_VGTID, vgtids
from tailrace.decode.postgres_types import OIDS
from tailrace.decode.schemas import Catalog
from tailrace.errors import Kind, TailraceError
from tailrace.kafka.events.boundaries import Ended
from tailrace.model import Column, Relation, ValueModes
from tailrace.protocol.frames import CONTROL_LSN_AT, XLOG_START_AT, Numbers
from tailrace.protocol.metadata_frames import schema_frames
from tailrace.ranges.changes import settled_facts, with_renames
from tailrace.ranges.plan import InputSplit
from tailrace.records.group import Group

#: Types of a change of shape: the table's first known shape, or a later one.
CREATE, ALTER = "CREATE", "ALTER"

_COMMON = "io.debezium.connector.common"

_ID = pa.field("id", pa.string(), nullable=False)
_TRANSACTION_KEY = named_field("key", pa.struct([_ID]), f"{_COMMON}.TransactionMetadataKey")
_COLLECTION = pa.struct(
    [
        pa.field("data_collection", pa.string(), nullable=False),
        pa.field("event_count", pa.int64(), nullable=False),
    ]
)
_COLLECTIONS = named_field("item", _COLLECTION, "event.collection").with_nullable(True)  # as Debezium's
_TRANSACTION_VALUE = named_field(
    "value",
    pa.struct(
        [
            pa.field("status", pa.string(), nullable=False),
            _ID,
            pa.field("event_count", pa.int64()),
            pa.field("data_collections", pa.list_(_COLLECTIONS)),
            pa.field("ts_ms", pa.int64(), nullable=False),
        ]
    ),
    f"{_COMMON}.TransactionMetadataValue",
)
_HEARTBEAT_KEY = named_field(
    "key",
    pa.struct([pa.field("serverName", pa.string(), nullable=False)]),
    f"{_COMMON}.ServerNameKey",
)
_HEARTBEAT_VALUE = named_field(
    "value", pa.struct([pa.field("ts_ms", pa.int64(), nullable=False)]), f"{_COMMON}.Heartbeat"
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
                pa.list_(named_field("item", _COLUMN, "tailrace.SchemaChangeColumn")),
                nullable=False,
            ),
        ]
    ),
    "tailrace.SchemaChange",
)


@dataclass(frozen=True, slots=True)
class ShapeChange:
    """A table's new shape, after the column policy.

    :param lsn: of the commit of the first transaction with this shape, or of the snapshot; 0: unknown.
    """

    what: str
    relation: Relation
    lsn: int


class Heartbeats:
    """A timer for heartbeats.

    :param interval_s: 0: no heartbeats.
    :param clock: a monotonic clock, in seconds.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._last_s = clock()

    @property
    def is_due(self) -> bool:
        """Whether a heartbeat is due now."""
        return self._interval_s > 0 and self._clock() - self._last_s >= self._interval_s

    def sent(self) -> None:
        """Restart the interval."""
        self._last_s = self._clock()


def transactions(topic: str, ended: Ended, origin: SourceInfo) -> Group:
    """Return two records for each transaction, BEGIN and END, in the order of commits.

    Ids are `<xid>:<LSN>`, with the LSN of the first change for BEGIN, and of the commit for END. For sources
    with shards they are VGTIDs.
    """
    count = len(ended)
    if origin.has_shards:
        known = ended.shards.of(vgtids(ended.shards.positions)).fill_null(NO_VGTID)
        ids = known.take(pa.array(np.repeat(np.arange(count), 2)))
    else:
        lsn = np.stack([ended.first_lsn, ended.commit_lsn], axis=1).reshape(-1)
        xid = np.repeat(ended.xid, 2)
        ids = pc.binary_join_element_wise(
            pa.array(xid).cast(pa.string()), pa.array(lsn).cast(pa.string()), pa.scalar(":")
        )
    ends = np.tile([False, True], count)
    # Rows of `ended` for the lists and counts; null for BEGIN.
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
    """Return one heartbeat with the time `ms`, in milliseconds since 1970."""
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


def shape_changes(
    log: LogReader | Path,
    splits: Sequence[InputSplit],
    start: int,
    end: int,
    modes: ValueModes,
    table_policy: TablePolicy,
) -> Iterator[ShapeChange]:
    """Yield the new shapes in `[start, end)`, in log order.

    :param splits: of a range that includes it.
    :raises TailraceError: `LOG_RANGE_GONE`, `LOG_CORRUPT`, and `CONFIG_INVALID` as `TablePolicy.shape`.
    """
    blocks = [block for split in splits for block in split.blocks]
    if not any(block.header.has_schema for block in blocks):
        return
    reader = log if isinstance(log, LogReader) else LogReader.open(log, splits[0].task)
    in_force = reader.schema_before(blocks[0])
    shaped = [block for block in blocks if block.header.has_schema]
    here = [frame for block in shaped for _, frame in schema_frames(reader.read(block))]
    settled = settled_facts(reader, blocks[0].header.log_offset, [*in_force, *here])
    table_policy = with_renames(table_policy, reader)  # renames are stored before such facts are in the log
    catalog = Catalog(in_force, modes, settled)
    commits: dict[int, int] = {}  # by relation: the LSN of its last facts
    for block in blocks:
        if not block.header.has_schema:
            continue
        raw, first = reader.read(block), block.header.log_offset
        # A range may begin and end within a block, between two frames.
        begins = max(0, start - first)
        for _, frame in schema_frames(raw[:begins]):
            catalog.apply(frame)
        for key, frame in schema_frames(raw[begins : max(0, end - first)]):
            oid = int(key[1:])
            before = _in_force(catalog, oid)
            catalog.apply(frame)
            if key[0] == "F":
                commits[oid] = _lsn_at(frame, CONTROL_LSN_AT)
            if key[0] != "R":
                continue  # types and facts come before their Relation message
            relation = catalog.relation(oid)
            if before is None or table_policy.relation(before) != table_policy.relation(relation):
                # A Relation message that the server sent has no LSN of its own.
                lsn = _lsn_at(frame, XLOG_START_AT) or commits.get(oid, 0)
                yield ShapeChange(ALTER if before else CREATE, table_policy.relation(relation), lsn)


def _lsn_at(frame: bytes, at: int) -> int:
    return int.from_bytes(frame[at : at + 8], "big")


def _in_force(catalog: Catalog, oid: int) -> Relation | None:
    try:
        return catalog.relation(oid)
    except TailraceError as error:
        if error.kind is not Kind.SCHEMA_MISSING:
            raise
        return None
