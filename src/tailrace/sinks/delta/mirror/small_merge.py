"""The MERGE of net changes into a mirror of modest size, by delta-rs in an executor.

Spark's MERGE costs seconds, however little there is to do; with a hundred tables it would be a
hundred of them for each range. delta-rs does a small one in a tenth of a second. Both give the
same result and carry the same transaction; this one takes only what it does surely alike: keys
of whole numbers, texts and booleans, plain names, and rows that stay at their key.
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

from tailrace.errors import Kind, TailraceError
from tailrace.sinks.delta.folder import DeltaFolder
from tailrace.sinks.delta.mirror.files import POSITION
from tailrace.sinks.delta.mirror.merge import Dialect, NetSource, statement
from tailrace.sinks.delta.mirror.net_changes import UNCHANGED, UPSERT, open_columns_of

#: A merge reads what it may change, several times as large in memory. Larger ones are not for this process.
IN_PROCESS_TARGET_BYTES_MAX = 16 << 20
#: Larger targets are Spark's, and more changes, or larger ones in memory: a merge takes some five times
#: what they take (measured with deltalake 1.6.6).
TARGET_BYTES_MAX = 128 << 20
SOURCE_ROWS_MAX, SOURCE_BYTES_MAX = 200_000, 128 << 20

_PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_SENT = "_sent"


@dataclass(frozen=True, slots=True)
class SmallMerge:
    """What an executor is given: `path` of the table, and its transaction after the merge."""

    path: str
    application: str
    version: int
    table: str
    source: NetSource


def is_small(source: NetSource, schema: pa.Schema, target_bytes: int) -> bool:
    """Return whether delta-rs may do this merge; `schema` is the table's."""
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
    """Merge and commit; done again, it finds the transaction and does nothing.

    :return: False if this is Spark's after all: values that stay have special texts, too, which
        would have to stay with them.
    :raises TailraceError: `SINK_WRITE_FAILED` if it did not happen.
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
        raise TailraceError(
            Kind.SINK_WRITE_FAILED,
            f"merge changes into a mirror: {type(error).__name__}",
            "another writer may have committed to the table meanwhile; it is tried again",
            {"table": work.table},
        ) from error
    return True


def remove_unread_small(folder: DeltaFolder, offset: int) -> bool:
    """Do what `merge.remove_unread` does, in this process.

    :return: False if this is Spark's: the table is large, or delta-rs failed.
    """
    if folder.bytes() > IN_PROCESS_TARGET_BYTES_MAX:
        return False
    with contextlib.suppress(DeltaError, OSError):  # Spark says what it is, if it meets the same
        once = CommitProperties(max_commit_retries=1)
        DeltaTable(str(folder.path)).delete(f"{POSITION}['log_offset'] < {offset}", commit_properties=once)
        return True
    return False


def _has_special_texts(table: DeltaTable, path: str) -> bool:
    # By Arrow's own file system: its threads may call delta-rs' in Python for a second after the last read,
    # which aborts a process that ends meanwhile.
    files = fs.SubTreeFileSystem(path, fs.LocalFileSystem())
    held = table.to_pyarrow_table(columns=[POSITION], filesystem=files)[POSITION]
    return any(part.field("special").null_count < len(part) for part in held.chunks)


def _read(path: str, source: NetSource, left: Mapping[str, str]) -> pa.Table:
    """Return a file's events with a column for each question that the merge asks of them.

    `_position` is what a new row gets: its special texts have a null for each value that was
    never sent; `_sent` is what a row gets that is there already.
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
