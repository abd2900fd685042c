"""What processors are made with: the settings of a task's processing, and the engine's objects for it."""

from __future__ import annotations

import threading
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Literal

from tailrace.backoff import Backoff
from tailrace.engine.contracts import Clock, Committer
from tailrace.engine.failures import Retrying
from tailrace.engine.processing.handlers import Handler, HandlerKind
from tailrace.engine.processing.in_flight import InFlightLimiter, TaskCounts
from tailrace.engine.processing.stage import Stage

Order = Literal["ordered", "unordered", "key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessingConfig:
    """How the records of one attempt of a task are handed over.

    :param handler: of `on_batch` or `on_record`.
    :param stopping: set when the task is to end: `process` no longer waits for the limiter then.
    :param order: of calls with records; `calls` is what holds for the handler.
    :param threads: of the pool that `initialize` gives; and so many call a handler of records out of order.
    :param backoff: for handlers that want to be called again; default: for ever.
    :param name: of the task, for threads and logs.
    :param counts: of the task; it outlives this attempt.
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
    counts: TaskCounts = field(default_factory=TaskCounts)

    @property
    def calls(self) -> Order:
        """The order in which the handler is called: one of batches always gets them in order."""
        return self.order if self.handler.takes is HandlerKind.RECORD else "ordered"


@dataclass(frozen=True, slots=True)
class ProcessingContext:
    """What the executors of one attempt are made with.

    :param pool: what `RecordProcessor.initialize` was given.
    :param stage: what is done to records before they are delivered.
    :param committer: marks what the limiter does not.
    """

    terms: ProcessingConfig
    pool: Executor
    stage: Stage
    committer: Committer
    limiter: InFlightLimiter

    def retrying(self, what: str) -> Retrying:
        """Return what tries again on these terms, until nothing is handed over any more."""
        terms, limiter = self.terms, self.limiter
        return Retrying(
            f"{terms.name}: {what}", terms.backoff, terms.clock, limiter.shut, limiter.tried_again
        )
