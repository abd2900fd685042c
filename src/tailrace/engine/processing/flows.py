"""The engine's record processors: one stage, and one of two ways of delivery.

Three choices make the six flows: a handler of batches or of records, a converter or none, in order
or not; order for each key is a seventh. Which thread calls a handler: of batches, and of records in
order, one thread of the task's own (never two at once for one task); of records without order or in
order for each key, threads of the pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, Literal

from tailrace.engine.backoff import Backoff
from tailrace.engine.contracts import Clock, Committer, RecordProcessor
from tailrace.engine.processing.crew import Crew
from tailrace.engine.processing.handlers import Handler, Takes
from tailrace.engine.processing.room import Room
from tailrace.engine.processing.serial import Serial
from tailrace.engine.processing.stage import Stage, Staging
from tailrace.engine.threads import belonging
from tailrace.records.batch import Batch
from tailrace.records.group import Group

Order = Literal["ordered", "unordered", "key"]

#: How long `close` waits for the delivering thread, which has nothing left to do unless a handler runs.
_END_S = 0.2


def processor_for(
    handler: Handler,
    *,
    clock: Clock,
    stopping: threading.Event,
    order: Order = "ordered",
    threads: int = 1,
    queue_batches_max: int = 8,
    queue_bytes_max: int = 256 << 20,
    backoff: Backoff | None = None,
    name: str = "task",
) -> RecordProcessor:
    """Return the processor of one life of a task.

    :param handler: of `on_batch` or `on_record`; those of batches are always called in order.
    :param stopping: set when the task is to end: `process` no longer waits for room then.
    :param threads: of the pool that `initialize` gives.
    :param backoff: for handlers that want to be called again; default: for ever.
    :param name: of the task, for threads and logs.
    """
    return Flow(
        handler,
        order if handler.takes is Takes.RECORD else "ordered",
        Room(queue_batches_max, queue_bytes_max, stopping),
        backoff or Backoff(-1),
        clock,
        threads,
        name,
    )


class Flow:
    """Stages batches on the pool while others are delivered (`contracts.RecordProcessor`)."""

    def __init__(
        self,
        handler: Handler,
        order: Order,
        room: Room,
        backoff: Backoff,
        clock: Clock,
        threads: int,
        name: str,
    ) -> None:
        self._handler = handler
        self._order = order
        self._room = room
        self._backoff = backoff
        self._clock = clock
        self._threads = threads
        self._name = name
        self._thread: threading.Thread | None = None

    @property
    def batches_under_way(self) -> int:
        """Batches that were taken and are not done."""
        return self._room.batches

    def initialize(
        self,
        executor: Executor,
        transform: Callable[[Group], Iterable[Group]] | None,
        convert: Callable[[Group], Any] | None,
        committer: Committer,
    ) -> None:
        """Take what is needed; see `contracts.RecordProcessor`."""
        self._executor = executor
        self._stage = Stage(transform, convert, self._order == "key")
        common = (self._handler, self._room, committer, self._backoff, self._clock, self._name)
        self._delivery: Serial | Crew = (
            Serial(*common)
            if self._order == "ordered"
            else Crew(*common, executor=executor, threads=self._threads, keeps_lanes=self._order == "key")
        )

    def process(self, batch: Batch) -> None:
        """Put a batch under way; waits while there is no room. After `close` nothing is taken."""
        self._room.raise_failure()
        if self._thread is None:
            self._thread = threading.Thread(
                target=belonging(self._delivery.run), name=f"{self._name} delivery", daemon=True
            )
            self._thread.start()
        self._room.take(batch.size_bytes)
        self._room.raise_failure()
        if self._room.shut.is_set():
            return
        self._delivery.put(Staging(batch, self._stage, self._executor, self._threads))

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything is delivered and marked; see `contracts.RecordProcessor`."""
        is_empty = self._room.wait_until_empty(timeout_s)
        self._room.raise_failure()
        return is_empty

    def close(self) -> None:
        """Give up what is not done; see `contracts.RecordProcessor`."""
        self._room.give_up()
        if self._thread is not None:
            self._delivery.wake()
            if self._thread is not threading.current_thread():
                self._thread.join(_END_S)
