"""Jobs of one run of a task, without Spark: a submitted call never waits for a job that nobody starts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import pytest

from tailrace.engine.failures import GivenUpError
from tailrace.errors import Kind, TailraceError
from tailrace.spark.processing import jobs as jobs_module
from tailrace.spark.processing.jobs import ExecutorCall, Jobs, wire


class Threads:
    """In place of the engine's pool: records the functions that it is to call, until it is closed."""

    def __init__(self) -> None:
        self.kept: list[Callable[[], None]] = []
        self.closed = False

    def submit(self, call: Callable[[], None]) -> None:
        if self.closed:
            raise RuntimeError("closed")
        self.kept.append(call)


def no_session() -> Any:
    raise RuntimeError("there is no Spark")


def jobs_of(threads: Threads, session: Callable[[], Any] = no_session) -> Jobs[Any, Any]:
    return Jobs(session, b"", threads, 1, threading.Event(), "test")  # type: ignore[arg-type]


def assert_over(futures: list[Future[Any]]) -> None:
    assert all(future.cancelled() for future in futures)
    assert not wait(futures, 0).not_done, "a wait for several futures would never end"


def test_a_call_submitted_after_the_end_is_cancelled() -> None:
    threads = Threads()
    jobs = jobs_of(threads)
    first = jobs.submit(1)
    jobs.cancel()
    assert_over([first, jobs.submit(2)])
    threads.kept.pop()()
    assert threads.kept == []


def test_cancelling_jobs_starts_no_spark() -> None:
    threads, started = Threads(), []
    jobs = jobs_of(threads, lambda: started.append("Spark"))
    jobs.submit(1)
    jobs.cancel()
    assert started == []


def test_a_job_that_is_cancelled_while_spark_starts_is_not_run() -> None:
    threads = Threads()
    jobs: Jobs[Any, Any]
    jobs = jobs_of(threads, lambda: jobs.cancel())  # noqa: PLW0108 - there is none yet
    future = jobs.submit(1)
    threads.kept.pop()()
    assert isinstance(future.exception(0), GivenUpError)


@pytest.mark.parametrize("begun", [False, True])
def test_calls_that_wait_when_the_threads_have_ended_are_cancelled(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs_module, "JOB_BYTES_MAX", 1)  # one call for each job
    threads = Threads()
    jobs = jobs_of(threads)
    monkeypatch.setattr(jobs, "_job", lambda loads: [wire.dumps((True, "done")) for _ in loads])
    first = jobs.submit(1) if begun else None
    second = jobs.submit(2) if begun else None
    threads.closed = True
    if first is None or second is None:
        assert_over([jobs.submit(3)])
    else:
        threads.kept.pop()()
        assert first.result(0) == "done"
        assert_over([second])


def _there() -> None:
    raise ModuleNotFoundError("no module named 'of_executors'")


class OfExecutors:
    """An object that can be unpickled only on executors."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _there, ()


def test_a_result_that_cannot_be_unpickled_here_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads()
    jobs = jobs_of(threads)
    made: list[Any] = [OfExecutors(), "done"]
    monkeypatch.setattr(jobs, "_job", lambda loads: [wire.dumps((True, made.pop(0))) for _ in loads])
    futures = [jobs.submit(number) for number in (1, 2)]
    threads.kept.pop()()
    error = futures[0].exception(0)
    assert isinstance(error, TailraceError)
    assert (error.kind, "ModuleNotFoundError" in error.message) == (Kind.TASK_FAILED, True)
    assert futures[1].result(0) == "done"
    made.append("again")
    third = jobs.submit(3)
    threads.kept.pop()()
    assert third.result(0) == "again", "the next job must start"


class Counted:
    """A function that counts how often it was unpickled."""

    made = 0

    def __setstate__(self, state: object) -> None:
        Counted.made += 1

    def __getstate__(self) -> dict[str, int]:
        return {"any": 1}

    def __call__(self, load: Any) -> Any:
        return load


def test_each_function_of_many_tasks_is_unpickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "made", 0)
    calls = [ExecutorCall(f"task {number}", wire.dumps(Counted())) for number in range(20)]
    for call in [*calls, *calls]:
        assert [wire.loads(found) for found in call([wire.dumps(1)])] == [(True, 1)]
    assert Counted.made == len(calls)
