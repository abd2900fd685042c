"""The executor on Spark: records are handed over in jobs, each task with a part of a batch, or of several.

Without order each part of a batch is staged and handed over by one task, and parts begin as they come. For
order by key, batches are staged first; whatever is staged when a round ends is handed over in the next, in
which each task gets all records of its keys, in order. So a key's records are never in two tasks at once.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from tailrace.backoff import Backoff
from tailrace.engine.contracts import StopEngine
from tailrace.engine.processing.context import ProcessingConfig, ProcessingContext
from tailrace.engine.processing.dispatcher import Dispatcher
from tailrace.engine.processing.handlers import where
from tailrace.engine.processing.in_flight import InFlight
from tailrace.engine.processing.ordering_keys import KeyTypes
from tailrace.engine.processing.stage import ReadyBatch, StagedGroup, parts_of
from tailrace.records.group import Group
from tailrace.spark.processing.jobs import Jobs
from tailrace.spark.processing.partitions import spread
from tailrace.spark.processing.task_function import ChunkOutcome, Portion


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    # Records of one batch that a task gets, and the attempts of those that failed, by place.
    in_flight: InFlight
    groups: Sequence[Group | StagedGroup]
    begun: Mapping[int, int] = field(default_factory=dict)
    attempts: Mapping[int, Backoff] = field(default_factory=dict)

    @property
    def portion(self) -> Portion:
        return Portion(self.in_flight.batch.partition, self.groups, self.begun)


@dataclass(frozen=True, slots=True, eq=False)
class TaskLoad:
    """What one Spark task gets.

    :param backoff: of staging, and of Spark's job; from the beginning after each that ended well.
    """

    parts: tuple[_Part, ...]
    backoff: Backoff


class SparkExecutor:
    """Delivers records in Spark's jobs (`engine.processing.dispatcher.PartExecutor`).

    :param dispatcher: whose executor it is.
    :param width: into how many tasks a batch, or a round, is cut, about.
    """

    def __init__(
        self,
        dispatcher: Dispatcher[TaskLoad],
        terms: ProcessingConfig,
        means: ProcessingContext,
        jobs: Jobs[Sequence[Portion], Sequence[ChunkOutcome]],
        width: int,
    ) -> None:
        self._dispatcher = dispatcher
        self._terms = terms
        self._limiter = means.limiter
        self._committer = means.committer
        self._jobs = jobs
        self._width = width
        self._key_types = KeyTypes()
        self._added: list[tuple[InFlight, ReadyBatch]] = []
        self._steps: deque[list[TaskLoad]] = deque()
        self._lock = threading.Lock()
        self._open = 0  # loads of the present step that are not done; under the lock

    def has_room(self) -> bool:
        """As `PartExecutor.has_room`: batches under way are limited."""
        return True

    def add(self, ready: ReadyBatch, size_bytes: int) -> Iterator[None]:
        """As `PartExecutor.add`."""
        in_flight = self._limiter.begin(ready.batch, self._committer, size_bytes)
        if self._terms.calls != "key":
            for groups in parts_of(ready.batch.groups, self._width):
                self.resume(TaskLoad((_Part(in_flight, groups),), self._terms.backoff))
            return
        for one in ready.staged:
            assert one.keys is not None
            self._key_types.note(one.group.topic, one.keys)
        self._added.append((in_flight, ready))
        yield

    def go_on(self) -> None:
        """As `PartExecutor.go_on`: begins the next step, once all of the one before is handed over."""
        with self._lock:
            if self._open or not (self._added or self._steps):
                return
        if not self._steps:
            self._steps.extend(self._round())
        loads = self._steps.popleft()
        with self._lock:
            self._open = len(loads)
        for load in loads:
            self.resume(load)

    def resume(self, part: TaskLoad) -> None:
        """As `PartExecutor.resume`."""
        if self._limiter.enter():
            future = self._jobs.submit([one.portion for one in part.parts])
            future.add_done_callback(functools.partial(self._ended_with, part))

    def close(self) -> None:
        """As `PartExecutor.close`."""
        self._jobs.cancel()

    def _round(self) -> list[list[TaskLoad]]:
        batches, self._added = self._added, []
        steps = spread([ready.staged for _, ready in batches], self._width)
        return [
            [
                TaskLoad(
                    tuple(_Part(batches[each.batch][0], each.staged) for each in load), self._terms.backoff
                )
                for load in step
            ]
            for step in steps
        ]

    # ------------------------------------------------------------------ on the pool, or where it was given up

    def _ended_with(self, load: TaskLoad, future: Future[Sequence[ChunkOutcome]]) -> None:
        try:
            if future.cancelled():
                self._limiter.leave()
            elif (error := future.exception()) is not None:
                self._limiter.leave()
                backoff, wait_s = load.backoff.after(error)
                if wait_s is None:
                    raise error
                self._dispatcher.try_later(replace(load, backoff=backoff), wait_s)
            else:
                self._note(load, future.result())
        except BaseException as error:  # noqa: BLE001 - the task's thread raises it
            self._limiter.fail(error)
            self._dispatcher.look()

    def _note(self, load: TaskLoad, outcomes: Sequence[ChunkOutcome]) -> None:
        """Mark what was handed over, and have what is left handed over again.

        :raises BaseException: an error of a record that is final, noted with the record; `StopEngine`.
        """
        self._limiter.leave(_mark, load, outcomes)
        self._limiter.settle()
        fresh = load.backoff.after_success()
        rest, wait_s = [], 0.0
        for part, outcome in zip(load.parts, outcomes, strict=True):
            attempts, longest_s = _attempts(part, outcome, fresh)
            if outcome.left:
                rest.append(_left_of(part, outcome, attempts))
                wait_s = max(wait_s, longest_s)
        if rest:
            self._dispatcher.try_later(TaskLoad(tuple(rest), fresh), wait_s)
            return
        with self._lock:
            self._open -= 1
        self._dispatcher.look()


def _mark(load: TaskLoad, outcomes: Sequence[ChunkOutcome]) -> None:
    for part, outcome in zip(load.parts, outcomes, strict=True):
        done = [place for one in part.groups for place in _group(one).index.tolist()]
        if outcome.left:
            done = [place for place in done if place not in outcome.left]
        part.in_flight.dropped += len(done) - outcome.delivered
        part.in_flight.done.extend(done)


def _attempts(part: _Part, outcome: ChunkOutcome, fresh: Backoff) -> tuple[dict[int, Backoff], float]:
    """Return the attempts of records that failed, by place, and the longest wait.

    :raises BaseException: as `SparkExecutor._note`.
    """
    attempts: dict[int, Backoff] = {}
    longest_s, final = 0.0, outcome.final
    for place, error in outcome.again.items():
        backoff, wait_s = part.attempts.get(place, fresh).after(error)
        if wait_s is None:
            final = final or (place, error)
        else:
            attempts[place] = backoff
            longest_s = max(longest_s, wait_s)
    if final is not None:
        where(final[1], part.in_flight.batch, final[0])
        raise final[1]
    if outcome.wants_end:
        raise StopEngine
    return attempts, longest_s


def _left_of(part: _Part, outcome: ChunkOutcome, attempts: Mapping[int, Backoff]) -> _Part:
    wanted = np.fromiter(outcome.left, np.int64)
    groups = [one.take(np.flatnonzero(np.isin(_group(one).index, wanted))) for one in part.groups]
    kept = [one for one in groups if len(_group(one))]
    return _Part(part.in_flight, kept, outcome.left, attempts)


def _group(one: Group | StagedGroup) -> Group:
    return one.group if isinstance(one, StagedGroup) else one
