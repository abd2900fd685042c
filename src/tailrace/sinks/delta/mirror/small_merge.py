"""The MERGE of net changes into a small mirror, by delta-rs in an executor or in this process.

Spark's MERGE takes seconds even for few rows, for each table of a range. delta-rs does a small one
in a tenth of a second. Both give the same result and commit the same transaction. delta-rs is used
only where its result is certainly the same: keys of whole numbers, texts and booleans, plain names,
and rows whose key does not change.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from pyarrow import fs

from tailrace.errors import TailraceError
from tailrace.sinks.delta.folder import DeltaFolder, kind_of
from tailrace.sinks.delta.mirror.files import POSITION
from tailrace.sinks.delta.mirror.merge import Dialect, NetSource, statement
from tailrace.sinks.delta.mirror.net_changes import UNCHANGED, UPSERT, open_columns_of

#: Largest target of a merge in this process: the files that it reads are several times as large in memory.
IN_PROCESS_TARGET_BYTES_MAX = 16 << 20
#: Largest target, most changes and most bytes of changes in memory for delta-rs; beyond them Spark merges. A
#: merge needs about five times the changes' memory (measured with deltalake 1.6.6).
TARGET_BYTES_MAX = 128 << 20
SOURCE_ROWS_MAX, SOURCE_BYTES_MAX = 200_000, 128 << 20

_PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_SENT = "_sent"

#: Hint of a merge that delta-rs did not commit.
_REFUSED = (
    "another writer may have committed to the table meanwhile, and the merge is tried again; if it fails "
    "each time, give the sink a new, empty path"
)


@dataclass(frozen=True, slots=True)
class SmallMerge:
    """The input of a merge: the table's path, its transaction after the merge, and the net changes."""

    path: str
    application: str
    version: int
    table: str
    source: NetSource


def is_small(source: NetSource, schema: pa.Schema, target_bytes: int) -> bool:
    """Return whether delta-rs may do this merge; `schema` is the table's schema."""
    return (
        source.rows <= SOURCE_ROWS_MAX
        and source.bytes <= SOURCE_BYTES_MAX
        and target_bytes <= TARGET_BYTES_MAX
        and not source.moved
        and not source.null_keys
        and all(_PLAIN_NAME.fullmatch(name) for name in schema.names)
        and all(_is_surely_alike(schema.field(name).type) for name in source.key)
    )


def merge_small(work: SmallMerge) -> bool:
    """Merge and commit. Idempotent: a repetition finds the transaction and does nothing.

    :return: False if Spark must merge: unchanged values have special texts, which would have to be
        kept, too.
    :raises TailraceError: `SINK_WRITE_FAILED` or `SINK_SCHEMA_REFUSED` if nothing was committed.
    """
    table = DeltaTable(work.path)
    if (table.transaction_version(work.application) or -1) >= work.version:
        return True
    source = work.source
    if source.open and (source.special or _has_special_texts(table, work.path)):
        return False
    same = " and ".join(f't."{name}" = s."{name}"' for name in source.key)
    left = {name: f"~left_{number}" for number, name in enumerate(sorted(source.open))}
    sql = Dialect(
        lambda name: f'"{name}"',
        lambda side: f"{side}.\"{POSITION}\"['log_offset']",
        lambda name: f's."{left[name]}"',
    )
    found = statement(source, sql, f's."{_SENT}"', f's."{POSITION}"')
    properties = CommitProperties(
        app_transactions=[Transaction(work.application, work.version)], max_commit_retries=1
    )
    changes = pa.concat_tables([_read(path, source, left) for path in source.paths])
    try:
        (
            table.merge(changes, same, source_alias="s", target_alias="t", commit_properties=properties)
            .when_matched_delete(found.delete_if)
            .when_matched_update(found.updates, found.update_if)
            .when_not_matched_insert(found.inserts, found.insert_if)
            .execute()
        )
    except (DeltaError, CommitFailedError) as error:
        if (DeltaTable(work.path).transaction_version(work.application) or -1) >= work.version:
            return True
        kind, hint = kind_of(error, _REFUSED)
        raise TailraceError(
            kind, f"merge changes into a mirror: {type(error).__name__}", hint, {"table": work.table}
        ) from error
    return True


def remove_unread_small(folder: DeltaFolder, offset: int) -> bool:
    """Remove rows as `merge.remove_unread`, in this process.

    :return: False if Spark must do it: the table is large, or delta-rs failed.
    """
    if folder.bytes() > IN_PROCESS_TARGET_BYTES_MAX:
        return False
    with contextlib.suppress(DeltaError, OSError):  # if Spark has the same error, Spark reports it
        once = CommitProperties(max_commit_retries=1)
        DeltaTable(str(folder.path)).delete(f"{POSITION}['log_offset'] < {offset}", commit_properties=once)
        return True
    return False


def _has_special_texts(table: DeltaTable, path: str) -> bool:
    # With Arrow's own file system: its threads may call that of delta-rs, which is in Python, for a second
    # after the last read, and this aborts a process that ends meanwhile.
    files = fs.SubTreeFileSystem(path, fs.LocalFileSystem())
    try:
        held = table.to_pyarrow_table(columns=[POSITION], filesystem=files)[POSITION]
    except DeltaError:  # it has a feature that only Spark reads, such as deletion vectors
        return True
    return any(part.field("special").null_count < len(part) for part in held.chunks)


def _read(path: str, source: NetSource, left: Mapping[str, str]) -> pa.Table:
    """Return a file's events with all columns that the merge's statement uses.

    `_position` is the value for a new row, with a null among its special texts for each value that
    was never sent; `_sent` is the value for an existing row.
    """
    held = pq.read_table(path)
    position = held[POSITION].combine_chunks()
    columns = {name: held[name] for name in source.columns}
    columns |= {POSITION: position, _SENT: position}
    plain = UPSERT not in held.column_names
    columns[UPSERT] = pa.repeat(True, len(held)) if plain else held[UPSERT]
    opened = {} if plain else open_columns_of(held[UNCHANGED].combine_chunks())
    if opened:
        marks = np.empty(len(held), object)
        for row in np.flatnonzero(np.logical_or.reduce(list(opened.values()))):
            marks[row] = [(name, None) for name in opened if opened[name][row]]
        special = pa.array(marks.tolist(), position.type.field("special").type)
        columns[POSITION] = pa.StructArray.from_arrays(
            [position.field("log_offset"), special], fields=list(position.type)
        )
    none = np.zeros(len(held), np.bool_)
    for name, column in left.items():
        columns[column] = pa.array(opened.get(name, none))
    return pa.table(columns)


def _is_surely_alike(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_boolean(kind))
