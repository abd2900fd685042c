"""An engine that shows its tasks to a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tailrace.engine.contracts import SourceTask
from tailrace.engine.engine import Engine

T = TypeVar("T")


class TestingEngine(Engine):
    """An `Engine` with which a test may reach what the engine keeps to itself."""

    __test__ = False  # pytest would take it for a class of tests

    def run_with_task(self, consumer: Callable[[SourceTask], T], number: int = 0) -> T:
        """Call `consumer` with a task, on the calling thread, and return what it returns.

        :param number: of the task; its present life's.
        :raises TailraceError: `ENGINE_MISUSED` before there are tasks, and after the end.
        """
        return consumer(self._task(number))
