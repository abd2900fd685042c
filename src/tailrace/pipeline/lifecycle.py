"""The engine's life as a table: event in, next state out. No clock, no thread, no I/O.

    STARTING ──▶ SNAPSHOT ──▶ STREAMING
        │            │            │
        ╰────────────┴─────┬──────╯
                           ▼
                       STOPPING ──▶ STOPPED | FAILED | NEEDS_SNAPSHOT

A failure first goes through STOPPING like any other end: sinks finish their batch and what is
durable is acknowledged. What the engine becomes in the end depends on whether it failed, and
whether changes are lost to the log, so that only a new snapshot leads on.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace


class State(enum.StrEnum):
    """Where the engine is in its life, as `status --json` says it."""

    STARTING = "starting"
    SNAPSHOT = "snapshot"
    STREAMING = "streaming"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    NEEDS_SNAPSHOT = "needs_snapshot"  # failed, and no new start without a new log helps


class Event(enum.StrEnum):
    """What happens to the engine."""

    SNAPSHOT_BEGAN = "snapshot began"
    STREAM_BEGAN = "stream began"
    CONNECTION_LOST = "connection lost"
    STOP_CALLED = "stop called"
    ALL_DONE = "all done"
    FAILURE = "failure"
    CHANGES_LOST = "changes lost"
    EVERYTHING_STOPPED = "everything stopped"


_RUNNING = (State.STARTING, State.SNAPSHOT, State.STREAMING)

#: A move that is not here is not allowed. Repetitions are no moves: the driver sees changes only.
TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.STARTING, Event.SNAPSHOT_BEGAN): State.SNAPSHOT,
    (State.STARTING, Event.STREAM_BEGAN): State.STREAMING,
    (State.SNAPSHOT, Event.STREAM_BEGAN): State.STREAMING,
    # A snapshot that was cut begins again; a stream that was cut is taken up where it was.
    (State.SNAPSHOT, Event.CONNECTION_LOST): State.STARTING,
    (State.STREAMING, Event.CONNECTION_LOST): State.STARTING,
    **{(state, Event.STOP_CALLED): State.STOPPING for state in _RUNNING},
    **{(state, Event.ALL_DONE): State.STOPPING for state in _RUNNING},
    **{(state, Event.FAILURE): State.STOPPING for state in (*_RUNNING, State.STOPPING)},
    **{(state, Event.CHANGES_LOST): State.STOPPING for state in (*_RUNNING, State.STOPPING)},
    # Signals come as often as a person is impatient.
    (State.STOPPING, Event.STOP_CALLED): State.STOPPING,
    (State.STOPPING, Event.ALL_DONE): State.STOPPING,
    (State.STOPPING, Event.EVERYTHING_STOPPED): State.STOPPED,
}


#: What a capture task is about, from the least advanced on; any other phase tells nothing.
_PHASES = {
    "connecting": State.STARTING,
    "queued": State.STARTING,
    "snapshot": State.SNAPSHOT,
    "streaming": State.STREAMING,
}

_TOWARD: dict[tuple[State, State], Event] = {
    (State.STARTING, State.SNAPSHOT): Event.SNAPSHOT_BEGAN,
    (State.STARTING, State.STREAMING): Event.STREAM_BEGAN,
    (State.SNAPSHOT, State.STREAMING): Event.STREAM_BEGAN,
    (State.SNAPSHOT, State.STARTING): Event.CONNECTION_LOST,
    (State.STREAMING, State.STARTING): Event.CONNECTION_LOST,
    # Between two looks the connection was lost and the snapshot begun again.
    (State.STREAMING, State.SNAPSHOT): Event.CONNECTION_LOST,
}


def toward(state: State, phases: Iterable[str]) -> Event | None:
    """Return what has happened, to go by what the capture tasks are about; None: nothing new.

    The engine is where the least advanced of them is: it streams when all do.
    """
    known = {_PHASES[phase] for phase in phases if phase in _PHASES}
    for target in (State.STARTING, State.SNAPSHOT, State.STREAMING):
        if target in known:
            return _TOWARD.get((state, target))
    return None


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """A state and how it came about."""

    state: State = State.STARTING
    failed: bool = False
    lost: bool = False  # it failed because changes are lost to the log
    story: tuple[tuple[State, Event], ...] = ()

    def step(self, event: Event) -> Lifecycle:
        """Return the life after `event`.

        :raises IllegalTransition: for a move that the table does not have.
        """
        # The story is for an error message: the newest steps tell enough of a long life.
        story = (*self.story[-19:], (self.state, event))
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalTransition(self.state, event, story)
        lost = self.lost or event is Event.CHANGES_LOST
        failed = self.failed or lost or event is Event.FAILURE
        if target is State.STOPPED and failed:
            target = State.NEEDS_SNAPSHOT if lost else State.FAILED
        return replace(self, state=target, failed=failed, lost=lost, story=story)

    @property
    def is_running(self) -> bool:
        """Whether nothing has asked for the end yet."""
        return self.state in _RUNNING


class IllegalTransition(RuntimeError):  # noqa: N818 - it is named after what happened
    """A move that the table does not have; always a bug. Tells the story that led to it."""

    def __init__(self, state: State, event: Event, story: tuple[tuple[State, Event], ...]) -> None:
        super().__init__(state, event, story)

    def __str__(self) -> str:
        state, event, story = self.args
        path = " -> ".join(f"{before}+{what.name}" for before, what in story)
        return f"the engine is {state}: {event.name} is not allowed here (story: {path})"
