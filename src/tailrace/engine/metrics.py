"""Metrics of an engine, for Prometheus, and the endpoint that serves them.

The engine's own metrics are computed from its view when they are read: they cost nothing in addition. Those
of its connector and tasks are shown with them. Each engine has its own registry; the library's default
registry is not used.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from tailrace.config import EngineOptions
from tailrace.engine.lifecycle import State
from tailrace.engine.supervision import Phase
from tailrace.engine.views import EngineView, TaskView
from tailrace.errors import Kind, TailraceError

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

log = structlog.get_logger(__name__)

#: Prefix of the names of the engine's own metrics.
OWN_PREFIX = "tailrace_engine_"

#: Labels of each metric: engine and task; the connector's metrics have an empty task.
LABELS = ("engine", "task")

#: Limit of the time series of connector and tasks, so that labels by record can't exhaust the memory.
SERIES_MAX = 10_000

#: Longest wait for the end of the server's thread, which checks twice a second, in seconds.
END_S = 1.0

#: Prometheus' rule for names; its library accepts any text, which not every reader of metrics does.
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)

_NO_LABELS: Mapping[str, str] = MappingProxyType({})


class _Own(NamedTuple):
    # A metric with a value for each task.
    name: str
    description: str
    value: Callable[[TaskView], float]


COUNTERS = (
    _Own("records_polled", "Records that the task polled.", lambda task: task.polled),
    _Own("batches_polled", "Batches that the task polled.", lambda task: task.batches),
    _Own("records_delivered", "Records of batches delivered completely.", lambda task: task.delivered),
    _Own("records_dropped", "Records that transformations dropped.", lambda task: task.dropped),
    _Own("records_processed", "Records up to which everything is processed.", lambda task: task.processed),
    _Own("records_committed", "Records up to the last commit.", lambda task: task.committed),
    _Own("retries", "Operations that failed and were retried.", lambda task: task.retries),
    _Own("restarts", "Restarts of the task.", lambda task: task.restarts),
    _Own("poll_seconds", "Seconds spent polling, including waits for records.", lambda task: task.poll_s),
    _Own("handler_seconds", "Seconds spent in handlers of this process.", lambda task: task.handler_s),
)
QUEUE_GAUGES = (
    _Own("queue_batches", "Batches polled and not yet delivered.", lambda task: task.batches_under_way),
    _Own("queue_bytes", "Bytes of batches polled and not yet delivered.", lambda task: task.bytes_under_way),
)
GAUGES = (
    _Own("source_errors", "Parts of the source that can't be read now.", lambda task: len(task.errors)),
)


def families_of(view: EngineView, *, polls: bool = True) -> Iterable[Metric]:
    """Yield the engine's own metrics; without `polls`, those of polled records are left out."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for own in COUNTERS if polls else ():
        counted = CounterMetricFamily(OWN_PREFIX + own.name, own.description, labels=LABELS)
        for task in view.tasks:
            counted.add_metric((view.name, str(task.number)), own.value(task))
        yield counted
    for own in (*(QUEUE_GAUGES if polls else ()), *GAUGES):
        level = GaugeMetricFamily(OWN_PREFIX + own.name, own.description, labels=LABELS)
        for task in view.tasks:
            level.add_metric((view.name, str(task.number)), own.value(task))
        yield level
    phases = GaugeMetricFamily(
        OWN_PREFIX + "task_state", "1 for the state of the task, 0 for the others.", labels=(*LABELS, "state")
    )
    for task in view.tasks:
        for phase in Phase:
            phases.add_metric((view.name, str(task.number), str(phase)), float(task.state is phase))
    yield phases
    states = GaugeMetricFamily(
        OWN_PREFIX + "state",
        "1 for the state of the engine, 0 for the others.",
        labels=("engine", "state"),
    )
    for state in State:
        states.add_metric((view.name, str(state)), float(view.state is state))
    yield states


class EngineMetrics:
    """The metrics of one engine. Any thread, at any time, also after its end.

    :param view: returns the present view of the engine.
    :param polls: whether its tasks poll records; if not, the metrics of records are left out.
    """

    def __init__(self, name: str, view: Callable[[], EngineView], *, polls: bool = True) -> None:
        self._name = name
        self._view = view
        self._polls = polls
        self._lock = threading.Lock()
        self._registry: CollectorRegistry | None = None
        self._families: dict[str, _Family] = {}
        self._series: dict[tuple[str, ...], Any] = {}
        #: The port at which they are served (`engine.metrics_port`); None while they are not.
        self.port: int | None = None

    @property
    def registry(self) -> CollectorRegistry:
        """The registry, for a program that serves it together with others, or in another way."""
        # Imported here: programs that read no metrics need not load the library.
        from prometheus_client import CollectorRegistry

        with self._lock:
            if self._registry is None:
                self._registry = CollectorRegistry()
                self._registry.register(self)
            return self._registry

    def text(self) -> str:
        """Return the present values of all metrics in the text format of Prometheus."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode()

    def collect(self) -> Iterable[Metric]:
        """Return the present values of the engine's own metrics; for the registry."""
        return families_of(self._view(), polls=self._polls)

    def describe(self) -> Iterable[Metric]:
        """Return the names of the engine's own metrics; for the registry."""
        return families_of(EngineView(self._name, State.CREATING, (), None, ""), polls=self._polls)

    def of(self, task: str) -> BoundMetrics:
        """Return the factory of metrics for a task; for the connector, `task` is an empty string."""
        return BoundMetrics(self, self._name, task)

    def series(
        self, kind: str, name: str, description: str, labels: Mapping[str, str], **settings: Any
    ) -> Any:
        """Return the metric with these labels; create it if it does not exist.

        :param kind: `Counter`, `Gauge` or `Histogram` of prometheus_client, with its `settings`.
        :raises TailraceError: `ENGINE_MISUSED`, as `contracts.Metrics`.
        """
        registry, names = self.registry, tuple(sorted(labels))
        values = [str(labels[label]) for label in names]
        key = (name, *values)
        with self._lock:
            family = self._families.get(name)
            if family is None:
                family = _Family(kind, names, _made(registry, kind, name, description, names, settings))
                self._families[name] = family
            if family[:2] != (kind, names):
                raise _misused(name, "one of another kind or with other labels exists", "choose another name")
            found = self._series.get(key)
            if found is None:
                if len(self._series) >= SERIES_MAX:
                    raise _misused(
                        name,
                        f"there are {SERIES_MAX} series already",
                        "use labels with few values: tables, not records",
                    )
                found = self._series[key] = family.made.labels(*values)
            return found


class _Family(NamedTuple):
    # All series with one name.
    kind: str
    labels: tuple[str, ...]
    made: Any


def _made(
    registry: CollectorRegistry,
    kind: str,
    name: str,
    description: str,
    labels: Sequence[str],
    settings: Mapping[str, Any],
) -> Any:
    import prometheus_client

    wrong = [one for one in (name, *labels) if not _NAME.fullmatch(one)]
    if wrong:
        raise _misused(name, f"{wrong[0]!r} is not a valid name", "use letters, digits and _")
    if name.startswith(OWN_PREFIX):
        raise _misused(name, f"{OWN_PREFIX} is reserved for the engine's own", "choose another name")
    try:
        return getattr(prometheus_client, kind)(name, description, labels, registry=registry, **settings)
    except ValueError as error:
        raise _misused(name, str(error), "choose another name, or other settings") from error


def _misused(name: str, found: str, hint: str) -> TailraceError:
    return TailraceError(Kind.ENGINE_MISUSED, f"make the metric {name!r}: {found}", hint)


class BoundMetrics:
    """Makes metrics with the labels of an engine and of one task (`contracts.Metrics`)."""

    def __init__(self, metrics: EngineMetrics, engine: str, task: str) -> None:
        self._metrics = metrics
        self._own = {"engine": engine, "task": task}

    def counter(self, name: str, description: str, labels: Mapping[str, str] = _NO_LABELS) -> Counter:
        """Return a counter; see `contracts.Metrics`."""
        counter: Counter = self._series("Counter", name, description, labels)
        return counter

    def gauge(self, name: str, description: str, labels: Mapping[str, str] = _NO_LABELS) -> Gauge:
        """Return a gauge; see `contracts.Metrics`."""
        gauge: Gauge = self._series("Gauge", name, description, labels)
        return gauge

    def histogram(
        self,
        name: str,
        description: str,
        labels: Mapping[str, str] = _NO_LABELS,
        *,
        buckets: Sequence[float] | None = None,
    ) -> Histogram:
        """Return a histogram; see `contracts.Metrics`."""
        settings = {} if buckets is None else {"buckets": tuple(buckets)}
        histogram: Histogram = self._series("Histogram", name, description, labels, **settings)
        return histogram

    def _series(
        self, kind: str, name: str, description: str, labels: Mapping[str, str], **settings: Any
    ) -> Any:
        if not self._own.keys().isdisjoint(labels):
            raise _misused(name, "the engine sets the labels engine and task itself", "leave them out")
        return self._metrics.series(kind, name, description, {**labels, **self._own}, **settings)


class MetricsEndpoint:
    """Serves metrics at `http://<host>:<port>/metrics` while an engine runs.

    Opened and closed by the engine's own thread.

    :param name: of the engine, for the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._served: tuple[EngineMetrics, WSGIServer, threading.Thread] | None = None

    def open(self, options: EngineOptions, metrics: EngineMetrics) -> None:
        """Serve, if the options have a port.

        :raises TailraceError: `ENVIRONMENT_UNFIT` if the port can't be opened.
        """
        host, port = options.metrics_host, options.metrics_port
        if port is None:
            return
        from prometheus_client import start_http_server

        try:
            server, thread = start_http_server(port, host, metrics.registry)
        except OSError as error:
            raise TailraceError(
                Kind.ENVIRONMENT_UNFIT,
                f"serve metrics at {host}:{port}: {error.strerror or error}",
                "choose another engine.metrics_port or metrics_host, or leave metrics_port out",
                {"host": host, "port": port},
            ) from error
        thread.name = f"{self._name} metrics"
        self._served = metrics, server, thread
        metrics.port = server.server_port
        log.info("metrics are served", engine=self._name, host=host, port=server.server_port)

    def close(self) -> None:
        """Stop serving."""
        if self._served is None:
            return
        metrics, server, thread = self._served
        metrics.port = None
        server.shutdown()
        server.server_close()
        thread.join(END_S)
