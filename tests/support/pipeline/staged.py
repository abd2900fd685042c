"""Fakes for the engine: a capture, sinks and a Spark that do what a test says."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from tailrace.changelog.format import Tail
from tailrace.errors import TailraceError
from tailrace.pipeline.background import Background
from tailrace.sinks.contract import SinkCommit
from tests.support.orders_log import LogOfOrders


@dataclass
class FakeProgress:
    phase: str = "connecting"
    rows: int = 0
    bytes: int = 0
    durable: Tail = field(default_factory=lambda: Tail(0, 0, 0))
    source_end: int = 0
    acknowledged: int = 0
    snapshot: dict = field(default_factory=dict)
    reconnects: int = 0
    error: TailraceError | None = None
    health: object = None
    warnings: tuple = ()


class FakeCapture:
    """Holds a real log open and reports what the test wants."""

    def __init__(self, path, log=None):
        self.log = log or LogOfOrders(path)
        self.stopping = threading.Event()
        self.failure = None
        self.phase = "connecting"
        self.known_lsn = 10**12

    def run(self):
        while not self.stopping.wait(0.005):
            if self.failure is not None:
                raise self.failure
        self.phase = "stopped"

    def stop(self):
        self.stopping.set()

    def caught_up(self, lsn):
        return self.log.writer.durable.position >= lsn

    def progress(self):
        return FakeProgress(self.phase, durable=self.log.writer.durable, source_end=self.known_lsn)


class FakeSink:
    type = "jsonl"

    def __init__(self, name, spans, failure):
        self.name, self.spans, self.failure = name, spans, failure

    def open(self, log, pipeline):
        if self.failure is not None:
            raise self.failure

    def position(self, task):
        return self.spans[-1] if self.spans else None

    reach = position

    def write(self, spark, log, span, splits):
        self.spans.append(span.end)
        return SinkCommit(span, rows=1)

    def close(self):
        pass


class FakeSpark:
    """A `SparkHost` that starts at once and has no Spark; `asked` counts the sessions given."""

    asked = 0
    is_ready = True
    comes_first = False

    def __init__(self, config=None):
        self.stopped = False

    def start(self):
        pass

    def session(self, stop, tag=""):
        FakeSpark.asked += 1
        return object()

    def require_shared(self, folders):
        assert "log.path" in folders

    def cancel_jobs(self, tags):
        pass

    def stop(self):
        self.stopped = True


def running(engine):
    background = Background("engine", engine.run)
    background.start()
    return background
