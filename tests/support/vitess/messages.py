"""Responses of VStream as vtgate writes them, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.sources.vitess.connection import vstream_pb2 as pb

KEYSPACE, SHARD = "shop", "-80"
TIME_S = 1_700_000_000

#: A column: name, type number, type as MySQL writes it, flags, collation number.
ColumnGiven = tuple[str, int, str, int, int]
Values = Sequence[bytes | None]

BIGINT, VARCHAR, JSON, BLOB = 265, 6165, 2078, 10260
NOT_NULL, PRIMARY = 1, 3
UTF8MB4, BINARY = 255, 63

ID: ColumnGiven = ("id", BIGINT, "bigint", PRIMARY, BINARY)
WHAT: ColumnGiven = ("what", VARCHAR, "varchar(64)", 0, UTF8MB4)


def response(*events: pb.VEvent) -> bytes:
    """Return a response with events."""
    return pb.VStreamResponse(events=events).SerializeToString()


def event(kind: pb.EventType, shard: str = SHARD, time_s: int = TIME_S, **more: object) -> pb.VEvent:
    """Return an event of a shard."""
    return pb.VEvent(type=kind, timestamp=time_s, keyspace=KEYSPACE, shard=shard, **more)  # type: ignore[arg-type]


def described(
    table: str, columns: Sequence[ColumnGiven], shard: str = SHARD, *, labels: bool = True
) -> pb.VEvent:
    """Return the event that describes a table."""
    found = pb.FieldEvent(
        table_name=f"{KEYSPACE}.{table}", keyspace=KEYSPACE, shard=shard, enum_set_string_values=labels
    )
    for name, number, column_type, flags, charset in columns:
        found.fields.add(name=name, type=number, column_type=column_type, flags=flags, charset=charset)
    return pb.VEvent(type=pb.FIELD, timestamp=TIME_S, field_event=found)


def row(values: Values) -> pb.Row:
    """Return a row's image."""
    lengths = [-1 if value is None else len(value) for value in values]
    return pb.Row(lengths=lengths, values=b"".join(value for value in values if value is not None))


def change(
    before: Values | None = None,
    after: Values | None = None,
    data: Sequence[bool] | None = None,
    json: Sequence[bool] | None = None,
) -> pb.RowChange:
    """Return a change; `data` says which columns the image after has, `json` which documents are partial."""
    found = pb.RowChange()
    if before is not None:
        found.before.CopyFrom(row(before))
    if after is not None:
        found.after.CopyFrom(row(after))
    if data is not None:
        found.data_columns.CopyFrom(_bitmap(data))
    if json is not None:
        found.json_partial_values.CopyFrom(_bitmap(json))
    return found


def _bitmap(bits: Sequence[bool]) -> pb.Bitmap:
    number = sum(1 << place for place, bit in enumerate(bits) if bit)
    return pb.Bitmap(count=len(bits), cols=number.to_bytes((len(bits) + 7) // 8, "little"))


def rows(table: str, changes: Sequence[pb.RowChange], shard: str = SHARD, time_s: int = TIME_S) -> pb.VEvent:
    """Return the event with changes of a table. Those of a copy have no time."""
    found = pb.RowEvent(table_name=f"{KEYSPACE}.{table}", keyspace=KEYSPACE, shard=shard, row_changes=changes)
    return pb.VEvent(type=pb.ROW, timestamp=time_s, row_event=found)


def vgtid(gtid: str, shard: str = SHARD, tables: Sequence[pb.TableLastPk] = (), *others: str) -> pb.VEvent:
    """Return the event with the position of a shard, besides those of the other shards of its stream."""
    found = pb.VGtid()
    for other in others:
        found.shard_gtids.add(keyspace=KEYSPACE, shard=other, gtid="MySQL56/other:1")
    found.shard_gtids.add(keyspace=KEYSPACE, shard=shard, gtid=gtid, table_pks=tables)
    return pb.VEvent(type=pb.VGTID, keyspace=KEYSPACE, shard=shard, vgtid=found)


def transaction(
    *events: pb.VEvent, gtid: str = "MySQL56/a:1-5", shard: str = SHARD, time_s: int = TIME_S
) -> bytes:
    """Return the response with a transaction that contains events."""
    begin = event(pb.BEGIN, shard, time_s)
    return response(begin, *events, vgtid(gtid, shard), event(pb.COMMIT, shard, time_s))


def copied(*events: pb.VEvent, gtid: str = "MySQL56/a:1-5", tables: Sequence[pb.TableLastPk] = ()) -> bytes:
    """Return the response with a part of a copy, whose rows have no time."""
    begin, end = event(pb.BEGIN, time_s=0), event(pb.COMMIT, time_s=0)
    return response(begin, *events, vgtid(gtid, SHARD, tables), end)
