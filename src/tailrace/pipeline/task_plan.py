"""Which capture task works on which sources: a function of the configuration alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tailrace.config import EngineConfig, PipelineConfig

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """What one capture task of an engine works on: the pipelines of its sources.

    `number` counts the engine's tasks from 0.
    """

    number: int
    pipelines: tuple[PipelineConfig, ...]


def plan_tasks(config: EngineConfig) -> tuple[TaskPlan, ...]:
    """Return the engine's tasks: at most `tasks_max`, none without a source."""
    groups = spread(config.pipelines, config.tasks_max)
    return tuple(TaskPlan(number, group) for number, group in enumerate(groups))


def spread(items: Sequence[Item], groups_max: int) -> list[tuple[Item, ...]]:
    """Deal `items` out, one after another, to as many groups as there may be.

    Sizes differ by one at most, and no group is empty. While there are `groups_max` groups, an
    item that is added at the end moves none of the others.
    """
    count = min(groups_max, len(items))
    return [tuple(items[number::count]) for number in range(count)]
