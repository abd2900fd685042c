"""Supervision of tasks: decides what follows when a task fails or finishes, by `on_task_failure`.

It decides and keeps the state of all tasks; the tasks' own threads carry the decisions out.
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
    """The phases of a task."""

    CREATED = "created"
    STARTING = "starting"
    POLLING = "polling"
    RESTARTING = "restarting"  # it failed, and waits for its restart
    FINISHED = "finished"  # it has no more records
    FAILED = "failed"  # it is not restarted
    STOPPED = "stopped"


#: Phases in which a task may still return records.
_AT_WORK = (Phase.CREATED, Phase.STARTING, Phase.POLLING, Phase.RESTARTING)


@dataclass(slots=True)
class _TaskState:
    # The state of one task.
    backoff: Backoff
    phase: Phase = Phase.CREATED
    restarts: int = 0
    error: TailraceError | None = None


class Supervision:
    """Decides about tasks. Any thread.

    :param end: requests the end of the engine, with the event and its error.
    """

    def __init__(
        self, options: EngineOptions, count: int, end: Callable[[EngineEvent, TailraceError | None], None]
    ) -> None:
        self._policy = options.on_task_failure
        self._end = end
        self._lock = threading.Lock()
        self._states = [_TaskState(restarts_of(options)) for _ in range(count)]
        self._isolated: list[TailraceError] = []

    def phase(self, number: int) -> Phase:
        """Return the present phase of a task."""
        return self._states[number].phase

    def restarts(self, number: int) -> int:
        """Return the number of restarts of a task."""
        return self._states[number].restarts

    def error(self, number: int) -> TailraceError | None:
        """Return the failure for which a task does not run; None if it runs, or has not failed."""
        return self._states[number].error

    def note(self, number: int, phase: Phase) -> None:
        """Set the phase of a task; `FAILED` is final."""
        with self._lock:
            state = self._states[number]
            if state.phase is not Phase.FAILED:
                state.phase = phase
                if phase is Phase.POLLING:
                    state.error = None

    def failed(
        self, number: int, error: BaseException, doing: str, *, got_on: bool, may_restart: bool = True
    ) -> float | None:
        """Note that `error` ended an attempt of a task; return the seconds until the next attempt.

        :param got_on: whether any record was processed in that attempt.
        :param may_restart: False if the engine ends anyway.
        :returns: None if there is no next attempt.
        """
        failure = as_task_failure(error, number, doing)
        wait_s = None
        with self._lock:
            state = self._states[number]
            state.error = failure
            if self._policy == "restart" and may_restart:
                backoff = state.backoff.after_success() if got_on else state.backoff
                state.backoff, wait_s = backoff.after_failure()
            if wait_s is not None:
                state.phase = Phase.RESTARTING
                state.restarts += 1
            else:
                state.phase = Phase.FAILED
            is_last = not any(other.phase in _AT_WORK for other in self._states)
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
        """Note that a task has no more records, and that all of them are processed."""
        with self._lock:
            self._states[number].phase = Phase.FINISHED
            is_last = not any(other.phase in _AT_WORK for other in self._states)
        if is_last:
            self._end(EngineEvent.TASKS_FINISHED, None)

    def stop_asked(self) -> None:
        """Note that a handler asks to stop the engine."""
        self._end(EngineEvent.STOP_ASKED, None)

    def failures(self) -> list[TailraceError]:
        """Return the failures of isolated tasks, in their order."""
        with self._lock:
            return list(self._isolated)
