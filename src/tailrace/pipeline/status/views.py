"""Views of a pipeline's status: frozen values, which the display, `status`, its file and the metrics read.

Each part of a pipeline replaces its own view by one atomic assignment, so that readers need no lock and
never see a partial update. `PipelineView` holds them all. `publisher.StatusPublisher` makes that of a
running engine, `document.view_at_rest` that of a pipeline at rest.

    STARTING ◀─▶ SNAPSHOT ◀─▶ STREAMING ──▶ STOPPING ──▶ STOPPED | FAILED | NEEDS_SNAPSHOT

No decision depends on a pipeline's state: it is only for users and programs. A failure first goes
through STOPPING like any other end: sinks finish their batch and durable changes are acknowledged.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from tailrace.changelog.format import Tail
from tailrace.errors import NEEDS_SNAPSHOT, TailraceError, error_json
from tailrace.model import format_lsn
from tailrace.realtime.path import RealtimeView
from tailrace.sources.progress import SourceHealth, SourceWarning, TableProgress

#: Limit of the tables of a snapshot in a view.
TABLES_SHOWN_MAX = 200


class PipelineState(enum.StrEnum):
    """The states of a pipeline, as in `status --json`."""

    STARTING = "starting"
    SNAPSHOT = "snapshot"
    STREAMING = "streaming"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    NEEDS_SNAPSHOT = "needs_snapshot"  # failed, and only a new log helps


#: Final states.
ENDED = (PipelineState.STOPPED, PipelineState.FAILED, PipelineState.NEEDS_SNAPSHOT)

#: States from the least advanced one on, with the phases of captures that imply them. Other phases imply no
#: state: a capture may wait for disk space both in a snapshot and while streaming.
_PHASES = {
    PipelineState.STARTING: {"connecting", "queued"},
    PipelineState.SNAPSHOT: {"snapshot"},
    PipelineState.STREAMING: {"streaming"},
}


def state_while_running(phases: Iterable[str], before: PipelineState) -> PipelineState:
    """Return the state of the least advanced capture: a pipeline streams when all of them do.

    :param before: the previous state, kept if no capture's phase determines another one.
    """
    known = set(phases)
    return next((state for state, meant in _PHASES.items() if meant & known), before)


def state_at_end(failures: Iterable[TailraceError | None]) -> PipelineState:
    """Return the state of a pipeline that has ended with these failures; None entries are ignored."""
    kinds = {error.kind for error in failures if error is not None}
    if not kinds:
        return PipelineState.STOPPED
    return PipelineState.NEEDS_SNAPSHOT if kinds & NEEDS_SNAPSHOT else PipelineState.FAILED


#: The type of an engine's handler, which is shown among the sinks.
HANDLER = "engine"


class SinkState(enum.StrEnum):
    """The states of a sink, as in `status --json`."""

    STARTING = "starting"
    RUNNING = "running"
    RETRYING = "retrying"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SinkView:
    """The present status of a sink.

    `position` is the log offset up to which everything is in the sink; None: not known yet, or, if
    `is_empty`, the sink has recorded none.
    `pending_since_us` is the commit time (since 1970) of the oldest change that is not in the sink.
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
    error: TailraceError | None = None
    is_empty: bool = False
    realtime: RealtimeView | None = None

    def lag_bytes(self, log_end: int | None) -> int | None:
        """Return the bytes of a log that ends at `log_end` that are not in the sink; None: not known."""
        reached = 0 if self.is_empty else self.position
        return None if reached is None or log_end is None else max(0, log_end - reached)

    def lag_s(self, log_end: int | None, now_us: int) -> float | None:
        """Return the age of the oldest change that is not in the sink, 0 if there is none; None: unknown."""
        return _age_s(self.lag_bytes(log_end), self.pending_since_us, now_us)

    def as_json(self, log_end: int | None, now_us: int, *, runs: bool) -> dict[str, Any]:
        """Return the view as one JSON object; counts only where an engine `runs`."""
        counts = {"rows": self.rows, "dead_letters": self.dead_letters} if runs else {}
        return {
            "name": self.name,
            "type": self.type,
            "state": str(self.state),
            "position": self.position,
            "lag_bytes": self.lag_bytes(log_end),
            "lag_s": self.lag_s(log_end, now_us),
            **counts,
            **({} if self.realtime is None else {"realtime": asdict(self.realtime)}),
            "error": error_json(self.error),
        }


@dataclass(frozen=True, slots=True)
class TableView:
    """A table whose snapshot is not complete in the log; its number of rows is an estimate.

    `eta_s`: seconds left at the rate so far; None: nothing was read in this run, or more rows
    were read than estimated.
    """

    name: str
    rows: int
    rows_estimated: int
    chunks: int  # 0: not planned yet
    chunks_done: int
    eta_s: float | None


def tables_left(tables: Mapping[str, TableProgress], now_s: float) -> tuple[TableView, ...]:
    """Return the tables whose rows are not all read, up to a limit; `now_s` on the monotonic clock."""
    left = ((name, table) for name, table in tables.items() if not table.done)
    return tuple(
        TableView(name, table.rows, table.rows_estimated, table.chunks, table.chunks_done, table.eta_s(now_s))
        for name, table in islice(left, TABLES_SHOWN_MAX)
    )


@dataclass(frozen=True, slots=True)
class CaptureView:
    """The present status of a capture. Offsets are the log's, LSNs the source's."""

    task: str
    state: str
    rows: int
    bytes: int
    log_end: int | None  # None: the log is not open yet
    position: int
    position_time_us: int
    source_end: int  # newest LSN that the source has reported; 0: none yet
    acknowledged: int
    snapshot_rows: int
    snapshot_rows_estimated: int
    reconnects: int
    error: TailraceError | None = None  # for which it reconnects
    slot: SourceHealth | None = None  # as of the last query
    concerns: tuple[SourceWarning, ...] = ()
    snapshot: tuple[TableView, ...] = ()  # tables that are not complete yet, up to a limit

    @classmethod
    def at_rest(cls, task: str, tail: Tail | None) -> CaptureView:
        """Return the view of a task that is not captured; its log ends at `tail`; None: it has no log."""
        return cls(
            task=task,
            state="stopped",
            rows=0,
            bytes=0,
            log_end=None if tail is None else tail.offset,
            position=0 if tail is None else tail.position,
            position_time_us=0 if tail is None else tail.position_time_us,
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
        """Return the age of the newest durable commit if later changes are missing, else 0; None: unknown."""
        return _age_s(self.source_lag_bytes, self.position_time_us, now_us)

    def as_json(self, now_us: int, *, runs: bool) -> dict[str, Any]:
        """Return the view as one JSON object; counts only where an engine `runs`."""
        found: dict[str, Any] = {
            "task": self.task,
            "state": self.state,
            "source_lag_bytes": self.source_lag_bytes,
            "source_lag_s": self.source_lag_s(now_us),
            "log_end": self.log_end,
            "error": error_json(self.error),
            "position": None if self.log_end is None else format_lsn(self.position),
            "slot": self.slot.details if self.slot else None,
            "warnings": [concern.as_json() for concern in self.concerns],
            "snapshot": [asdict(table) for table in self.snapshot],
        }
        if runs:
            found |= {
                "acknowledged": format_lsn(self.acknowledged),
                "rows": self.rows,
                "bytes": self.bytes,
                "reconnects": self.reconnects,
            }
        return found


@dataclass(frozen=True, slots=True)
class SourceView:
    """The present status of a source: its capture and its sinks.

    `name` is the source's name if there are several, else empty; `engine_task` the number of the task that
    captures it, None if there is none.
    """

    name: str
    engine_task: int | None
    task: CaptureView
    sinks: tuple[SinkView, ...]

    def task_json(self, now_us: int, *, runs: bool) -> dict[str, Any]:
        """Return the capture as one JSON object, with the source's name and task if it has a name."""
        found = self.task.as_json(now_us, runs=runs)
        if not self.name:
            return found
        number = {} if self.engine_task is None else {"engine_task": self.engine_task}
        return {"name": self.name, **found, **number}

    def sinks_json(self, now_us: int, *, runs: bool) -> list[dict[str, Any]]:
        """Return the sinks as JSON objects, with the source's name if it has one."""
        named = {"source": self.name} if self.name else {}
        return [{**named, **sink.as_json(self.task.log_end, now_us, runs=runs)} for sink in self.sinks]


@dataclass(frozen=True, slots=True)
class PipelineView:
    """The present status of a pipeline; `pid` is the process of the engine that runs it, None at rest."""

    name: str
    state: PipelineState
    sources: tuple[SourceView, ...]
    error: TailraceError | None
    pid: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the view as `status --json` prints it.

        With several sources, each entry of `tasks` has the source's `name`, each of `sinks` its `source`.
        """
        now_us = time.time_ns() // 1000
        runs = self.pid is not None
        return {
            "name": self.name,
            "state": str(self.state),
            **({"pid": self.pid, "updated_us": now_us} if runs else {}),
            "tasks": [source.task_json(now_us, runs=runs) for source in self.sources],
            "sinks": [sink for source in self.sources for sink in source.sinks_json(now_us, runs=runs)],
            "error": error_json(self.error),
        }


def _age_s(lag_bytes: int | None, since_us: int | None, now_us: int) -> float | None:
    # 0 without a lag, None if it is not known.
    if lag_bytes is None:
        return None
    if lag_bytes == 0:
        return 0.0
    return round(max(0, now_us - since_us) / 1e6, 3) if since_us else None
