"""The columns of `format("tailrace-join")`."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.join.messages import HEADERS_FIELD
from tailrace.join.range_join import JoinRange

_TIME = pa.timestamp("us", "UTC")

SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", _TIME),
        HEADERS_FIELD,
        ("transaction_id", pa.string()),
        ("transaction_position", pa.int64()),
        ("transaction_timestamp", _TIME),
        ("transaction_offset", pa.int64()),
        ("transaction_event_count", pa.int64()),
        ("total_order", pa.int64()),
        ("partition_order", pa.int64()),
        ("partition_complete", pa.bool_()),
        ("transaction_complete", pa.bool_()),
    ]
)


def with_columns(batch: pa.RecordBatch, wanted: JoinRange) -> pa.RecordBatch:
    """Return a range's joined rows with all columns of `SCHEMA`, in their types."""
    topic, number = wanted.place
    rows = len(batch)
    whole = pa.array(np.full(rows, wanted.is_batch_whole), mask=np.asarray(batch["transaction_id"].is_null()))
    made = {
        "topic": pa.repeat(pa.scalar(topic), rows),
        "partition": pa.repeat(pa.scalar(number, pa.int32()), rows),
        "timestamp": _times(batch["timestamp_ms"]),
        "transaction_timestamp": _times(batch["transaction_ts_ms"]),
        "transaction_complete": whole,
    }
    arrays = [made[field.name] if field.name in made else batch[field.name] for field in SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _times(milliseconds: pa.Array) -> pa.Array:
    return pc.cast(pc.cast(milliseconds, pa.timestamp("ms", "UTC")), _TIME)
