"""The stage on executors: parts of batches go there, and come back as they are delivered."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from tailrace.engine.processing.stage import Stage, StagedGroup
from tailrace.records.group import Group
from tailrace.spark.processing.jobs import Jobs

#: In the place of a group that is not sent back.
_NOTHING = Group("", np.empty(0, np.int64), _columns=pa.RecordBatch.from_pydict({}))


@dataclass(frozen=True, slots=True)
class Preparing:
    """The stage, as executors call it. A group that it left as it was is not sent back."""

    stage: Stage

    def __call__(self, part: list[Group]) -> list[tuple[int, StagedGroup]]:
        """Return what becomes of groups; with the number of the one that it is, or -1."""
        numbers = {id(group): number for number, group in enumerate(part)}
        found = []
        for staged in self.stage(part):
            number = numbers.get(id(staged.group), -1)
            found.append((number, staged if number < 0 else replace(staged, group=_NOTHING)))
        return found


class SparkStageExecutor:
    """Has parts staged on executors (`engine.processing.stage.Stager`).

    :param width: tasks that run at a time there.
    """

    def __init__(self, jobs: Jobs[list[Group], list[tuple[int, StagedGroup]]], width: int) -> None:
        self._jobs = jobs
        self._width = width

    @property
    def width(self) -> int:
        """Into how many parts a batch is cut, about."""
        return self._width

    def stage(self, part: list[Group]) -> Future[list[StagedGroup]]:
        """Have a part staged by a Spark job."""
        outcome: Future[list[StagedGroup]] = Future()
        self._jobs.submit(part).add_done_callback(functools.partial(_settle, outcome, part))
        return outcome


def _settle(
    outcome: Future[list[StagedGroup]], part: Sequence[Group], found: Future[list[tuple[int, StagedGroup]]]
) -> None:
    if found.cancelled():
        outcome.cancel()
    if not outcome.set_running_or_notify_cancel():
        return
    if (error := found.exception()) is not None:
        outcome.set_exception(error)
        return
    outcome.set_result(
        [staged if number < 0 else replace(staged, group=part[number]) for number, staged in found.result()]
    )
