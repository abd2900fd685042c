"""Changes as columns with separate rows before and after: the input of the engine's records.

`rows` returns one row per change, for tables; here each change has its key, the row before it (as far
as it was sent) and the row after it, as structs of the table's typed columns.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tailrace.decode import kernel
from tailrace.decode.envelope import image_choices
from tailrace.decode.gather import Cells, gather, gather_bytes
from tailrace.decode.rows import (
    Specials,
    metadata,
    or_null,
    special_map,
    typed_column,
    unchanged_names,
)
from tailrace.decode.shards import RowShards, ShardPositions, own_names, rows_of
from tailrace.decode.tuples import Tuples
from tailrace.decode.types import column_types
from tailrace.model import Op, Relation
from tailrace.protocol.frames import Numbers

#: Type of the column `source`: metadata of each change. `schema_version` counts the shapes of the table in
#: the log. Only sources with shards set the fields from `shard` on: see `decode.shards`.
SOURCE = pa.struct(
    [
        pa.field("schema", pa.string()),
        pa.field("table", pa.string()),
        pa.field("log_offset", pa.int64()),
        pa.field("commit_lsn", pa.int64()),
        pa.field("lsn", pa.int64()),
        pa.field("ordinal", pa.int64()),
        pa.field("xid", pa.int64()),
        pa.field("commit_ts", pa.timestamp("us", tz="UTC")),
        pa.field("schema_version", pa.int32()),
        pa.field("shard", pa.string()),
        pa.field("gtid", pa.string()),
        pa.field("epoch", pa.int64()),
        pa.field("rank", pa.int64()),
        pa.field("watermark", pa.timestamp("us", tz="UTC")),
    ]
)

#: Names of the columns, in order. `partial` says that `before` has only the key columns;
#: `special` maps `key.<column>`, `before.<column>` and `after.<column>` to the texts of values that their
#: typed column does not hold exactly; `unchanged` names the columns of `after` that were not sent.
NAMES = ("op", "key", "before", "after", "source", "partial", "special", "unchanged")

_MESSAGE = [pa.field("prefix", pa.string()), pa.field("content", pa.binary())]

# Returns the cells of the column at an index.
_Column = Callable[[int], Cells]


def images(tuples: Tuples) -> pa.RecordBatch:
    """Return changes of a table, or logical messages (a struct `after` of prefix and content).

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    specials: Specials = []
    columns = {name: _image(tuples, name, specials) for name in NAMES if name != "special"}
    columns["special"] = special_map(specials, len(tuples))
    return pa.RecordBatch.from_arrays([columns[name] for name in NAMES], names=list(NAMES))


def image(tuples: Tuples, name: str) -> tuple[pa.Array, pa.MapArray | None]:
    """Return one column of `images` other than `special`, without decoding others; and the entries of
    `special` about its values, by `<name>.<column>`, or None.

    :raises TailraceError: as `images`.
    """
    specials: Specials = []
    return _image(tuples, name, specials), special_map(specials, len(tuples)) if specials else None


def _image(tuples: Tuples, name: str, specials: Specials) -> pa.Array:
    count, relation = len(tuples), tuples.relation
    if name == "op":
        return metadata(tuples)[0]
    if name == "source":
        return source_of(relation, tuples.fields, tuples.shards)
    if name == "partial":
        return pa.array(image_choices(tuples)[0] == 2)
    if name == "unchanged":
        no_names = pa.list_(pa.string())
        return pa.nulls(count, no_names) if relation is None else unchanged_names(relation, tuples)
    if relation is None:
        return _message(tuples) if name == "after" else pa.nulls(count)
    return _row(relation, tuples, name, specials)


def _message(tuples: Tuples) -> pa.StructArray:
    content = [gather(tuples.column(0)), gather_bytes(tuples.column(1))]
    return pa.StructArray.from_arrays(content, fields=_MESSAGE)


def _row(
    relation: Relation, tuples: Tuples, name: str, specials: Specials, only: str | None = None
) -> pa.Array:
    # `only`: the one column that is decoded.
    names = [column.name for column in relation.columns]
    wanted = set(names if name != "key" else relation.key) & (set(names) if only is None else {only})
    places, prefix = [place for place, each in enumerate(names) if each in wanted], f"{name}."
    if name == "key":
        # Null for a truncate. The current row of a delete is what was sent of the old row: at least its key.
        there = tuples.op != ord(Op.TRUNCATE)
        if not places:
            return pa.nulls(len(tuples))
        return _struct(relation, tuples.column, places, there, specials, prefix)
    choice_before, choice_after = image_choices(tuples)
    if name == "after":
        return _struct(relation, tuples.column, places, choice_after != 0, specials, prefix)
    if not choice_before.any():
        types = column_types(relation)
        return pa.nulls(len(tuples), pa.struct([pa.field(names[c], types[c].arrow) for c in places]))
    old = functools.partial(tuples.old_column, rows=np.arange(len(tuples)))
    return _struct(relation, old, places, choice_before != 0, specials, prefix)


def _struct(
    relation: Relation,
    column: _Column,
    places: Sequence[int],
    present: npt.NDArray[np.bool_],
    specials: Specials,
    prefix: str,
) -> pa.StructArray:
    types = column_types(relation)
    fields = [pa.field(relation.columns[c].name, types[c].arrow) for c in places]
    found: Specials = []
    arrays = [typed_column(relation, relation.columns[c].name, types[c], column(c), found) for c in places]
    for rows, name, texts in found:
        there = present[rows]
        specials.append((rows[there], prefix + name, texts.filter(pa.array(there))))
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=pa.array(~present))


def image_column(tuples: Tuples, image: str, name: str) -> pa.Array | None:
    """Return one field of `key`, `before` or `after` of `images`, without decoding other columns.

    None if there is no such field.
    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    relation = tuples.relation
    known = () if relation is None else relation.key if image == "key" else [c.name for c in relation.columns]
    if relation is None or name not in known:
        return None
    return _row(relation, tuples, image, [], name).flatten()[0]


def source_of(relation: Relation | None, fields: Numbers, shards: ShardPositions | None) -> pa.StructArray:
    """Return the metadata of changes in the type `SOURCE`; `fields` are the kernel's numbers of each."""
    count = fields.shape[1]
    schema, table, version = (
        (relation.schema, relation.table, relation.version or None) if relation else ("", "", None)
    )
    arrays = [
        pa.repeat(pa.scalar(schema), count),
        pa.repeat(pa.scalar(table), count),
        pa.array(fields[kernel.LOG_OFFSET]),
        pa.array(fields[kernel.AT_COMMIT_LSN]),
        pa.array(fields[kernel.LSN]),
        pa.array(fields[kernel.AT_ORDINAL]),
        or_null(fields[kernel.AT_XID]),
        or_null(fields[kernel.AT_COMMIT_TIME]).cast(pa.timestamp("us", tz="UTC")),
        pa.repeat(pa.scalar(version, pa.int32()), count),
        *_shard_columns(fields[kernel.AT_COMMIT_LSN], shards),
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(SOURCE))


def _shard_columns(commit_lsn: Numbers, shards: ShardPositions | None) -> list[pa.Array]:
    # The columns of `SOURCE` from `shard` on.
    if shards is None:
        return [pa.nulls(len(commit_lsn), field.type) for field in list(SOURCE)[-5:]]
    rows = rows_of(shards, commit_lsn)
    watermark = or_null(np.where(shards.watermark_us < 0, kernel.NONE, shards.watermark_us))
    columns = [
        own_names(shards),
        shards.gtid,
        pa.array(shards.epoch),
        pa.array(shards.rank),
        watermark.cast(pa.timestamp("us", tz="UTC")),
    ]
    return [rows.of(column) for column in columns]


def shards_of(source: pa.Array) -> RowShards:
    """Return the shard positions of rows from their column `source`, of whatever type that is."""
    count = len(source)
    of_shards = pa.types.is_struct(source.type) and source.type.get_field_index("gtid") >= 0
    if not of_shards or source.field("gtid").null_count == count:
        return rows_of(None, np.zeros(count, np.int64))
    known = source.filter(source.field("gtid").is_valid())
    lsns, first = np.unique(known.field("commit_lsn").to_numpy(), return_index=True)
    units = known.take(pa.array(first))
    shards = zip(units.field("schema").to_pylist(), units.field("shard").to_pylist(), strict=True)
    names = pa.array([json.dumps(f"{keyspace}/{shard}")[1:-1] for keyspace, shard in shards], pa.string())
    epoch, rank = (units.field(name).to_numpy(zero_copy_only=False) for name in ("epoch", "rank"))
    unknown = np.full(len(lsns), -1, np.int64)
    found = ShardPositions(lsns, names, units.field("gtid"), epoch, rank, unknown)
    commit_lsn = source.field("commit_lsn").fill_null(kernel.NONE).to_numpy(zero_copy_only=False)
    return rows_of(found, commit_lsn)
