"""The stage before delivery: transform, convert, find the lanes; part by part on the pool.

A batch is cut into parts of about the same number of records, so that all threads share in it: large
groups are split, small ones put together. What comes of the parts is put together in the batch's
order of groups; the order of records is that of their places (`Batch.order`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol

from tailrace.engine.processing.lanes import Lanes, lanes_of, moved_of
from tailrace.records.batch import Batch
from tailrace.records.events import Converted, Event, Events
from tailrace.records.group import Group, Places
from tailrace.records.record import Record

#: Fewer records than this are not worth a thread of their own.
PART_RECORDS_MIN = 2048

Transform = Callable[[Group], Iterable[Group]]
Convert = Callable[[Group], Converted]


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A group as it goes on to the handler; what was not asked for is None."""

    group: Group
    converted: Converted | None
    lanes: Lanes | None

    def take(self, rows: Places) -> Staged:
        """Return the records at `rows` (counted within the group, rising)."""
        if len(rows) == len(self.group):
            return self
        return Staged(
            self.group.take(rows),
            None if self.converted is None else self.converted.of_rows(rows),
            None if self.lanes is None else self.lanes.take(rows),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """A batch that is ready to be delivered.

    :param given: what a handler of batches gets, and, iterated, handlers of records.
    :param lanes: for each group of `batch`; empty if records need no lanes.
    """

    batch: Batch
    given: Batch | Events
    lanes: Sequence[Lanes]

    @classmethod
    def of(cls, batch: Batch, staged: Sequence[Staged]) -> Ready:
        """Return `batch` with what its records have become."""
        batch = batch.with_groups([one.group for one in staged])
        lanes = [one.lanes for one in staged if one.lanes is not None]
        converted = tuple(one.converted for one in staged if one.converted is not None)
        # A batch of which nothing is left is given to nobody.
        return Ready(batch, Events(batch, converted) if converted else batch, lanes)

    def by_record(self) -> Iterator[tuple[int, tuple[Record | Event, ...]]]:
        """Yield each record's place, and what of it a handler gets: itself, or its events, if any."""
        places = self.batch.places.tolist()
        if isinstance(self.given, Batch):
            yield from ((place, (record,)) for place, record in zip(places, self.given, strict=True))
            return
        events = zip(self.given.places.tolist(), self.given, strict=True)
        at, event = next(events, (-1, None))
        for place in places:
            found = []
            while at == place and event is not None:
                found.append(event)
                at, event = next(events, (-1, None))
            yield place, tuple(found)


@dataclass(frozen=True, slots=True)
class Stage:
    """What is done to a group before it is delivered: one function for all flows."""

    transform: Transform | None
    convert: Convert | None
    finds_lanes: bool

    def __call__(self, part: Sequence[Group]) -> list[Staged]:
        """Return what becomes of some groups. On any thread."""
        out: list[Staged] = []
        for source in part:
            moved = moved_of(source) if self.finds_lanes else None
            for group in (source,) if self.transform is None else self.transform(source):
                if len(group):
                    converted = None if self.convert is None else self.convert(group)
                    out.append(Staged(group, converted, lanes_of(group, moved) if self.finds_lanes else None))
        return out

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return self.transform is None and self.convert is None and not self.finds_lanes


class Stager(Protocol):
    """Where parts are staged."""

    @property
    def width(self) -> int:
        """Into how many parts a batch is cut, about."""
        ...

    def stage(self, part: list[Group]) -> Future[list[Staged]]:
        """Have a part staged. Any thread."""
        ...


@dataclass(frozen=True, slots=True)
class PoolStager:
    """Parts are staged on a pool of threads."""

    work: Stage
    executor: Executor
    width: int

    def stage(self, part: list[Group]) -> Future[list[Staged]]:
        """Have a part staged on one of the threads."""
        return self.executor.submit(self.work, part)


class Staging:
    """A batch on its way through the stage.

    :param stager: where; None: there is nothing to do.
    """

    def __init__(self, batch: Batch, stager: Stager | None) -> None:
        self.batch = batch
        self.size_bytes = batch.size_bytes
        self._stager = stager
        self._failed: list[int] = []
        self._parts = [] if stager is None else parts_of(batch.groups, stager.width)
        self._outcomes = [] if stager is None else [stager.stage(part) for part in self._parts]

    @property
    def is_done(self) -> bool:
        """Whether `result` would not wait."""
        return all(outcome.done() for outcome in self._outcomes)

    def when_done(self, call: Callable[[], None]) -> None:
        """Have `call` called, on any thread, whenever a part is done."""
        for outcome in self._outcomes:
            outcome.add_done_callback(lambda _: call())

    def result(self) -> Ready:
        """Wait for the parts and return the batch as it is delivered.

        :raises BaseException: what a transformation or the converter raised; called again, the parts
            that failed are tried again.
        """
        if self._stager is None:
            return Ready(self.batch, self.batch, ())
        return Ready.of(self.batch, self.staged())

    def staged(self) -> list[Staged]:
        """Wait for the parts, and return what has become of them, in their order.

        :raises BaseException: as `result`.
        """
        while self._failed:
            part = self._failed.pop()
            assert self._stager is not None
            self._outcomes[part] = self._stager.stage(self._parts[part])
        staged: list[Staged] = []
        for part, outcome in enumerate(self._outcomes):
            try:
                staged += outcome.result()
            except BaseException:
                self._failed.append(part)
                raise
        return staged

    def cancel(self) -> None:
        """Give up what has not begun."""
        for outcome in self._outcomes:
            outcome.cancel()


def parts_of(groups: Sequence[Group], threads: int) -> list[list[Group]]:
    """Cut groups into parts for so many threads; together they are the groups, in their order."""
    total = sum(len(group) for group in groups)
    size = max(PART_RECORDS_MIN, -(-total // max(1, threads)))
    parts: list[list[Group]] = []
    room = 0
    for group in groups:
        first = 0
        while first < len(group):
            if room <= 0:
                parts.append([])
                room = size
            # A rest that is hardly worth it goes with what comes before.
            last = len(group) if len(group) - first < room + size // 4 else first + room
            parts[-1].append(group.slice(first, last))
            room -= last - first
            first = last
    return parts
