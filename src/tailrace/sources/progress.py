"""What a capture says of itself while it runs, and what a source says of itself, whatever its type."""

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
    """A number that a source has for the engine's metrics; `rises`: it is a count, and never falls."""

    name: str
    description: str
    value: int
    rises: bool = False


@dataclass(frozen=True, slots=True)
class SourceHealth:
    """What keeps changes for us on the source, at one moment; PostgreSQL's is the slot.

    `state` is one word; `retained_bytes`, what the source keeps for us, None if it does not say;
    `details`, what `status --json` shows; `numbers`, what metrics do.
    """

    state: str
    retained_bytes: int | None
    details: dict[str, Any]
    numbers: tuple[SourceNumber, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceWarning:
    """Something that a person should know of. `key` is the same while it lasts."""

    key: str
    message: str
    repair: str = ""

    def as_json(self) -> dict[str, str]:
        return {"name": self.key, "message": self.message, "repair": self.repair}


@dataclass(slots=True)
class TableProgress:
    """How far one table's snapshot is; the estimate is the server's statistics.

    `rows` are those that were read, in chunks that are done and in those that are under way.
    Changed by several threads, through its methods.
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
        """The table was planned, or a plan is gone on with."""
        with self._lock:
            self.chunks, self.chunks_done, self.rows_estimated = chunks, chunks_done, rows_estimated
            self.rows = self.rows_before = rows
            self.done = chunks_done == chunks

    def add(self, rows: int, *, chunks: int = 0) -> None:
        """So many rows more were read; so many chunks more are done."""
        with self._lock:
            self.began_s = self.began_s or time.monotonic()
            self.rows += rows
            self.chunks_done += chunks
            self.done = 0 < self.chunks <= self.chunks_done

    def eta_s(self, now_s: float) -> float | None:
        """Return the seconds left at the pace so far; None if it can't be said."""
        if self.done:
            return 0.0
        read = self.rows - self.rows_before
        left = self.rows_estimated - self.rows
        if not self.began_s or read <= 0 or left <= 0:
            return None
        return left * (now_s - self.began_s) / read


@dataclass(frozen=True, slots=True)
class CaptureProgress:
    """What a task does and how far it is. Counts are since the task was started."""

    phase: PhaseName
    rows: int
    bytes: int
    appended: Tail
    durable: Tail
    source_end: int  # the position of the source's end, as far as it said
    acknowledged: int
    snapshot: dict[str, TableProgress]
    reconnects: int
    error: TailraceError | None  # why it is connecting again
    health: SourceHealth | None = None  # when it was last looked at
    warnings: tuple[SourceWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class SourceLook:
    """What a source says when it is asked beside a capture; None: it did not say.

    `lost`: it no longer has changes that the log lacks.
    """

    end: int | None
    health: SourceHealth | None = None
    warnings: tuple[SourceWarning, ...] = ()
    lost: TailraceError | None = None
