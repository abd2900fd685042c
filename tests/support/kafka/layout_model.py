"""A model of a broker, of drivers and of executors, for the procedures of `kafka.layout`.

Changes are numbered from 0; a change's key is its number modulo `KEYS`, and a key's share that modulo the
number of producers. The broker keeps an epoch for each transactional id, the head, the members' offsets and
the committed changes. Each process may stop between any two of its steps, for a while (a pause) or for ever
(a crash).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tailrace.kafka.producer import layout
from tailrace.kafka.producer.layout import AssignmentState, Head

KEYS = 3
_OWN = -1


class Fenced(Exception):  # noqa: N818 - what happened
    """Another producer of the same transactional id was opened."""


@dataclass(frozen=True)
class Broker:
    """The durable state. `epochs` is by transactional id; that of the task itself is `_OWN`."""

    epochs: tuple[tuple[int, int], ...] = ()
    head: Head | None = None
    offsets: tuple[tuple[int, tuple[str, int]], ...] = ()  # of members: layout and offset
    log: tuple[int, ...] = ()

    def opened(self, number: int) -> Broker:
        epochs = dict(self.epochs)
        epochs[number] = epochs.get(number, 0) + 1
        return replace(self, epochs=tuple(sorted(epochs.items())))

    def epoch(self, number: int) -> int:
        return dict(self.epochs).get(number, 0)

    def member_offset(self, number: int) -> tuple[str, int] | None:
        return dict(self.offsets).get(number)

    def with_share(self, number: int, head: Head, start: int, end: int) -> Broker:
        log = self.log + tuple(c for c in range(start, end) if share(c, head.producers) == number)
        offsets = dict(self.offsets) | {number: (head.layout, end)}
        return replace(self, log=log, offsets=tuple(sorted(offsets.items())))


def share(change: int, producers: int) -> int:
    return change % KEYS % producers


@dataclass(frozen=True)
class WriteOwn:
    """The driver writes a range with its own producer, and the head with it."""

    start: int
    end: int
    lease: str


@dataclass(frozen=True)
class Job:
    """The driver has members write a range, and waits for all of them."""

    head: Head
    end: int


@dataclass(frozen=True)
class Offsets:
    """What `ReadMembers` found: layout and offset of each member, or None."""

    each: tuple[tuple[str, int] | None, ...]


@dataclass(frozen=True)
class Driver:
    """Steps of an engine, in order, with their results."""

    number: int
    producers: int
    ends: tuple[int, ...]
    results: tuple[Any, ...] = ()
    epoch: int = 0
    over: bool = False
    stands: bool = False  # it has taken over the task and knows the committed position

    def steps(self) -> Generator[Any, Any, None]:
        fresh = (f"{self.number}.{n}" for n in itertools.count())
        make: Callable[[], str] = lambda: next(fresh)  # noqa: E731
        standing = yield from layout.taking(self.producers, make, fenced=True)
        for end in self.ends:
            if standing.head is None and self.producers:
                standing = yield from layout.beginning("", 0, self.producers, make, fenced=True)
            if (standing.position or 0) >= end:
                continue
            if standing.head is not None and standing.head.producers:
                yield Job(standing.head, end)
                standing = standing.written_to(end)
                if not standing.has(self.producers) and standing.is_even:
                    standing = yield from layout.taking(self.producers, make, fenced=True)
            else:
                own = standing.head or Head("", 0, lease=make())
                yield WriteOwn(standing.position or 0, end, own.lease)
                standing = AssignmentState(Head("", end, lease=own.lease), (end,))


@dataclass(frozen=True)
class Executor:
    """One attempt at writing a share."""

    driver_epoch: int
    head: Head
    number: int
    end: int
    results: tuple[Any, ...] = ()
    epoch: int = 0
    over: bool = False
    done: bool = False

    def steps(self) -> Generator[Any, Any, int | None]:
        return layout.sharing(self.head, self.number, self.end)


Process = Driver | Executor


@functools.lru_cache(maxsize=1 << 16)
def next_step(process: Process) -> tuple[Any, Any]:
    """Return the next step and None, or None and the result."""
    steps = process.steps()
    try:
        step = next(steps)
        for result in process.results:
            step = steps.send(answer(result))
    except StopIteration as end:
        return None, end.value
    return step, None


def answer(result: Any) -> Any:
    """Return the result of a step, as the procedure gets it."""
    if isinstance(result, Offsets):
        return [answer(offset) for offset in result.each]
    if isinstance(result, tuple):
        return {"log_id": "", "layout": result[0], "log_offset": result[1]}
    return result


def carried_out(broker: Broker, process: Process, step: Any) -> tuple[Broker, Process]:
    """Return the world after a step.

    :raises Fenced: if it is refused.
    """
    after: Any = process
    result: Any = None
    if isinstance(step, layout.OpenOwn | layout.OpenMember | layout.Fence):
        number = _OWN if isinstance(step, layout.OpenOwn) else step.number
        broker = broker.opened(number)
        if not isinstance(step, layout.Fence):
            result = broker.head if number == _OWN else broker.member_offset(number)
            after = replace(process, epoch=broker.epoch(number))
    elif isinstance(step, layout.ReadMembers):
        result = Offsets(tuple(map(broker.member_offset, range(step.producers))))
    elif isinstance(step, layout.ReadHead):
        result = broker.head
    elif isinstance(step, layout.WriteHead):
        _require(broker, _OWN, process)
        broker = replace(broker, head=step.head)
    elif isinstance(step, WriteOwn):
        _require(broker, _OWN, process)
        log = broker.log + tuple(range(step.start, step.end))
        broker = replace(broker, head=Head("", step.end, lease=step.lease), log=log)
    else:
        assert isinstance(process, Executor)
        _require(broker, step.number, process)
        broker = broker.with_share(step.number, process.head, step.start, step.end)
    return broker, replace(after, results=(*process.results, result))


def _require(broker: Broker, number: int, process: Process) -> None:
    if broker.epoch(number) != process.epoch:
        raise Fenced


def expected(broker: Broker) -> Iterator[int]:
    """Yield the changes that are written according to the offsets."""
    head = broker.head
    if head is None:
        return
    for change in range(8):
        done = head.log_offset
        if head.producers:
            done = head.reached(answer(broker.member_offset(share(change, head.producers))))
        if change < done:
            yield change
