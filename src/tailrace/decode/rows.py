"""Typed rows: a table's own columns in Arrow types, then the metadata columns of every change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.decode import kernel
from tailrace.decode.columns import ColumnType
from tailrace.decode.gather import Cells, gather, string_array
from tailrace.decode.tuples import WHOLE_ROW, Tuples
from tailrace.decode.types import METADATA, column_types, row_schema
from tailrace.errors import TailraceError
from tailrace.model import Op, Relation, ReplicaIdentity
from tailrace.protocol.frames import Numbers

_SPECIAL = METADATA[-1]
_LOG_OFFSET = METADATA[5]

_Made = TypeVar("_Made")

#: Rows (ascending), column name and texts of values that their typed column does not hold exactly.
Specials = list[tuple[npt.NDArray[np.int64], str, pa.StringArray]]

#: `Specials` by column name.
HeldTexts = dict[str, tuple[npt.NDArray[np.int64], pa.StringArray]]


def typed_rows(relation: Relation, tuples: Tuples, as_text: Collection[str]) -> pa.RecordBatch:
    """Return the changes in the schema `row_schema(relation)`; columns of `as_text` as strings.

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8 or a column's name is reserved.
    """
    schema, types = row_schema(relation), column_types(relation)
    specials: Specials = []
    columns: list[pa.Array] = []
    for c, column in enumerate(relation.columns):
        cells = tuples.column(c)
        if column.name in as_text:
            columns.append(_named(relation, column.name, gather, cells))
            schema = schema.set(c, pa.field(column.name, pa.string()))
        else:
            columns.append(typed_column(relation, column.name, types[c], cells, specials))
    columns += metadata(tuples)
    columns.append(unchanged_names(relation, tuples))
    columns.append(special_map(specials, len(tuples)))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def old_keys(relation: Relation, tuples: Tuples) -> pa.RecordBatch | None:
    """Return the former keys of updates that changed the key: key columns, `_log_offset` of the
    update and `_special`; None if there are none.

    :raises TailraceError: as `typed_rows`.
    """
    places, rows = _changed_keys(relation, tuples, set(relation.key))
    return _before(relation, tuples, places, rows)


def old_key_texts(relation: Relation, tuples: Tuples) -> pa.MapArray:
    """Return for each change a map from column to text: the former key of an update that changed it.

    :raises TailraceError: as `typed_rows`.
    """
    key = set(relation.key)
    if not key and relation.identity is ReplicaIdentity.FULL:
        key = {column.name for column in relation.columns}
    places, rows = _changed_keys(relation, tuples, key)
    texts: Specials = []
    if len(rows):
        names = [relation.columns[c].name for c in places]
        texts = [
            (rows, name, _named(relation, name, gather, tuples.old_column(c, rows)))
            for c, name in zip(places, names, strict=True)
        ]
    return special_map(texts, len(tuples))


def _changed_keys(
    relation: Relation, tuples: Tuples, key: set[str]
) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Return the indexes of the key's columns, and of the updates that changed the key."""
    places = [c for c, column in enumerate(relation.columns) if column.name in key]
    changed = np.zeros(len(tuples), np.bool_)
    if places and tuples.old_mark.any():
        kernel.mark_changed_keys(
            tuples.buffer, tuples.op, tuples.old_mark, np.array(places, np.int64),
            *tuples.current.arrays, *tuples.old.arrays, changed,
        )  # fmt: skip
    return places, np.flatnonzero(changed)


def old_rows(relation: Relation, tuples: Tuples) -> pa.RecordBatch | None:
    """Return the complete old rows of updates that sent them: all columns, `_log_offset` of the
    update and `_special`; None if there are none.

    :raises TailraceError: as `typed_rows`.
    """
    rows = np.flatnonzero((tuples.op == ord(Op.UPDATE)) & (tuples.old_mark == WHOLE_ROW))
    return _before(relation, tuples, range(len(relation.columns)), rows)


def _before(
    relation: Relation, tuples: Tuples, places: Sequence[int], rows: npt.NDArray[np.int64]
) -> pa.RecordBatch | None:
    # What was sent of the columns at `places` in the rows before the changes `rows`.
    if len(rows) == 0:
        return None
    specials: Specials = []
    types = column_types(relation)
    kept = [(c, relation.columns[c].name, types[c]) for c in places]
    columns = [
        typed_column(relation, name, kind, tuples.old_column(c, rows), specials) for c, name, kind in kept
    ]
    fields = [pa.field(name, kind.arrow) for _, name, kind in kept]
    columns.append(pa.array(tuples.fields[kernel.LOG_OFFSET][rows]))
    columns.append(special_map(specials, len(rows)))
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([*fields, _LOG_OFFSET, _SPECIAL]))


def metadata(tuples: Tuples) -> list[pa.Array]:
    """Return the columns `_op` to `_log_offset`."""
    fields = tuples.fields
    return [
        string_array(np.arange(len(tuples) + 1, dtype=np.int32), tuples.op),
        pa.array(fields[kernel.AT_COMMIT_LSN]),
        pa.array(fields[kernel.AT_ORDINAL]),
        or_null(fields[kernel.AT_XID]),
        or_null(fields[kernel.AT_COMMIT_TIME]).cast(pa.timestamp("us", tz="UTC")),
        pa.array(fields[kernel.LOG_OFFSET]),
    ]


def or_null(numbers: Numbers) -> pa.Int64Array:
    """Return `numbers` as an array, `kernel.NONE` as null."""
    missing = numbers == kernel.NONE
    return pa.array(numbers, mask=missing if missing.any() else None)


def typed_column(
    relation: Relation, name: str, kind: ColumnType, cells: Cells, specials: Specials
) -> pa.Array:
    """Return a column in its Arrow type, and add to `specials` the texts that it does not hold exactly.

    :raises TailraceError: `DECODE_FAILED`, naming the column, if a text is not UTF-8.
    """
    typed = _named(relation, name, kind.read, cells)
    rows = typed.special_rows
    if len(rows):
        odd = Cells(cells.buffer, cells.start[rows], cells.length[rows], cells.kind[rows])
        specials.append((rows, name, _named(relation, name, gather, odd)))
    return typed.values


def _named(relation: Relation, name: str, read: Callable[[Cells], _Made], cells: Cells) -> _Made:
    # Adds the table and column to the context of an error.
    try:
        return read(cells)
    except TailraceError as error:
        raise error.changed({"table": relation.qualified_name, "column": name}) from error


def unchanged_names(relation: Relation, tuples: Tuples) -> pa.ListArray:
    """Return for each change the names of the columns whose value was not sent."""
    missing = tuples.current.kind == kernel.UNCHANGED
    offsets = np.zeros(len(tuples) + 1, np.int32)
    names = pa.array([column.name for column in relation.columns], pa.string())
    if not missing.any():
        return pa.ListArray.from_arrays(pa.array(offsets), names[:0])
    np.cumsum(missing.sum(axis=0), out=offsets[1:])
    columns = np.nonzero(missing.T)[1]
    return pa.ListArray.from_arrays(pa.array(offsets), names.take(pa.array(columns)))


def special_map(specials: Specials, count: int) -> pa.MapArray:
    """Return for each of `count` rows a map from column to text; null where nothing is special."""
    if not specials:
        return pa.nulls(count, _SPECIAL.type)
    rows = np.concatenate([part[0] for part in specials])
    order = pa.array(np.argsort(rows, kind="stable"))
    names = pa.concat_arrays([pa.repeat(pa.scalar(name), len(part)) for part, name, _ in specials])
    texts = pa.concat_arrays([part[2] for part in specials])
    entries = np.bincount(rows, minlength=count)
    offsets = np.concatenate(([0], np.cumsum(entries))).astype(np.int32)
    null = np.append(entries == 0, False)
    return pa.MapArray.from_arrays(pa.array(offsets, mask=null), names.take(order), texts.take(order))


def specials(maps: pa.Array) -> HeldTexts:
    """Return the rows (ascending) and texts of values that columns don't hold, by `before.<column>` …"""
    if maps.null_count == len(maps):
        return {}
    keys, items, parents = special_entries(maps)
    names = keys.to_numpy(zero_copy_only=False)
    places = {str(name): np.flatnonzero(names == name) for name in set(names)}
    return {name: (parents[at], items.take(pa.array(at))) for name, at in places.items()}


def special_entries(maps: pa.MapArray) -> tuple[pa.Array, pa.Array, npt.NDArray[np.int64]]:
    """Return the keys and items of all maps, and the index of each item's map."""
    offsets = maps.offsets.fill_null(0).to_numpy() if maps.offsets.null_count else maps.offsets.to_numpy()
    first, last = int(offsets[0]), int(offsets[-1])
    parents = np.repeat(np.arange(len(maps)), np.diff(offsets))
    return maps.keys.slice(first, last - first), maps.items.slice(first, last - first), parents
