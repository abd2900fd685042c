"""Turns: a limited number at a time, first come, first served; and sources that start in turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tailrace.fair_semaphore import FairSemaphore
from tests.support.capture.captured import CREATE_ITEMS, Running, capturing, make_task, read_log
from tests.support.postgres import Database
from tests.support.wait import wait_until


@contextmanager
def held(semaphore: FairSemaphore) -> Iterator[threading.Event]:
    """A thread that has its turn until the event is set, or the context ends."""
    may_go, has_it, stop = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        with semaphore.turn(stop) as given:
            assert given
            has_it.set()
            may_go.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        wait_until(has_it.is_set, 60, "the turn")
        yield may_go
    finally:
        may_go.set()
        thread.join(10)


def test_turns_are_given_in_order_and_limited_in_number() -> None:
    semaphore, order, threads = FairSemaphore(2), [], []
    at_work, most = 0, 0
    lock = threading.Lock()

    def work(number: int) -> None:
        nonlocal at_work, most
        with semaphore.turn(threading.Event()) as given:
            assert given
            with lock:
                order.append(number)
                at_work += 1
                most = max(most, at_work)
            with lock:
                at_work -= 1

    with ExitStack() as stack:
        places = [stack.enter_context(held(semaphore)) for _ in range(2)]
        assert semaphore.must_wait
        for number in range(20):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            wait_until(lambda: len(semaphore._waiting) == number + 1, 60, "the queue")  # noqa: B023
        places[0].set()  # one place: one after another
        for thread in threads:
            thread.join(10)
    assert order == list(range(20))
    assert most == 1
    assert not semaphore.must_wait


def test_a_thread_that_is_stopped_waits_no_longer_and_takes_no_turn() -> None:
    semaphore, stop, told = FairSemaphore(1), threading.Event(), []

    def work() -> None:
        with semaphore.turn(stop) as given:
            told.append(given)

    with held(semaphore):
        waiting = threading.Thread(target=work)
        waiting.start()
        stop.set()
        waiting.join(10)
        assert told == [False]
    assert not semaphore.must_wait


def test_a_turn_ends_with_an_error() -> None:
    semaphore = FairSemaphore(1)
    with pytest.raises(ValueError, match="x"), semaphore.turn(threading.Event()):
        raise ValueError("x")
    assert not semaphore.must_wait


def test_a_source_that_waits_for_its_turn_has_created_nothing_yet(pg: Database, tmp_path: Path) -> None:
    pg.execute(CREATE_ITEMS)
    pg.execute("insert into items values (1)")
    semaphore = FairSemaphore(1)
    with held(semaphore) as may_go:
        running = Running(make_task(pg.dsn, tmp_path / "log", semaphore=semaphore))
        running.wait_for("queued")
        made = "select (select count(*) from pg_publication), (select count(*) from pg_replication_slots"
        assert pg.query(f"{made} where database = current_database())") == [(0, 0)]
        # It stops at once, too, and starts in another run.
        running.stop(10)
        with capturing(pg.dsn, tmp_path / "log", semaphore=semaphore) as running:
            running.wait_for("queued")
            may_go.set()
            running.wait_for("streaming")
            pg.execute("insert into items values (2)")
            running.catch_up(pg.query)
    # A source that has started before does not wait.
    with held(semaphore), capturing(pg.dsn, tmp_path / "log", semaphore=semaphore) as running:
        running.wait_for("streaming")
    assert read_log(tmp_path / "log").ids == [1, 2]
