"""The engine's states as a table: event in, next state out. Pure.

    CREATING ─▶ INITIALIZING ─▶ CREATING_TASKS ─▶ STARTING_TASKS ─▶ POLLING_TASKS
        ╰─────────────┴───────────────┴───────┬────────┴──────────────────╯
                                              ▼
                                          STOPPING ─▶ STOPPED

If the engine is asked to stop while tasks start, it stays in that state until every start has ended: an
interrupted start would leave its slot and its connections behind.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tailrace.errors import Kind, TailraceError
from tailrace.state_machine import IllegalTransition, StateMachine


class State(enum.StrEnum):
    """The states of the engine."""

    CREATING = "creating"
    INITIALIZING = "initializing"
    CREATING_TASKS = "creating_tasks"
    STARTING_TASKS = "starting_tasks"
    POLLING_TASKS = "polling_tasks"
    STOPPING = "stopping"
    STOPPED = "stopped"


class EngineEvent(enum.StrEnum):
    """The events that change the engine's state."""

    RUN_CALLED = "run called"
    CONNECTOR_STARTED = "connector started"
    TASKS_CREATED = "tasks created"
    STARTS_ENDED = "every start ended"
    CLOSE_CALLED = "close called"
    STOP_ASKED = "a handler asked for the end"
    TASKS_FINISHED = "all tasks finished"
    FAILURE = "failure"
    EVERYTHING_STOPPED = "everything stopped"


_ENDS = (EngineEvent.CLOSE_CALLED, EngineEvent.STOP_ASKED, EngineEvent.TASKS_FINISHED, EngineEvent.FAILURE)
_PROGRESS = (EngineEvent.CONNECTOR_STARTED, EngineEvent.TASKS_CREATED, EngineEvent.STARTS_ENDED)

#: All allowed transitions.
TRANSITIONS: dict[tuple[State, EngineEvent], State] = {
    (State.CREATING, EngineEvent.RUN_CALLED): State.INITIALIZING,
    (State.INITIALIZING, EngineEvent.CONNECTOR_STARTED): State.CREATING_TASKS,
    (State.CREATING_TASKS, EngineEvent.TASKS_CREATED): State.STARTING_TASKS,
    (State.STARTING_TASKS, EngineEvent.STARTS_ENDED): State.POLLING_TASKS,
    **{
        (state, end): State.STOPPING
        for state in (State.CREATING, State.INITIALIZING, State.CREATING_TASKS, State.POLLING_TASKS)
        for end in _ENDS
    },
    **{(State.STARTING_TASKS, end): State.STARTING_TASKS for end in _ENDS},
    # The end may be requested several times, and starts that were running may still report progress.
    **{(State.STOPPING, event): State.STOPPING for event in (*_ENDS, *_PROGRESS)},
    (State.STOPPING, EngineEvent.EVERYTHING_STOPPED): State.STOPPED,
}

#: Transitions with another target once the end was requested.
WHEN_ENDING: dict[tuple[State, EngineEvent], State] = {
    (State.STARTING_TASKS, EngineEvent.STARTS_ENDED): State.STOPPING,
}


@dataclass(frozen=True, slots=True)
class EngineLifecycle(StateMachine[State, EngineEvent]):
    """The engine's state and its story, the events that led to it.

    :param ending: the event that first requested the end; None until then.
    :param failed: whether a failure is part of the story.
    """

    state: State = State.CREATING
    ending: EngineEvent | None = None
    failed: bool = False

    def step(self, event: EngineEvent) -> EngineLifecycle:
        """Return the lifecycle after `event`.

        :raises TailraceError: `ENGINE_MISUSED` for a transition that the table does not have.
        """
        try:
            target = self.found(TRANSITIONS, event)
        except IllegalTransition as illegal:
            raise self.misused(str(event)) from illegal
        if self.ending is not None:
            target = WHEN_ENDING.get((self.state, event), target)
        ending = self.ending or (event if event in _ENDS else None)
        return self.moved(event, target, ending=ending, failed=self.failed or event is EngineEvent.FAILURE)

    @property
    def goes_on(self) -> bool:
        """Whether the end was not requested yet."""
        return self.ending is None

    def misused(self, attempt: str) -> TailraceError:
        """Return the error of a call that this state does not allow; `attempt` describes the call."""
        found = {
            State.CREATING: "it was not started yet",
            State.STOPPING: "it is being stopped",
            State.STOPPED: "it has stopped",
        }.get(self.state, "it was started already")
        return TailraceError(
            Kind.ENGINE_MISUSED,
            f"{attempt}: the engine can't, {found}; its story: {self.story}",
            "an engine runs once: create another one to run again"
            if self.state is not State.CREATING
            else "call run() or start() first",
        )
