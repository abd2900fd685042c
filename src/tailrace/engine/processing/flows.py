"""The engine's record processors: one stage, and one of two ways of delivery.

Three choices make the six flows: a handler of batches or of records, a converter or none, in order
or not; order for each key is a seventh. Which thread calls a handler: of batches, and of records in
order, one thread of the task's own (never two at once for one task); of records without order or in
order for each key, threads of the pool.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Any, Literal, Protocol

from tailrace.engine.backoff import Backoff
from tailrace.engine.contracts import Clock, Committer, RecordProcessor
from tailrace.engine.processing.crew import Crew
from tailrace.engine.processing.handlers import Handler, Takes
from tailrace.engine.processing.room import Room
from tailrace.engine.processing.serial import Serial
from tailrace.engine.processing.stage import Convert, PoolStager, Stage, Transform
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
        functools.partial(
            _on_threads,
            handler,
            order if handler.takes is Takes.RECORD else "ordered",
            backoff or Backoff(-1),
            clock,
            threads,
            name,
        ),
        Room(queue_batches_max, queue_bytes_max, stopping),
        name,
    )


class Delivery(Protocol):
    """What has batches staged and delivered. `run` has a thread of its own."""

    def put(self, batch: Batch) -> None:
        """Take a batch; on the task's thread. Returns at once."""
        ...

    def run(self) -> None:
        """Work until `wake`."""
        ...

    def wake(self) -> None:
        """Have `run` return: nothing more may be delivered. Any thread; returns soon."""
        ...


#: Makes a delivery of what `RecordProcessor.initialize` is given, and the room.
NewDelivery = Callable[[Executor, Transform | None, Convert | None, Committer, Room], Delivery]


def _on_threads(
    handler: Handler,
    order: Order,
    backoff: Backoff,
    clock: Clock,
    threads: int,
    name: str,
    executor: Executor,
    transform: Transform | None,
    convert: Convert | None,
    committer: Committer,
    room: Room,
) -> Delivery:
    stage = Stage(transform, convert, order == "key")
    stager = None if stage.is_empty else PoolStager(stage, executor, threads)
    common = (handler, room, committer, backoff, clock, name)
    if order == "ordered":
        return Serial(*common, stager=stager)
    return Crew(*common, executor=executor, threads=threads, stager=stager, keeps_lanes=order == "key")


class Flow:
    """Stages batches while others are delivered (`contracts.RecordProcessor`)."""

    def __init__(self, new_delivery: NewDelivery, room: Room, name: str) -> None:
        self._new_delivery = new_delivery
        self._room = room
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
        self._delivery = self._new_delivery(executor, transform, convert, committer, self._room)

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
        self._delivery.put(batch)

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
