"""A pipeline's state, from what its captures are about and why they failed. Pure.

    STARTING ◀─▶ SNAPSHOT ◀─▶ STREAMING ──▶ STOPPING ──▶ STOPPED | FAILED | NEEDS_SNAPSHOT

Nothing is decided by it: it is what people and programs see of the engine's tasks. A failure first goes
through STOPPING like any other end: sinks finish their batch and what is durable is acknowledged.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from tailrace.errors import NEEDS_SNAPSHOT, TailraceError


class PipelineState(enum.StrEnum):
    """What a pipeline is about, as `status --json` says it."""

    STARTING = "starting"
    SNAPSHOT = "snapshot"
    STREAMING = "streaming"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    NEEDS_SNAPSHOT = "needs_snapshot"  # failed, and no new start without a new log helps


#: States that an engine does not leave any more.
ENDED = (PipelineState.STOPPED, PipelineState.FAILED, PipelineState.NEEDS_SNAPSHOT)

#: From the least advanced one on, with the phases of captures that mean it. Others say nothing: a capture
#: waits for room on the disk in a snapshot as in a stream.
_PHASES = {
    PipelineState.STARTING: {"connecting", "queued"},
    PipelineState.SNAPSHOT: {"snapshot"},
    PipelineState.STREAMING: {"streaming"},
}


def state_while_running(phases: Iterable[str], before: PipelineState) -> PipelineState:
    """Return the state of the least advanced capture: a pipeline streams when all of them do.

    :param before: what it stays where no capture's phase says more.
    """
    known = set(phases)
    return next((state for state, meant in _PHASES.items() if meant & known), before)


def state_at_end(failures: Iterable[TailraceError | None]) -> PipelineState:
    """Return the state of a pipeline that has ended with these failures; None is no failure."""
    kinds = {error.kind for error in failures if error is not None}
    if not kinds:
        return PipelineState.STOPPED
    return PipelineState.NEEDS_SNAPSHOT if kinds & NEEDS_SNAPSHOT else PipelineState.FAILED
