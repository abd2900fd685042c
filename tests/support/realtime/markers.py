"""Reads the markers in a log."""

from __future__ import annotations

from tailrace.protocol import frames
from tailrace.realtime.switching import Marker, MarkerKind


def markers_in(content: frames.Bytes) -> list[tuple[int, Marker]]:
    """Return the markers among whole frames, in order, each with the number of bytes up to its end."""
    found = []
    for at, frame in frames.each_frame(content):
        said = frames.control_json(frame) if frame[frames.KIND_AT] == frames.CONTROL else {}
        if "marker" in said:
            marker = Marker(MarkerKind(said["marker"]), said["consumer"], said.get("log_offset", -1))
            found.append((at + len(frame), marker))
    return found
