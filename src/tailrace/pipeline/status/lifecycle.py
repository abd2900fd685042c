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


class PipelineState(enum.StrEnum):
    """Where the engine is in its life, as `status --json` says it."""

    STARTING = "starting"
    SNAPSHOT = "snapshot"
    STREAMING = "streaming"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    NEEDS_SNAPSHOT = "needs_snapshot"  # failed, and no new start without a new log helps


class PipelineEvent(enum.StrEnum):
    """What happens to the engine."""

    SNAPSHOT_BEGAN = "snapshot began"
    STREAM_BEGAN = "stream began"
    CONNECTION_LOST = "connection lost"
    STOP_CALLED = "stop called"
    ALL_DONE = "all done"
    FAILURE = "failure"
    CHANGES_LOST = "changes lost"
    EVERYTHING_STOPPED = "everything stopped"


_RUNNING = (PipelineState.STARTING, PipelineState.SNAPSHOT, PipelineState.STREAMING)

#: A move that is not here is not allowed. Repetitions are no moves: the driver sees changes only.
TRANSITIONS: dict[tuple[PipelineState, PipelineEvent], PipelineState] = {
    (PipelineState.STARTING, PipelineEvent.SNAPSHOT_BEGAN): PipelineState.SNAPSHOT,
    (PipelineState.STARTING, PipelineEvent.STREAM_BEGAN): PipelineState.STREAMING,
    (PipelineState.SNAPSHOT, PipelineEvent.STREAM_BEGAN): PipelineState.STREAMING,
    # A snapshot that was cut begins again; a stream that was cut is taken up where it was.
    (PipelineState.SNAPSHOT, PipelineEvent.CONNECTION_LOST): PipelineState.STARTING,
    (PipelineState.STREAMING, PipelineEvent.CONNECTION_LOST): PipelineState.STARTING,
    **{(state, PipelineEvent.STOP_CALLED): PipelineState.STOPPING for state in _RUNNING},
    **{(state, PipelineEvent.ALL_DONE): PipelineState.STOPPING for state in _RUNNING},
    **{
        (state, PipelineEvent.FAILURE): PipelineState.STOPPING
        for state in (*_RUNNING, PipelineState.STOPPING)
    },
    **{
        (state, PipelineEvent.CHANGES_LOST): PipelineState.STOPPING
        for state in (*_RUNNING, PipelineState.STOPPING)
    },
    # Signals come as often as a person is impatient.
    (PipelineState.STOPPING, PipelineEvent.STOP_CALLED): PipelineState.STOPPING,
    (PipelineState.STOPPING, PipelineEvent.ALL_DONE): PipelineState.STOPPING,
    (PipelineState.STOPPING, PipelineEvent.EVERYTHING_STOPPED): PipelineState.STOPPED,
}


#: What a capture task is about, from the least advanced on; any other phase tells nothing.
_PHASES = {
    "connecting": PipelineState.STARTING,
    "queued": PipelineState.STARTING,
    "snapshot": PipelineState.SNAPSHOT,
    "streaming": PipelineState.STREAMING,
}

_TOWARD: dict[tuple[PipelineState, PipelineState], PipelineEvent] = {
    (PipelineState.STARTING, PipelineState.SNAPSHOT): PipelineEvent.SNAPSHOT_BEGAN,
    (PipelineState.STARTING, PipelineState.STREAMING): PipelineEvent.STREAM_BEGAN,
    (PipelineState.SNAPSHOT, PipelineState.STREAMING): PipelineEvent.STREAM_BEGAN,
    (PipelineState.SNAPSHOT, PipelineState.STARTING): PipelineEvent.CONNECTION_LOST,
    (PipelineState.STREAMING, PipelineState.STARTING): PipelineEvent.CONNECTION_LOST,
    # Between two looks the connection was lost and the snapshot begun again.
    (PipelineState.STREAMING, PipelineState.SNAPSHOT): PipelineEvent.CONNECTION_LOST,
}


def toward(state: PipelineState, phases: Iterable[str]) -> PipelineEvent | None:
    """Return what has happened, to go by what the capture tasks are about; None: nothing new.

    The engine is where the least advanced of them is: it streams when all do.
    """
    known = {_PHASES[phase] for phase in phases if phase in _PHASES}
    for target in (PipelineState.STARTING, PipelineState.SNAPSHOT, PipelineState.STREAMING):
        if target in known:
            return _TOWARD.get((state, target))
    return None


@dataclass(frozen=True, slots=True)
class PipelineLifecycle:
    """A state and how it came about."""

    state: PipelineState = PipelineState.STARTING
    failed: bool = False
    lost: bool = False  # it failed because changes are lost to the log
    story: tuple[tuple[PipelineState, PipelineEvent], ...] = ()

    def step(self, event: PipelineEvent) -> PipelineLifecycle:
        """Return the life after `event`.

        :raises IllegalTransition: for a move that the table does not have.
        """
        # The story is for an error message: the newest steps tell enough of a long life.
        story = (*self.story[-19:], (self.state, event))
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalPipelineTransition(self.state, event, story)
        lost = self.lost or event is PipelineEvent.CHANGES_LOST
        failed = self.failed or lost or event is PipelineEvent.FAILURE
        if target is PipelineState.STOPPED and failed:
            target = PipelineState.NEEDS_SNAPSHOT if lost else PipelineState.FAILED
        return replace(self, state=target, failed=failed, lost=lost, story=story)

    @property
    def is_running(self) -> bool:
        """Whether nothing has asked for the end yet."""
        return self.state in _RUNNING


class IllegalPipelineTransition(RuntimeError):  # noqa: N818 - it is named after what happened
    """A move that the table does not have; always a bug. Tells the story that led to it."""

    def __init__(
        self,
        state: PipelineState,
        event: PipelineEvent,
        story: tuple[tuple[PipelineState, PipelineEvent], ...],
    ) -> None:
        super().__init__(state, event, story)

    def __str__(self) -> str:
        state, event, story = self.args
        path = " -> ".join(f"{before}+{what.name}" for before, what in story)
        return f"the engine is {state}: {event.name} is not allowed here (story: {path})"
