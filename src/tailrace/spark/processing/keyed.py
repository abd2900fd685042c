"""Delivery on executors in order for each key: staged there, dealt out here, handed over there.

Batches are staged as they come. Whatever is staged when a round ends is handed over in the next: each
task gets all records of its lanes, in order. So a key's records are never in two tasks at once.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass

import numpy as np
import structlog

from tailrace.engine.processing.context import ProcessingConfig, ProcessingContext
from tailrace.engine.processing.ordering_keys import KeyTypes
from tailrace.engine.processing.stage import StagedGroup, StageExecutor, StageFuture
from tailrace.engine.retry import GivenUpError
from tailrace.records.batch import Batch
from tailrace.spark.processing.acknowledgement import BatchAcknowledgement
from tailrace.spark.processing.attempts import AttemptCounts
from tailrace.spark.processing.jobs import Jobs
from tailrace.spark.processing.partitions import TaskRecords, spread
from tailrace.spark.processing.task_function import ChunkOutcome, Portion

log = structlog.get_logger(__name__)

#: The delivering thread looks up at least so often.
_IDLE_S = 60.0


@dataclass(slots=True, eq=False)
class _Part:
    # What a task is given of one batch; `number` is within the batch.
    of: BatchAcknowledgement
    number: int
    portion: Portion
    trying: AttemptCounts


class SparkKeyedDispatcher:
    """Hands over in rounds.

    :param width: tasks of a round, at most.
    """

    def __init__(
        self,
        terms: ProcessingConfig,
        means: ProcessingContext,
        jobs: Jobs[Sequence[Portion], Sequence[ChunkOutcome]],
        stage_executor: StageExecutor,
        width: int,
    ) -> None:
        self._terms = terms
        self._limiter = means.limiter
        self._committer = means.committer
        self._jobs = jobs
        self._stage_executor = stage_executor
        self._width = width
        self._staging = means.retrying(terms, "transformation and conversion")
        self._key_types = KeyTypes()
        self._waiting: deque[StageFuture] = deque()
        self._wake = threading.Event()
        self._ended = False

    def put(self, batch: Batch) -> None:
        """Have a batch staged, and handed over."""
        staging = StageFuture(batch, self._stage_executor)
        staging.when_done(self._wake.set)
        self._waiting.append(staging)
        self._wake.set()

    def run(self) -> None:
        """Hand over round by round, until `wake`."""
        while not self._ended:
            self._wake.clear()
            try:
                if self._round():
                    continue
            except (GivenUpError, CancelledError):
                pass
            except BaseException as error:  # noqa: BLE001 - the task's thread raises it
                self._limiter.fail(error)
            if self._limiter.shut.is_set():
                while self._waiting:
                    self._waiting.popleft().cancel()
            if not self._ended:
                self._terms.clock.wait(self._wake, _IDLE_S)

    def wake(self) -> None:
        """Have `run` return, once the round at hand has ended."""
        self._ended = True
        self._wake.set()

    def _round(self) -> bool:
        # Hands over all batches that are staged; tells whether there were any.
        batches: list[tuple[BatchAcknowledgement, list[StagedGroup]]] = []
        while self._waiting and self._waiting[0].is_done and not self._limiter.shut.is_set():
            staging = self._waiting.popleft()
            staged = self._staging.call(staging.staged)
            for one in staged:
                assert one.lanes is not None
                self._key_types.hear(one.group.topic, one.lanes)
            of = BatchAcknowledgement(staging.batch, staging.size_bytes, self._limiter, self._committer)
            batches.append((of, staged))
        if not batches:
            return False
        steps = spread([staged for _, staged in batches], self._width)
        numbers = itertools.count()
        loads = [[self._load(batches, load, numbers) for load in step] for step in steps]
        for of, _ in batches:
            # What transformations dropped, or all.
            self._limiter.mark(of.mark, -1, ())
            of.finish()
        for step in loads:
            left = step
            while left:
                left = self._hand_over(left)
        return True

    def _load(
        self,
        batches: Sequence[tuple[BatchAcknowledgement, list[StagedGroup]]],
        shares: Sequence[TaskRecords],
        numbers: Iterator[int],
    ) -> list[_Part]:
        load = []
        for share in shares:
            of, number = batches[share.batch][0], next(numbers)
            of.owe(number, [one.group for one in share.staged])
            portion = Portion(of.batch.partition, share.staged, {})
            load.append(_Part(of, number, portion, AttemptCounts(self._terms.backoff)))
        return load

    def _hand_over(self, loads: Sequence[list[_Part]]) -> list[list[_Part]]:
        """Hand over once, and wait until what is left may be handed over again; return that.

        :raises GivenUpError: nothing more is handed over.
        """
        if not self._limiter.enter():
            raise GivenUpError
        try:
            futures = [self._jobs.submit([part.portion for part in load]) for load in loads]
            wait(futures)
        finally:
            self._limiter.leave()
        waits_s = [0.0]
        left = [
            rest
            for load, future in zip(loads, futures, strict=True)
            if (rest := self._rest_of(load, future, waits_s))
        ]
        if self._limiter.shut.is_set():
            raise GivenUpError
        if left:
            self._limiter.tried_again()
            what = f"{self._terms.name}: handing over on executors"
            log.warning("failed, tried again", what=what, wait_s=max(waits_s))
            if self._terms.clock.wait(self._limiter.shut, max(waits_s)):
                raise GivenUpError
        return left

    def _rest_of(
        self, load: list[_Part], future: Future[Sequence[ChunkOutcome]], waits_s: list[float]
    ) -> list[_Part]:
        # What is left of a load, after all that was done of it is marked.
        if future.cancelled():
            return []
        if (error := future.exception()) is not None:
            for part in load:
                try:
                    part.trying, wait_s = part.trying.after(error)
                    waits_s.append(wait_s)
                except BaseException as final:  # noqa: BLE001 - the task's thread raises it
                    self._limiter.fail(final)
            return load
        rest: list[_Part] = []
        for part, outcome in zip(load, future.result(), strict=True):
            self._limiter.mark(part.of.mark, part.number, outcome.left, outcome.delivered)
            try:
                part.trying, wait_s = part.trying.after_outcome(outcome, part.of.batch)
                waits_s.append(wait_s)
            except BaseException as final:  # noqa: BLE001 - the task's thread raises it
                self._limiter.fail(final)
            if outcome.left:
                part.portion = _left_of(part.portion, outcome)
                rest.append(part)
            else:
                part.of.finish()
        return rest


def _left_of(portion: Portion, outcome: ChunkOutcome) -> Portion:
    wanted = np.fromiter(outcome.left, np.int64)
    staged = [
        one.take(np.flatnonzero(np.isin(one.group.index, wanted)))
        for one in portion.groups
        if isinstance(one, StagedGroup)
    ]
    return Portion(portion.partition, [one for one in staged if len(one.group)], outcome.left)
