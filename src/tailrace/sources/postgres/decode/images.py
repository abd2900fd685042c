"""Changes as columns whose rows before and after stand apart: what the engine's records are made of.

`rows` gives one row a change for tables; here each change has its key, the row before it (as far as
it was sent) and the row after it, as structs of the table's typed columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model import Op, Relation
from tailrace.protocol.frames import Numbers
from tailrace.sources.postgres.decode import kernel
from tailrace.sources.postgres.decode.envelope import image_choices, message_content
from tailrace.sources.postgres.decode.gather import Cells, gather
from tailrace.sources.postgres.decode.rows import (
    Specials,
    metadata,
    or_null,
    special_map,
    typed_column,
    unchanged_names,
)
from tailrace.sources.postgres.decode.tuples import Tuples
from tailrace.sources.postgres.decode.types import column_types

#: What a source tells of each change. `schema_version` counts the shapes of the table in the log.
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
    ]
)

#: Names of the columns, in order. `partial` says that `before` holds the columns of the key alone;
#: `special` maps `before.<column>` and `after.<column>` to the texts of values that their typed
#: column does not hold exactly; `unchanged` names the columns of `after` that were not sent.
NAMES = ("op", "key", "before", "after", "source", "partial", "special", "unchanged")

_MESSAGE = [pa.field("prefix", pa.string()), pa.field("content", pa.binary())]

# The cells of a column of the table.
_Column = Callable[[int], Cells]


def images(tuples: Tuples) -> pa.RecordBatch:
    """Return changes of a table, or logical messages (a struct `after` of prefix and content).

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    count, relation = len(tuples), tuples.relation
    partial, special = np.zeros(count, np.bool_), pa.nulls(count, special_map([], 0).type)
    if relation is None:
        content = [gather(tuples.column(0)), message_content(tuples.column(1))]
        key = before = pa.nulls(count)
        after = pa.StructArray.from_arrays(content, fields=_MESSAGE)
        unchanged = pa.nulls(count, pa.list_(pa.string()))
    else:
        key, before, after, special = _rows(relation, tuples)
        partial = image_choices(tuples)[0] == 2
        unchanged = unchanged_names(relation, tuples)
    columns = [
        metadata(tuples)[0],
        key,
        before,
        after,
        source_of(relation, tuples.fields),
        pa.array(partial),
        special,
        unchanged,
    ]
    return pa.RecordBatch.from_arrays(columns, names=list(NAMES))


def keys(tuples: Tuples) -> pa.Array:
    """Return the key of each change as a struct; null for a truncate, and where there is none.

    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    relation = tuples.relation
    names = set(relation.key) if relation is not None else set()
    if relation is None or not names:
        return pa.nulls(len(tuples))
    in_key = [c for c, column in enumerate(relation.columns) if column.name in names]
    # The current row of a delete is what was sent of the old one, its key at least.
    return _struct(relation, tuples.column, in_key, tuples.op != ord(Op.TRUNCATE), [], "")


def _rows(relation: Relation, tuples: Tuples) -> tuple[pa.Array, pa.Array, pa.Array, pa.Array]:
    specials: Specials = []
    choice_before, choice_after = image_choices(tuples)
    everything = range(len(relation.columns))
    key = keys(tuples)
    after = _struct(relation, tuples.column, everything, choice_after != 0, specials, "after.")
    before = pa.nulls(len(tuples), after.type)
    if choice_before.any():
        every = np.arange(len(tuples))
        before = _struct(
            relation,
            lambda c: tuples.old_column(c, every),
            everything,
            choice_before != 0,
            specials,
            "before.",
        )
    return key, before, after, special_map(specials, len(tuples))


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
    """Return one field of `key`, `before` or `after` as `images` has it, nothing else decoded.

    None: there is no such field.
    :raises TailraceError: `DECODE_FAILED` if a text is not UTF-8.
    """
    relation = tuples.relation
    names = () if relation is None else tuple(column.name for column in relation.columns)
    if relation is None or name not in names or (image == "key" and name not in relation.key):
        return None
    place, before = names.index(name), image == "before"
    kind = column_types(relation)[place]
    in_before, in_after = image_choices(tuples)
    if before and not in_before.any():
        return pa.nulls(len(tuples), kind.arrow)
    cells = tuples.old_column(place, np.arange(len(tuples))) if before else tuples.column(place)
    present = in_before if before else in_after if image == "after" else tuples.op != ord(Op.TRUNCATE)
    values = typed_column(relation, name, kind, cells, [])
    return (
        values if present.all() else pc.if_else(pa.array(present != 0), values, pa.scalar(None, kind.arrow))
    )


def source_of(relation: Relation | None, fields: Numbers) -> pa.StructArray:
    """Return what the source tells of changes, in `SOURCE`; `fields` are the kernel's numbers of each."""
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
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(SOURCE))
