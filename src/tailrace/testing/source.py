"""A source that returns the same lines in every run, and fails on request.

Its lines depend only on its parameters and on the offset that it starts from. So a test knows which
lines must come, in which order, after any fault.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tailrace.engine.contracts import ConnectorContext, Settings, SourceTask, TaskContext
from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Batch, Offset, Partition
from tailrace.records.group import Group

#: The default words of each line.
WORDS = "Generated line number"

#: Interval at which a task that waits for lines checks whether the engine stops, in seconds.
_LOOK_S = 0.1

_AFTER = pa.struct([("partition", pa.string()), ("number", pa.int64()), ("line", pa.string())])
_SOURCE = pa.struct([("partition", pa.string()), ("number", pa.int64())])


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at the `at`-th call of a task's method, counted from 1 over all attempts of the task.

    :param method: `start`, `poll` (counted only when there are lines to return), `commit` or `stop`.
    :param error: the error to raise; None: none.
    :param delay_s: delay before it, in seconds; in `start` and `poll` it ends when the engine stops.
    :param deaf: whether the delay does not end when the engine stops.
    :param call: a function to call before.
    """

    method: str
    at: int = 1
    task: int = 0
    error: BaseException | None = None
    delay_s: float = 0.0
    deaf: bool = False
    call: Callable[[], object] | None = None


class LinesSource:
    """A connector whose partitions are numbered lines; each task has one partition or several.

    Lines are changes with `op` `c` and columns `partition`, `number` (from 1) and `line`, for the topic
    `lines.<partition>`. An offset is `{"line": n}`: line n is done.

    :param lines: number of lines in each partition; `append` adds more.
    :param tasks: number of tasks.
    :param partitions: number of partitions of each task, which are polled in turn.
    :param batch: most lines in a batch.
    :param transaction: number of lines of a transaction; batches may end within one.
    :param words: text of each line, before its number.
    :param ends: whether tasks finish when all lines were returned; otherwise they wait for more.
    :param faults: the faults to cause.
    """

    def __init__(
        self,
        lines: int = 10,
        *,
        tasks: int = 1,
        partitions: int = 1,
        batch: int = 10,
        transaction: int = 1,
        words: str = WORDS,
        ends: bool = True,
        faults: Iterable[Fault] = (),
    ) -> None:
        self._lines = {f"{task}-{part}": lines for task in range(tasks) for part in range(partitions)}
        self.batch_lines = batch
        self.transaction_lines = transaction
        self.words = words
        self.ends = ends
        self._tasks = tasks
        self._partitions = partitions
        self._faults = {(fault.method, fault.task, fault.at): fault for fault in faults}
        self._counts: Counter[tuple[str, int]] = Counter()
        self._changed = threading.Condition()
        #: The calls, in order: `connector.start`, `task.start 0`, …
        self.calls: list[str] = []
        #: Tasks that were started and not stopped.
        self.open: set[SourceTask] = set()
        #: For each partition, the offsets in calls of a task's `commit`.
        self.committed: dict[str, list[int]] = {name: [] for name in self._lines}

    # ------------------------------------------------------------------ for the test

    def append(self, lines: int, partition: str = "0-0") -> None:
        """Add lines to a partition."""
        with self._changed:
            self._lines[partition] += lines
            self._changed.notify_all()

    @property
    def partitions(self) -> Sequence[str]:
        """The names of all partitions: `<task>-<partition>`."""
        return tuple(self._lines)

    def count(self, method: str, task: int = 0) -> int:
        """Return the number of calls of a task's method, over all attempts."""
        return self._counts[method, task]

    # ------------------------------------------------------------------ the connector

    def start(self, context: ConnectorContext) -> None:
        """Note that it was called."""
        self.calls.append("connector.start")

    def task_settings(self, tasks_max: int) -> Sequence[Settings]:
        """Return the number and the partitions of each task."""
        if self._tasks > tasks_max:
            raise TailraceError(
                Kind.CONFIG_INVALID,
                f"plan {self._tasks} tasks: at most {tasks_max} may be",
                "raise tasks_max, or have fewer tasks",
            )
        return [
            {"task": task, "partitions": [f"{task}-{part}" for part in range(self._partitions)]}
            for task in range(self._tasks)
        ]

    def create_task(self) -> LinesTask:
        """Return a task."""
        return LinesTask(self)

    def stop(self) -> None:
        """Note that it was called."""
        self.calls.append("connector.stop")

    # ------------------------------------------------------------------ for its tasks

    def lines_in(self, partition: str) -> int:
        """Return the current number of lines of a partition."""
        with self._changed:
            return self._lines[partition]

    def wait_for_lines(self, timeout_s: float, stopping: threading.Event) -> None:
        """Wait until lines may have been appended, or the engine stops."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            lines = dict(self._lines)
            while self._lines == lines and not stopping.is_set() and time.monotonic() < until_s:
                self._changed.wait(min(timeout_s, _LOOK_S))

    def reached(self, method: str, task: int, stopping: threading.Event | None) -> None:
        """Count a call of a task's method, and cause its fault, if there is one."""
        with self._changed:
            self._counts[method, task] += 1
            fault = self._faults.get((method, task, self._counts[method, task]))
            self.calls.append(f"task.{method} {task}")
        if fault is None:
            return
        if fault.call is not None:
            fault.call()
        if fault.delay_s:
            if fault.deaf or stopping is None:
                time.sleep(fault.delay_s)
            else:
                stopping.wait(fault.delay_s)
        if fault.error is not None:
            raise fault.error


class LinesTask:
    """A task of a `LinesSource`."""

    def __init__(self, source: LinesSource) -> None:
        self._source = source
        self._number = 0
        self._context: TaskContext | None = None
        self._given: dict[str, int] = {}
        self._turn = 0

    def start(self, context: TaskContext) -> None:
        """Continue after the lines that were committed."""
        self._context, self._number = context, int(context.settings["task"])
        self._source.open.add(self)
        self._source.reached("start", self._number, context.stopping)
        names = list(context.settings["partitions"])
        offsets = context.offsets.read([_partition(name) for name in names])
        self._given = {
            name: int(offsets[at]["line"]) if at in offsets else 0 for at, name in enumerate(names)
        }

    def poll(self, timeout_s: float) -> Batch | None:
        """Return the next lines of the next partition."""
        assert self._context is not None
        if not self._left():
            if self._source.ends:
                self._context.finish()
            else:
                self._source.wait_for_lines(timeout_s, self._context.stopping)
                if not self._left():
                    return None
            if not self._left():
                return None
        self._source.reached("poll", self._number, self._context.stopping)
        name = self._next()
        first, last = self._given[name], self._source.lines_in(name)
        last = min(last, first + self._source.batch_lines)
        self._given[name] = last
        if self._source.ends and not self._left():
            self._context.finish()
        return lines(name, first, last, self._source.transaction_lines, self._source.words)

    def commit(self, partition: Partition, offset: Offset) -> None:
        """Record the committed offset."""
        self._source.reached("commit", self._number, None)
        self._source.committed[partition["partition"]].append(int(offset["line"]))

    def stop(self) -> None:
        """Mark the task as stopped."""
        self._source.open.discard(self)
        self._source.reached("stop", self._number, None)

    def _left(self) -> bool:
        return any(given < self._source.lines_in(name) for name, given in self._given.items())

    def _next(self) -> str:
        names = list(self._given)
        while True:
            name = names[self._turn % len(names)]
            self._turn += 1
            if self._given[name] < self._source.lines_in(name):
                return name


class _Lines:
    # Offsets of a batch, one after each line.
    def __init__(self, first: int) -> None:
        self._first = first

    def __getitem__(self, place: int) -> Mapping[str, int]:
        return {"line": self._first + place + 1}


def lines(partition: str, first: int, last: int, transaction: int = 1, words: str = WORDS) -> Batch:
    """Return the batch of the lines after `first`, up to `last`, inclusive."""
    numbers = np.arange(first + 1, last + 1)
    names = pa.array([partition] * len(numbers), pa.string())
    texts = pa.array([f"{words} {number}" for number in numbers.tolist()], pa.string())
    after = pa.StructArray.from_arrays([names, pa.array(numbers), texts], fields=list(_AFTER))
    source = pa.StructArray.from_arrays([names, pa.array(numbers)], fields=list(_SOURCE))
    key = pa.StructArray.from_arrays([pa.array(numbers)], names=["number"])
    columns = pa.RecordBatch.from_arrays(
        [pa.array(["c"] * len(numbers), pa.string()), key, after, source],
        names=["op", "key", "after", "source"],
    )
    return Batch(
        _partition(partition),
        (Group.of_columns(f"lines.{partition}", np.arange(len(numbers)), columns),),
        len(numbers),
        _Lines(first),
        transaction_ends=numbers % transaction == 0,
    )


def _partition(name: str) -> Partition:
    return {"partition": name}
