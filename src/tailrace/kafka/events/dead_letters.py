"""What takes the place of records that their topic can't hold: a letter that says which, why and where.

A letter goes to a topic of its own, in the transaction of the batch that the record belongs to, so
that it is there exactly if the batch is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import Kind
from tailrace.kafka.producer.record_sizes import OVERHEAD, sizes
from tailrace.protocol.frames import Numbers
from tailrace.records.events import Converted
from tailrace.sources.postgres.decode.changes import TableChanges

#: Longer keys than this are left out: a letter itself must fit.
KEY_BYTES_MAX = 64 << 10

_TEXT = pa.large_string()


def letters(events: Converted, rows: Numbers, changes: TableChanges, topic: str, limit: int) -> Converted:
    """Return a letter for each event.

    Its headers: `tailrace.error` (a `Kind`), `tailrace.topic`, `tailrace.table`, `tailrace.op`,
    `tailrace.log_offset`, `tailrace.commit_lsn`, `tailrace.ordinal`, `tailrace.size` and
    `tailrace.limit` in bytes, `tailrace.key_size`. Its key is the record's; null if that is too long.
    Its value is null.

    :param rows: of `changes`, for each event.
    """
    table = changes.relation.qualified_name if changes.relation else ""
    keys = _bytes(events.keys, len(events))
    key_sizes = pc.binary_length(keys)
    short = pc.less_equal(key_sizes, KEY_BYTES_MAX)
    headers = {
        "tailrace.error": _same(str(Kind.SINK_RECORD_TOO_LARGE), len(events)),
        "tailrace.topic": _same(topic, len(events)),
        "tailrace.table": _same(table, len(events)),
        "tailrace.op": pa.array([chr(letter) for letter in changes.op[rows]], _TEXT),
        "tailrace.log_offset": _texts(changes.log_offset[rows]),
        "tailrace.commit_lsn": _texts(changes.commit_lsn[rows]),
        "tailrace.ordinal": _texts(changes.ordinal[rows]),
        "tailrace.size": _texts(sizes(events) - OVERHEAD),
        "tailrace.limit": _texts(np.full(len(events), limit, np.int64)),
        "tailrace.key_size": key_sizes.cast(_TEXT),
    }
    return Converted(
        pc.if_else(short, keys, pa.scalar(None, pa.large_binary())),
        pa.nulls(len(events), pa.large_binary()),
        pa.StructArray.from_arrays(list(headers.values()), list(headers)),
    )


def _bytes(values: pa.Array | Sequence[object] | None, count: int) -> pa.Array:
    if values is None:
        return pa.nulls(count, pa.large_binary())
    found = values if isinstance(values, pa.Array) else pa.array(values)
    return found.cast(pa.large_binary())


def _texts(numbers: Numbers) -> pa.Array:
    return pa.array(numbers).cast(_TEXT)


def _same(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text, _TEXT), count)
