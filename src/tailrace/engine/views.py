"""The engine as it is now, for those who look at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tailrace.engine.life import State
from tailrace.engine.supervision import Phase
from tailrace.errors import TailraceError


@dataclass(frozen=True, slots=True)
class TaskView:
    """One task. Counts are of all its lives.

    :param processed: records before which everything is processed, dropped ones included.
    :param error: why it failed last.
    """

    number: int
    state: Phase
    polled: int
    batches: int
    processed: int
    retries: int
    restarts: int
    error: TailraceError | None

    def as_json(self) -> dict[str, Any]:
        """Return the view as one JSON object."""
        return {
            "number": self.number,
            "state": str(self.state),
            "polled": self.polled,
            "batches": self.batches,
            "processed": self.processed,
            "retries": self.retries,
            "restarts": self.restarts,
            "error": _json(self.error),
        }


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine; `story` is how it came to its state."""

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
            "error": _json(self.error),
            "story": self.story,
        }


def _json(error: TailraceError | None) -> dict[str, Any] | None:
    return None if error is None else error.as_json()
