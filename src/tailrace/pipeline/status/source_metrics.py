"""Metrics of sources, their sinks and an engine's handler, derived from their views."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from tailrace.engine.contracts import Metrics
from tailrace.pipeline.status.views import HANDLER, SinkState, SinkView, SourceView
from tailrace.realtime.path import RealtimeView
from tailrace.realtime.switching import RealtimeMode

_COUNTERS = {
    "rows": ("tailrace_sink_rows", "Changes that were written to the sink."),
    "batches": ("tailrace_sink_batches", "Batches that were written to the sink."),
    "bytes": ("tailrace_sink_log_bytes", "Bytes of the log that were written to the sink."),
    "dead_letters": ("tailrace_sink_dead_letters", "Records that the sink's target can't hold."),
}
_LAG_BYTES = ("tailrace_sink_lag_bytes", "Bytes of the log that the sink has not written.")
_LAG_SECONDS = ("tailrace_sink_lag_seconds", "Age of the oldest commit that the sink has not written.")
_IS_RUNNING = ("tailrace_sink_running", "1 while the sink runs, 0 if it failed, retries or ended.")

_REALTIME_GAUGES = {
    "position": ("tailrace_realtime_position_bytes", "Log offset up to which everything is processed."),
    "buffer_blocks": ("tailrace_realtime_buffer_blocks", "Blocks of the log that wait in memory."),
    "buffer_rows": ("tailrace_realtime_buffer_rows", "Changes that wait in memory."),
    "buffer_bytes": ("tailrace_realtime_buffer_bytes", "Bytes that wait in memory or are being processed."),
    "buffer_capacity_bytes": ("tailrace_realtime_buffer_capacity_bytes", "Limit of bytes in memory."),
    "lag_segments": ("tailrace_realtime_lag_segments", "Segments of the log that begin after the position."),
    "lag_ms": ("tailrace_realtime_lag_milliseconds", "Age of the oldest change that waits in memory."),
}
_REALTIME_COUNTERS = {
    "switches": ("tailrace_realtime_switches", "Changes of mode."),
    "fall_backs": ("tailrace_realtime_fall_backs", "Switches to the log because the buffer was full."),
    "restored_rows": ("tailrace_realtime_restored_rows", "Changes read from the log to restore real time."),
}
_REALTIME_ON = ("tailrace_realtime_on", "1 while the consumer is fed from memory, 0 while from the log.")


class SourceMetrics:
    """Updates the metrics of one task from views. One thread at a time.

    :param metrics: the metrics of the task.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seen: dict[tuple[str, str], SinkView] = {}
        self._counted: dict[tuple[str, str], int] = {}

    def note(self, sources: Iterable[SourceView]) -> None:
        """Update the metrics to the views of these sources and their sinks."""
        for source in sources:
            self._note_source(source)
            for sink in source.sinks:
                before = self._seen.get((source.name, sink.name))
                if sink.type != HANDLER:
                    self._note(source, sink, before)
                if sink.realtime is not None:
                    self._note_realtime(source.name, sink.name, sink.realtime, before)
                self._seen[source.name, sink.name] = sink

    def _note_source(self, source: SourceView) -> None:
        labels = {"source": source.name}
        for number in source.task.slot.numbers if source.task.slot is not None else ():
            if not number.rises:
                self._metrics.gauge(number.name, number.description, labels).set(float(number.value))
                continue
            place = source.name, number.name
            self._rise((number.name, number.description), labels, number.value, self._counted.get(place, 0))
            self._counted[place] = number.value

    def _note(self, source: SourceView, sink: SinkView, before: SinkView | None) -> None:
        labels = {"source": source.name, "sink": sink.name, "type": sink.type}
        if sink is not before:
            self._count(_COUNTERS, labels, sink, before)
            self._metrics.gauge(*_IS_RUNNING, labels).set(float(sink.state is SinkState.RUNNING))
        end = source.task.log_end
        if (lag_bytes := sink.lag_bytes(end)) is not None:
            self._metrics.gauge(*_LAG_BYTES, labels).set(float(lag_bytes))
            self._metrics.gauge(*_LAG_SECONDS, labels).set(sink.lag_s(end, time.time_ns() // 1000) or 0.0)

    def _note_realtime(self, source: str, consumer: str, view: RealtimeView, before: SinkView | None) -> None:
        labels = {"source": source, "consumer": consumer}
        self._count(_REALTIME_COUNTERS, labels, view, None if before is None else before.realtime)
        for name, (metric, description) in _REALTIME_GAUGES.items():
            self._metrics.gauge(metric, description, labels).set(float(getattr(view, name)))
        self._metrics.gauge(*_REALTIME_ON, labels).set(float(view.mode is RealtimeMode.ON))

    def _count(
        self, counters: Mapping[str, tuple[str, str]], labels: dict[str, str], view: object, before: object
    ) -> None:
        for name, metric in counters.items():
            self._rise(metric, labels, getattr(view, name), getattr(before, name, 0))

    def _rise(self, metric: tuple[str, str], labels: dict[str, str], now: int, then: int) -> None:
        # A restarted source counts from 0, and so do its sinks.
        self._metrics.counter(*metric, labels).inc(now - then if now >= then else now)
