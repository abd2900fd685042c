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
from typing import Any

from tailrace.errors import Kind, TailraceError
from tailrace.protocol import frames, metadata_frames
from tailrace.protocol.frames import Bytes

_MARKER, _CONSUMER, _LOG_OFFSET = "marker", "consumer", "log_offset"


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
        content: dict[str, str | int] = {_MARKER: str(self.kind), _CONSUMER: self.consumer}
        if self.kind is not MarkerKind.TRY_START_REALTIME:
            content[_LOG_OFFSET] = self.log_offset
        return frames.control_frame(frames.PROGRESS, position, time_us, content)


def markers_in(content: Bytes) -> list[tuple[int, Marker]]:
    """Return the markers among whole frames, in order, each with the number of bytes up to its end.

    :raises TailraceError: `PROTOCOL_VIOLATION` if a length does not fit, or a marker makes no sense.
    """
    found = []
    for at, frame in metadata_frames.progress_contents(content):
        said = frames.control_json(frame)
        if _MARKER in said:
            found.append((at + len(frame), _marker(said)))
    return found


def _marker(said: dict[str, Any]) -> Marker:
    kind = next((kind for kind in MarkerKind if str(kind) == said[_MARKER]), None)
    consumer, log_offset = said.get(_CONSUMER), said.get(_LOG_OFFSET, -1)
    is_offset = type(log_offset) is int and (log_offset == -1) == (kind is MarkerKind.TRY_START_REALTIME)
    if kind is None or not isinstance(consumer, str) or not is_offset or log_offset < -1:
        raise TailraceError(
            Kind.PROTOCOL_VIOLATION,
            "read a marker of a consumer that is fed from memory: it makes no sense",
            "read the log with the version of tailrace that wrote it",
        )
    return Marker(kind, consumer, log_offset)
