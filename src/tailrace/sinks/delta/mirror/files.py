"""Files of net changes, which executors write from a split for a mirror, or from several such files.

A file contains net events of one table (see `net_changes`): the table's columns, the guard column
`_position`, and, unless all of its events are complete rows, `_upsert`, `_unchanged` and `_origin`.
A file without these three can be used as a data file of the mirror, so a snapshot is written
only once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.decode.changes import TableChanges
from tailrace.decode.types import known_type, rounded_by, row_schema
from tailrace.errors import Kind, TailraceError
from tailrace.model import Op, Relation, ReplicaIdentity
from tailrace.sinks.delta.mirror.net_changes import (
    LOG_OFFSET,
    ORIGIN,
    SPECIAL,
    UNCHANGED,
    UPSERT,
    events_of,
    net,
    net_plan,
    origin_type,
    picked,
    replaced,
)
from tailrace.sinks.files.parquet import ParquetWriter
from tailrace.sinks.write_job import BUFFERED_BYTES_MAX

POSITION = "_position"
POSITION_TYPE = pa.struct([("log_offset", pa.int64()), ("special", pa.map_(pa.string(), pa.string()))])
EXTRAS = (UPSERT, UNCHANGED, ORIGIN)
#: Columns that are kept when the rows' schema changes; the type of `_origin` is the file's.
KEPT = (
    (POSITION, POSITION_TYPE),
    (UPSERT, pa.bool_()),
    (UNCHANGED, pa.list_(pa.string())),
    (ORIGIN, pa.null()),
)


class NetWriter:
    """Collects the changes of one table in one split and writes their net changes into one file.

    Its facts, in addition to those of `ParquetWriter`: `truncated`, the table was emptied and the file
    has the later changes; `plain`, the file can be used as a data file; `snapshot`, the consistent
    point of the single snapshot that all of its rows are from, or None; `open`, columns whose value some
    event takes from the target's row; `moved`, some of these rows have another key there.

    :param reads_once: a snapshot has each key once.
    """

    def __init__(self, path: str, relation: Relation, *, reads_once: bool) -> None:
        self.rows = 0
        self._reads_once = reads_once
        self._path = path
        self._relation = relation
        self._key = relation.key
        self._events: list[pa.Table] = []
        self._net_rows = 0  # number of net events, which are the first ones
        self._bytes, self._limit = 0, BUFFERED_BYTES_MAX
        self._truncated = False
        self._snapshots: set[int | None] = set()

    def write(self, changes: TableChanges) -> None:
        self.rows += changes.count
        op = changes.op
        truncates = changes.log_offset[op == ord(Op.TRUNCATE)]
        if len(truncates):
            self._events, self._net_rows, self._bytes, self._truncated = [], 0, 0, True
            changes = changes.slice(int(truncates[-1]) + 1, np.iinfo(np.int64).max)
            op = changes.op
        if not changes.count:
            return
        reads = self._reads_once and (op == ord(Op.READ)).all()
        self._snapshots.update(np.unique(changes.commit_lsn).tolist() if reads else [None])
        events = events_of(changes, self._key)
        self._events.append(events)
        self._bytes += events.nbytes
        if self._bytes >= self._limit:
            events = self._net()
            self._events, self._net_rows, self._bytes = [events], len(events), events.nbytes
            self._limit = max(BUFFERED_BYTES_MAX, 2 * self._bytes)  # what stays is not reduced each time

    def close(self) -> dict[str, Any]:
        one_snapshot = len(self._snapshots) == 1 and None not in self._snapshots
        events = None
        if self._events:
            events = pa.concat_tables(self._events) if one_snapshot else self._net()
        facts = write_events(self._path, events, self._relation)
        self._events = []
        return {
            **facts,
            "truncated": self._truncated,
            "snapshot": next(iter(self._snapshots)) if one_snapshot else None,
        }

    def _net(self) -> pa.Table:
        events = pa.concat_tables(self._events)
        # Net events are one earlier range as a whole: their unchanged values are as of its start.
        is_net = np.arange(len(events)) < self._net_rows
        return net(events, self._key, np.where(is_net, -1, events[LOG_OFFSET].to_numpy()))


def open_net(path: str, relation: Relation, *, reads_once: bool) -> NetWriter:
    """Return a writer of net changes for a new file at `path`; see `NetWriter`.

    :raises TailraceError: `SINK_KEY_MISSING`, `SINK_SCHEMA_REFUSED`.
    """
    if not relation.key:
        name = ".".join(map(_identifier, (relation.schema, relation.table)))
        # Vitess always sends whole old rows of such a table.
        is_full = relation.identity is ReplicaIdentity.FULL
        identity = "" if is_full else f"ALTER TABLE {name} REPLICA IDENTITY FULL, and "
        raise TailraceError(
            Kind.SINK_KEY_MISSING,
            "mirror a table: it has no key (a deferrable one is no key), so its rows can't be identified",
            f"choose: give it one (ALTER TABLE {name} ADD PRIMARY KEY …) and begin with a new log, a new "
            "snapshot and an empty path; or name columns that tell its rows apart in source.message_keys, "
            "and start again, but not those of a deferrable key, which two rows may share for a moment; "
            f"or mirror it by whole rows ({identity}`keyless: full_row` for the sink); or leave it out of "
            "the sink's `tables`",
            {"table": relation.qualified_name},
        )
    _require_exact_key(relation)
    return NetWriter(path, relation, reads_once=reads_once)


def _identifier(name: str) -> str:
    # MySQL, and so Vitess, quotes names in another way: what needs no quotes gets none.
    return name if re.fullmatch(r"[a-z_][a-z0-9_]*", name) else '"' + name.replace('"', '""') + '"'


def _require_exact_key(relation: Relation) -> None:
    for column in relation.columns:
        setting = rounded_by(known_type(column), relation.modes) if column.name in relation.key else ""
        if setting:
            raise TailraceError(
                Kind.SINK_SCHEMA_REFUSED,
                f"mirror a table: {setting} rounds its key column {column.name!r}, so that different rows "
                "could have the same key",
                f"cast the column to text (`transformations` of the sink), or choose another {setting} or "
                "none; if the mirror has the table already, with a new, empty path; or leave the table out "
                "of the sink's `tables`",
                {"table": relation.qualified_name, "column": column.name},
            )


def write_events(path: str, events: pa.Table | None, relation: Relation) -> dict[str, Any]:
    """Write net events as a file, and return facts about it; see `NetWriter`."""
    if events is None:
        events = empty_events(relation)
    open_columns = pc.unique(pc.list_flatten(events[UNCHANGED])).to_pylist()
    plain = not open_columns and bool(pc.all(events[UPSERT], min_count=0).as_py())
    position = pa.StructArray.from_arrays(
        [events[LOG_OFFSET].combine_chunks(), events[SPECIAL].combine_chunks()],
        fields=list(POSITION_TYPE),
    )
    data = events.drop_columns([LOG_OFFSET, SPECIAL, *EXTRAS]).append_column(POSITION, position)
    schema = data.schema
    if not plain:
        for name in EXTRAS:
            data = data.append_column(events.schema.field(name), events[name])
    writer = ParquetWriter(path, "zstd")
    writer.write_table(data)
    return {
        **writer.close(),
        "schema": schema.serialize().to_pybytes(),
        "net_rows": len(events),
        "net_bytes": events.nbytes,
        "plain": plain,
        "open": open_columns,
        "moved": bool(events[ORIGIN].null_count < len(events)),
        "special": bool(events[SPECIAL].null_count < len(events)),
    }


def empty_events(relation: Relation) -> pa.Table:
    """Return an empty table with the schema of a table's events."""
    rows = row_schema(relation)
    own = [rows.field(column.name) for column in relation.columns]
    extra = [
        rows.field(LOG_OFFSET), rows.field(UNCHANGED), rows.field(SPECIAL), pa.field(UPSERT, pa.bool_()),
        pa.field(ORIGIN, origin_type(rows, relation.key)),
    ]  # fmt: skip
    return pa.schema([*own, *extra]).empty_table()


def read_events(path: str, schema: pa.Schema, key: Sequence[str]) -> pa.Table:
    """Return the events in a file, with the columns of `schema` (own columns and `_position`)."""
    with pq.ParquetFile(path) as file:
        held = file.read([*{*schema.names, POSITION, *EXTRAS}])
    count = len(held)
    columns: dict[str, pa.ChunkedArray | pa.Array] = {}
    for field in schema:
        if field.name != POSITION:
            there = field.name in held.column_names
            columns[field.name] = held[field.name].cast(field.type) if there else pa.nulls(count, field.type)
    position = held[POSITION].combine_chunks()
    columns[LOG_OFFSET] = position.field("log_offset")
    columns[SPECIAL] = position.field("special")
    plain = UPSERT not in held.column_names
    columns[UPSERT] = pa.array(np.ones(count, np.bool_)) if plain else held[UPSERT]
    columns[UNCHANGED] = _empty_lists(count) if plain else held[UNCHANGED]
    columns[ORIGIN] = pa.nulls(count, origin_type(schema, key)) if plain else held[ORIGIN]
    return pa.table(columns)


def _empty_lists(count: int) -> pa.ListArray:
    return pa.ListArray.from_arrays(np.zeros(count + 1, np.int32), pa.array([], pa.string()))


@dataclass(frozen=True, slots=True)
class Composition:
    """Files of one table, in log order, to be reduced to one at `out`, for bucket `bucket` of `buckets`.

    `rows_only`: the table was empty before the first of them, so only its rows at the end are needed.
    `bounds`: values of the key column `divided_by` that divide the keys into buckets; None: net events are
    divided by their size, of which `row_bytes` is the average in each file.
    """

    relation: Relation
    paths: tuple[str, ...]
    row_bytes: tuple[int, ...]
    schema: bytes
    rows_only: bool
    bucket: int
    buckets: int
    divided_by: str
    bounds: pa.Array | None
    out: str


def compose(work: Composition) -> dict[str, Any]:
    """Write the net changes of the files' events; return the new file's facts, `bytes` and `rows`."""
    schema = pa.ipc.read_schema(pa.py_buffer(work.schema))
    by_size = work.buckets > 1 and work.bounds is None
    events = _part(work, schema) if by_size else _of_keys(work, schema)
    if work.rows_only:
        events = _existing_rows(events)
    facts = write_events(work.out, events, work.relation)
    return {**facts, "path": work.out, "rows": len(events), "bytes": os.stat(work.out).st_size}


def _of_keys(work: Composition, schema: pa.Schema) -> pa.Table:
    """Return the net events of the bucket's keys."""
    key = work.relation.key
    parts = []
    for path in work.paths:
        events = read_events(path, schema, key)
        if work.bounds is not None:
            events = events.filter(_bucket_of(events[work.divided_by], work.bounds) == work.bucket)
        parts.append(events)
    return net(pa.concat_tables(parts), key, _steps(parts))


def _part(work: Composition, schema: pa.Schema) -> pa.Table:
    """Return the bucket's part of the net events.

    A value of a row whose key changed may be that of an event of another key. So where each value comes from
    is found without the values; then only the events that the part needs are read.
    """
    key = work.relation.key
    keys = pa.schema([schema.field(name) for name in key])
    bare = [read_events(path, keys, key) for path in work.paths]
    steps = _steps(bare)
    plan = net_plan(pa.concat_tables(bare), key, steps)
    sizes = np.repeat(work.row_bytes, [len(part) for part in bare])
    upto = np.max([sizes[numbers] for numbers in (plan.winners, *plan.sources.values())], axis=0).cumsum()
    limits = upto[-1] * np.arange(1, work.buckets) // work.buckets
    edges = [0, *np.searchsorted(upto, limits).tolist(), len(upto)]
    plan = plan.part(edges[work.bucket], edges[work.bucket + 1])
    needed = plan.needed()
    parts = []
    for step, path in enumerate(work.paths):
        begin, end = np.searchsorted(steps, [step, step + 1])
        numbers = needed[slice(*np.searchsorted(needed, [begin, end]))] - begin
        parts.append(picked(read_events(path, schema, key), numbers))
    return plan.made(pa.concat_tables(parts), needed)


def _steps(parts: Sequence[pa.Table]) -> npt.NDArray[np.int64]:
    return np.repeat(np.arange(len(parts)), [len(part) for part in parts])


def _existing_rows(events: pa.Table) -> pa.Table:
    """Return the rows of a table that was empty before. A value that was never sent is null, and
    `_special` has a null for its column, so that it differs from a NULL of the source.
    """
    events = events.filter(events[UPSERT])
    unknown = events[UNCHANGED].to_pylist() if len(pc.list_flatten(events[UNCHANGED])) else None
    if unknown is not None:
        special = [
            list({**dict(held or ()), **dict.fromkeys(columns)}.items()) or None
            for held, columns in zip(events[SPECIAL].to_pylist(), unknown, strict=True)
        ]
        events = replaced(events, SPECIAL, pa.array(special, events.schema.field(SPECIAL).type))
    events = replaced(events, UNCHANGED, _empty_lists(len(events)))
    return replaced(events, ORIGIN, pa.nulls(len(events), events.schema.field(ORIGIN).type))


def bounds_of(path: str, columns: Sequence[str], buckets: int) -> tuple[str, pa.Array | None]:
    """Return the column with most different values, and ascending values of it that divide the file's rows
    into buckets of about equal size; None if it has only nulls.
    """
    with pq.ParquetFile(path) as file:
        held = file.read(list(columns))
    column = max(columns, key=lambda name: pc.count_distinct(held[name]).as_py())
    values = held[column].drop_null()
    if not len(values):
        return column, None
    ordered = values.take(pc.sort_indices(values))
    places = [len(ordered) * k // buckets for k in range(1, buckets)]
    return column, ordered.take(pa.array(places, pa.int64())).combine_chunks()


def _bucket_of(values: pa.ChunkedArray, bounds: pa.Array) -> npt.NDArray[np.int64]:
    # No comparison with NULL or NaN is true, so both are always in bucket 0.
    bucket = np.zeros(len(values), np.int64)
    for bound in bounds:
        above = pc.greater_equal(values, bound)
        bucket += pc.fill_null(above, False).to_numpy()
    return bucket
