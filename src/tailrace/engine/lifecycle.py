"""The engine's life as a table: event in, next state out. No clock, no thread, no I/O.

    CREATING ─▶ INITIALIZING ─▶ CREATING_TASKS ─▶ STARTING_TASKS ─▶ POLLING_TASKS
        ╰─────────────┴───────────────┴───────┬────────┴──────────────────╯
                                              ▼
                                          STOPPING ─▶ STOPPED

Whoever asks for the end while tasks start is heard, but the engine stays where it is until every
start has ended: a task that is cut off half-way would leave its slot and its connections behind.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from tailrace.errors import Kind, TailraceError

#: The newest steps tell enough of a long life.
STORY_STEPS_MAX = 20


class State(enum.StrEnum):
    """Where the engine is in its life."""

    CREATING = "creating"
    INITIALIZING = "initializing"
    CREATING_TASKS = "creating_tasks"
    STARTING_TASKS = "starting_tasks"
    POLLING_TASKS = "polling_tasks"
    STOPPING = "stopping"
    STOPPED = "stopped"


class EngineEvent(enum.StrEnum):
    """What happens to the engine."""

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

#: A move that is not here is not allowed.
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
    # The end is asked for as often as somebody is impatient, and what was under way then comes to its own.
    **{(State.STOPPING, event): State.STOPPING for event in (*_ENDS, *_PROGRESS)},
    (State.STOPPING, EngineEvent.EVERYTHING_STOPPED): State.STOPPED,
}

#: Moves that go elsewhere once the end was asked for.
WHEN_ENDING: dict[tuple[State, EngineEvent], State] = {
    (State.STARTING_TASKS, EngineEvent.STARTS_ENDED): State.STOPPING,
}


@dataclass(frozen=True, slots=True)
class EngineLifecycle:
    """A state and how it came about.

    :param ending: what first asked for the end; None as long as nothing has.
    :param failed: whether a failure is part of the story.
    """

    state: State = State.CREATING
    ending: EngineEvent | None = None
    failed: bool = False
    steps: tuple[tuple[State, EngineEvent], ...] = ()

    def step(self, event: EngineEvent) -> EngineLifecycle:
        """Return the life after `event`.

        :raises TailraceError: `ENGINE_MISUSED` for a move that the table does not have.
        """
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise self.misused(str(event))
        if self.ending is not None:
            target = WHEN_ENDING.get((self.state, event), target)
        ending = self.ending or (event if event in _ENDS else None)
        steps = (*self.steps, (self.state, event))[-STORY_STEPS_MAX:]
        return replace(
            self, state=target, ending=ending, failed=self.failed or event is EngineEvent.FAILURE, steps=steps
        )

    @property
    def goes_on(self) -> bool:
        """Whether nothing has asked for the end yet."""
        return self.ending is None

    @property
    def story(self) -> str:
        """How the engine came to its state, for a person."""
        told = "".join(f"{state.name} ({event}) → " for state, event in self.steps)
        return told + self.state.name

    def misused(self, attempt: str) -> TailraceError:
        """Return the error of a call that this state does not allow; `attempt` is what was called."""
        found = {
            State.CREATING: "it was not started yet",
            State.STOPPING: "it is being stopped",
            State.STOPPED: "it has stopped",
        }.get(self.state, "it was started already")
        return TailraceError(
            Kind.ENGINE_MISUSED,
            f"{attempt}: the engine can't, {found}; its story: {self.story}",
            "an engine has one life: create another one to run again"
            if self.state is not State.CREATING
            else "call run() or start() first",
        )
