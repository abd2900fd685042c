"""Progress of a running capture, and the state of a source, for all types of source."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from tailrace.changelog.writer import Tail
from tailrace.errors import TailraceError

PhaseName = Literal["connecting", "queued", "snapshot", "streaming", "waiting_for_disk", "stopped"]


@dataclass(frozen=True, slots=True)
class SourceNumber:
    """A number of a source for the engine's metrics; `rises`: it is a counter and never decreases."""

    name: str
    description: str
    value: int
    rises: bool = False


@dataclass(frozen=True, slots=True)
class SourceHealth:
    """State of what retains changes for this capture on the source; for PostgreSQL, of the slot.

    `state` is one word; `retained_bytes` is how much the source retains, None if unknown; `status --json`
    shows `details`; metrics show `numbers`.
    """

    state: str
    retained_bytes: int | None
    details: dict[str, Any]
    numbers: tuple[SourceNumber, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceWarning:
    """A warning for the user. `key` stays the same while the problem lasts."""

    key: str
    message: str
    repair: str = ""

    def as_json(self) -> dict[str, str]:
        return {"name": self.key, "message": self.message, "repair": self.repair}


@dataclass(slots=True)
class TableProgress:
    """Progress of one table's snapshot; the estimate is from the server's statistics.

    `rows` counts the rows that were read, in finished and in unfinished chunks.
    Several threads change it, through its methods.
    """

    rows: int
    rows_estimated: int
    done: bool
    chunks: int = 0  # 0: not planned yet
    chunks_done: int = 0
    began_s: float = 0.0  # on the monotonic clock; 0: nothing was read in this run
    rows_before: int = 0  # read before this run
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def plan(self, chunks: int, rows_estimated: int, *, chunks_done: int = 0, rows: int = 0) -> None:
        """Note that the table was planned, or that an earlier plan continues."""
        with self._lock:
            self.chunks, self.chunks_done, self.rows_estimated = chunks, chunks_done, rows_estimated
            self.rows = self.rows_before = rows
            self.done = chunks_done == chunks

    def add(self, rows: int, *, chunks: int = 0) -> None:
        """Add rows that were read and chunks that are done."""
        with self._lock:
            self.began_s = self.began_s or time.monotonic()
            self.rows += rows
            self.chunks_done += chunks
            self.done = 0 < self.chunks <= self.chunks_done

    def eta_s(self, now_s: float) -> float | None:
        """Return the remaining seconds at the rate so far; None if unknown."""
        if self.done:
            return 0.0
        read = self.rows - self.rows_before
        left = self.rows_estimated - self.rows
        if not self.began_s or read <= 0 or left <= 0:
            return None
        return left * (now_s - self.began_s) / read


@dataclass(frozen=True, slots=True)
class CaptureProgress:
    """State and progress of a task. Counts begin with the task's start."""

    phase: PhaseName
    rows: int
    bytes: int
    appended: Tail
    durable: Tail
    source_end: int  # the position of the source's end, as last reported
    acknowledged: int
    snapshot: dict[str, TableProgress]
    reconnects: int
    error: TailraceError | None  # why it is connecting again
    health: SourceHealth | None = None  # as of the last check
    warnings: tuple[SourceWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceLook:
    """State of a source, as queried independently of a capture; None: unknown.

    `lost`: the error if it no longer has changes that the log lacks.
    """

    end: int | None
    health: SourceHealth | None = None
    warnings: tuple[SourceWarning, ...] = ()
    lost: TailraceError | None = None
