"""Async handlers: records count as processed once their coroutine has ended, and one loop runs all
coroutines.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from typing import Any

import pytest

from tailrace import Engine
from tailrace.engine.contracts import Committer, RetriableError, StopEngine
from tailrace.engine.processing import Order, manual, on_batch, on_record
from tailrace.engine.processing.handlers import AwaitedCall
from tailrace.records.batch import Batch
from tailrace.records.record import Record
from tailrace.testing import LinesSource
from tests.support.engine.flowing import SOON_S, THREADS, numbers, running, stream
from tests.support.wait import wait_until

ORDERS: list[Order] = ["ordered", "unordered", "key"]


async def ignored(_: Any) -> None:
    """Does nothing, asynchronously."""
    await asyncio.sleep(0)


@pytest.mark.parametrize("order", ORDERS)
def test_records_count_as_processed_once_their_coroutine_has_ended(order: Order) -> None:
    got: list[int] = []
    loops = set()

    async def one(record: Record) -> None:
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        got.append(record.source["n"])

    with running(on_record(one), order) as run:
        run.work_off(stream(5))
        assert run.committer.finish(SOON_S)
        assert run.store.last == len(got)
    wanted = numbers(stream(5))
    assert (got if order == "ordered" else sorted(got)) == wanted
    assert len(loops) == 1


def test_a_batch_whose_coroutine_waits_is_not_committed() -> None:
    begun, may_end = threading.Event(), threading.Event()

    class Whole:
        async def __call__(self, batch: Batch) -> None:
            begun.set()
            while not may_end.is_set():  # noqa: ASYNC110 - another thread sets it
                await asyncio.sleep(0.001)

    with running(on_batch(Whole())) as run:
        run.put(stream(5, batches=2, most=20))
        assert begun.wait(SOON_S)
        run.committer.tick()
        assert run.store.last == 0
        may_end.set()
        assert run.processor.drain(SOON_S)
        assert run.committer.finish(SOON_S)
        assert run.store.last == len(numbers(stream(5, batches=2, most=20)))


def test_without_order_as_many_coroutines_run_at_once_as_there_are_threads() -> None:
    waiting, most = 0, 0

    async def one(_: Record) -> None:
        nonlocal waiting, most
        waiting += 1
        most = max(most, waiting)
        for _attempt in range(1000):
            if most == THREADS:
                break
            await asyncio.sleep(0.001)
        waiting -= 1

    with running(on_record(one), "unordered") as run:
        run.work_off(stream(5, batches=1, most=20))
    assert most == THREADS


@pytest.mark.parametrize("order", ORDERS)
def test_an_error_of_a_coroutine_is_an_error_of_the_handler(order: Order) -> None:
    tried: list[int] = []

    async def one(record: Record) -> None:
        await asyncio.sleep(0)
        tried.append(number := record.source["n"])
        if tried.count(number) == 1:
            raise RetriableError
        if number == 50:
            raise StopEngine

    with running(on_record(one), order) as run, pytest.raises(StopEngine):
        run.work_off(stream(5))

    async def poison(_: Record) -> None:
        raise KeyError("poison")

    with running(on_record(poison), order) as run, pytest.raises(KeyError, match="poison"):
        run.work_off(stream(5))
    assert run.store.last == 0


@pytest.mark.parametrize("in_task", [False, True])
@pytest.mark.parametrize("error", [SystemExit, asyncio.CancelledError])
def test_no_error_ends_the_loop(error: type[BaseException], in_task: bool) -> None:
    raises = True

    async def fail() -> None:
        raise error

    async def once(_: Any) -> None:
        if raises:
            await (asyncio.gather(fail()) if in_task else fail())

    call = AwaitedCall(once)
    with pytest.raises(error):
        call(1)
    raises = False
    call(1)


def test_an_async_manual_handler_marks_records_itself() -> None:
    async def whole(batch: Batch, committer: Committer) -> None:
        await asyncio.sleep(0)
        committer.mark_processed(batch)
        committer.mark_batch_finished(batch)

    with running(on_batch(manual(whole))) as run:
        run.work_off(stream(5))
        assert run.committer.finish(SOON_S)
        assert run.store.last == len(numbers(stream(5)))


def _loops() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "tailrace async handler"}


def _are_over(loops: set[threading.Thread]) -> bool:
    gc.collect()  # repeated: it does nothing while another thread collects
    return not any(loop.is_alive() for loop in loops)


def test_the_loop_ends_with_its_handler_and_a_pickled_handler_gets_a_new_one() -> None:
    before = _loops()
    call = pickle.loads(pickle.dumps(AwaitedCall(ignored)))  # noqa: S301 - our own
    call(1)
    [loop] = _loops() - before
    del call
    wait_until(lambda: _are_over({loop}), 10, "the loop's end")


def _close_by_a_coroutine() -> None:
    got: list[int] = []

    async def whole(batch: Batch) -> None:
        got.append(len(batch))
        engine.close()

    engine = Engine(connector=LinesSource(5), on_batch=whole)
    engine.run()
    assert got


def test_a_coroutine_may_close_its_engine_and_the_loop_ends() -> None:
    before = _loops()
    _close_by_a_coroutine()
    new = _loops() - before
    wait_until(lambda: _are_over(new), 10, "the loop's end")
