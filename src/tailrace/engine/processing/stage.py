"""The stage before delivery: transforms, converts, finds the ordering keys; part by part on the pool.

A batch is divided into parts of about the same number of records, to use all threads: large groups are
split, small ones combined. The results of the parts are combined in the batch's order of groups; the order
of records is that of their places (`Batch.order`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tailrace.engine.processing.ordering_keys import OrderingKeys, transformed_keys_of
from tailrace.records.batch import Batch
from tailrace.records.events import Converted, Event, Events
from tailrace.records.group import Group, Places, source_order
from tailrace.records.record import Record

#: Minimum size of a part, in records: fewer are not worth a thread.
PART_RECORDS_MIN = 2048

#: Size of the runs of `ReadyBatch.by_record`, in records.
_RUN_RECORDS = 1024

#: Returns the handler's arguments for a record, by the record's number in its batch.
GetRecord = Callable[[int], tuple[Record | Event, ...]]

Transform = Callable[[Group], Iterable[Group]]
Convert = Callable[[Group], Converted]


@dataclass(frozen=True, slots=True, eq=False)
class StagedGroup:
    """A group as it is delivered to the handler; `converted` and `keys` are None if they were not wanted."""

    group: Group
    converted: Converted | None
    keys: OrderingKeys | None


@dataclass(frozen=True, slots=True, eq=False)
class ReadyBatch:
    """A batch that is ready to be delivered.

    :param given: the argument of a handler of batches; iterated, the arguments of handlers of records.
    :param staged: the staged groups of the batch; empty if there was nothing to do.
    """

    batch: Batch
    given: Batch | Events
    staged: Sequence[StagedGroup]

    @classmethod
    def of(cls, batch: Batch, staged: Sequence[StagedGroup]) -> ReadyBatch:
        """Return `batch` with its staged records."""
        batch = batch.with_groups([one.group for one in staged])
        converted = tuple(one.converted for one in staged if one.converted is not None)
        # A batch without records is not delivered.
        given = Events(batch, converted) if converted else batch
        if all(one.group.is_second is None for one in staged):
            return ReadyBatch(batch, given, staged)
        staged = _one_a_place(staged)
        return ReadyBatch(batch.with_groups([one.group for one in staged]), given, staged)

    @property
    def ordering_keys(self) -> list[OrderingKeys]:
        """The ordering keys of each group; empty if they were not wanted."""
        return [one.keys for one in self.staged if one.keys is not None]

    def by_record(self) -> Iterator[tuple[int, tuple[Record | Event, ...]]]:
        """Yield each record's place, and the handler's arguments for it: itself, or its events, if any."""
        places = self.batch.places.tolist()
        for first, last, get in self.runs(_RUN_RECORDS):
            yield from zip(places[first:last], map(get, range(first, last)), strict=True)

    def in_turn(self) -> Iterator[tuple[int, Record | Event]]:
        """Return the handler's arguments in order, each with the number of the batch's records, from the
        first, that are delivered after that call.
        """
        count = len(self.batch)
        if isinstance(self.given, Batch):
            # For each record, only `Record` itself is called.
            return zip(range(1, count + 1), self.given, strict=True)
        # A record is delivered with its last event: when the next event is of another record.
        numbers = np.searchsorted(self.batch.places, self.given.places)
        return zip(np.append(numbers[1:], count).tolist(), self.given, strict=False)

    def runs(self, size: int) -> Iterator[tuple[int, int, GetRecord]]:
        """Yield runs of records, numbered in the source's order from `first` (inclusive) to `last`
        (exclusive), each with its `GetRecord`, which may be called on any thread.

        Records and events are created when they are delivered: thousands of waiting objects would trigger
        full garbage collections.
        """
        count = len(self.batch)
        runs = ((first, min(first + size, count)) for first in range(0, count, size))
        if isinstance(self.given, Batch):
            for first, last in runs:
                yield first, last, _new_records(self.batch, first, last)
            return
        begins = np.append(np.searchsorted(self.given.places, self.batch.places), len(self.given))
        for first, last in runs:
            yield first, last, _new_events(self.given, begins[first : last + 1], first)


def _one_a_place(staged: Sequence[StagedGroup]) -> Sequence[StagedGroup]:
    """Return the groups with only the last record of each place, to which all events of the place count.

    It has the ordering keys of both.
    """
    places = [one.group.index for one in staged]
    order = source_order(places, [one.group.is_second for one in staged])
    in_order = np.concatenate(places)[order]
    is_first = np.append(in_order[1:] == in_order[:-1], False)
    first, last = order[:-1][is_first[:-1]], order[1:][is_first[:-1]]
    is_kept = np.ones(len(order), np.bool_)
    is_kept[first] = False
    keys = [one.keys for one in staged if one.keys is not None]
    if keys:
        other = np.concatenate([found.other for found in keys])
        other[last] = np.concatenate([found.own for found in keys])[first]
    ends = np.cumsum([len(at) for at in places])
    found = []
    for one, begin, end in zip(staged, [0, *ends], ends, strict=False):
        rows = np.flatnonzero(is_kept[begin:end])
        if len(rows):
            of_rows = one.keys
            if of_rows is not None:
                of_rows = replace(
                    of_rows,
                    own=of_rows.own[rows],
                    other=other[begin:end][rows],
                    in_all=of_rows.in_all[rows],
                )
            found.append(StagedGroup(one.group.take(rows), None, of_rows))
    return found


def _new_records(batch: Batch, first: int, last: int) -> GetRecord:
    # Calls dominate the cost of a delivery, so these functions call nothing but `Record`.
    partition = batch.partition
    if len(batch.groups) == 1:
        [group] = batch.groups
        return lambda number: (Record(group, number, partition),)
    found, rows = batch.rows_of(first, last)
    groups = list(found)
    return lambda number: (Record(groups[number - first], rows[number - first], partition),)


def _new_events(events: Events, begins: Places, first: int) -> GetRecord:
    # `begins`: the number of the first event of each record from `first` on, then the end of the last one.
    begin, end = int(begins[0]), int(begins[-1])
    event = events.maker(begin, end)
    if (np.diff(begins) == 1).all():
        before = begin - first
        return lambda number: (event(before + number),)
    bounds = begins.tolist()
    return lambda number: tuple(map(event, range(bounds[number - first], bounds[number - first + 1])))


@dataclass(frozen=True, slots=True)
class Stage:
    """The steps that are applied to a group before it is delivered: one function for all flows."""

    transform: Transform | None
    convert: Convert | None
    finds_keys: bool

    def __call__(self, part: Sequence[Group]) -> list[StagedGroup]:
        """Return the staged groups of `part`. On any thread."""
        out: list[StagedGroup] = []
        for source in part:
            for group in (source,) if self.transform is None else self.transform(source):
                if len(group):
                    converted = None if self.convert is None else self.convert(group)
                    keys = transformed_keys_of(group, source) if self.finds_keys else None
                    out.append(StagedGroup(group, converted, keys))
        return out

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return self.transform is None and self.convert is None and not self.finds_keys


class StageExecutor(Protocol):
    """Runs the stage for parts of batches."""

    @property
    def width(self) -> int:
        """Approximate number of parts into which a batch is divided."""
        ...

    def stage(self, part: list[Group]) -> Future[list[StagedGroup]]:
        """Stage a part asynchronously. Any thread."""
        ...

    def close(self) -> None:
        """Stage no more parts. Any thread; returns soon."""
        ...


@dataclass(frozen=True, slots=True)
class PoolStageExecutor:
    """Stages parts on a pool of threads."""

    work: Stage
    executor: Executor
    width: int

    def stage(self, part: list[Group]) -> Future[list[StagedGroup]]:
        """Stage a part on one of the threads."""
        return self.executor.submit(self.work, part)

    def close(self) -> None:
        """Do nothing: `StageFuture.cancel` cancels the submitted parts."""


class StageFuture:
    """A batch that is being staged.

    :param stage_executor: stages its parts; None: there is nothing to do.
    """

    def __init__(self, batch: Batch, stage_executor: StageExecutor | None) -> None:
        self.batch = batch
        self.size_bytes = batch.size_bytes
        self._stage_executor = stage_executor
        self._failed: list[int] = []
        self._parts = [] if stage_executor is None else parts_of(batch.groups, stage_executor.width)
        self._outcomes = (
            [] if stage_executor is None else [stage_executor.stage(part) for part in self._parts]
        )

    @property
    def is_done(self) -> bool:
        """Whether `result` would not wait."""
        return all(outcome.done() for outcome in self._outcomes)

    def when_done(self, call: Callable[[], None]) -> None:
        """Register `call`, which is called on any thread when a part is done."""
        for outcome in self._outcomes:
            outcome.add_done_callback(lambda _: call())

    def result(self) -> ReadyBatch:
        """Wait for the parts and return the batch as it is delivered.

        :raises BaseException: the error of a transformation or the converter; another call retries the
            failed parts.
        """
        if self._stage_executor is None:
            return ReadyBatch(self.batch, self.batch, ())
        while self._failed:
            part = self._failed.pop()
            assert self._stage_executor is not None
            self._outcomes[part] = self._stage_executor.stage(self._parts[part])
        staged: list[StagedGroup] = []
        for part, outcome in enumerate(self._outcomes):
            try:
                staged += outcome.result()
            except BaseException:
                self._failed.append(part)
                raise
        return ReadyBatch.of(self.batch, staged)

    def cancel(self) -> None:
        """Cancel the parts that have not begun."""
        for outcome in self._outcomes:
            outcome.cancel()


def parts_of(groups: Sequence[Group], threads: int) -> list[list[Group]]:
    """Divide groups into parts for `threads` threads; together they are the groups, in their order."""
    total = sum(len(group) for group in groups)
    size = max(PART_RECORDS_MIN, -(-total // max(1, threads)))
    parts: list[list[Group]] = []
    limiter = 0
    for group in groups:
        first = 0
        while first < len(group):
            if limiter <= 0:
                parts.append([])
                limiter = size
            # A small rest is added to the previous part.
            last = len(group) if len(group) - first < limiter + size // 4 else first + limiter
            parts[-1].append(group.slice(first, last))
            limiter -= last - first
            first = last
    return parts
