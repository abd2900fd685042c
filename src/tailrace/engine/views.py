"""Views of the engine: its present state and counts, for the user."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tailrace.engine.lifecycle import State
from tailrace.engine.supervision import Phase
from tailrace.errors import TailraceError, error_json


@dataclass(frozen=True, slots=True)
class TaskView:
    """The state of one task. Counts are of all its attempts.

    :param batches: polled batches.
    :param delivered: records of batches that the engine's own processors delivered completely.
    :param dropped: records of these batches that transformations dropped.
    :param processed: records up to which everything is processed, dropped ones included.
    :param committed: records up to the last commit of each partition.
    :param retries: starts, polls, transformations, conversions and handler calls that failed and were
        retried.
    :param batches_under_way: batches polled and not delivered yet; `bytes_under_way` is their size.
    :param poll_s: seconds in `poll`, including waits for records.
    :param handler_s: seconds for which threads of this process called handlers.
    :param errors: why its source, or a part of it, can't be read now: a server that can't be reached, a
        database that failed while the task's others are read. Empty if all of it can be read.
    :param error: the first of `errors`, or the failure for which the task does not poll.
    """

    number: int
    state: Phase
    polled: int = 0
    batches: int = 0
    delivered: int = 0
    dropped: int = 0
    processed: int = 0
    committed: int = 0
    retries: int = 0
    restarts: int = 0
    batches_under_way: int = 0
    bytes_under_way: int = 0
    poll_s: float = 0.0
    handler_s: float = 0.0
    errors: tuple[TailraceError, ...] = ()
    error: TailraceError | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the view as one JSON object."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return found | {
            "state": str(self.state),
            "poll_s": round(self.poll_s, 6),
            "handler_s": round(self.handler_s, 6),
            "errors": [error_json(error) for error in self.errors],
            "error": error_json(self.error),
        }


@dataclass(frozen=True, slots=True)
class EngineView:
    """The state of an engine; `story` has the events that led to it, `error` is as `Engine.error`."""

    name: str
    state: State
    tasks: tuple[TaskView, ...]
    error: TailraceError | None
    story: str

    def as_json(self) -> dict[str, Any]:
        """Return the view as one JSON object."""
        return {
            "name": self.name,
            "state": str(self.state),
            "tasks": [task.as_json() for task in self.tasks],
            "error": error_json(self.error),
            "story": self.story,
        }
