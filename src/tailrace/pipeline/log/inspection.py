"""Selects changes in a log by position, table, key, transaction or condition.

Blocks that can't contain selected changes are not read; the others are decoded and filtered by whole
columns, one decode batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.format import BlockRef
from tailrace.changelog.reader import LogReader
from tailrace.changelog.verify import Damage
from tailrace.config import is_exact, matches
from tailrace.decode.changes import TableChanges
from tailrace.decode.column_policy import TablePolicy
from tailrace.decode.json.debezium import SourceInfo
from tailrace.errors import Kind, TailraceError
from tailrace.model import OWN_FORMS, ValueModes
from tailrace.pipeline.log.consumer import next_split
from tailrace.pipeline.status.document import last_written
from tailrace.ranges import plan
from tailrace.ranges.batches import MESSAGES_TOPIC
from tailrace.ranges.changes import DecodedBatch, PendingWaits, decoded_batches
from tailrace.ranges.plan import InputSplit, input_splits
from tailrace.ranges.positions import LogPoint, locate
from tailrace.records.group import Group

if TYPE_CHECKING:
    from tailrace.expressions.computing import Expression

Mask = npt.NDArray[np.bool_]

#: Interval between checks of the end of a log that is followed, in seconds.
LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Selection:
    """The changes to return; None in a field: any.

    `key` maps key columns to PostgreSQL's text of their values; the column "" stands for the
    only column of a key. `begin` is inclusive, `end` exclusive. `modes` are the forms of values.
    `where` is true for the changes.
    """

    table: str | None = None
    key: dict[str, str] | None = None
    xid: int | None = None
    begin: LogPoint | None = None
    end: LogPoint | None = None
    limit: int | None = None
    modes: ValueModes = OWN_FORMS
    where: Expression | None = None


@dataclass(frozen=True, slots=True)
class Followed:
    """Changes as JSON Lines; `end`: the log offset from which to continue after them."""

    lines: Sequence[str]
    end: int


def json_lines(
    directory: LogDirectory, task: str, wanted: Selection, table_policy: TablePolicy
) -> Iterator[str]:
    """Yield the wanted changes in log order, each as the JSON Lines sink writes it, with newline.

    :param table_policy: which columns are shown, and how.
    :raises TailraceError: `LOG_CORRUPT`, `LOG_RANGE_GONE`, `DECODE_FAILED`; `CONFIG_INVALID` if `where` does
        not fit a table.
    """
    left = wanted.limit
    for decoded in _decoded(directory, task, wanted, table_policy):
        lines, _ = _lines(directory, task, decoded.changes, replace(wanted, limit=left))
        yield from lines
        if left is not None:
            left -= len(lines)
            if left <= 0:
                return


def follow(
    directory: LogDirectory, task: str, wanted: Selection, table_policy: TablePolicy, stop: Event
) -> Iterator[Followed]:
    """Yield the wanted changes as they become durable, until `stop` or `wanted.limit`.

    The first one is the start offset, without lines; a part of the log without such changes has no lines
    either. No reader is registered: retention may remove what was not read yet.

    :param wanted: without `begin`, the changes from now on.
    :param stop: ends the iteration.
    :raises TailraceError: as `json_lines`.
    """
    left, pending = wanted.limit, PendingWaits()
    with LogReader.open(directory, task) as reader:
        at = reader.end().offset if wanted.begin is None else locate(reader, wanted.begin)
        yield Followed((), at)
        while not stop.is_set():
            split = next_split(reader, task, at)
            if split is None:
                stop.wait(LOOK_S)
                continue
            try:
                for decoded in decoded_batches(reader, split, _exact(wanted), wanted.modes, table_policy):
                    lines, last = _lines(directory, task, decoded.changes, replace(wanted, limit=left))
                    left = None if left is None else left - len(lines)
                    at = last + 1 if left == 0 else decoded.end
                    yield Followed(lines, at)
                    if left == 0:
                        return
                at = split.end
            except TailraceError as error:
                pending.wait(error, at, stop)


def _lines(
    directory: LogDirectory, task: str, found: Sequence[TableChanges], wanted: Selection
) -> tuple[list[str], int]:
    """Return the wanted ones of `found`, in log order, and the log offset of the last one; -1 if none."""
    chosen = [(changes, mask) for changes in found if (mask := _mask(changes, task, wanted)).any()]
    if not chosen:
        return [], -1
    facts = origin_of(directory)
    offsets = np.concatenate([changes.log_offset[mask] for changes, mask in chosen])
    order = np.argsort(offsets, kind="stable")[: wanted.limit]
    lines = pa.chunked_array(
        [changes.json_lines(task, facts).filter(pa.array(mask)) for changes, mask in chosen]
    )
    return lines.take(pa.array(order)).to_pylist(), int(offsets[order[-1]])


def origin_of(directory: LogDirectory) -> SourceInfo:
    """Return the content of the field `source` for changes in this log, with the name of the pipeline that
    last wrote it; if it left no status, with the slot's.
    """
    source, path = directory.identity.source, directory.path
    if (status := last_written(path)) is not None:
        name = status["name"]
    elif (status := last_written(path.parent)) is not None:  # of several sources
        name = f"{status['name']}_{path.name}"
    else:
        name = source.slot.removeprefix("tailrace_")
    return SourceInfo.of(name, source)


def _exact(wanted: Selection) -> tuple[str, ...] | None:
    """Return the one table that can be wanted; None: several can."""
    exact = wanted.table is not None and is_exact(wanted.table) and '"' not in wanted.table
    return (wanted.table,) if exact and wanted.table is not None else None


def _decoded(
    directory: LogDirectory, task: str, wanted: Selection, table_policy: TablePolicy
) -> Iterator[DecodedBatch]:
    with LogReader.open(directory, task) as reader:
        start, end = reader.start, reader.end().offset
        blocks = reader.blocks(start, end)
        # The given positions may lie inside a transaction: a split can begin and end anywhere.
        begin = start if wanted.begin is None else locate(reader, wanted.begin)
        until = end if wanted.end is None else locate(reader, wanted.end)
    if wanted.end is not None and begin > until:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"show a part of a change log: --from is the log offset {begin}, after --to, {until}",
            "exchange them, or leave one out",
            {"path": str(directory.path)},
        )
    until = min(end, until)
    for split in plan.input_splits(task, blocks, begin, until):
        yield from decoded_batches(directory.path, split, _exact(wanted), wanted.modes, table_policy)


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
    if wanted.where is not None and mask.any():
        rows = np.flatnonzero(mask)
        mask[rows] = truths(changes.take(rows), wanted.where)
    return mask


def truths(changes: TableChanges, where: Expression) -> Mask:
    """Return for which changes an expression is true; null counts as false.

    :raises TailraceError: `CONFIG_INVALID` if it does not fit the table.
    """
    from tailrace.expressions.language import ExpressionError  # loads DuckDB
    from tailrace.transforms.groups.rows import GroupRows

    name = MESSAGES_TOPIC if changes.relation is None else changes.relation.qualified_name
    group = Group.of_changes(name, np.arange(changes.count), changes)
    try:
        found = where.truths(GroupRows(group))
    except ExpressionError as error:
        raise TailraceError(
            Kind.CONFIG_INVALID,
            f"look for changes for which an expression is true: {error}",
            "correct the expression (where), or choose the tables that it is for (table)",
            {"table": name},
        ) from error
    return np.asarray(pc.fill_null(found, fill_value=False).to_numpy(zero_copy_only=False), np.bool_)


def _key_mask(changes: TableChanges, task: str, key: dict[str, str]) -> Mask:
    """Return which changes concern the row with this key, before or after the change."""
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


def unreadable(log: LogDirectory) -> Iterator[Damage]:
    """Yield the first undecodable block of each split of a log whose checksums are correct.

    :raises TailraceError: `LOG_CORRUPT`, if they are not.
    """
    for task in log.tasks():
        with LogReader.open(log, task) as reader:
            start, end = reader.start, reader.end().offset
            for split in input_splits(task, reader.blocks(start, end), start, end):
                found = _stop_in(reader, log, split)
                if found is not None:
                    yield found


def _stop_in(reader: LogReader, log: LogDirectory, split: InputSplit) -> Damage | None:
    reached = split.start
    try:
        for decoded in decoded_batches(reader, split):
            for changes in decoded.changes:
                changes.tuples()
            reached = decoded.end
    except TailraceError as error:
        if error.kind in {Kind.LOG_RANGE_GONE, Kind.SCHEMA_PENDING}:
            return None  # retention has removed it, or its catalogue facts are not known yet
        blocks = (block for block in split.blocks if isinstance(block, BlockRef))
        block = next(block for block in blocks if block.header.end > reached)
        inside = (log.task_path(split.task) / block.segment).relative_to(log.path)
        return Damage(str(inside), block.file_at, f"no reader gets past offset {reached}: {error.message}")
    return None
