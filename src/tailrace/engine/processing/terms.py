"""What deliveries are made of: on what terms records are handed over, and by what means."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Literal

from tailrace.engine.backoff import Backoff
from tailrace.engine.contracts import Clock, Committer
from tailrace.engine.processing.handlers import Handler, Takes
from tailrace.engine.processing.room import Room
from tailrace.engine.processing.tally import Tally
from tailrace.engine.retrying import Retrying
from tailrace.records.group import Group

Order = Literal["ordered", "unordered", "key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How the records of one life of a task are handed over.

    :param handler: of `on_batch` or `on_record`.
    :param stopping: set when the task is to end: `process` no longer waits for room then.
    :param order: of calls with records; `calls` is what holds for the handler.
    :param threads: of the pool that `initialize` gives.
    :param backoff: for handlers that want to be called again; default: for ever.
    :param name: of the task, for threads and logs.
    :param tally: of the task; it outlives this life.
    """

    handler: Handler
    clock: Clock
    stopping: threading.Event
    order: Order = "ordered"
    threads: int = 1
    queue_batches_max: int = 8
    queue_bytes_max: int = 256 << 20
    backoff: Backoff = field(default_factory=lambda: Backoff(-1))
    name: str = "task"
    tally: Tally = field(default_factory=Tally)

    @property
    def calls(self) -> Order:
        """The order in which the handler is called: one of batches always gets them in order."""
        return self.order if self.handler.takes is Takes.RECORD else "ordered"

    def new_room(self) -> Room:
        """Return the room of one life."""
        return Room(self.queue_batches_max, self.queue_bytes_max, self.stopping, self.tally)


@dataclass(frozen=True, slots=True)
class Means:
    """What `RecordProcessor.initialize` is given, and the room."""

    executor: Executor
    transform: Callable[[Group], Iterable[Group]] | None
    convert: Callable[[Group], Any] | None
    committer: Committer
    room: Room

    def retrying(self, terms: Terms, what: str) -> Retrying:
        """Return what tries again on these terms, until nothing is handed over any more."""
        return Retrying(
            f"{terms.name}: {what}", terms.backoff, terms.clock, self.room.shut, self.room.tried_again
        )
