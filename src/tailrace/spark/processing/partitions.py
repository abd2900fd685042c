"""Which records go together: those of an ordering key to one Spark task, in order; before and after
records that have all keys, one step after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.engine.processing.ordering_keys import OrderingKeys
from tailrace.engine.processing.stage import StagedGroup
from tailrace.records.fingerprints import Fingerprints


@dataclass(frozen=True, slots=True, eq=False)
class TaskRecords:
    """What one Spark task gets of one batch.

    :param batch: its number among those that were given.
    """

    batch: int
    staged: Sequence[StagedGroup]


def spread(batches: Sequence[Sequence[StagedGroup]], width: int) -> list[list[list[TaskRecords]]]:
    """Return steps, each of at most `width` loads, each of shares in the order of the batches.

    A load holds all records of its ordering keys in its step. All of a step must be handed over before the
    next.

    :param batches: staged with ordering keys, in order.
    """
    steps: list[list[tuple[int, StagedGroup]]] = [[]]
    for number, staged in enumerate(batches):
        first, *others = _between_walls(staged)
        steps[-1] += ((number, one) for one in first)
        steps += ([(number, one) for one in step] for step in others)
    return [_loads(step, width) for step in steps if step]


def _between_walls(staged: Sequence[StagedGroup]) -> list[list[StagedGroup]]:
    # What comes before the first record that has all ordering keys, that record, what comes then, …
    found = [one.group.index[_keys(one).in_all] for one in staged]
    walls = np.sort(np.concatenate([np.empty(0, np.int64), *found]))
    if not len(walls):
        return [list(staged)]
    steps: list[list[StagedGroup]] = [[] for _ in range(2 * len(walls) + 1)]
    for one in staged:
        step_of = np.searchsorted(walls, one.group.index, "left") + np.searchsorted(
            walls, one.group.index, "right"
        )
        for step in np.unique(step_of).tolist():
            steps[step].append(one.take(np.flatnonzero(step_of == step)))
    return steps


def _loads(step: Sequence[tuple[int, StagedGroup]], width: int) -> list[list[TaskRecords]]:
    joined = _joined([_keys(one) for _, one in step])
    loads: list[dict[int, list[StagedGroup]]] = [{} for _ in range(width)]
    for number, one in step:
        load_of = joined(_keys(one).own) % width
        for load in np.unique(load_of).tolist():
            loads[load].setdefault(number, []).append(one.take(np.flatnonzero(load_of == load)))
    return [[TaskRecords(number, found) for number, found in load.items()] for load in loads if load]


class _Joined:
    # Ordering keys that records of two tie together count as one: the least of them.
    def __init__(self, ties: Iterable[tuple[int, int]]) -> None:
        parents: dict[int, int] = {}

        def root(key: int) -> int:
            while (parent := parents.setdefault(key, key)) != key:
                parents[key] = key = parents[parent]
            return key

        for one, other in ties:
            low, high = sorted((root(one), root(other)))
            parents[high] = low
        self._from = np.array(sorted(parents), np.uint64)
        self._to = np.array([root(key) for key in self._from.tolist()], np.uint64)

    def __call__(self, keys: Fingerprints) -> Fingerprints:
        if not len(self._from):
            return keys
        at = np.minimum(np.searchsorted(self._from, keys), len(self._from) - 1)
        return np.where(self._from[at] == keys, self._to[at], keys)


def _joined(keys: Sequence[OrderingKeys]) -> _Joined:
    ties: list[tuple[int, int]] = []
    for found in keys:
        moved = np.flatnonzero(found.own != found.other)
        ties += zip(found.own[moved].tolist(), found.other[moved].tolist(), strict=True)
    return _Joined(ties)


def _keys(staged: StagedGroup) -> OrderingKeys:
    assert staged.keys is not None, "staged for order by key"
    return staged.keys
