"""The plan of a range: a function of the range, complete, ordered, within limits."""

from __future__ import annotations

import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.changelog.format import BlockRef, RunHeader
from tailrace.errors import Kind, TailraceError
from tailrace.ranges.plan import MIB, SPLIT_BYTES_MAX, SPLITS_MIN, input_splits, split_count


def run(offset: int, size: int, rows: int = 10) -> BlockRef:
    fields = dict.fromkeys(RunHeader._fields, 0)
    header = RunHeader(**{**fields, "log_offset": offset, "raw_size": size, "rows": rows})  # type: ignore[arg-type]
    return BlockRef("0000000000000000.seg", offset, header, 1, size)


def runs(sizes: list[int], start: int = 1000) -> list[BlockRef]:
    found = []
    for size in sizes:
        found.append(run(start, size))
        start += size
    return found


SIZES = st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=200)


@given(SIZES)
def test_splits_cover_the_range_once_and_in_order(sizes: list[int]) -> None:
    blocks = runs(sizes)
    end = 1000 + sum(sizes)
    plan = input_splits("0", blocks, 1000, end)
    assert [split.index for split in plan] == list(range(len(plan)))
    assert plan[0].start == 1000
    assert plan[-1].end == end
    assert all(one.end == other.start for one, other in itertools.pairwise(plan))
    assert [block for split in plan for block in split.blocks] == blocks


@given(SIZES, st.data())
def test_a_plan_depends_only_on_its_range(sizes: list[int], data: st.DataObject) -> None:
    # What lies before and after the range, and how much, changes nothing.
    blocks = runs(sizes)
    first = data.draw(st.integers(0, len(blocks) - 1))
    last = data.draw(st.integers(first, len(blocks) - 1))
    start, end = blocks[first].header.log_offset, blocks[last].header.end
    alone = input_splits("0", blocks[first : last + 1], start, end)
    assert input_splits("0", blocks, start, end) == alone
    assert input_splits("0", blocks[: last + 1], start, end) == alone


@given(st.integers(1, 1 << 40))
def test_the_number_of_splits_grows_only_with_the_range(size: int) -> None:
    count = split_count(size)
    assert count * SPLIT_BYTES_MAX >= size
    assert count >= SPLITS_MIN or size < SPLITS_MIN * 4 * MIB


def test_a_large_range_is_divided_evenly() -> None:
    plan = input_splits("0", runs([MIB] * 1000), 1000, 1000 + 1000 * MIB)
    assert len(plan) == 16
    assert {(split.end - split.start) // MIB for split in plan} <= {62, 63, 64}
    assert sum(split.rows for split in plan) == 10_000


def test_one_huge_block_is_one_split() -> None:
    assert len(input_splits("0", runs([500 * MIB]), 1000, 1000 + 500 * MIB)) == 1


def test_an_empty_range_has_no_splits() -> None:
    assert input_splits("0", [], 5, 5) == []


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_range_with_a_hole_is_refused(missing: int) -> None:
    blocks = runs([100, 100, 100])
    del blocks[missing]
    with pytest.raises(TailraceError) as caught:
        input_splits("0", blocks, 1000, 1300)
    assert caught.value.kind is Kind.LOG_RANGE_INVALID


def test_a_split_can_be_pickled() -> None:
    plan = input_splits("0", runs([MIB] * 20), 1000, 1000 + 20 * MIB)
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301
    assert len(pickle.dumps(plan[0])) < 2000
