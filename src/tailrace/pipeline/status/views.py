"""What the parts of an engine show of themselves: frozen values, replaced whole.

A part replaces its view by one assignment, which is atomic, so that whoever looks needs no
lock and sees no half of it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from tailrace.changelog.endmark import Tail
from tailrace.errors import TailraceError
from tailrace.pipeline.status.lifecycle import PipelineState
from tailrace.sources.progress import SourceHealth, SourceWarning


class SinkState(enum.StrEnum):
    """What a sink is doing, as `status --json` says it."""

    STARTING = "starting"
    RUNNING = "running"
    RETRYING = "retrying"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SinkView:
    """A sink as it is now.

    `position` is the log offset up to which everything is in the sink; None: not known yet.
    `pending_since_us` is the commit time (since 1970) of the oldest change that is not.
    """

    name: str
    type: str
    state: SinkState = SinkState.STARTING
    position: int | None = None
    pending_since_us: int | None = None
    rows: int = 0
    bytes: int = 0  # of the log
    dead_letters: int = 0  # records that the target can't hold, since the start
    batches: int = 0
    last_batch_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)  # of the last batch, by step
    error: TailraceError | None = None


@dataclass(frozen=True, slots=True)
class TableView:
    """A table whose snapshot is not whole in the log; its number of rows is an estimate.

    `eta_s`: seconds left at the pace so far; None: nothing was read in this run, or more rows
    came than were thought.
    """

    name: str
    rows: int
    rows_estimated: int
    chunks: int  # 0: not planned yet
    chunks_done: int
    eta_s: float | None

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class CaptureView:
    """A capture task as it is now. Offsets are the log's, LSNs the source's."""

    task: str
    state: str
    rows: int
    bytes: int
    log_end: int | None  # None: the log is not open yet
    position: int
    position_time_us: int
    source_end: int  # newest LSN that the source has told of; 0: none yet
    acknowledged: int
    snapshot_rows: int
    snapshot_rows_estimated: int
    reconnects: int
    error: TailraceError | None = None  # why it is connecting again
    slot: SourceHealth | None = None  # when it was last looked at
    concerns: tuple[SourceWarning, ...] = ()
    snapshot: tuple[TableView, ...] = ()  # what is not whole yet, up to a limit

    @classmethod
    def at_rest(cls, task: str, tail: Tail) -> CaptureView:
        """Return the view of a task that nobody captures; its log ends at `tail`."""
        return cls(
            task=task,
            state="stopped",
            rows=0,
            bytes=0,
            log_end=tail.offset,
            position=tail.position,
            position_time_us=tail.position_time_us,
            source_end=0,
            acknowledged=0,
            snapshot_rows=0,
            snapshot_rows_estimated=0,
            reconnects=0,
        )

    @property
    def source_lag_bytes(self) -> int | None:
        """Bytes of the source's WAL that are not durable in the log; None: not known yet."""
        if self.log_end is None or not self.source_end:
            return None
        return max(0, self.source_end - self.position)

    def source_lag_s(self, now_us: int) -> float | None:
        """Age of the newest durable commit if there is more to come, else 0."""
        return lag_s(self.source_lag_bytes, self.position_time_us, now_us)


@dataclass(frozen=True, slots=True)
class SourceView:
    """One source's way, as it is now: what is captured, and how far each sink is with it.

    `name` is the source's name among several, empty for the only one; `engine_task` the number
    of the capture task that works on it.
    """

    name: str
    engine_task: int
    task: CaptureView
    sinks: tuple[SinkView, ...]


@dataclass(frozen=True, slots=True)
class PipelineView:
    """The engine as it is now."""

    name: str
    state: PipelineState
    sources: tuple[SourceView, ...]
    error: TailraceError | None

    @property
    def sinks(self) -> tuple[SinkView, ...]:
        """The sinks of all sources, source by source."""
        return tuple(sink for source in self.sources for sink in source.sinks)


def lag_s(lag_bytes: int | None, since_us: int | None, now_us: int) -> float | None:
    """Return the seconds behind: 0 with nothing to come, None if it can't be said."""
    if lag_bytes is None:
        return None
    if lag_bytes == 0:
        return 0.0
    return round(max(0, now_us - since_us) / 1e6, 3) if since_us else None
