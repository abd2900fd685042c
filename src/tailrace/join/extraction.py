"""Extraction of keys and orders for the merge from Kafka messages: Debezium's JSON, and other JSON. Pure.

Messages are record batches with the columns of `MESSAGES`, in the order of their partition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from tailrace.decode.json.members import WRAPPER, members
from tailrace.errors import Kind, TailraceError
from tailrace.join.merge import UNKNOWN, DataRows, Integers, TransactionRows
from tailrace.join.postgres_ids import sequences, transaction_ids

MESSAGES = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("offset", pa.int64()),
        ("timestamp_ms", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class Transactions:
    """Transactions of a part of the transaction topic.

    :param rows: the values that the merge compares.
    :param ids: the transactions' ids for consumers; text.
    :param times_ms: of the commits, in milliseconds since 1970; null: not given.
    """

    rows: TransactionRows
    ids: pa.Array
    times_ms: pa.Array


@runtime_checkable
class Extraction(Protocol):
    """Extracts keys and orders from messages; users can supply one for other topics. Any thread."""

    def data(self, messages: pa.RecordBatch) -> DataRows:
        """Return the values that the merge compares: one row for each data message."""
        ...

    def transactions(self, messages: pa.RecordBatch) -> Transactions:
        """Return the transactions of messages of the transaction topic: at most one for each of them."""
        ...


_NEW_LINE = ord("\n")

_Found = TypeVar("_Found")


def extracted(
    extract: Callable[[pa.RecordBatch], _Found], messages: pa.RecordBatch, topic: str, partition: int | str
) -> _Found:
    """Return the result of an extraction from messages of a partition, whose name is added to errors."""
    try:
        return extract(messages)
    except TailraceError as error:
        raise error.changed({"topic": topic, "partition": int(partition)}) from None


#: Members of a change that are used.
DATA = [
    ("transaction", pa.struct([("id", pa.string()), ("total_order", pa.int64())])),
    ("source", pa.struct([("sequence", pa.string())])),
    ("op", pa.string()),
]
#: Members of a message of the transaction topic that are used.
TRANSACTION = [
    ("status", pa.string()),
    ("id", pa.string()),
    ("event_count", pa.int64()),
    ("ts_ms", pa.int64()),
]


class DebeziumJson:
    """Extraction from the topics that Debezium and Tailrace write as JSON, with or without schemas.

    For PostgreSQL, the key is the transaction's number, and the order is the position of its commit: a row
    has the position of the commit that it follows. For others the key is the whole id; there are no orders.
    """

    def data(self, messages: pa.RecordBatch) -> DataRows:
        """Return keys and orders; a message without `transaction`, as in a snapshot, has none."""
        return data_rows(messages, json_members(messages, DATA))

    def transactions(self, messages: pa.RecordBatch) -> Transactions:
        """Return the transactions whose `END` is among the messages; a `BEGIN` is ignored."""
        return ended(messages, json_members(messages, TRANSACTION))


@dataclass(frozen=True, slots=True)
class JsonFields:
    """Extraction from other JSON documents, by the names of their fields; `a.b` is a field of a field.

    A key is a text or a whole number, the same on both sides; an order, a count and a time are whole numbers.

    :param key: of data: the key of the row's transaction, or of another group of rows.
    :param order: of data: the row's place in the transaction, increasing. Empty: not given.
    :param one_key: the key in the transaction topic, which has one message for each key.
    :param one_order: increases from transaction to transaction. Empty: not given.
    :param one_count: number of the transaction's rows. Empty: not given.
    :param one_time_ms: time of the transaction. Empty: not given.
    """

    key: str
    one_key: str
    order: str = ""
    one_order: str = ""
    one_count: str = ""
    one_time_ms: str = ""

    def data(self, messages: pa.RecordBatch) -> DataRows:
        """Return keys and orders; a message without the key has no transaction."""
        return keyed_data(messages, *_fields(messages, self.key, [self.order]))

    def transactions(self, messages: pa.RecordBatch) -> Transactions:
        """Return a transaction for each message that has the key."""
        numbers = [self.one_order, self.one_count, self.one_time_ms]
        found = _fields(messages, self.one_key, numbers)
        return keyed_transactions(messages, *found, rises=bool(self.one_order))


def keyed_data(messages: pa.RecordBatch, keys: pa.Array, orders: pa.Array) -> DataRows:
    """Return the values that the merge compares for data messages with these keys (text) and orders."""
    unknown = np.full(len(messages), UNKNOWN, np.int64)
    return DataRows(np.asarray(messages.column("offset")), keys, unknown, _integers(orders))


def keyed_transactions(
    messages: pa.RecordBatch,
    keys: pa.Array,
    orders: pa.Array,
    counts: pa.Array,
    times_ms: pa.Array,
    *,
    rises: bool,
) -> Transactions:
    """Return a transaction for each message that has a key.

    :param rises: whether transactions have orders.
    """
    there = keys.is_valid()
    found = (messages.column("offset"), keys, orders, counts, times_ms)
    offsets, keys, orders, counts, times_ms = (column.filter(there) for column in found)
    rising = _integers(orders) if rises else None
    rows = TransactionRows(np.asarray(offsets), keys, rising, _integers(counts))
    return Transactions(rows, keys, times_ms)


def _fields(messages: pa.RecordBatch, key: str, numbers: Sequence[str]) -> list[pa.Array]:
    # Returns the key as text, and the numbers, null for an empty name; the key's field may be one of them.
    others = [(name, pa.int64()) for name in numbers if name and name != key]
    found = _at_paths(messages, [(key, pa.string()), *others])
    own = _read_paths(messages, [(key, pa.int64())]) if key in numbers else {}
    as_numbers = {"": pa.nulls(len(messages), pa.int64()), **found, **own}
    return [found[key], *map(as_numbers.__getitem__, numbers)]


def _at_paths(messages: pa.RecordBatch, paths: Sequence[tuple[str, pa.DataType]]) -> dict[str, pa.Array]:
    try:
        return _read_paths(messages, paths)
    except TailraceError:
        # The keys may be numbers: a column has one type.
        first, *others = paths
        try:
            found = _read_paths(messages, [(first[0], pa.int64()), *others])
        except TailraceError:
            if len(messages) == 1:
                raise
            # Keys of both kinds, or an invalid message: divide the batch to find out which.
            half = len(messages) // 2
            parts = [_at_paths(part, paths) for part in (messages.slice(0, half), messages.slice(half))]
            return {name: pa.concat_arrays([part[name] for part in parts]) for name in parts[0]}
        return found | {first[0]: found[first[0]].cast(pa.string())}


def _read_paths(messages: pa.RecordBatch, paths: Sequence[tuple[str, pa.DataType]]) -> dict[str, pa.Array]:
    found = json_members(messages, _members([(path.split("."), kind) for path, kind in paths]))
    columns = {}
    for path, _ in paths:
        first, *inner = path.split(".")
        column = found[first]
        for name in inner:
            column = pc.struct_field(column, name)
        columns[path] = column
    return columns


def _members(paths: Sequence[tuple[Sequence[str], pa.DataType]]) -> list[tuple[str, pa.DataType]]:
    # Returns the members of documents that contain these paths, with their types.
    below: dict[str, list[tuple[Sequence[str], pa.DataType]]] = {}
    for (first, *rest), kind in paths:
        below.setdefault(first, []).append((rest, kind))
    return [
        (name, found[0][1] if not found[0][0] else pa.struct(_members(found)))
        for name, found in below.items()
    ]


def data_rows(messages: pa.RecordBatch, found: Mapping[str, pa.Array]) -> DataRows:
    """Return keys and orders of Debezium's changes with these members (`DATA`).

    :raises TailraceError: `JOIN_VIOLATED` for a message that is not a change.
    """
    transaction, source = found["transaction"], found["source"]
    ids = pc.struct_field(transaction, "id")
    is_other = pc.and_(pc.and_(pc.is_null(ids), pc.is_null(found["op"])), messages.column("value").is_valid())
    if (first := pc.index(is_other, True).as_py()) >= 0:
        raise TailraceError(
            Kind.JOIN_VIOLATED,
            "read messages: one is no change as Debezium writes it, and names no transaction",
            "see that the topics under `data` hold Debezium's changes, not flattened, with "
            "provide.transaction.metadata; of other topics say where keys and orders are",
            {"offset": messages.column("offset")[first].as_py()},
        )
    commits, own = sequences(pc.struct_field(source, "sequence"))
    split = transaction_ids(ids)
    follows = np.where(commits > own, commits - 1, commits)
    follows[split.positions == UNKNOWN] = UNKNOWN
    orders = _integers(pc.struct_field(transaction, "total_order"))
    # In Tailrace's topics, the delete and the create of a changed key are one change with one order.
    is_create = np.asarray(pc.fill_null(pc.equal(found["op"], "c"), False))
    steps = np.where(orders == UNKNOWN, UNKNOWN, 2 * orders + is_create)
    return DataRows(np.asarray(messages.column("offset")), split.keys, follows, orders, steps)


def ended(messages: pa.RecordBatch, found: Mapping[str, pa.Array]) -> Transactions:
    """Return the ended transactions of messages with these members (`TRANSACTION`).

    :raises TailraceError: `JOIN_VIOLATED` for an `END` without an id.
    """
    is_end = pc.fill_null(pc.equal(found["status"], "END"), False)
    ids, counts, times = (
        column.filter(is_end) for column in (found["id"], found["event_count"], found["ts_ms"])
    )
    offsets = np.asarray(messages.column("offset").filter(is_end))
    if ids.null_count:
        raise TailraceError(
            Kind.JOIN_VIOLATED,
            "read the transaction topic: an END has no id",
            "see that the topic named under `transactions` is the one that Debezium writes with "
            "provide.transaction.metadata",
            {"offset": int(offsets[int(pc.index(pc.is_null(ids), True).as_py())])},
        )
    split = transaction_ids(ids)
    orders = split.positions if bool((split.positions != UNKNOWN).all()) else None
    return Transactions(TransactionRows(offsets, split.keys, orders, _integers(counts)), ids, times)


def _integers(values: pa.Array) -> Integers:
    found = pc.fill_null(values.cast(pa.int64()), UNKNOWN)
    return np.array(found, np.int64)


def json_members(messages: pa.RecordBatch, fields: Sequence[tuple[str, pa.DataType]]) -> dict[str, pa.Array]:
    """Return some members of the messages' documents, or of the `payload` in them.

    :raises TailraceError: `JOIN_VIOLATED` for a message that is not JSON.
    """
    if not any(name == WRAPPER for name, _ in fields):
        found = members(messages.column("value"), fields)
        if found is not None:
            return found
    return _parsed(messages, fields)


def _parsed(messages: pa.RecordBatch, fields: Sequence[tuple[str, pa.DataType]]) -> dict[str, pa.Array]:
    values, count = pc.fill_null(messages.column("value"), b"{}"), len(messages)
    text = _lines(values)
    if np.count_nonzero(np.frombuffer(text, np.uint8) == _NEW_LINE) > count:
        text = _lines(pc.replace_substring(values, "\n", " "))
    schema = pa.schema([*fields, (WRAPPER, pa.struct(fields))])
    try:
        table = pj.read_json(
            pa.BufferReader(text),
            pj.ReadOptions(use_threads=False, block_size=text.size),
            pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
        )
    except pa.ArrowInvalid:
        table = None
    if table is None or table.num_rows != count:
        # Arrow's message quotes what it read.
        raise TailraceError(
            Kind.JOIN_VIOLATED,
            "read messages: one is no document that JSON and Debezium know",
            "see that both topics hold JSON, or give an extraction of your own",
            {"offset_first": messages.column("offset")[0].as_py(), "messages": count},
        )
    table = table.combine_chunks()
    payload = _column(table, WRAPPER)
    return {name: pc.coalesce(pc.struct_field(payload, name), _column(table, name)) for name, _kind in fields}


def _lines(documents: pa.Array) -> pa.Buffer:
    # Returns the documents as lines.
    lines = pc.binary_join_element_wise(documents, b"\n", b"")
    first, last = np.frombuffer(lines.buffers()[1], np.int32)[[lines.offset, lines.offset + len(lines)]]
    return lines.buffers()[2].slice(first, last - first)


def _column(table: pa.Table, name: str) -> pa.Array:
    found = table.column(name)
    return found.chunk(0) if found.num_chunks else pa.array([], found.type)
