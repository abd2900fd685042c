"""Delivery on executors without any order: each part of a batch is staged and handed over by one task."""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import structlog

from tailrace.engine.processing.context import ProcessingConfig, ProcessingContext
from tailrace.engine.processing.stage import parts_of
from tailrace.records.batch import Batch
from tailrace.records.group import Group
from tailrace.spark.processing.acknowledgement import BatchAcknowledgement
from tailrace.spark.processing.attempts import AttemptCounts
from tailrace.spark.processing.jobs import Jobs
from tailrace.spark.processing.task_function import ChunkOutcome, Portion

log = structlog.get_logger(__name__)

#: The delivering thread looks up at least so often.
_IDLE_S = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    # What one Spark task is given; `number` is within the batch.
    of: BatchAcknowledgement
    number: int
    groups: Sequence[Group]
    trying: AttemptCounts
    begun: Mapping[int, int]


class SparkUnorderedDispatcher:
    """Hands over what is polled at once; what fails and may pass, again after a while.

    :param width: into how many parts a batch is cut, about.
    """

    def __init__(
        self,
        terms: ProcessingConfig,
        means: ProcessingContext,
        jobs: Jobs[Sequence[Portion], Sequence[ChunkOutcome]],
        width: int,
    ) -> None:
        self._terms = terms
        self._limiter = means.limiter
        self._committer = means.committer
        self._jobs = jobs
        self._width = width
        self._wake = threading.Event()
        self._ended = False
        self._lock = threading.Lock()
        self._later: list[tuple[float, int, _Part]] = []  # by the time to try again
        self._numbers = itertools.count()

    def put(self, batch: Batch) -> None:
        """Have a batch handed over."""
        of = BatchAcknowledgement(batch, batch.size_bytes, self._limiter, self._committer)
        trying = AttemptCounts(self._terms.backoff)
        parts = [
            _Part(of, number, groups, trying, {})
            for number, groups in enumerate(parts_of(batch.groups, self._width))
        ]
        for part in parts:
            of.owe(part.number, part.groups)
        if not parts:
            self._limiter.mark(self._committer.mark_processed, batch)
            of.finish()
        for part in parts:
            self._begin(part)

    def run(self) -> None:
        """Have those handed over again whose time has come, until `wake`."""
        while True:
            self._wake.clear()
            if self._ended:
                return
            now_s = self._terms.clock.monotonic()
            with self._lock:
                due = []
                while self._later and self._later[0][0] <= now_s:
                    due.append(heapq.heappop(self._later)[2])
                wait_s = self._later[0][0] - now_s if self._later else _IDLE_S
            for part in due:
                self._begin(part)
            self._terms.clock.wait(self._wake, wait_s)

    def wake(self) -> None:
        """Have `run` return."""
        self._ended = True
        self._wake.set()

    def _begin(self, part: _Part) -> None:
        if not self._limiter.enter():
            return
        future = self._jobs.submit([Portion(part.of.batch.partition, part.groups, part.begun)])
        future.add_done_callback(functools.partial(self._ended_with, part))

    def _ended_with(self, part: _Part, future: Future[Sequence[ChunkOutcome]]) -> None:
        # On the pool, or where it was cancelled.
        try:
            if future.cancelled():
                self._limiter.leave()
            elif (error := future.exception()) is not None:
                self._limiter.leave()
                self._again(part, *part.trying.after(error))
            else:
                [outcome] = future.result()
                self._take(part, outcome)
        except BaseException as error:  # noqa: BLE001 - the task's thread raises it
            self._limiter.fail(error)
            self._wake.set()

    def _take(self, part: _Part, outcome: ChunkOutcome) -> None:
        self._limiter.leave(part.of.mark, part.number, outcome.left, outcome.delivered)
        trying, wait_s = part.trying.after_outcome(outcome, part.of.batch)
        if not outcome.left:
            part.of.finish()
            return
        groups = part.of.left_of(part.number)
        self._again(replace(part, groups=groups, begun=outcome.left), trying, wait_s)

    def _again(self, part: _Part, trying: AttemptCounts, wait_s: float) -> None:
        self._limiter.tried_again()
        what = f"{self._terms.name}: handing over on executors"
        log.warning("failed, tried again", what=what, wait_s=wait_s)
        with self._lock:
            entry = (
                self._terms.clock.monotonic() + wait_s,
                next(self._numbers),
                replace(part, trying=trying),
            )
            heapq.heappush(self._later, entry)
        self._wake.set()
