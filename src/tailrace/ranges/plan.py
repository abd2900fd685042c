"""How a range of the log is cut into input splits that executors decode side by side.

Pure: a plan is a function of the range and of the blocks that hold it. It never asks how many
cores there are, what time it is or what the log has gained or lost since, so that a range that
is read again, on another machine or after a failure, is cut into the same splits. Sinks rest
on it: they name files after splits.

Cuts lie on block edges, at any place in a transaction: a block's header tells which unit is
open at its start and the number of its next change, so a split is decoded without the one
before it. Only a range's own ends may lie inside a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.errors import Kind, TailraceError

if TYPE_CHECKING:
    # At run time it would load the kernels into processes that only plan.
    from tailrace.changelog.format import BlockRef, HeldBlock

MIB = 1 << 20

#: Smaller splits cost more in start-up than they gain in spread.
SPLIT_BYTES_MIN = 4 * MIB
#: A failed or slow task is repeated as a whole: larger splits make that dear.
SPLIT_BYTES_MAX = 64 * MIB
#: A range that is large enough gives at least so many splits, so that a machine with more
#: cores than the writer's has work for them.
SPLITS_MIN = 8


@dataclass(frozen=True, slots=True)
class InputSplit:
    """A part of a range, `[start, end)` in log offsets, and the blocks that hold it.

    `index` counts a range's splits from 0 in log order. `rows` is an upper bound: a block at
    an end of the range may hold changes outside of it.
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

    :param blocks: the blocks that hold the range, in log order, as `LogReader.blocks` gives
        them; a block without a byte in the range is ignored.
    :raises TailraceError: `LOG_RANGE_INVALID` if the blocks leave a part of the range out.
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
    """Return into how many splits a range of `size` bytes is cut, blocks permitting."""
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
            "choose a range inside the log; `tailrace log ls` shows what it holds",
            {"start": start, "end": end},
        )
