"""What is done about a task that failed or has finished: `on_task_failure`, for all tasks together.

It decides and keeps the books; the tasks' own threads carry it out.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from tailrace.backoff import Backoff
from tailrace.config import EngineOptions
from tailrace.engine.failures import as_task_failure, restarts_of
from tailrace.engine.lifecycle import EngineEvent
from tailrace.errors import TailraceError

log = structlog.get_logger(__name__)


class Phase(enum.StrEnum):
    """What a task is about."""

    CREATED = "created"
    STARTING = "starting"
    POLLING = "polling"
    RESTARTING = "restarting"  # it failed, and waits to be started again
    FINISHED = "finished"  # it has no more to give
    FAILED = "failed"  # for good
    STOPPED = "stopped"


#: Phases in which a task may still give something.
_AT_WORK = (Phase.CREATED, Phase.STARTING, Phase.POLLING, Phase.RESTARTING)


@dataclass(slots=True)
class _Books:
    # Of one task.
    backoff: Backoff
    phase: Phase = Phase.CREATED
    restarts: int = 0
    error: TailraceError | None = None


class Supervision:
    """Decides about tasks. Any thread.

    :param end: asks for the end of the engine, and says why.
    """

    def __init__(
        self, options: EngineOptions, count: int, end: Callable[[EngineEvent, TailraceError | None], None]
    ) -> None:
        self._policy = options.on_task_failure
        self._end = end
        self._lock = threading.Lock()
        self._books = [_Books(restarts_of(options)) for _ in range(count)]
        self._isolated: list[TailraceError] = []

    def phase(self, number: int) -> Phase:
        """What a task is about now."""
        return self._books[number].phase

    def restarts(self, number: int) -> int:
        """How often a task was started again."""
        return self._books[number].restarts

    def error(self, number: int) -> TailraceError | None:
        """Why a task failed last; None if it has not, or has got on since."""
        return self._books[number].error

    def note(self, number: int, phase: Phase) -> None:
        """Take note of what a task is about; one that failed for good stays so."""
        with self._lock:
            books = self._books[number]
            if books.phase is not Phase.FAILED:
                books.phase = phase

    def failed(
        self, number: int, error: BaseException, doing: str, *, got_on: bool, may_restart: bool = True
    ) -> float | None:
        """Take note that `error` ended an attempt of a task; return the seconds until the next.

        :param got_on: whether any record was processed in that attempt.
        :param may_restart: False when the engine ends anyhow.
        :returns: None: there is no other.
        """
        failure = as_task_failure(error, number, doing)
        wait_s = None
        with self._lock:
            books = self._books[number]
            books.error = failure
            if self._policy == "restart" and may_restart:
                backoff = books.backoff.after_success() if got_on else books.backoff
                books.backoff, wait_s = backoff.after_failure()
            if wait_s is not None:
                books.phase = Phase.RESTARTING
                books.restarts += 1
            else:
                books.phase = Phase.FAILED
            is_last = not any(other.phase in _AT_WORK for other in self._books)
            isolates = self._policy == "isolate" and not is_last
            if self._policy == "isolate":
                self._isolated.append(failure)
        log.warning(
            "a task failed",
            task=number,
            error=str(failure),
            then="restart" if wait_s is not None else "isolated" if isolates else "stop",
            wait_s=wait_s,
        )
        if wait_s is None and not isolates:
            self._end(EngineEvent.FAILURE, self._isolated[0] if self._isolated else failure)
        return wait_s

    def finished(self, number: int) -> None:
        """Take note that a task has no more to give, and that all of it is processed."""
        with self._lock:
            self._books[number].phase = Phase.FINISHED
            is_last = not any(other.phase in _AT_WORK for other in self._books)
        if is_last:
            self._end(EngineEvent.TASKS_FINISHED, None)

    def stop_asked(self) -> None:
        """Take note that a handler asks for the end of the engine."""
        self._end(EngineEvent.STOP_ASKED, None)

    def failures(self) -> list[TailraceError]:
        """The failures of tasks that were isolated, in their order."""
        with self._lock:
            return list(self._isolated)
