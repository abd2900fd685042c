"""Random runs of engines over one source and one store, and the rules that hold for all of them.

A `World` outlives its engines: lines are appended, engines start and stop, and whatever happens, a line
is committed only after it and all before it were processed, and unprocessed lines come again, in order.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tailrace.engine.contracts import Callbacks, RetriableError, StopEngine
from tailrace.engine.lifecycle import State
from tailrace.errors import Kind, TailraceError
from tailrace.testing import Fault, LinesSource, TestingEngine
from tests.support.engines import Store
from tests.support.wait import wait_until

#: A seed for this test run, the same in all workers; `TAILRACE_SEEDS=7,8` sets others.
SEEDS = [int(seed) for seed in os.environ.get("TAILRACE_SEEDS", "").split(",") if seed] or [
    random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).randrange(1_000_000)
]

FAR_S = 60.0
TASKS = 3
PARTITIONS = 2

ERRORS = [
    RetriableError(),
    TailraceError(Kind.SOURCE_UNREACHABLE, "no"),
    ValueError("no"),
    TailraceError(Kind.SLOT_MISSING, "no"),
    KeyboardInterrupt(),
]


@dataclass
class Script:
    """What happens in one run."""

    batch: int
    transaction: int
    ends: bool
    handler: str
    options: dict
    faults: list
    #: By the number of the handler's call: an error, seconds to wait, or `stop`, `close`.
    handling: dict
    #: By the number of the store's write: an error, or seconds to wait.
    writing: dict
    #: What closes the engine: seconds after the start, a callback's name, or nothing.
    close: object
    closers: int = 1


def script_of(rng: random.Random) -> Script:
    """Return a script of events, each of which is allowed to happen."""
    faults = [
        Fault(
            rng.choice(["start", "poll", "poll", "poll", "commit", "stop"]),
            rng.randint(1, 4),
            rng.randrange(TASKS),
            error=rng.choice([None, *ERRORS]),
            delay_s=rng.choice([0, 0, 0.01, 0.05]),
            deaf=rng.random() < 0.5,
        )
        for _ in range(rng.choice([0, 0, 1, 2, 4]))
    ]
    happenings = [*ERRORS, 0.01, 0.05, "stop", "close"]
    handling = {rng.randint(1, 60): rng.choice(happenings) for _ in range(rng.choice([0, 0, 1, 3]))}
    writing = {rng.randint(1, 10): rng.choice([ValueError(), 0.02]) for _ in range(rng.choice([0, 0, 2]))}
    handler = rng.choice(["on_batch", "on_record", "on_record"])
    close = rng.choice([None, 0.0, 0.002, 0.02, 0.1, *Callbacks.__slots__])
    return Script(
        batch=rng.choice([1, 3, 10, 40]),
        transaction=rng.choice([1, 4]),
        # Something must end the run.
        ends=True if not isinstance(close, float) else rng.random() < 0.5,
        handler=handler,
        options={
            "errors_retries_max": rng.choice([-1, 0, 2]),
            "errors_retry_delay_initial_ms": 1,
            "errors_retry_delay_max_ms": 4,
            "on_task_failure": rng.choice(["stop", "restart", "isolate"]),
            "record_processing": {
                "threads": rng.choice([1, 3]),
                "order": rng.choice(["ordered", "unordered", "key"]) if handler == "on_record" else "ordered",
                "shutdown_timeout_ms": rng.choice([0, 20, 2000]),
                "queue_batches_max": rng.choice([1, 8]),
            },
            "offset_commit": {
                "policy": rng.choice(["always", "count", "periodic", "transaction"]),
                "records": 7,
                "interval_ms": rng.choice([0, 10]),
                "timeout_ms": rng.choice([10, 2000]),
            },
        },
        faults=faults,
        handling=handling,
        writing=writing,
        close=close,
        closers=rng.choice([1, 1, 3]),
    )


PEACE = Script(10, 1, True, "on_record", {"offset_commit": {"policy": "always"}}, [], {}, {}, None)


@dataclass
class World:
    """A source's lines and a store, and what was processed of them."""

    lines: dict = field(default_factory=lambda: dict.fromkeys(_names(), 0))
    done: dict = field(default_factory=lambda: defaultdict(set))
    store: Store = field(default_factory=Store)
    broken: list = field(default_factory=list)
    lives: int = 0

    def append(self, partition: int, count: int) -> None:
        self.lines[_names()[partition]] += count

    def live(self, script: Script) -> TestingEngine:
        """Run one engine, and check the rules."""
        self.lives += 1
        life = _Life(self, script)
        life.run()
        assert not self.broken, self.broken
        return life.engine

    def end(self) -> None:
        """Process the rest without faults: then everything is done and committed."""
        engine = self.live(PEACE)
        assert engine.error is None
        for name, count in self.lines.items():
            assert self.done[name] == set(range(1, count + 1)), name
            assert self.store.line(name) == count


class _Life:
    def __init__(self, world: World, script: Script) -> None:
        self.world = world
        self.script = script
        self.lock = threading.Lock()
        self.calls = 0
        self.writes = 0
        self.told: list = []
        # Handlers of batches get them in order, and handlers of records if that was configured.
        processing = script.options.get("record_processing", {})
        self.ordered = script.handler == "on_batch" or processing.get("order", "ordered") == "ordered"
        source = self.source = LinesSource(
            0,
            tasks=TASKS,
            partitions=PARTITIONS,
            batch=script.batch,
            transaction=script.transaction,
            ends=script.ends,
            faults=script.faults,
        )
        for name, count in world.lines.items():
            source.append(count, name)
        self.engine = TestingEngine(
            connector=source,
            tasks_max=TASKS,
            offsets=_Watched(self),
            options=script.options,
            callbacks=Callbacks(**{name: self._callback(name) for name in Callbacks.__slots__}),
            **cast(Any, {script.handler: self._batch if script.handler == "on_batch" else self._record}),
        )

    def run(self) -> None:
        script, engine = self.script, self.engine
        closers = []
        if isinstance(script.close, float):
            for _ in range(script.closers):
                closers.append(threading.Thread(target=self._close, args=(script.close,)))
                closers[-1].start()
        watch = threading.Timer(FAR_S, self._hangs)
        watch.start()
        try:
            engine.run()
        except TailraceError as error:
            # If it was closed before the start, or failed, the error says so.
            if error is not engine.error and error.kind is not Kind.ENGINE_MISUSED:
                raise
        finally:
            watch.cancel()
            watch.join()
        for closer in closers:
            closer.join(FAR_S)
            assert not closer.is_alive()
        self._after()

    def _after(self) -> None:
        source, engine = self.source, self.engine
        assert engine.state is State.STOPPED
        assert not source.open
        assert engine.error is None or engine.error.kind is not Kind.TASK_TIMED_OUT, engine.error
        assert self.told.count("completed") == 1
        assert self.told[-1] == "completed"
        assert source.calls.count("connector.start") == source.calls.count("connector.stop") <= 1
        for task in range(TASKS):
            assert source.count("start", task) == source.count("stop", task)
        failed = engine.error is not None
        assert failed == ("(failure)" in engine.view().story)

    def _close(self, delay_s: float) -> None:
        time.sleep(delay_s)
        self.engine.close()
        assert self.engine.state is State.STOPPED

    def _hangs(self) -> None:
        self.world.broken.append(f"life {self.world.lives}: it does not end by itself")
        self.engine.close()

    def _callback(self, name):
        def told(*_):
            self.told.append(name)
            if self.script.close == name:
                self.engine.close()

        return told

    def _happen(self) -> object:
        with self.lock:
            self.calls += 1
            what = self.script.handling.get(self.calls)
        if isinstance(what, float):
            time.sleep(what)
        elif isinstance(what, BaseException):
            raise what
        elif what == "close":
            self.engine.close()
        return what

    def _batch(self, batch) -> None:
        what = self._happen()
        for record in batch:
            self._done(record)
        if what == "stop":
            raise StopEngine

    def _record(self, record) -> None:
        what = self._happen()
        self._done(record)
        if what == "stop":
            raise StopEngine

    def _done(self, record) -> None:
        name, number = record.after["partition"], record.after["number"]
        with self.lock:
            done = self.world.done[name]
            if self.ordered and number > 1 and number - 1 not in done:
                self.world.broken.append(f"life {self.world.lives}: {name} {number} came before {number - 1}")
            done.add(number)

    def check_write(self, offsets) -> None:
        with self.lock:
            self.writes += 1
            what = self.script.writing.get(self.writes)
            for partition, offset in offsets:
                name, line = partition["partition"], offset["line"]
                missing = set(range(1, line + 1)) - self.world.done[name]
                if missing:
                    self.world.broken.append(f"{name} {line} is committed, and {missing} not processed")
        if isinstance(what, float):
            time.sleep(what)
        elif isinstance(what, BaseException):
            raise what


class _Watched:
    """The store of the world for one engine: once that is closed, writes fail."""

    def __init__(self, life: _Life) -> None:
        self._life = life
        self._store = life.world.store
        self._stopped = False
        self._lock = threading.Lock()

    def start(self) -> None:
        pass

    def read(self, partitions):
        return self._store.read(partitions)

    def write(self, offsets, timeout_s) -> None:
        self._life.check_write(offsets)
        with self._lock:
            if not self._stopped:
                self._store.write(offsets, timeout_s)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True


class Leaks:
    """Threads and file descriptors of this process that outlive a run."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._files = _files()

    def check(self) -> None:
        """Fail if there are more than before, and remain so: an unused client of an earlier test may have had
        a descriptor open for a moment.
        """
        try:
            wait_until(lambda: not self._left(), FAR_S, "threads to end")
        except AssertionError as error:
            frames = sys._current_frames()
            for thread in self._left():
                error.add_note(f"{thread.name}:")
                error.add_note("".join(traceback.format_stack(frames.get(thread.ident or 0))))
            raise
        try:
            wait_until(
                lambda: len(_counted(_files())) <= len(_counted(self._files)),
                FAR_S,
                "descriptors to be closed",
            )
        except AssertionError as error:
            error.add_note(f"open since: {self._opened()}")
            raise

    def _left(self) -> set[threading.Thread]:
        return set(threading.enumerate()) - self._threads

    def _opened(self) -> dict[str, str]:
        # {} if there are no more than before: a number may have been reused for something else.
        before, now = _counted(self._files), _counted(_files())
        return dict(now.items() - before.items()) if len(now) > len(before) else {}


def _files() -> dict[str, str]:
    # What each open descriptor refers to, without the one used for listing.
    open_now = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            open_now[number] = os.readlink(f"/proc/self/fd/{number}")
    return open_now


def _counted(files: dict[str, str]) -> dict[str, str]:
    # A Kafka client that an earlier test left opens connections, and pipes that wake its threads, at any
    # time: if there is one, those are not counted.
    uncounted = ("pipe:", "socket:", "anon_inode:") if _has_kafka_client() else ()
    return {number: path for number, path in files.items() if not path.startswith(uncounted)}


def _has_kafka_client() -> bool:
    # librdkafka names its threads.
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if (thread / "comm").read_text().startswith("rdk:"):
                return True
    return False


def _names() -> list[str]:
    return [f"{task}-{part}" for task in range(TASKS) for part in range(PARTITIONS)]
