"""Looking into a log: which changes it holds, chosen by place, table, key or transaction.

Blocks that can't hold what is asked for are not read; the rest is decoded and filtered by
whole columns, a stretch of the log at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace import __version__
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.config import is_exact, matches
from tailrace.model import OWN_FORMS, ValueModes
from tailrace.pipeline.log.positions import LogPoint, locate
from tailrace.ranges import plan
from tailrace.ranges.changes import changes_of
from tailrace.sources.postgres.decode.changes import TableChanges
from tailrace.sources.postgres.decode.column_policy import TablePolicy
from tailrace.sources.postgres.decode.json.debezium import SourceInfo

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Selection:
    """What is wanted; None: any.

    `key` maps key columns to PostgreSQL's text of their values; the column "" stands for the
    only column of a key. `begin` is inclusive, `end` exclusive. `modes` say how values are
    given.
    """

    table: str | None = None
    key: dict[str, str] | None = None
    xid: int | None = None
    begin: LogPoint | None = None
    end: LogPoint | None = None
    limit: int | None = None
    modes: ValueModes = OWN_FORMS


def json_lines(
    directory: LogDirectory, task: str, wanted: Selection, table_policy: TablePolicy
) -> Iterator[str]:
    """Yield the wanted changes in log order, each as the JSON Lines sink writes it, with newline.

    :param table_policy: what of the tables is let out.
    :raises TailraceError: `LOG_CORRUPT`, `LOG_RANGE_GONE`, `DECODE_FAILED`.
    """
    source = directory.identity.source
    facts = SourceInfo(source.slot.removeprefix("tailrace_"), source.database, __version__, source.type)
    left = wanted.limit
    for stretch in _stretches(directory, task, wanted, table_policy):
        chosen = [(changes, mask) for changes in stretch if (mask := _mask(changes, task, wanted)).any()]
        if not chosen:
            continue
        offsets = np.concatenate([changes.log_offset[mask] for changes, mask in chosen])
        lines = pa.chunked_array(
            [changes.json_lines(task, facts).filter(pa.array(mask)) for changes, mask in chosen]
        )
        ordered = lines.take(pa.array(np.argsort(offsets, kind="stable")[:left]))
        yield from (line.as_py() for line in ordered)
        if left is not None:
            left -= len(ordered)
            if left <= 0:
                return


def _stretches(
    directory: LogDirectory, task: str, wanted: Selection, table_policy: TablePolicy
) -> Iterator[list[TableChanges]]:
    with LogReader.open(directory, task) as reader:
        start, end = reader.start, reader.end().offset
        blocks = reader.blocks(start, end)
        # A place that was named may lie inside a transaction: pieces are cut anywhere.
        begin = start if wanted.begin is None else locate(reader, wanted.begin)
        until = end if wanted.end is None else min(end, locate(reader, wanted.end))
    exact = wanted.table is not None and is_exact(wanted.table) and '"' not in wanted.table
    tables = (wanted.table,) if exact and wanted.table is not None else None
    for piece in plan.pieces(task, blocks, begin, until):
        yield from changes_of(directory.path, piece, tables, wanted.modes, table_policy)


def _mask(changes: TableChanges, task: str, wanted: Selection) -> Mask:
    relation = changes.relation
    mask = np.ones(changes.count, np.bool_)
    if wanted.table is not None and (
        relation is None or not matches(wanted.table, relation.schema, relation.table)
    ):
        return np.zeros(changes.count, np.bool_)
    if wanted.xid is not None:
        mask &= changes.xid == wanted.xid
    if wanted.key is not None and mask.any():
        mask &= _key_mask(changes, task, wanted.key)
    return mask


def _key_mask(changes: TableChanges, task: str, key: dict[str, str]) -> Mask:
    """Return which changes are of the row with this key, before the change or after."""
    relation = changes.relation
    if relation is None:
        return np.zeros(changes.count, np.bool_)
    columns = dict(key)
    if "" in columns:
        if len(relation.key) != 1:
            return np.zeros(changes.count, np.bool_)
        columns = {relation.key[0]: columns[""]}
    rows = changes.envelope(task)
    found = np.zeros(changes.count, np.bool_)
    for side in ("key", "before", "after"):
        fits = np.ones(changes.count, np.bool_)
        for name, value in columns.items():
            cells = pc.map_lookup(rows.column(side), name, "first")
            fits &= pc.fill_null(pc.equal(cells, value), fill_value=False).to_numpy(zero_copy_only=False)
        found |= fits
    return found
