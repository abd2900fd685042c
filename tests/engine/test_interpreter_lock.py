"""The main work of tasks releases the interpreter lock: other threads run in the middle of it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tailrace.converters import JsonConverter
from tailrace.records.group import Group
from tests.support.decode.wire import decode, insert, relation, transaction

ROWS = 4000


@pytest.fixture
def no_thread_is_interrupted() -> Iterator[None]:
    """Let a thread keep the lock until it releases it by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


def group() -> Group:
    [changes] = decode(transaction(relation(), *(insert(str(n), "x" * 500, "1.00") for n in range(ROWS))))
    return Group.of_changes("public.orders", np.arange(len(changes)), changes)


def decoded() -> Callable[[], object]:
    found = group()
    return lambda: found.columns


def as_json() -> Callable[[], object]:
    found, converter = group(), JsonConverter()
    return lambda: converter.convert(found)


def found_in_a_block() -> Callable[[], object]:
    data = transaction(relation(), *(insert(str(n), "x" * 500, "1.00") for n in range(ROWS)))
    return lambda: decode(data)


def only_python() -> Callable[[], object]:
    return lambda: sum(number * number for number in range(100_000))


@pytest.mark.usefixtures("no_thread_is_interrupted")
@pytest.mark.parametrize("prepare", [found_in_a_block, decoded, as_json])
def test_another_thread_runs_in_the_middle_of_a_tasks_work(
    prepare: Callable[[], Callable[[], object]],
) -> None:
    assert turns_of_another(prepare), "the work did not release the lock in any run"


@pytest.mark.usefixtures("no_thread_is_interrupted")
def test_no_other_thread_runs_during_pure_python_work() -> None:
    assert not turns_of_another(only_python), "the count does not measure releases of the lock"


def turns_of_another(prepare: Callable[[], Callable[[], object]]) -> int:
    """Count how often another thread ran during the work, in the first of some runs in which it did."""
    inside, done = threading.Event(), threading.Event()
    semaphore = 0

    def look_on() -> None:
        nonlocal semaphore
        while not done.is_set():
            semaphore += inside.is_set()
            time.sleep(0)

    prepare()()  # so that what the first call loads is loaded
    other = threading.Thread(target=look_on)
    other.start()
    for _ in range(20):
        work = prepare()
        inside.set()
        work()
        inside.clear()
        if semaphore:
            break
    done.set()
    other.join(60)
    return semaphore
