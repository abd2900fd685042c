"""The arguments of processors: the settings of a task's processing, and the engine's objects for it."""

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
    """Settings of how the records of one attempt of a task are delivered.

    :param handler: made by `on_batch` or `on_record`.
    :param stopping: set when the task is to end: `process` no longer waits for the limiter then.
    :param order: of calls with single records; `calls` is the order that applies to the handler.
    :param threads: of the pool passed to `initialize`, and those that call an unordered or keyed handler.
    :param backoff: waits before a handler is called again after an error; default: without a limit.
    :param name: of the task, for threads and logs.
    :param counts: of the task, over all its attempts.
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
        """The order in which the handler is called: a handler of batches always gets them in order."""
        return self.order if self.handler.takes is HandlerKind.RECORD else "ordered"


@dataclass(frozen=True, slots=True)
class ProcessingContext:
    """The arguments of the executors of one attempt.

    :param pool: the executor passed to `RecordProcessor.initialize`.
    :param stage: transforms and converts records before they are delivered.
    :param committer: for marks that the limiter does not make.
    """

    terms: ProcessingConfig
    pool: Executor
    stage: Stage
    committer: Committer
    limiter: InFlightLimiter

    def retrying(self, what: str) -> Retrying:
        """Return an object that retries a call by these settings, until the limiter shuts."""
        terms, limiter = self.terms, self.limiter
        return Retrying(
            f"{terms.name}: {what}", terms.backoff, terms.clock, limiter.shut, limiter.tried_again
        )
