"""Markers: what the change log says of a consumer that is fed from memory. Pure.

    {"marker": "realtime", "consumer": NAME, "log_offset": N}       everything before N is handled
    {"marker": "stop_realtime", "consumer": NAME, "log_offset": N}  the log's side takes over, at N
    {"marker": "try_start_realtime", "consumer": NAME}              the log's side goes up to here

A marker is the content of a progress frame, which says nothing else: who knows nothing of markers takes it as
one. It stands between transactions.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tailrace.protocol import frames


class MarkerKind(enum.StrEnum):
    """What a marker says."""

    REALTIME = "realtime"
    STOP_REALTIME = "stop_realtime"
    TRY_START_REALTIME = "try_start_realtime"


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker of one consumer.

    :param log_offset: everything before it is handled; -1 for `TRY_START_REALTIME`, whose place says all.
    """

    kind: MarkerKind
    consumer: str
    log_offset: int = -1

    def frame(self, position: int, time_us: int) -> bytes:
        """Return the frame to append at a boundary: `position` and `time_us` are those of the log there."""
        content: dict[str, str | int] = {"marker": str(self.kind), "consumer": self.consumer}
        if self.kind is not MarkerKind.TRY_START_REALTIME:
            content["log_offset"] = self.log_offset
        return frames.control_frame(frames.PROGRESS, position, time_us, content)
