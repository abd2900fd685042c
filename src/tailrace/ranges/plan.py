"""Divides a range of the log into input splits that executors decode in parallel.

Pure: a plan is a function of the range and of the blocks that contain it. It doesn't depend on the
number of cores, the time, or later changes of the log, so that a range that is read again, on
another machine or after a failure, is divided into the same splits. Sinks depend on this: they
name files after splits.

Splits begin and end between blocks, also inside a transaction: a block's header has the unit that
is open at its start and the number of its next change, so a split is decoded without the
previous one. Only a range's own ends may lie inside a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.errors import Kind, TailraceError

if TYPE_CHECKING:
    # At run time the import would load the kernels into processes that only plan.
    from tailrace.changelog.format import BlockRef, HeldBlock

MIB = 1 << 20

#: Least size of one of several splits: the start-up of smaller ones costs more than parallelism gains.
SPLIT_BYTES_MIN = 4 * MIB
#: Greatest size of a split, blocks permitting: a failed or slow task is repeated as a whole.
SPLIT_BYTES_MAX = 64 * MIB
#: Least number of splits of a range that is large enough, so that machines with many cores have
#: work for them.
SPLITS_MIN = 8


@dataclass(frozen=True, slots=True)
class InputSplit:
    """A part of a range, `[start, end)` in log offsets, and the blocks that contain it.

    `index` numbers a range's splits from 0 in log order. `rows` is an upper bound: a block at
    an end of the range may have changes outside of it.
    """

    task: str
    index: int
    start: int
    end: int
    blocks: tuple[BlockRef | HeldBlock, ...]

    @property
    def rows(self) -> int:
        return sum(block.header.rows for block in self.blocks)


def input_splits(task: str, blocks: Sequence[BlockRef], start: int, end: int) -> list[InputSplit]:
    """Return the splits of `[start, end)` in log order; none if the range is empty.

    :param blocks: the blocks that contain the range, in log order, as `LogReader.blocks` returns
        them; a block without a byte in the range is ignored.
    :raises TailraceError: `LOG_RANGE_INVALID` if the blocks don't contain the whole range.
    """
    if start >= end:
        return []
    inside = [block for block in blocks if block.header.log_offset < end and block.header.end > start]
    _require_contiguous(inside, start, end)
    count = split_count(end - start)
    found: list[InputSplit] = []
    taken = 0
    for index in range(count):
        goal = start + (end - start) * (index + 1) // count
        upto = taken
        while upto < len(inside) and inside[upto].header.log_offset < goal:
            upto += 1
        if upto == taken:  # one block spans several goals
            continue
        mine = tuple(inside[taken:upto])
        first, last = mine[0].header.log_offset, mine[-1].header.end
        found.append(InputSplit(task, len(found), max(start, first), min(end, last), mine))
        taken = upto
    return found


def split_count(size: int) -> int:
    """Return the number of splits of a range of `size` bytes, blocks permitting."""
    enough = min(SPLITS_MIN, size // SPLIT_BYTES_MIN)
    needed = -(-size // SPLIT_BYTES_MAX)
    return max(1, enough, needed)


def _require_contiguous(blocks: Sequence[BlockRef], start: int, end: int) -> None:
    reached = start
    for number, block in enumerate(blocks):
        if block.header.log_offset > reached or (number and block.header.log_offset != reached):
            break
        reached = block.header.end
    if not blocks or reached < end:
        raise TailraceError(
            Kind.LOG_RANGE_INVALID,
            f"plan the log range {start} to {end}: its blocks end at {reached}",
            "choose a range inside the log; `tailrace log ls` shows its contents",
            {"start": start, "end": end},
        )
