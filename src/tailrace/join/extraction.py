"""What the merge compares, taken from messages of Kafka: Debezium's topics, in JSON. Pure.

Messages are record batches with the columns of `MESSAGES`, in the order of their partition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

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

    :param rows: what the merge compares.
    :param ids: their names, as consumers know them; text.
    :param times_ms: of the commits, in milliseconds since 1970; null: not said.
    """

    rows: TransactionRows
    ids: pa.Array
    times_ms: pa.Array


class Extraction(Protocol):
    """Tells keys and orders of messages; given by the user for topics that are not Debezium's. Any thread."""

    def data(self, messages: pa.RecordBatch) -> DataRows:
        """Return what the merge compares of data messages: one row for each of them."""
        ...

    def transactions(self, messages: pa.RecordBatch) -> Transactions:
        """Return the transactions of messages of the transaction topic: at most one for each of them."""
        ...


_NEW_LINE = ord("\n")

_Found = TypeVar("_Found")


def extracted(
    extract: Callable[[pa.RecordBatch], _Found], messages: pa.RecordBatch, topic: str, partition: int | str
) -> _Found:
    """Return what an extraction finds in messages of a partition, which its errors then name."""
    try:
        return extract(messages)
    except TailraceError as error:
        where = {"topic": topic, "partition": int(partition), **error.context}
        raise TailraceError(error.kind, error.message, error.hint, where) from None


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

    Of PostgreSQL the number of a transaction is its key, and the position of its commit its order: a row says
    after which commit it comes. Of other databases the whole id is the key, and nothing is said of orders.
    """

    def data(self, messages: pa.RecordBatch) -> DataRows:
        """Return keys and orders; a message without `transaction`, as of a snapshot, has none."""
        return data_rows(messages, json_members(messages, DATA))

    def transactions(self, messages: pa.RecordBatch) -> Transactions:
        """Return the transactions whose `END` is among the messages; a `BEGIN` says nothing that is used."""
        return ended(messages, json_members(messages, TRANSACTION))


@dataclass(frozen=True, slots=True)
class JsonFields:
    """Extraction from documents of any kind, by the names of their fields; `a.b` is a field of a field.

    A key is a text or a whole number, the same on both sides; an order, a count and a time are whole numbers.

    :param key: of data: the key of the row's transaction, or whatever it is one of.
    :param order: of data: the row's place in it, rising. Empty: not said.
    :param one_key: on the side of which there is one for each key.
    :param one_order: rises from one to the next. Empty: not said.
    :param one_count: how many rows it has. Empty: not said.
    :param one_time_ms: when it was. Empty: not said.
    """

    key: str
    one_key: str
    order: str = ""
    one_order: str = ""
    one_count: str = ""
    one_time_ms: str = ""

    def data(self, messages: pa.RecordBatch) -> DataRows:
        """Return keys and orders; a message without the key is of no transaction."""
        return keyed_data(messages, *_fields(messages, self.key, [self.order]))

    def transactions(self, messages: pa.RecordBatch) -> Transactions:
        """Return one for each message that has the key."""
        numbers = [self.one_order, self.one_count, self.one_time_ms]
        found = _fields(messages, self.one_key, numbers)
        return keyed_transactions(messages, *found, rises=bool(self.one_order))


def keyed_data(messages: pa.RecordBatch, keys: pa.Array, orders: pa.Array) -> DataRows:
    """Return what the merge compares of data messages with these keys, texts, and orders, whole numbers."""
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
    """Return one for each message that has a key.

    :param rises: whether there are orders at all.
    """
    there = keys.is_valid()
    found = (messages.column("offset"), keys, orders, counts, times_ms)
    offsets, keys, orders, counts, times_ms = (column.filter(there) for column in found)
    rising = _integers(orders) if rises else None
    rows = TransactionRows(np.asarray(offsets), keys, rising, _integers(counts))
    return Transactions(rows, keys, times_ms)


def _fields(messages: pa.RecordBatch, key: str, numbers: Sequence[str]) -> list[pa.Array]:
    # The key as text, and the numbers, null where a name is empty; the key's field may be one of them.
    others = [(name, pa.int64()) for name in numbers if name and name != key]
    found = _at_paths(messages, [(key, pa.string()), *others])
    own = _read_paths(messages, [(key, pa.int64())]) if key in numbers else {}
    as_numbers = {"": pa.nulls(len(messages), pa.int64()), **found, **own}
    return [found[key], *map(as_numbers.__getitem__, numbers)]


def _at_paths(messages: pa.RecordBatch, paths: Sequence[tuple[str, pa.DataType]]) -> dict[str, pa.Array]:
    try:
        return _read_paths(messages, paths)
    except TailraceError:
        # Keys that are numbers: a column has one type.
        first, *others = paths
        try:
            found = _read_paths(messages, [(first[0], pa.int64()), *others])
        except TailraceError:
            if len(messages) == 1:
                raise
            # Keys of both kinds, or a message that is wrong: which one, the parts show.
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
    # The types of documents in which these paths are.
    below: dict[str, list[tuple[Sequence[str], pa.DataType]]] = {}
    for (first, *rest), kind in paths:
        below.setdefault(first, []).append((rest, kind))
    return [
        (name, found[0][1] if not found[0][0] else pa.struct(_members(found)))
        for name, found in below.items()
    ]


def data_rows(messages: pa.RecordBatch, found: Mapping[str, pa.Array]) -> DataRows:
    """Return keys and orders of Debezium's changes, of which these members (`DATA`) were found.

    :raises TailraceError: `JOIN_VIOLATED` for what is no change.
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
    return DataRows(
        np.asarray(messages.column("offset")),
        split.keys,
        follows,
        _integers(pc.struct_field(transaction, "total_order")),
    )


def ended(messages: pa.RecordBatch, found: Mapping[str, pa.Array]) -> Transactions:
    """Return the transactions that have ended, of messages of which these members (`TRANSACTION`) were found.

    :raises TailraceError: `JOIN_VIOLATED` for one without an id.
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

    :raises TailraceError: `JOIN_VIOLATED` for what is no JSON.
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
        # Arrow's own words quote what it read.
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
    # One document a line.
    lines = pc.binary_join_element_wise(documents, b"\n", b"")
    first, last = np.frombuffer(lines.buffers()[1], np.int32)[[lines.offset, lines.offset + len(lines)]]
    return lines.buffers()[2].slice(first, last - first)


def _column(table: pa.Table, name: str) -> pa.Array:
    found = table.column(name)
    return found.chunk(0) if found.num_chunks else pa.array([], found.type)
