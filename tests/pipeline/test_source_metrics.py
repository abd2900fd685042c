"""The metrics of sources and sinks."""

from __future__ import annotations

from typing import Any, cast

from tailrace.changelog.format import Tail
from tailrace.engine.contracts import Metrics
from tailrace.pipeline.status.source_metrics import SourceMetrics
from tailrace.pipeline.status.views import CaptureView, SinkState, SinkView, SourceView


class Numbers:
    """In place of an engine's metrics: gauges by name."""

    def __init__(self) -> None:
        self.gauges: dict[str, float] = {}
        self._name = ""

    def gauge(self, name: str, description: str, labels: dict[str, str]) -> Numbers:
        self._name = name
        return self

    def counter(self, *_: Any) -> Numbers:
        return self

    def set(self, value: float) -> None:
        self.gauges[self._name] = value

    def inc(self, amount: float) -> None:
        """Count nothing."""


def shown(sink: SinkView) -> dict[str, float]:
    numbers = Numbers()
    task = CaptureView.at_rest("0", Tail(100, 5, 1))
    SourceMetrics(cast(Metrics, numbers)).note([SourceView("", None, task, (sink,))])
    return numbers.gauges


def test_a_sink_with_an_unknown_position_has_no_lag_metric() -> None:
    unknown = shown(SinkView("lake", "delta", SinkState.RETRYING))
    assert unknown == {"tailrace_sink_running": 0.0}
    behind = shown(SinkView("lake", "delta", SinkState.RUNNING, position=40, pending_since_us=1))
    assert behind["tailrace_sink_lag_bytes"] == 60.0
    assert behind["tailrace_sink_lag_seconds"] > 0
    there = shown(SinkView("lake", "delta", SinkState.RUNNING, position=100))
    assert (there["tailrace_sink_lag_bytes"], there["tailrace_sink_lag_seconds"]) == (0.0, 0.0)
