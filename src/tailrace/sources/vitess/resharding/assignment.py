"""Assignment of shards to tasks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tailrace.sources.vitess.resharding.key_ranges import by_keys


def assigned(shards: Iterable[str], tasks: Sequence[int], before: Mapping[str, int | None]) -> dict[str, int]:
    """Return a task for each shard. The tasks' numbers of shards differ by at most one, and as few shards as
    possible leave the task that they had `before`.

    The result doesn't depend on the order of the arguments' elements.
    """
    ordered = by_keys(shards)
    held: dict[int, list[str]] = {task: [] for task in sorted(tasks)}
    free: list[str] = []
    for shard in ordered:
        held.get(before.get(shard), free).append(shard)  # type: ignore[arg-type]
    least, more = divmod(len(ordered), len(held))
    # The tasks that hold most may have one more than the others: this moves the fewest shards.
    fullest = sorted(held, key=lambda task: (-len(held[task]), task))
    limits = {task: least + (place < more) for place, task in enumerate(fullest)}
    for task, limit in limits.items():
        free += held[task][limit:]
        del held[task][limit:]
    rest = iter(by_keys(free))
    for task, found in held.items():
        found += [next(rest) for _ in range(limits[task] - len(found))]
    return {shard: task for task, found in held.items() for shard in found}
