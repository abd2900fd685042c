"""From an input split to its changes: read its blocks, decode them, yield what is in them.

The data source, every sink and the engine read the log through `decoded_batches`, so a split gives the same
changes to all of them. Nothing is kept between calls: a split carries what is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from tailrace.changelog.format import BlockRef, HeldBlock
from tailrace.changelog.reader import LogReader
from tailrace.decode.changes import TableChanges, decode_block
from tailrace.decode.column_policy import EVERYTHING, TablePolicy
from tailrace.decode.schemas import Catalog, pending_version
from tailrace.decode.shards import ShardPositions, find_shards
from tailrace.errors import Kind, TailraceError
from tailrace.model import OWN_FORMS, ValueModes
from tailrace.protocol.facts import Facts
from tailrace.protocol.frames import Bytes, OpenUnit, control_json
from tailrace.protocol.metadata_frames import schema_frames
from tailrace.ranges.plan import MIB, InputSplit

log = structlog.get_logger(__name__)

#: Blocks are decoded together up to this size: capture writes small ones when little happens,
#: and a decoding call has a fixed cost. It bounds an executor's memory, too.
DECODED_BYTES_MAX = 4 * MIB

#: How often it is looked again for what capture has yet to learn of a table.
PENDING_S = 1.0


class PendingWaits:
    """A reader's waits before rows of an altered table, until capture has learnt what it is now."""

    def __init__(self) -> None:
        self._reported_at = -1

    def wait(self, error: TailraceError, at: int, stop: threading.Event) -> None:
        """Wait a moment, or until `stop` is set, as `error` says that facts are pending; else raise it.

        :param at: the log offset up to which was read; the wait there is reported once.
        """
        if error.kind is not Kind.SCHEMA_PENDING:
            raise error
        if at != self._reported_at:
            log.warning("waiting until capture has learnt of a table", error=error.message)
        self._reported_at = at
        stop.wait(PENDING_S)


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """What was decoded together.

    :param changes: table by table, each in log order; only tables that changed.
    :param end: the log offset up to which the split is decoded now.
    :param open_at_end: the unit that is open there.
    """

    changes: list[TableChanges]
    end: int
    open_at_end: OpenUnit | None


def decoded_batches(
    log: LogReader | Path | str,
    split: InputSplit,
    tables: Collection[str] | None = None,
    modes: ValueModes = OWN_FORMS,
    table_policy: TablePolicy = EVERYTHING,
) -> Iterator[DecodedBatch]:
    """Yield what is in `split`, batch by batch, in log order.

    Every change lies in `[split.start, split.end)`, and from one batch to the next the log offsets
    only rise. Nothing is read before it is asked for.

    :param log: where the log is, or a reader of the split's task.
    :param tables: qualified names (`schema.table`) to decode; None: all, and logical messages.
    :param modes: how values are given.
    :param table_policy: what of the tables is let out.
    :raises TailraceError: `LOG_CORRUPT`, `LOG_RANGE_GONE`, `DECODE_FAILED`, `CONFIG_INVALID`,
        `SCHEMA_PENDING`.
    """
    if not split.blocks:
        return
    reader = log if isinstance(log, LogReader) else LogReader.open(log, split.task)
    # Now that the split is durable: a new name is kept before the log has rows under it.
    table_policy = with_renames(table_policy, reader)
    schema = Catalog(reader.schema_before(split.blocks[0]))
    waiting: list[BlockRef | HeldBlock] = list(split.blocks)
    settled: dict[tuple[int, int], bytes] = {}
    beyond = _Beyond(reader)
    while waiting:
        wanted = None if tables is None else schema.named(tables)
        blocks, waiting = _next_blocks(waiting, wanted)
        if not blocks:
            continue
        raw = _joined([reader.read(block) for block in blocks])
        first = blocks[0].header
        changes_shape = any(block.header.has_schema for block in blocks)
        in_batch = [frame for _, frame in schema_frames(raw)] if changes_shape else []
        if more := settled_facts(reader, first.log_offset, [*schema.frames, *in_batch]):
            settled |= more
            table_policy = with_renames(table_policy, reader)  # kept before these facts were in the log
        last = blocks[-1].header
        decoded = decode_block(
            raw,
            first.log_offset,
            first.open_at_start,
            schema.frames,
            # A table that gets a wanted name within the batch is not among `wanted`.
            tables=None if changes_shape else wanted,
            modes=modes,
            table_policy=table_policy,
            settled=settled,
            beyond=beyond.of(last.open_at_end, last.end),
        )
        for frame in in_batch:
            schema.apply(frame)
        found = [
            changes.slice(split.start, split.end)
            for changes in decoded
            if tables is None or (changes.relation and changes.relation.qualified_name in tables)
        ]
        yield DecodedBatch(
            [changes for changes in found if changes.count],
            min(last.end, split.end),
            last.open_at_end if last.end <= split.end else None,
        )


class _Beyond:
    """Where the shard of a transaction stood that is too large for one block: its last block says it."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._found: tuple[int, ShardPositions | None] = (-1, None)

    def of(self, unit: OpenUnit | None, offset: int) -> ShardPositions | None:
        """Return it of the unit that is open at a log offset; None: there is none."""
        if unit is None or self._reader.source_type == "postgresql":
            return None
        if self._found[0] != unit.commit_lsn:
            self._found = unit.commit_lsn, self._look(unit, offset)
        return self._found[1]

    def _look(self, unit: OpenUnit, offset: int) -> ShardPositions | None:
        for run in reversed(self._reader.rest_of_unit(offset)):
            if run.header.has_schema:
                found = find_shards(self._reader.read(run), run.header.open_at_start)
                place = found.places(np.array([unit.commit_lsn]))
                if place[0] >= 0:
                    return found.take(place)
        return None


def settled_facts(
    reader: LogReader, log_offset: int, frames: Iterable[bytes]
) -> dict[tuple[int, int], bytes]:
    """Return facts frames that the log has by now for those of `frames` that are pending, by relation and
    version.

    :param log_offset: where to begin to look for them: a boundary, or within a unit.
    :raises TailraceError: `LOG_CORRUPT`, `LOG_RANGE_GONE`.
    """
    pending = {version for frame in frames if (version := pending_version(frame)) is not None}
    if not pending:
        return {}
    found: dict[tuple[int, int], bytes] = {}
    end = reader.end().offset
    for block in reader.blocks(reader.boundary_up_to(log_offset), end):
        if not block.header.has_schema:
            continue
        for key, frame in schema_frames(reader.read(block)):
            if key[0] == "F" and pending_version(frame) is None:
                facts = Facts.from_json(control_json(frame))
                if (facts.relation, facts.version) in pending:
                    found.setdefault((facts.relation, facts.version), frame)
        if len(found) == len(pending):
            break
    return found


def with_renames(table_policy: TablePolicy, reader: LogReader) -> TablePolicy:
    """Return `table_policy` with what the log knows now of former and later names of its columns.

    :raises TailraceError: as `LogReader.renames`.
    """
    return table_policy if table_policy.discloses_all else table_policy.knowing(reader.renames())


def _next_blocks(
    blocks: list[BlockRef | HeldBlock], wanted: frozenset[int] | None
) -> tuple[list[BlockRef | HeldBlock], list[BlockRef | HeldBlock]]:
    """Return the next blocks to decode together, which follow each other, and what remains.

    Among blocks in memory, those without changes are missing.

    With `wanted`, blocks that touch none of these relations are left out, and a block with
    schema frames ends its batch: it may say that another relation bears a wanted name.
    """
    begin = 0
    while wanted is not None and begin < len(blocks) and not _concerns(blocks[begin], wanted):
        begin += 1
    end, size = begin, 0
    while end < len(blocks):
        header = blocks[end].header
        follows = end == begin or header.log_offset == blocks[end - 1].header.end
        if not follows or (end > begin and size + header.raw_size > DECODED_BYTES_MAX):
            break
        if wanted is not None and not _concerns(blocks[end], wanted):
            break
        end, size = end + 1, size + header.raw_size
        if wanted is not None and header.has_schema:
            break
    return blocks[begin:end], blocks[end:]


def _concerns(block: BlockRef | HeldBlock, wanted: frozenset[int]) -> bool:
    header = block.header
    return header.has_schema or header.tables is None or not wanted.isdisjoint(header.tables)


def _joined(parts: list[Bytes]) -> Bytes:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
