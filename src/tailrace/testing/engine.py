"""An engine that gives tests access to its tasks, and a clock that only a test moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from tailrace.engine.contracts import SourceTask
from tailrace.engine.engine import Engine

#: Interval at which `wait` checks its event, in seconds of real time.
_LOOK_S = 0.01


class MovableClock:
    """A `Clock` for tests, which back-offs and commit policies use. Any thread.

    The limits of an engine's start and stop always use real time.

    :param time_us: microseconds since 1970 at the beginning.
    """

    def __init__(self, time_us: int = 1_700_000_000_000_000) -> None:
        self._changed = threading.Condition()
        self._now_s = 0.0
        self._origin_us = time_us
        self._waiting = 0

    def monotonic(self) -> float:
        """Return seconds since the beginning."""
        with self._changed:
            return self._now_s

    def time_us(self) -> int:
        """Return microseconds since 1970."""
        return self._origin_us + round(self.monotonic() * 1_000_000)

    def advance(self, seconds: float) -> None:
        """Move the clock forward; waits whose timeout has passed then end."""
        if seconds < 0:
            raise ValueError("time does not go back")
        with self._changed:
            self._now_s += seconds
            self._changed.notify_all()

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait for `event`, at most until the clock has moved by `timeout_s`; return whether it is set."""
        with self._changed:
            until_s = self._now_s + timeout_s
            self._waiting += 1
            self._changed.notify_all()
            try:
                while not event.is_set() and self._now_s < until_s:
                    self._changed.wait(_LOOK_S)
            finally:
                self._waiting -= 1
        return event.is_set()

    def wait_for_waiters(self, count: int = 1, timeout_s: float = 10.0) -> bool:
        """Wait, in real time, until `count` threads are in `wait`; return whether they are."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while self._waiting < count:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
            return True


T = TypeVar("T")


class TestingEngine(Engine):
    """An `Engine` that gives tests access to its tasks."""

    __test__ = False  # otherwise pytest would collect it as a class of tests

    def run_with_task(self, consumer: Callable[[SourceTask], T], number: int = 0) -> T:
        """Call `consumer` with a task, on the calling thread, and return its result.

        :param number: the task's number; the object is that of its current attempt.
        :raises TailraceError: `ENGINE_MISUSED` before there are tasks, and after the end.
        """
        return consumer(self._task(number))
