"""The delivery executor on Spark: tasks of Spark jobs stage and deliver unordered records.

A batch is divided into parts; each is a Spark task, and parts begin as they are submitted. `TaskFunction`
runs on Spark executors and keeps no state: it returns failures, and the driver decides about retries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tailrace.backoff import Backoff, is_retriable
from tailrace.engine.contracts import StopEngine
from tailrace.engine.processing.context import ProcessingContext
from tailrace.engine.processing.dispatcher import Dispatcher
from tailrace.engine.processing.handlers import check_done, where
from tailrace.engine.processing.in_flight import InFlight
from tailrace.engine.processing.stage import ReadyBatch, Stage, parts_of
from tailrace.records.batch import Batch, Partition
from tailrace.records.group import Group
from tailrace.spark.processing.jobs import Jobs, portable


@dataclass(frozen=True, slots=True, eq=False)
class TaskRecords:
    """Records of one batch that one Spark task delivers.

    :param groups: as polled.
    :param begun: by place: number of the record's events that were already delivered to the handler.
    """

    partition: Partition
    groups: Sequence[Group]
    begun: Mapping[int, int]

    def rest(self, left: Mapping[int, int]) -> TaskRecords:
        """Return the records that are left, by place, with `left` as their `begun`."""
        wanted = np.fromiter(left, np.int64)
        kept = [group.take(np.flatnonzero(np.isin(group.index, wanted))) for group in self.groups]
        return TaskRecords(self.partition, [group for group in kept if len(group)], left)


@dataclass(slots=True)
class TaskOutcome:
    """The outcome of a task's records. Records that are not in `left` are processed, or were dropped.

    :param left: by place, rising: number of the record's events that were delivered to the handler.
    :param again: by place: errors of records that are retried; these records are in `left`.
    :param final: place and error of the record after which nothing more was delivered.
    :param wants_end: whether the handler raised `StopEngine`.
    :param delivered: number of records that were delivered.
    """

    left: dict[int, int] = field(default_factory=dict)
    again: dict[int, BaseException] = field(default_factory=dict)
    final: tuple[int, BaseException] | None = None
    wants_end: bool = False
    delivered: int = 0

    @property
    def goes_on(self) -> bool:
        """Whether the handler may be called with further records."""
        return self.final is None and not self.wants_end


@dataclass(frozen=True, slots=True)
class TaskFunction:
    """Stages the records of a task, then delivers them one by one. Runs on Spark executors."""

    stage: Stage
    handler: Callable[[Any], object]

    def __call__(self, records: TaskRecords) -> TaskOutcome:
        """Return the outcome of the records.

        :raises BaseException: the error of a transformation or the converter, before any delivery.
        """
        ready = ReadyBatch.of(Batch(records.partition, (), 0, ()), self.stage(records.groups))
        found = TaskOutcome()
        for place, given in ready.by_record():
            begun = records.begun.get(place, 0)
            if not found.goes_on:
                found.left[place] = begun
            elif (had := self._call(place, given, begun, found)) < len(given):
                found.left[place] = had
            else:
                found.delivered += 1
        return found

    def _call(self, place: int, given: Sequence[Any], begun: int, found: TaskOutcome) -> int:
        # Returns the number of the record's events that were delivered to the handler.
        for event in range(begun, len(given)):
            try:
                if (returned := self.handler(given[event])) is not None:
                    check_done(returned)
            except StopEngine:
                found.wants_end = True
                return event + 1
            except BaseException as error:  # noqa: BLE001 - retried, or the task's thread raises it
                if is_retriable(error):
                    found.again[place] = portable(error)
                else:
                    found.final = (place, portable(error))
                return event
        return len(given)


@dataclass(frozen=True, slots=True, eq=False)
class TaskLoad:
    """The driver's state of the records of a task.

    :param backoff: of staging and of the Spark job; starts again after each job that succeeded.
    :param attempts: by place: the back-offs of failed records.
    """

    in_flight: InFlight
    records: TaskRecords
    backoff: Backoff
    attempts: Mapping[int, Backoff] = field(default_factory=dict)


class SparkExecutor:
    """Delivers records in Spark jobs (`engine.processing.dispatcher.DeliveryExecutor`).

    :param dispatcher: the owner of this executor.
    :param width: approximate number of tasks into which a batch is divided.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        context: ProcessingContext,
        jobs: Jobs[TaskRecords, TaskOutcome],
        width: int,
    ) -> None:
        self._dispatcher = dispatcher
        self._backoff = context.terms.backoff
        self._limiter = context.limiter
        self._jobs = jobs
        self._width = width

    def add(self, ready: ReadyBatch, size_bytes: int) -> Iterator[None]:
        in_flight = self._limiter.begin(ready.batch, size_bytes)
        for groups in parts_of(ready.batch.groups, self._width):
            records = TaskRecords(ready.batch.partition, groups, {})
            self._submit(TaskLoad(in_flight, records, self._backoff))
        return iter(())  # the limiter bounds the batches in flight

    def _submit(self, load: TaskLoad) -> None:
        if self._limiter.enter():
            future = self._jobs.submit(load.records)
            future.add_done_callback(functools.partial(self._ended_with, load))

    def close(self) -> None:
        self._jobs.cancel()

    # ------------------------------------------------------------------ on the pool, or the cancelling thread

    def _ended_with(self, load: TaskLoad, future: Future[TaskOutcome]) -> None:
        try:
            if future.cancelled():
                self._limiter.leave()
            elif (error := future.exception()) is not None:
                self._limiter.leave()
                backoff, wait_s = load.backoff.after(error)
                if wait_s is None:
                    raise error
                again = functools.partial(self._submit, replace(load, backoff=backoff))
                self._dispatcher.try_later(again, wait_s)
            else:
                self._note(load, future.result())
        except BaseException as error:  # noqa: BLE001 - the task's thread raises it
            self._limiter.fail(error)
            self._dispatcher.look()

    def _note(self, load: TaskLoad, outcome: TaskOutcome) -> None:
        """Mark the delivered records, and schedule those that are left.

        :raises BaseException: a record's final error, with a note of the record; `StopEngine`.
        """
        self._limiter.leave(_mark, load, outcome)
        self._limiter.settle()
        fresh = load.backoff.after_success()
        attempts, longest_s = _attempts(load, outcome, fresh)
        if outcome.left:
            left = load.records.rest(outcome.left)
            again = functools.partial(self._submit, TaskLoad(load.in_flight, left, fresh, attempts))
            self._dispatcher.try_later(again, longest_s)
        else:
            self._dispatcher.look()


def _mark(load: TaskLoad, outcome: TaskOutcome) -> None:
    places = [place for group in load.records.groups for place in group.index.tolist()]
    done = [place for place in places if place not in outcome.left]
    load.in_flight.dropped += len(done) - outcome.delivered
    load.in_flight.done.extend(done)


def _attempts(load: TaskLoad, outcome: TaskOutcome, fresh: Backoff) -> tuple[dict[int, Backoff], float]:
    """Return the back-offs of failed records, by place, and the longest wait, in seconds.

    :raises BaseException: as `SparkExecutor._note`.
    """
    attempts: dict[int, Backoff] = {}
    longest_s, final = 0.0, outcome.final
    for place, error in outcome.again.items():
        backoff, wait_s = load.attempts.get(place, fresh).after(error)
        if wait_s is None:
            final = final or (place, error)
        else:
            attempts[place] = backoff
            longest_s = max(longest_s, wait_s)
    if final is not None:
        where(final[1], load.in_flight.batch, final[0])
        raise final[1]
    if outcome.wants_end:
        raise StopEngine
    return attempts, longest_s
