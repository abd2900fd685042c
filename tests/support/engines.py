"""Engines over lines, as the tests of the engine share them."""

from __future__ import annotations

import json
import threading
from collections import defaultdict

from tailrace.engine.contracts import Callbacks
from tailrace.testing import TestingEngine

#: Back-offs too short for tests to wait for.
QUICK = {"errors_retry_delay_initial_ms": 1, "errors_retry_delay_max_ms": 5}


class Seen:
    """A handler that records the numbers of the lines that it got, by partition."""

    def __init__(self, fault=lambda _: None):
        self._lock = threading.Lock()
        self._fault = fault
        self.lines = defaultdict(list)

    def record(self, record):
        number = record.after["number"]
        self._fault(number)
        with self._lock:
            self.lines[record.after["partition"]].append(number)

    def batch(self, batch):
        for record in batch:
            self.record(record)

    @property
    def count(self):
        with self._lock:
            return sum(len(numbers) for numbers in self.lines.values())


class Heard:
    """Callbacks that record their calls, in order."""

    def __init__(self, fault=lambda _: None):
        self.events = []
        self.completed = None
        self._fault = fault

    def callbacks(self):
        def note(what):
            def heard(*arguments):
                self.events.append(" ".join([what, *map(str, arguments)]))
                self._fault(what)

            return heard

        names = [name for name in Callbacks.__slots__ if name != "completed"]
        return Callbacks(**{name: note(name) for name in names}, completed=self._completed)

    def _completed(self, success, message, error):
        self.events.append("completed")
        self.completed = (success, message, error)
        self._fault("completed")

    def at(self, what):
        return self.events.index(what)


class Store:
    """An offset store in memory that outlives engines; `fault` is called before each write."""

    def __init__(self, fault=lambda: None):
        self.kept = {}
        self.writes = 0
        self.calls = []
        self.fault = fault

    def start(self):
        self.calls.append("start")

    def read(self, partitions):
        keys = [json.dumps(dict(partition), sort_keys=True) for partition in partitions]
        return {at: self.kept[key] for at, key in enumerate(keys) if key in self.kept}

    def write(self, offsets, timeout_s):
        self.writes += 1
        self.fault()
        for partition, offset in offsets:
            self.kept[json.dumps(dict(partition), sort_keys=True)] = dict(offset)

    def stop(self):
        self.calls.append("stop")

    def line(self, partition="0-0"):
        """The number of the line up to which everything is committed."""
        return self.kept.get(json.dumps({"partition": partition}), {}).get("line", 0)


def engine_of(source, handler=None, **arguments):
    """Return an engine over `source` with short waits and frequent commits, unless options say otherwise."""
    options = {**QUICK, "offset_commit": {"policy": "always"}, **arguments.pop("options", {})}
    if handler is not None:
        arguments.setdefault("on_record", handler)
    arguments.setdefault("tasks_max", 100)
    arguments.setdefault("offsets", Store())
    return TestingEngine(connector=source, options=options, **arguments)
