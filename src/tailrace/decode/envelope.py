"""The envelope: the changes of all tables in one schema, with values as PostgreSQL's text.

Rows are maps, which Spark can query without knowing a table's columns (`after['price']`). In a map,
SQL NULL is a null value, and a column that was not sent (unchanged TOAST) is absent.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.compiled import compiled
from tailrace.decode.gather import (
    TEXT_BYTES_MAX,
    copy_bytes,
    gather,
    gather_bytes,
    require_utf8,
    string_array,
)
from tailrace.decode.kernel import NULL, SPANS, TEXT, TRIPLE
from tailrace.decode.rows import metadata
from tailrace.decode.tuples import Spans, Tuples
from tailrace.errors import Kind, TailraceError
from tailrace.model import Op, Relation
from tailrace.protocol.frames import FROZEN_BYTES, Bytes

_MAP = pa.map_(pa.string(), pa.string())

#: The envelope's columns. `message_prefix` and `message_content` belong to logical messages;
#: `schema_version` counts the shapes of the table, and is null if the log does not record it.
SCHEMA = pa.schema(
    [
        pa.field("op", pa.string()),
        pa.field("schema", pa.string()),
        pa.field("table", pa.string()),
        pa.field("task", pa.string()),
        pa.field("log_offset", pa.int64()),
        pa.field("commit_lsn", pa.int64()),
        pa.field("ordinal", pa.int64()),
        pa.field("xid", pa.int64()),
        pa.field("commit_ts", pa.timestamp("us", tz="UTC")),
        pa.field("key", _MAP),
        pa.field("before", _MAP),
        pa.field("after", _MAP),
        pa.field("message_prefix", pa.string()),
        pa.field("message_content", pa.binary()),
        pa.field("schema_version", pa.int32()),
    ]
)


@compiled(TRIPLE(nb.uint8[::1], nb.boolean[:, ::1], nb.int32[::1], *SPANS, nb.int32[::1]))
def _measure_maps(choice, wanted, name_at, start, length, kind, offsets):  # type: ignore[no-untyped-def]
    # Returns the entries, bytes of names and bytes of values of the maps, one map per change; -1: too
    # many. choice[r] is 0 for no map, else the row of `wanted` (from 1) with the map's columns.
    entries = np.int64(0)
    name_bytes = np.int64(0)
    value_bytes = np.int64(0)
    offsets[0] = 0
    for r in range(len(choice)):
        if choice[r] > 0:
            for c in range(start.shape[0]):
                there = kind[c, r] == TEXT or kind[c, r] == NULL
                if there and wanted[choice[r] - 1, c]:
                    entries += 1
                    name_bytes += name_at[c + 1] - name_at[c]
                    value_bytes += length[c, r]
            if max(entries, name_bytes, value_bytes) > TEXT_BYTES_MAX:
                return np.int64(-1), np.int64(0), np.int64(0)
        offsets[r + 1] = entries
    return entries, name_bytes, value_bytes


@compiled(
    nb.void(
        FROZEN_BYTES, nb.uint8[::1], nb.boolean[:, ::1], FROZEN_BYTES, nb.int32[::1], *SPANS,
        nb.int32[::1], nb.uint8[::1], nb.int32[::1], nb.uint8[::1], nb.uint8[::1],
    )
)  # fmt: skip
def _write_maps(  # type: ignore[no-untyped-def]
    b, choice, wanted, names, name_at, start, length, kind, key_ends, keys, value_ends, values, valid
):
    entry = 0
    key_ends[0] = 0
    value_ends[0] = 0
    for r in range(len(choice)):
        if choice[r] == 0:
            continue
        for c in range(start.shape[0]):
            there = kind[c, r] == TEXT or kind[c, r] == NULL
            if not there or not wanted[choice[r] - 1, c]:
                continue
            size = np.int64(name_at[c + 1] - name_at[c])
            copy_bytes(keys, np.int64(key_ends[entry]), names, np.int64(name_at[c]), size)
            key_ends[entry + 1] = key_ends[entry] + size
            size = np.int64(0)
            if kind[c, r] == TEXT:
                size = np.int64(length[c, r])
                copy_bytes(values, np.int64(value_ends[entry]), b, np.int64(start[c, r]), size)
                valid[entry >> 3] |= np.uint8(1 << (entry & 7))
            value_ends[entry + 1] = value_ends[entry] + size
            entry += 1


def envelope(tuples: Tuples, task: str) -> pa.RecordBatch:
    """Return the changes in `SCHEMA`.

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8, or a block's maps exceed 2 GiB.
    """
    count = len(tuples)
    op, commit_lsn, ordinal, xid, commit_ts, log_offset = metadata(tuples)
    relation = tuples.relation
    if relation is None:
        key = before = after = pa.nulls(count, _MAP)
        prefix = gather(tuples.column(0))
        content = gather_bytes(tuples.column(1))
        schema = table = pa.nulls(count, pa.string())
    else:
        key, before, after = _maps(relation, tuples)
        prefix, content = pa.nulls(count, pa.string()), pa.nulls(count, pa.binary())
        schema = pa.repeat(pa.scalar(relation.schema), count)
        table = pa.repeat(pa.scalar(relation.table), count)
    columns = [
        op, schema, table, pa.repeat(pa.scalar(task), count), log_offset, commit_lsn, ordinal, xid,
        commit_ts, key, before, after, prefix, content, _version(relation, count),
    ]  # fmt: skip
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _version(relation: Relation | None, count: int) -> pa.Int32Array:
    known = relation.version if relation is not None and relation.version else None
    return pa.repeat(pa.scalar(known, pa.int32()), count)


def image_choices(tuples: Tuples) -> Bytes:
    """Return which changes have a row before (1: all columns, 2: the key columns), and which a row after."""
    before = np.where(tuples.old_mark == ord("O"), 1, np.where(tuples.old_mark == 0, 0, 2))
    after = (tuples.op != ord(Op.DELETE)) & (tuples.op != ord(Op.TRUNCATE))
    return np.stack([before, after]).astype(np.uint8)


def _maps(relation: Relation, tuples: Tuples) -> tuple[pa.MapArray, pa.MapArray, pa.MapArray]:
    names = set(relation.key)
    is_key = np.array([column.name in names for column in relation.columns], np.bool_)
    everything = np.ones(len(relation.columns), np.bool_)
    before, after = image_choices(tuples)
    whole = np.stack([everything, tuples.in_key])
    has_key = (tuples.op != ord(Op.TRUNCATE)) & bool(names)
    return (
        _map(relation, tuples.buffer, has_key.astype(np.uint8), is_key.reshape(1, -1), tuples.current),
        _map(relation, tuples.buffer, before, whole, tuples.old),
        _map(relation, tuples.buffer, after, whole, tuples.current),
    )


def _map(
    relation: Relation, buffer: Bytes, choice: Bytes, wanted: npt.NDArray[np.bool_], spans: Spans
) -> pa.MapArray:
    count = len(choice)
    if not choice.any():
        return pa.nulls(count, _MAP)
    encoded = [column.name.encode() for column in relation.columns]
    names = np.frombuffer(b"".join(encoded), np.uint8)
    name_at = np.concatenate(([0], np.cumsum([len(name) for name in encoded]))).astype(np.int32)
    offsets = np.empty(count + 1, np.int32)
    entries, name_bytes, value_bytes = _measure_maps(choice, wanted, name_at, *spans.arrays, offsets)
    if entries < 0:
        raise TailraceError(
            Kind.DECODE_FAILED,
            "built envelopes: the maps of one block are longer than 2 GiB",
            "read the table's typed rows (option `table`) instead",
            {"table": relation.qualified_name},
        )
    key_ends, value_ends = np.empty(entries + 1, np.int32), np.empty(entries + 1, np.int32)
    keys, values = np.empty(name_bytes + 8, np.uint8), np.empty(value_bytes + 8, np.uint8)
    valid = np.zeros((entries + 7) >> 3, np.uint8)
    _write_maps(
        buffer, choice, wanted, names, name_at, *spans.arrays, key_ends, keys, value_ends, values, valid
    )
    texts = string_array(value_ends, values, valid, -1)
    if values[:value_bytes].max(initial=0) >= 0x80:
        require_utf8(texts)
    present = pa.py_buffer(np.packbits(choice != 0, bitorder="little"))
    entry = pa.StructArray.from_arrays(
        [string_array(key_ends, keys), texts],
        fields=[pa.field("key", pa.string(), nullable=False), pa.field("value", pa.string())],
    )
    return pa.Array.from_buffers(_MAP, count, [present, pa.py_buffer(offsets)], children=[entry])
