"""Reads the blocks of an input split, decodes them, and yields their changes.

The data source, every sink and the engine read the log with `decoded_batches`, so all of them get the same
changes from a split. No state is kept between calls: a split has everything that is needed.
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

#: Greatest size in bytes of blocks that are decoded together: capture writes small blocks when there
#: are few changes, and a decoding call has a fixed cost. It limits an executor's memory, too.
DECODED_BYTES_MAX = 4 * MIB

#: Interval of the check for pending catalogue facts, in seconds.
PENDING_S = 1.0


class PendingWaits:
    """The waits of a reader before rows of an altered table, until its catalogue facts are known."""

    def __init__(self) -> None:
        self._reported_at = -1

    def wait(self, error: TailraceError, at: int, stop: threading.Event) -> None:
        """Wait `PENDING_S` seconds, or until `stop` is set, if `error` is `SCHEMA_PENDING`; else raise it.

        :param at: the log offset up to which the log was read; the wait there is reported once.
        """
        if error.kind is not Kind.SCHEMA_PENDING:
            raise error
        if at != self._reported_at:
            log.warning("waiting for the catalogue facts of an altered table", error=error.message)
        self._reported_at = at
        stop.wait(PENDING_S)


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """Changes that were decoded together.

    :param changes: by table, each in log order; only tables with changes.
    :param end: the log offset up to which the split is decoded now.
    :param open_at_end: the unit that is open at `end`.
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
    """Yield the changes of `split` in batches, in log order.

    Every change lies in `[split.start, split.end)`, and log offsets only increase from batch to
    batch. A batch is read when the caller requests it.

    :param log: the log's path, or a reader of the split's task.
    :param tables: qualified names (`schema.table`) to decode; None: all, and logical messages.
    :param modes: the forms of values.
    :param table_policy: the columns that are left out or masked.
    :raises TailraceError: `LOG_CORRUPT`, `LOG_RANGE_GONE`, `DECODE_FAILED`, `CONFIG_INVALID`,
        `SCHEMA_PENDING`.
    """
    if not split.blocks:
        return
    reader = log if isinstance(log, LogReader) else LogReader.open(log, split.task)
    # The split is durable, so all names in it are known: a rename is kept before the log has rows with it.
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
        if tables is not None and wanted is not None:  # also what gets a wanted name within the batch
            wanted = wanted.union(*(Catalog([frame]).named(tables) for frame in in_batch))
        if more := settled_facts(reader, first.log_offset, [*schema.frames, *in_batch]):
            settled |= more
            table_policy = with_renames(table_policy, reader)  # the log keeps renames before these facts
        last = blocks[-1].header
        decoded = decode_block(
            raw,
            first.log_offset,
            first.open_at_start,
            schema.frames,
            tables=wanted,
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
    """The shard's position of a transaction that is larger than a block: its last block has it."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._found: tuple[int, ShardPositions | None] = (-1, None)

    def of(self, unit: OpenUnit | None, offset: int) -> ShardPositions | None:
        """Return the shard's position of the unit that is open at a log offset; None: there is none."""
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
    """Return the facts frames that the log now has for the pending ones among `frames`, by relation and
    version.

    :param log_offset: where the search begins: a boundary, or inside a unit.
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
    """Return `table_policy` with the former and later names of columns that the log knows now.

    :raises TailraceError: like `LogReader.renames`.
    """
    return table_policy if table_policy.discloses_all else table_policy.knowing(reader.renames())


def _next_blocks(
    blocks: list[BlockRef | HeldBlock], wanted: frozenset[int] | None
) -> tuple[list[BlockRef | HeldBlock], list[BlockRef | HeldBlock]]:
    """Return the next blocks to decode together, which are contiguous, and the remaining blocks.

    Blocks in memory may not be contiguous: those without changes are missing.

    With `wanted`, blocks without changes of these relations are skipped, and a block with schema
    frames ends its batch: another relation may have a wanted name after it.
    """
    begin = 0
    while wanted is not None and begin < len(blocks) and not concerns(blocks[begin], wanted):
        begin += 1
    end, size = begin, 0
    while end < len(blocks):
        header = blocks[end].header
        follows = end == begin or header.log_offset == blocks[end - 1].header.end
        if not follows or (end > begin and size + header.raw_size > DECODED_BYTES_MAX):
            break
        if wanted is not None and not concerns(blocks[end], wanted):
            break
        end, size = end + 1, size + header.raw_size
        if wanted is not None and header.has_schema:
            break
    return blocks[begin:end], blocks[end:]


def concerns(block: BlockRef | HeldBlock, wanted: frozenset[int]) -> bool:
    """Return whether a run may have changes of relations with these oids, or describes tables."""
    header = block.header
    return header.has_schema or header.tables is None or not wanted.isdisjoint(header.tables)


def _joined(parts: list[Bytes]) -> Bytes:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
