"""Waits that check a condition repeatedly."""

from __future__ import annotations

import threading
import time

from tailrace.waits import join_all, wait_until


def test_the_condition_is_checked_at_least_once_and_its_last_value_is_returned() -> None:
    found = iter([0, 0, 3])
    assert wait_until(lambda: next(found), 60.0, 0.0) == 3
    assert wait_until(list, 0.0, 60.0) == []
    assert wait_until(lambda: "there", 0.0, 60.0) == "there"


def test_the_condition_is_checked_a_last_time_at_the_timeout() -> None:
    until_s = time.monotonic() + 0.2
    assert wait_until(lambda: time.monotonic() >= until_s, 0.1, 0.3)


def test_a_stop_ends_the_wait_at_once() -> None:
    stop, looks = threading.Event(), []
    stop.set()
    assert wait_until(lambda: looks.append(1), 60.0, 60.0, stop) is None
    assert looks == [1]


def test_threads_are_joined_within_one_timeout_and_the_calling_one_is_not() -> None:
    release = threading.Event()
    threads = [threading.Thread(target=release.wait, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    began_s = time.monotonic()
    assert not join_all(threads, 0.2)
    assert time.monotonic() - began_s < 5.0
    release.set()
    assert join_all(threads, None)
    assert not join_all([threading.current_thread()], None)
