"""Contexts for connectors and tasks that a test drives itself, without an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tailrace.engine.commit_policies import Always
from tailrace.engine.contracts import (
    Clock,
    ConnectorContext,
    OffsetReader,
    OffsetWriter,
    Settings,
    TaskContext,
)
from tailrace.engine.lifecycle import State
from tailrace.engine.metrics import EngineMetrics
from tailrace.engine.offsets.stores import MemoryOffsetStore
from tailrace.engine.threads import SystemClock
from tailrace.engine.views import EngineView
from tailrace.records.batch import Offset, Partition


class Written:
    """An offset writer that keeps offsets in memory (`contracts.OffsetWriter`). Any thread."""

    def __init__(self, heard: Callable[[Partition, Offset], None] = lambda _partition, _offset: None) -> None:
        self._lock = threading.Lock()
        self._heard = heard
        #: The offsets that were written, in order.
        self.offsets: list[tuple[Partition, Offset]] = []

    def write(self, partition: Partition, offset: Offset) -> None:
        """Keep an offset."""
        with self._lock:
            self.offsets.append((partition, offset))
            self._heard(partition, offset)


def metrics_of(name: str) -> EngineMetrics:
    """Return metrics for tests without an engine; their `registry` has the values."""
    return EngineMetrics(name, lambda: EngineView(name, State.CREATING, (), None, ""))


def connector_context(
    settings: Settings,
    *,
    name: str = "test",
    offsets: OffsetReader | None = None,
    clock: Clock | None = None,
    report: Callable[[BaseException], None] = lambda _: None,
    tasks_on: str = "threads",
    offset_writer: OffsetWriter | None = None,
    metrics: EngineMetrics | None = None,
) -> ConnectorContext:
    """Return a connector's context; tools that are not given work in memory."""
    return ConnectorContext(
        name,
        settings,
        offsets or MemoryOffsetStore(),
        clock or SystemClock(),
        report,
        tasks_on,
        offset_writer=offset_writer or Written(),
        commit_policy=Always(),
        metrics=(metrics or metrics_of(name)).of(""),
    )


def task_context(
    settings: Settings,
    *,
    name: str = "test",
    number: int = 0,
    offsets: OffsetReader | None = None,
    clock: Clock | None = None,
    stopping: threading.Event | None = None,
    finish: Callable[[], None] = lambda: None,
    wanted: bool = True,
    offset_writer: OffsetWriter | None = None,
    metrics: EngineMetrics | None = None,
) -> TaskContext:
    """Return a task's context; tools that are not given work in memory."""
    return TaskContext(
        name,
        number,
        settings,
        offsets or MemoryOffsetStore(),
        clock or SystemClock(),
        stopping or threading.Event(),
        finish,
        wanted,
        offset_writer=offset_writer or Written(),
        commit_policy=Always(),
        metrics=(metrics or metrics_of(name)).of(str(number)),
    )


def require(kept: bool, rule: str) -> None:
    """Check that `kept` is true.

    :raises AssertionError: with `rule`, if it is not.
    """
    if not kept:
        raise AssertionError(f"contract broken: {rule}")
