"""Real time in the engine's metrics, from what consumers show of it."""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.engine.contracts import Metrics
from tailrace.pipeline.status.views import SourceView
from tailrace.realtime.path import RealtimeView
from tailrace.realtime.switching import RealtimeMode

_GAUGES = {
    "position": ("tailrace_realtime_position_bytes", "Log offset before which everything is handled."),
    "buffer_blocks": ("tailrace_realtime_buffer_blocks", "Blocks of the log that wait in memory."),
    "buffer_rows": ("tailrace_realtime_buffer_rows", "Changes that wait in memory."),
    "buffer_bytes": ("tailrace_realtime_buffer_bytes", "Bytes that wait in memory, or are worked on."),
    "buffer_capacity_bytes": ("tailrace_realtime_buffer_capacity_bytes", "Most bytes that may wait there."),
    "lag_segments": ("tailrace_realtime_lag_segments", "Segments of the log that begin after the position."),
    "lag_ms": ("tailrace_realtime_lag_milliseconds", "Age of the oldest change that waits in memory."),
}
_COUNTERS = {
    "switches": ("tailrace_realtime_switches", "Changes of mode."),
    "fall_backs": ("tailrace_realtime_fall_backs", "Times that the log took over, as the buffer was full."),
    "restored_rows": ("tailrace_realtime_restored_rows", "Changes read from the log to restore real time."),
}
_ON = ("tailrace_realtime_on", "1 while the consumer is fed from memory, 0 while from the log.")


class RealtimeMetrics:
    """Counts for one task. One thread at a time.

    :param metrics: the task's.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seen: dict[tuple[str, str], RealtimeView] = {}

    def note(self, sources: Iterable[SourceView]) -> None:
        """Bring the numbers to what the consumers of these sources show."""
        for source in sources:
            for sink in source.sinks:
                if sink.realtime is not None:
                    self._note(source.name, sink.name, sink.realtime)

    def _note(self, source: str, consumer: str, view: RealtimeView) -> None:
        labels = {"source": source, "consumer": consumer}
        before = self._seen.get((source, consumer))
        for name, (metric, description) in _COUNTERS.items():
            now, then = getattr(view, name), getattr(before, name, 0)
            self._metrics.counter(metric, description, labels).inc(now - then if now >= then else now)
        for name, (metric, description) in _GAUGES.items():
            self._metrics.gauge(metric, description, labels).set(float(getattr(view, name)))
        self._metrics.gauge(*_ON, labels).set(float(view.mode is RealtimeMode.ON))
        self._seen[source, consumer] = view
