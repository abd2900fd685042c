"""Several producers of a task, under all interleavings of a bounded size."""

from __future__ import annotations

import pickle
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.kafka.producer import layout
from tailrace.kafka.producer.layout import (
    AssignmentState,
    Fence,
    Head,
    OpenMember,
    OpenOwn,
    ReadHead,
    ReadMembers,
    WriteHead,
    WriteShare,
)
from tests.support.kafka import layout_model as model
from tests.support.kafka.layout_model import KEYS, Broker, Driver, Executor, Fenced, Job, Process

World = tuple[Broker, tuple[Process, ...]]
Engines = tuple[tuple[int, tuple[int, ...]], ...]


def _explore(engines: Engines, attempts: int) -> int:
    """Visit every state; return how many there are.

    At any moment the next engine may start, whatever those before it are doing; and these go on as long
    as they are able to.
    :param engines: for each, its number of producers and the ends of its ranges.
    :param attempts: executors that may work at one share of a job.
    """
    model.next_step.cache_clear()
    start: World = (Broker(), (Driver(0, *engines[0]),))
    seen = {start}
    waiting = [start]
    while waiting:
        world = waiting.pop()
        for found in map(_tidied, _following(world, engines, attempts)):
            if found not in seen:
                _check(found[0])
                seen.add(found)
                waiting.append(found)
    return len(seen)


def _following(world: World, engines: Engines, attempts: int) -> Iterator[World]:
    broker, processes = world
    drivers = sum(isinstance(process, Driver) for process in processes)
    if drivers < len(engines):
        yield broker, (*processes, Driver(drivers, *engines[drivers]))
    for at, process in enumerate(processes):
        if process.over:
            continue
        step, _ = model.next_step(process)
        if isinstance(step, Job):
            yield from _of_job(world, at, step, attempts)
        else:
            yield _moved(world, at, step)


def _moved(world: World, at: int, step: Any) -> World:
    broker, processes = world
    process = processes[at]
    try:
        broker, moved = model.carried_out(broker, process, step)
    except Fenced:
        moved = replace(process, over=True, results=())
    else:
        if isinstance(step, WriteShare | model.WriteOwn):
            _require_newest(processes, process)
        following, outcome = model.next_step(moved)
        if isinstance(moved, Driver) and not isinstance(following, WriteHead | Fence | ReadMembers):
            moved = replace(moved, stands=True)
        if following is None:
            moved = replace(moved, over=True, results=())
            if isinstance(moved, Executor):
                moved = replace(moved, epoch=0, done=outcome is not None)
    return broker, (*processes[:at], moved, *processes[at + 1 :])


def _of_job(world: World, at: int, job: Job, attempts: int) -> Iterator[World]:
    broker, processes = world
    driver = processes[at]
    assert isinstance(driver, Driver)
    tried = [p for p in processes if isinstance(p, Executor) and (p.head, p.end) == (job.head, job.end)]
    if len({p.number for p in tried if p.done}) == job.head.producers:
        after = replace(driver, results=(*driver.results, None))
        if model.next_step(after)[0] is None:
            after = replace(after, over=True, results=())
        yield broker, (*processes[:at], after, *processes[at + 1 :])
    for number in range(job.head.producers):
        if sum(p.number == number for p in tried) < attempts:
            yield broker, (*processes, Executor(driver.epoch, job.head, number, job.end))


def _tidied(world: World) -> World:
    # Executors that have ended matter only while their job is waited for, and their order never does.
    broker, processes = world
    drivers = [process for process in processes if isinstance(process, Driver)]
    jobs = [model.next_step(driver)[0] for driver in drivers if not driver.over]
    waited = {(job.head, job.end) for job in jobs if isinstance(job, Job)}
    left = [p for p in processes if isinstance(p, Executor) and (not p.over or (p.head, p.end) in waited)]
    return broker, (*drivers, *sorted(left, key=repr))


def _require_newest(processes: tuple[Process, ...], writing: Process) -> None:
    # Once a driver knows its position, no earlier one commits anything.
    epoch = writing.driver_epoch if isinstance(writing, Executor) else writing.epoch
    for process in processes:
        if isinstance(process, Driver) and process.epoch > epoch:
            assert not process.stands, "an older one committed"


def _check(broker: Broker) -> None:
    # Each change once; at every moment the offsets agree with it; and the order of each key.
    assert sorted(broker.log) == sorted(model.expected(broker))
    for key in range(KEYS):
        of_key = [change for change in broker.log if change % KEYS == key]
        assert of_key == sorted(of_key)


#: Engines in the order in which they may start: producers and ends of ranges; and attempts at a share.
SCENES: dict[str, tuple[Engines, int]] = {
    "taken over": (((2, (1,)), (2, (2,))), 1),
    "attempts at once": (((1, (2,)), (1, (3,))), 2),
    "one more": (((1, (2,)), (2, (1, 3))), 1),
    "one fewer, half-way": (((2, (2,)), (1, (1, 3))), 1),
    "to the own producer, half-way": (((2, (2,)), (0, (1, 3))), 1),
    "from the own producer": (((0, (1, 2)), (2, (3,))), 1),
    "there and back": (((1, (1,)), (0, (2,)), (1, (3,))), 1),
}


def _explore_all() -> None:
    for scene in SCENES.values():
        _explore(*scene)


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.slow
def test_each_change_is_committed_once_whichever_engine_takes_over(scene: str) -> None:
    assert _explore(*SCENES[scene]) > 300


def _without_lease_check(sent_with: Head, number: int, end: int) -> Generator[Any, Any, int | None]:
    yield ReadHead()
    start = sent_with.reached((yield OpenMember(number)))
    if start < end:
        yield WriteShare(number, start, end)
    return end


def _looking_only_before(sent_with: Head, number: int, end: int) -> Generator[Any, Any, int | None]:
    if (yield ReadHead()).lease != sent_with.lease:
        return None
    start = sent_with.reached((yield OpenMember(number)))
    if start < end:
        yield WriteShare(number, start, end)
    return end


def _from_the_driver_alone(sent_with: Head, number: int, end: int) -> Generator[Any, Any, int | None]:
    yield OpenMember(number)
    if (yield ReadHead()).lease != sent_with.lease:
        return None
    yield WriteShare(number, sent_with.log_offset, end)
    return end


@pytest.mark.parametrize(
    "planted", [_without_lease_check, _looking_only_before, _from_the_driver_alone], ids=lambda f: f.__name__
)
def test_a_bug_in_an_executor_is_found(monkeypatch: pytest.MonkeyPatch, planted: Any) -> None:
    monkeypatch.setattr(layout, "sharing", planted)
    with pytest.raises(AssertionError):
        _explore_all()


def _fencing_before_the_lease(producers: int, fresh: Any, **_: Any) -> Generator[Any, Any, AssignmentState]:
    head = yield OpenOwn()
    if head is None:
        return AssignmentState()
    standing = AssignmentState(head, (head.log_offset,))
    if head.producers:
        reached = yield from _fenced_and_read(head)
        head = replace(head, lease=fresh())
        yield WriteHead(head)
        standing = AssignmentState(head, reached)
    if standing.has(producers) or not standing.is_even:
        return standing
    return (yield from layout.beginning("", standing.reached[0], producers, fresh))


def _not_waiting_for_rest(producers: int, fresh: Any, **_: Any) -> Generator[Any, Any, AssignmentState]:
    steps = layout_taking(producers, fresh)
    standing = yield from steps
    if standing.head is None or standing.has(producers):
        return standing
    return (yield from layout.beginning("", standing.position or 0, producers, fresh))


def _keeping_the_lease(producers: int, fresh: Any, **_: Any) -> Generator[Any, Any, AssignmentState]:
    head = yield OpenOwn()
    if head is None or not head.producers:
        return AssignmentState(head, () if head is None else (head.log_offset,))
    return AssignmentState(head, (yield from _fenced_and_read(head)))


def _fenced_and_read(head: Head) -> Generator[Any, Any, tuple[int, ...]]:
    for number in range(head.producers):
        yield Fence(number)
    return tuple(map(head.reached, (yield ReadMembers(head.producers))))


def _reading_before_fencing(producers: int, fresh: Any, **_: Any) -> Generator[Any, Any, AssignmentState]:
    head = yield OpenOwn()
    if head is None:
        return AssignmentState()
    head = replace(head, lease=fresh())
    yield WriteHead(head)
    standing = AssignmentState(head, (head.log_offset,))
    if head.producers:
        offsets = yield ReadMembers(head.producers)
        for number in range(head.producers):
            yield Fence(number)
        standing = AssignmentState(head, tuple(map(head.reached, offsets)))
    if standing.has(producers) or not standing.is_even:
        return standing
    return (yield from layout.beginning("", standing.reached[0], producers, fresh))


layout_taking = layout.taking


@pytest.mark.slow
@pytest.mark.parametrize(
    "planted",
    [_fencing_before_the_lease, _reading_before_fencing, _not_waiting_for_rest, _keeping_the_lease],
    ids=lambda f: f.__name__,
)
def test_a_bug_in_a_driver_is_found(monkeypatch: pytest.MonkeyPatch, planted: Any) -> None:
    monkeypatch.setattr(layout, "taking", planted)
    with pytest.raises(AssertionError):
        _explore_all()


def test_a_head_is_read_as_written_and_that_of_one_producer_has_only_log_and_offset() -> None:
    alone = Head("log", 7)
    assert alone.as_offset() == {"log_id": "log", "log_offset": 7}
    shared = Head("log", 7, 3, "layout", "lease")
    assert [Head.of(head.as_offset()) for head in (alone, shared)] == [alone, shared]
    assert shared.reached(None) == 7
    assert shared.reached(shared.member_offset(9)) == 9
    assert shared.reached(replace(shared, layout="older").member_offset(900)) == 7
    assert pickle.loads(pickle.dumps(shared)) == shared  # noqa: S301 - our own


@pytest.mark.parametrize("value", [{}, {"log_id": "x", "log_offset": "9"}, {"log_id": 1, "log_offset": 1}])
def test_an_invalid_head_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(TailraceError) as refused:
        Head.of(value)
    assert refused.value.kind is Kind.OFFSETS_UNREADABLE
