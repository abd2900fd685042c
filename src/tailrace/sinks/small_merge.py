"""The MERGE of net changes into a mirror of modest size, by delta-rs in an executor.

Spark's MERGE costs seconds, however little there is to do; with a hundred tables it would be a
hundred of them for each range. delta-rs does a small one in a tenth of a second. Both give the
same result and carry the same transaction; this one takes only what it does surely alike: keys
of whole numbers, texts and booleans, plain names, and rows that were sent whole.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError

from tailrace.errors import Kind, TailraceError
from tailrace.sinks.merge import NetSource

#: Larger targets and larger changes are Spark's.
TARGET_BYTES_MAX = 128 << 20
SOURCE_ROWS_MAX = 200_000

_PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_POSITION, _OFFSET, _UPSERT = "_position", "_offset", "_upsert"


@dataclass(frozen=True, slots=True)
class SmallMerge:
    """What an executor is told: `path` of the table, and its transaction after the merge."""

    path: str
    application: str
    version: int
    table: str
    source: NetSource


def is_small(source: NetSource, schema: pa.Schema, target_bytes: int) -> bool:
    """Tell whether delta-rs may do this merge; `schema` is the table's."""
    return (
        source.rows <= SOURCE_ROWS_MAX
        and target_bytes <= TARGET_BYTES_MAX
        and not source.open
        and not source.null_keys
        and all(_PLAIN_NAME.fullmatch(name) for name in schema.names)
        and all(_is_surely_alike(schema.field(name).type) for name in source.key)
    )


def merge_small(work: SmallMerge) -> None:
    """Merge and commit. Done again, it finds the transaction and does nothing.

    :raises TailraceError: `SINK_WRITE_FAILED` if it did not happen.
    """
    table = DeltaTable(work.path)
    if (table.transaction_version(work.application) or -1) >= work.version:
        return
    changes = pa.concat_tables([_read(path, work.source) for path in work.source.paths])
    same = " and ".join(f't."{name}" = s."{name}"' for name in work.source.key)
    newer = f's."{_OFFSET}" > t."{_POSITION}"[\'log_offset\']'
    values = {name: f's."{name}"' for name in (*work.source.columns, _POSITION)}
    properties = CommitProperties(
        app_transactions=[Transaction(work.application, work.version)], max_commit_retries=1
    )
    try:
        (
            table.merge(changes, same, source_alias="s", target_alias="t", commit_properties=properties)
            .when_matched_delete(f'not s."{_UPSERT}" and {newer}')
            .when_matched_update(values, f's."{_UPSERT}" and {newer}')
            .when_not_matched_insert(values, f's."{_UPSERT}"')
            .execute()
        )
    except (DeltaError, CommitFailedError) as error:
        if (DeltaTable(work.path).transaction_version(work.application) or -1) >= work.version:
            return
        raise TailraceError(
            Kind.SINK_WRITE_FAILED,
            f"merge changes into a mirror: {type(error).__name__}",
            "another writer may have committed to the table meanwhile; it is tried again",
            {"table": work.table},
        ) from error


def _read(path: str, source: NetSource) -> pa.Table:
    held = pq.read_table(path)
    columns = {name: held[name] for name in (*source.columns, _POSITION)}
    columns[_OFFSET] = pa.chunked_array(
        [part.field("log_offset") for part in held[_POSITION].chunks], pa.int64()
    )
    columns[_UPSERT] = held[_UPSERT] if _UPSERT in held.column_names else pa.repeat(True, len(held))
    return pa.table(columns)


def _is_surely_alike(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_boolean(kind))
