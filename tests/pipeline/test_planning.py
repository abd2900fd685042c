"""Sources are divided among tasks evenly, and the same way every time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.pipeline.run import spread


@given(st.lists(st.integers(), unique=True, max_size=40), st.integers(1, 12))
def test_every_item_is_in_one_group_and_no_group_is_larger_by_two(items, groups_max):
    groups = spread(items, groups_max)
    assert len(groups) == min(groups_max, len(items))
    assert sorted(item for group in groups for item in group) == sorted(items)
    sizes = [len(group) for group in groups]
    assert not groups or max(sizes) - min(sizes) <= 1
    assert all(list(group) == sorted(group, key=items.index) for group in groups)
    assert spread(items, groups_max) == groups


@given(st.lists(st.integers(), unique=True, min_size=1, max_size=40), st.integers(1, 12))
def test_an_item_at_the_end_moves_no_other_once_the_groups_are_full(items, groups_max):
    if len(items) > groups_max:
        fewer, more = spread(items[:-1], groups_max), spread(items, groups_max)
        assert all(group == grown[: len(group)] for group, grown in zip(fewer, more, strict=True))
