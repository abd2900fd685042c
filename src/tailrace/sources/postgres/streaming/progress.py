"""What a capture says of itself while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tailrace.changelog.writer import Tail
from tailrace.errors import TailraceError
from tailrace.sources.postgres.slot.health import SlotHealth, SlotWarning
from tailrace.sources.postgres.snapshot.copy import TableProgress

PhaseName = Literal["connecting", "queued", "snapshot", "streaming", "waiting_for_disk", "stopped"]


@dataclass(frozen=True, slots=True)
class CaptureProgress:
    """What a task does and how far it is. Counts are since the task was started."""

    phase: PhaseName
    rows: int
    bytes: int
    appended: Tail
    durable: Tail
    server_end_lsn: int  # as far as the server told
    acknowledged_lsn: int
    snapshot: dict[str, TableProgress]
    reconnects: int
    error: TailraceError | None  # why it is connecting again
    slot: SlotHealth | None = None  # when it was last looked at
    concerns: tuple[SlotWarning, ...] = ()
