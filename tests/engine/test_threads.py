"""The thread pool of an engine, and calls that may hang."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, wait

import pytest

from tailrace.engine import threads
from tailrace.engine.threads import BoundedCall, Pool, belonging, owner
from tests.support.engines import Heard
from tests.support.wait import wait_until

FAR_S = 60.0


class AnEngine:
    """An engine to which threads belong."""


def test_a_pool_has_no_more_threads_than_allowed():
    pool, threads = Pool(3, "pool", self := AnEngine()), set()

    def work(number):
        threads.add(threading.current_thread())
        assert owner() is self
        return number * 2

    futures = [pool.submit(work, number) for number in range(200)]
    assert [future.result(FAR_S) for future in futures] == list(range(0, 400, 2))
    assert len(threads) <= 3
    assert list(pool.map(lambda x: x + 1, [1, 2])) == [2, 3]
    pool.shutdown()
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(RuntimeError, match="no more work"):
        pool.submit(work, 1)
    pool.shutdown()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_goes_to_the_future_and_the_thread_goes_on(error):
    def fail():
        raise error

    with Pool(1, "pool", None) as pool:
        with pytest.raises(error):
            pool.submit(fail).result(FAR_S)
        assert pool.submit(lambda: 5).result(FAR_S) == 5


def test_functions_that_have_not_begun_can_be_cancelled_at_the_end():
    entered, release = threading.Event(), threading.Event()
    pool = Pool(1, "pool", None)
    first = pool.submit(lambda: (entered.set(), release.wait(FAR_S)))
    rest = [pool.submit(int) for _ in range(5)]
    assert entered.wait(FAR_S)
    pool.shutdown(wait=False, cancel_futures=True)
    assert not pool.join(0.01)
    for future in rest:
        with pytest.raises(CancelledError):
            future.result(FAR_S)
    release.set()
    wait([first], FAR_S)
    assert pool.join(FAR_S)


def test_a_thread_belongs_to_the_engine_of_the_thread_that_made_it():
    found = []

    def outer():
        inner = threading.Thread(target=belonging(lambda: found.append(owner())))
        inner.start()
        inner.join()

    engine = AnEngine()
    assert BoundedCall("call", engine, outer).wait(FAR_S)
    assert found == [engine]
    assert owner() is None


def test_a_bounded_call_is_waited_for_no_longer_than_its_timeout():
    release = threading.Event()
    call = BoundedCall("call", None, lambda: release.wait(FAR_S) and 1 / 0)  # type: ignore[arg-type]
    assert not call.wait(0.01)
    release.set()
    with pytest.raises(ZeroDivisionError):
        call.wait(FAR_S)


def test_a_callback_that_hangs_fills_a_bounded_queue(monkeypatch):
    monkeypatch.setattr(threads, "WAITING_MAX", 3)
    release = threading.Event()
    heard = Heard(lambda _: release.wait(FAR_S))
    teller = threads.CallbackDispatcher(heard.callbacks(), "callbacks", None)
    teller.notify("connector_started")
    wait_until(lambda: heard.events, FAR_S)
    for number in range(10):
        teller.notify("task_started", number)
    release.set()
    wait_until(lambda: len(heard.events) == 4, FAR_S)
    assert teller.finish(FAR_S)
    assert heard.events == ["connector_started", "task_started 0", "task_started 1", "task_started 2"]


def test_nothing_is_called_after_the_end():
    heard = Heard()
    teller = threads.CallbackDispatcher(heard.callbacks(), "callbacks of nobody", None)
    assert teller.finish(FAR_S)
    teller.notify("task_stopped", 0)
    assert "callbacks of nobody" not in [thread.name for thread in threading.enumerate()]
    assert heard.events == []
