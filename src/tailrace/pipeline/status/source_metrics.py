"""Sources and their sinks in the engine's metrics, from what they show of themselves."""

from __future__ import annotations

import time
from collections.abc import Iterable

from tailrace.engine.contracts import Metrics
from tailrace.pipeline.status.views import SinkState, SinkView, SourceView

_COUNTERS = {
    "rows": ("tailrace_sink_rows", "Changes that were written to the sink."),
    "batches": ("tailrace_sink_batches", "Batches that were written to the sink."),
    "bytes": ("tailrace_sink_log_bytes", "Bytes of the log that were written to the sink."),
    "dead_letters": ("tailrace_sink_dead_letters", "Records that the sink's target can't hold."),
}
_LAG_BYTES = ("tailrace_sink_lag_bytes", "Bytes of the log that the sink has not written.")
_LAG_SECONDS = ("tailrace_sink_lag_seconds", "Age of the oldest commit that the sink has not written.")
_IS_RUNNING = ("tailrace_sink_running", "1 while the sink writes, 0 where it failed, tries again or ended.")


class SourceMetrics:
    """Counts for one task. One thread at a time.

    :param metrics: the task's.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seen: dict[tuple[str, str], SinkView] = {}
        self._counted: dict[tuple[str, str], int] = {}

    def note(self, sources: Iterable[SourceView]) -> None:
        """Bring the numbers to what these sources and their sinks show."""
        for source in sources:
            self._note_source(source)
            for sink in source.sinks:
                self._note(source, sink)

    def _note_source(self, source: SourceView) -> None:
        labels = {"source": source.name}
        for number in source.task.slot.numbers if source.task.slot is not None else ():
            if not number.rises:
                self._metrics.gauge(number.name, number.description, labels).set(float(number.value))
                continue
            place, now = (source.name, number.name), number.value
            then = self._counted.get(place, 0)
            # One that is captured again begins with nothing.
            counter = self._metrics.counter(number.name, number.description, labels)
            counter.inc(now - then if now >= then else now)
            self._counted[place] = now

    def _note(self, source: SourceView, sink: SinkView) -> None:
        labels = {"source": source.name, "sink": sink.name, "type": sink.type}
        before = self._seen.get((source.name, sink.name))
        if sink is not before:
            for name, (metric, description) in _COUNTERS.items():
                now, then = getattr(sink, name), getattr(before, name, 0)
                # A source that is captured again begins with sinks that have counted nothing.
                counter = self._metrics.counter(metric, description, labels)
                counter.inc(now - then if now >= then else now)
            self._metrics.gauge(*_IS_RUNNING, labels).set(float(sink.state is SinkState.RUNNING))
            self._seen[source.name, sink.name] = sink
        end = source.task.log_end
        if (lag_bytes := sink.lag_bytes(end)) is not None:
            self._metrics.gauge(*_LAG_BYTES, labels).set(float(lag_bytes))
        self._metrics.gauge(*_LAG_SECONDS, labels).set(sink.lag_s(end, time.time_ns() // 1000) or 0.0)
