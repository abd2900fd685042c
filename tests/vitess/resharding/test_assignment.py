"""Assignment of shards to tasks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tailrace.sources.vitess.resharding.assignment import assigned

_SHARDS = [f"{first:02x}-{first + 1:02x}" for first in range(1, 40)]


@given(
    st.sets(st.sampled_from(_SHARDS)),
    st.sets(st.integers(0, 7), min_size=1),
    st.dictionaries(st.sampled_from(_SHARDS), st.none() | st.integers(0, 9)),
)
def test_tasks_are_balanced_and_as_few_shards_as_possible_move(
    shards: set[str], tasks: set[int], before: dict[str, int | None]
) -> None:
    found = assigned(shards, sorted(tasks), before)
    assert found.keys() == shards
    counts = Counter(found.values())
    sizes = sorted((counts[task] for task in tasks), reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert found == assigned(sorted(shards, reverse=True), sorted(tasks, reverse=True), before)
    # No balanced assignment keeps more: the fullest tasks keep most.
    held = sorted((sum(before.get(shard) == task for shard in shards) for task in tasks), reverse=True)
    kept = sum(before.get(shard) == task for shard, task in found.items())
    assert kept == sum(map(min, held, sizes))


def test_one_task_more_or_less_moves_only_its_share() -> None:
    shards = [f"{first:04x}-{first + 1:04x}" for first in range(1, 1001)]
    eight = assigned(shards, range(8), {})
    nine = assigned(shards, range(9), eight)
    assert sum(nine[shard] != eight[shard] for shard in shards) == 111
    seven = assigned(shards, range(7), eight)
    assert sum(seven[shard] != eight[shard] for shard in shards) == 125
