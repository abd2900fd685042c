"""The stage before delivery: transform, convert, find the lanes; part by part on the pool.

A batch is cut into parts of about the same number of records, so that all threads share in it: large
groups are split, small ones put together. What comes of the parts is put together in the batch's
order of groups; the order of records is that of their places (`Batch.order`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from tailrace.engine.processing.lanes import Lanes, lanes_of, moved_of
from tailrace.records.batch import Batch
from tailrace.records.events import Converted, Event, Events
from tailrace.records.group import Group
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


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """A batch that is ready to be delivered.

    :param given: what a handler of batches gets, and, iterated, handlers of records.
    :param lanes: for each group of `batch`; empty if records need no lanes.
    """

    batch: Batch
    given: Batch | Events
    lanes: Sequence[Lanes]

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


class Staging:
    """A batch on its way through the stage."""

    def __init__(self, batch: Batch, stage: Stage, executor: Executor, threads: int) -> None:
        self.batch = batch
        self.size_bytes = batch.size_bytes
        self._stage = stage
        self._executor = executor
        self._parts: list[list[Group]] = []
        self._outcomes: list[Future[list[Staged]]] = []
        self._failed: list[int] = []
        if not stage.is_empty:
            self._parts = parts_of(batch.groups, threads)
            self._outcomes = [executor.submit(stage, part) for part in self._parts]

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
        if self._stage.is_empty:
            return Ready(self.batch, self.batch, ())
        while self._failed:
            part = self._failed.pop()
            self._outcomes[part] = self._executor.submit(self._stage, self._parts[part])
        staged: list[Staged] = []
        for part, outcome in enumerate(self._outcomes):
            try:
                staged += outcome.result()
            except BaseException:
                self._failed.append(part)
                raise
        return self._together(staged)

    def cancel(self) -> None:
        """Give up what has not begun."""
        for outcome in self._outcomes:
            outcome.cancel()

    def _together(self, staged: Sequence[Staged]) -> Ready:
        batch = self.batch.with_groups([one.group for one in staged])
        lanes = [one.lanes for one in staged if one.lanes is not None]
        if self._stage.convert is None:
            return Ready(batch, batch, lanes)
        converted = tuple(one.converted for one in staged if one.converted is not None)
        return Ready(batch, Events(batch, converted), lanes)


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
