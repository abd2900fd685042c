"""Checks that connectors, tasks, offset stores and record processors keep their contracts.

Call these functions in your tests; they raise `AssertionError` with the broken rule of the contract. They
don't need pytest.

    from tailrace.testing import conformance

    def test_my_store(tmp_path):
        conformance.check_offset_store(lambda: MyStore(tmp_path))
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from tailrace.engine.contracts import (
    CommitPolicy,
    ConnectorContext,
    OffsetStore,
    RecordProcessor,
    Settings,
    SourceConnector,
    SourceTask,
    StopEngine,
    TaskContext,
)
from tailrace.engine.offsets.stores import MemoryOffsetStore
from tailrace.errors import TailraceError
from tailrace.records.batch import Batch, Offset, Partition
from tailrace.testing.contexts import Written, connector_context, require, task_context
from tailrace.testing.source import LinesSource, lines
from tailrace.testing.source_types import check_source as check_source  # noqa: PLC0414 - a check like the others
from tailrace.waits import wait_until

#: Longest wait of a check for behaviour that a contract requires soon, in seconds.
SOON_S = 30.0

NAME = "conformance"

#: About how many of the offsets that a task writes itself are checked.
WRITTEN_CHECKED = 3


# ---------------------------------------------------------------------- offset stores


def check_offset_store(make: Callable[[], OffsetStore], *, durable: bool = True) -> None:
    """Check an offset store.

    :param make: returns a store for the same place each time, not started; at first the place is empty.
    :param durable: whether another store for the same place has the offsets that the first one wrote.
    """
    one, two = {"server": "a"}, {"server": "b", "shard": "-80"}
    store = make()
    require(isinstance(store, OffsetStore), "a store has start, read, write and stop")
    store.start()
    require(store.read([one, two]) == {}, "read returns no offset that was never written")
    offset = {"line": 2**53, "text": "Ñ ñ", "none": None, "nested": {"list": [1, 2.5, True]}}
    store.write([(one, {"line": 1}), (two, offset)], SOON_S)
    require(store.read([two]) == {0: offset}, "an offset is read as it was written")
    require(
        store.read([two, {"server": "c"}, one]) == {0: offset, 2: {"line": 1}},
        "read returns offsets by the index of their partition in the argument",
    )
    store.write([({"shard": "-80", "server": "b"}, {"line": 5})], SOON_S)
    require(store.read([two, one]) == {0: {"line": 5}, 1: {"line": 1}}, "names in a partition have no order")
    store.write([], SOON_S)
    _written_at_once(store)
    store.stop()
    if durable:
        after = make()
        after.start()
        found = after.read([one, two])
        after.stop()
        require(found == {0: {"line": 1}, 1: {"line": 5}}, "the next attempt reads the written offsets")
    make().stop()  # a store that was not started can be stopped, too


def _written_at_once(store: OffsetStore) -> None:
    """Check that several threads can write at once."""

    def write(number: int) -> None:
        for line in range(20):
            store.write([({"thread": str(number)}, {"line": line})], SOON_S)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    found = store.read([{"thread": str(number)} for number in range(4)])
    require(found == {number: {"line": 19} for number in range(4)}, "any thread may write, at any time")


# ---------------------------------------------------------------------- connectors and tasks


def check_connector(
    make: Callable[[], SourceConnector], settings: Settings, *, tasks_max: int = 4, name: str = NAME
) -> None:
    """Check how a connector starts, plans and stops, and that its tasks can be started and stopped.

    :param make: returns a connector for the same source each time.
    """
    for most in {1, tasks_max}:
        connector = make()
        require(isinstance(connector, SourceConnector), "a connector has the methods of SourceConnector")
        connector.start(_connector_context(name, settings))
        try:
            planned = connector.task_settings(most)
            require(0 < len(planned) <= most, "task_settings plans at least one task and at most tasks_max")
            for own in planned:
                require(json.loads(json.dumps(own)) == own, "settings of tasks are JSON")
            tasks = [connector.create_task() for _ in planned]
            require(len({id(task) for task in tasks}) == len(tasks), "each task is a separate object")
            partitions: list[Mapping[str, str]] = []
            for number, (task, own) in enumerate(zip(tasks, planned, strict=True)):
                require(isinstance(task, SourceTask), "a task has the methods of SourceTask")
                run = TaskRun(task, own, number=number, name=name)
                partitions += run.partitions_of(run.poll_until(1, 2.0))
                run.stop()
            require(
                len({json.dumps(dict(p), sort_keys=True) for p in partitions}) == len(partitions),
                "no partition belongs to two tasks",
            )
        finally:
            connector.stop()
    unstarted = make()
    unstarted.start(_connector_context(name, settings))
    unstarted.stop()


def check_task(make: Callable[[], SourceTask], settings: Settings, *, records: int, name: str = NAME) -> None:
    """Check that a task returns each record once, in order, and continues from any of its offsets.

    :param make: returns a task for the same source each time, not started; the source gets no new records
        during the check.
    :param records: least number of its records, over all partitions.
    """
    first = TaskRun(make(), settings, name=name)
    whole = first.poll_until(records, SOON_S)
    require(sum(batch.polled for batch in whole) >= records, f"the task returns {records} records")
    for batch in whole:
        _check_batch(batch)
    first.stop()
    again = TaskRun(make(), settings, name=name)
    repeated = again.poll_until(records, SOON_S)
    again.stop()
    require(
        _by_partition(repeated) == _by_partition(whole),
        "a new attempt without offsets returns the same records, in order",
    )
    offsets = _numbered(whole)
    for at in sorted({0, records // 2, records - 1}):
        partition, offset = offsets[at]
        left = [o for p, o in offsets[at + 1 :] if p == partition]
        _check_goes_on(make, settings, name, (partition, offset), offsets[: at + 1], left)
    for own, written, given in first.written[:: max(1, len(first.written) // WRITTEN_CHECKED)]:
        require(json.loads(json.dumps(written)) == written, "offsets that a task writes are JSON")
        begin = (_text(own), json.dumps(dict(written)))
        left = [o for p, o in _numbered(whole[given:]) if p == begin[0]]
        _check_goes_on(make, settings, name, begin, _numbered(whole[:given]), left)


def _check_goes_on(
    make: Callable[[], SourceTask],
    settings: Settings,
    name: str,
    begin: tuple[str, str],
    before: Sequence[tuple[str, str]],
    left: Sequence[str],
) -> None:
    """Check that an attempt that begins with an offset returns `left`, the rest of its partition."""
    partition, offset = json.loads(begin[0]), json.loads(begin[1])
    store = MemoryOffsetStore()
    store.write([(partition, offset)], SOON_S)
    rest = TaskRun(make(), settings, store=store, name=name)
    found: list[str] = []
    deadline_s = time.monotonic() + (SOON_S if left else 1.0)
    while len(found) < max(1, len(left)) and not rest.finished.is_set() and time.monotonic() < deadline_s:
        found += [o for p, o in _numbered(rest.poll_until(1, 0.2)) if p == begin[0]]
    rest.task.commit(partition, offset)
    rest.stop()
    require(
        found[: len(left)] == left and {(begin[0], o) for o in found}.isdisjoint(before),
        "an attempt that starts from an offset continues after it, and repeats no record before it",
    )


class TaskRun:
    """One attempt of a task, called as by the engine."""

    def __init__(
        self,
        task: SourceTask,
        settings: Settings,
        *,
        number: int = 0,
        store: OffsetStore | None = None,
        name: str = NAME,
    ) -> None:
        self.task = task
        self.finished = threading.Event()
        self.stopping = threading.Event()
        #: Offsets that the task wrote itself, each with the number of batches returned before.
        self.written: list[tuple[Partition, Offset, int]] = []
        self._given = 0
        task.start(
            task_context(
                settings,
                name=name,
                number=number,
                offsets=store,
                stopping=self.stopping,
                finish=self.finished.set,
                offset_writer=Written(self._note),
            )
        )

    def poll_until(self, records: int, timeout_s: float) -> list[Batch]:
        """Return the polled batches, until they have `records` records, the task finishes, or time is up."""
        found: list[Batch] = []
        deadline_s = time.monotonic() + timeout_s
        while sum(batch.polled for batch in found) < records and time.monotonic() < deadline_s:
            if self.finished.is_set():
                break
            began_s = time.monotonic()
            batch = self.task.poll(0.1)
            require(time.monotonic() - began_s < SOON_S, "poll returns when its time is up")
            if batch is not None:
                found.append(batch)
                self._given += 1
        return found

    def partitions_of(self, batches: Sequence[Batch]) -> list[Partition]:
        """Return the distinct partitions of batches."""
        return list({_text(b.partition): b.partition for b in batches}.values())

    def _note(self, partition: Partition, offset: Offset) -> None:
        self.written.append((partition, offset, self._given))

    def stop(self) -> None:
        """Stop the task as the engine does: set `stopping`, then call `stop` on another thread."""
        self.stopping.set()
        ended = threading.Thread(target=self.task.stop, daemon=True)
        ended.start()
        ended.join(SOON_S)
        require(not ended.is_alive(), "stop returns")


def _check_batch(batch: Batch) -> None:
    require(isinstance(batch, Batch), "poll returns a Batch or None")
    names: list[object] = [*batch.partition, *batch.partition.values()]
    require(all(isinstance(name, str) for name in names), "a partition maps names to texts")
    places = batch.places.tolist()
    require(
        places == sorted(set(places)) and all(0 <= place < batch.polled for place in places),
        "each record has a separate place in [0, polled)",
    )
    for place in range(batch.polled):
        offset = dict(batch.offsets[place])
        require(json.loads(json.dumps(offset)) == offset, "offsets are JSON")


def _numbered(batches: Sequence[Batch]) -> list[tuple[str, str]]:
    """Return each record's partition and offset, as texts."""
    return [
        (_text(batch.partition), json.dumps(dict(batch.offsets[place])))
        for batch in batches
        for place in range(batch.polled)
    ]


def _text(partition: Partition) -> str:
    return json.dumps(dict(partition), sort_keys=True)


def _by_partition(batches: Sequence[Batch]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for partition, offset in _numbered(batches):
        found.setdefault(partition, []).append(offset)
    return found


def _connector_context(name: str, settings: Settings) -> ConnectorContext:
    def report(error: BaseException) -> None:
        raise AssertionError("the connector reported an error") from error

    return connector_context(settings, name=name, report=report)


# ---------------------------------------------------------------------- contexts


def check_contexts(run: Callable[[SourceConnector, OffsetStore, Callable[[Any], None]], str]) -> None:
    """Check the contexts that an engine passes to connectors and tasks.

    :param run: runs an engine with the connector and the store to its end, with the name `conformance`,
        transformations that keep every record, the commit policy `always`, and a handler of single records in
        order; returns its metrics as text.
    """
    store = MemoryOffsetStore()
    probe = _Probe()

    def handle(record: Any) -> None:
        found = store.read([_LINES]).get(0, {})
        require(found.get("line", 0) < record.after["number"], "nothing is committed before it is processed")
        require("idle" not in found, "an offset that a task writes skips no record")

    text = run(probe, store, handle)
    require(probe.seen == ["connector", "task"], "connector and task are started once each")
    require(
        store.read([_PLAN, _LINES, _IDLE]) == {0: {"parts": 1}, 1: {"line": 20, "idle": True}, 2: {"at": 2}},
        "the newest offset of each partition that connector and task write themselves is committed",
    )
    for task, value in (("", 2.0), ("0", 3.0)):
        labels = f'engine="{NAME}",kind="probe",task="{task}"'
        require(f"probe_calls_total{{{labels}}} {value}" in text, "metrics are shown with engine and task")


_PLAN, _LINES, _IDLE = {"plan": "a"}, {"partition": "0-0"}, {"idle": "a"}


class _Probe:
    """A connector of lines, with one task; both check their contexts."""

    def __init__(self) -> None:
        self._source = LinesSource(20, batch=7)
        self.seen: list[str] = []

    def start(self, context: ConnectorContext) -> None:
        self._source.start(context)
        self.context = context
        self.seen.append("connector")
        require(context.name == NAME, "the name is the engine's")
        _check_tools(context)
        context.offset_writer.write(_PLAN, {"parts": 1})
        require(
            context.offsets.read([_LINES, _PLAN]) == {1: {"parts": 1}}, "a connector's offset is kept at once"
        )
        _counted(context, 2)

    def task_settings(self, tasks_max: int) -> Sequence[Settings]:
        return self._source.task_settings(tasks_max)

    def create_task(self) -> SourceTask:
        return _ProbeTask(self, self._source.create_task())

    def stop(self) -> None:
        self._source.stop()


class _ProbeTask:
    def __init__(self, probe: _Probe, task: SourceTask) -> None:
        self._probe = probe
        self._task = task
        self._done = False

    def start(self, context: TaskContext) -> None:
        self._context = context
        self._probe.seen.append("task")
        require(context.number == 0 and context.wanted, "the task knows its number, and that it is wanted")
        require(dict(context.settings) == {"task": 0, "partitions": ["0-0"]}, "settings are those planned")
        require(context.offsets.read([_PLAN]) == {0: {"parts": 1}}, "a task reads what its connector wrote")
        _check_tools(context)
        context.offset_writer.write(_IDLE, {"at": 1})
        _counted(context, 3)
        self._task.start(replace(context, finish=self._finished))

    def poll(self, timeout_s: float) -> Batch | None:
        if self._done:
            self._context.offset_writer.write(_LINES, {"line": 20, "idle": True})
            self._context.offset_writer.write(_IDLE, {"at": 2})
            try:
                self._probe.context.offset_writer.write(_LINES, {"line": 99})
            except TailraceError:
                self._context.finish()
                return None
            raise AssertionError(
                "contract broken: a connector writes no offset of a partition that a task polls"
            )
        return self._task.poll(timeout_s)

    def commit(self, partition: Partition, offset: Offset) -> None:
        pass

    def stop(self) -> None:
        self._task.stop()

    def _finished(self) -> None:
        self._done = True


def _check_tools(context: ConnectorContext | TaskContext) -> None:
    require(isinstance(context.commit_policy, CommitPolicy), "there is a commit policy")
    require(context.commit_policy.is_due(1, True, 0.0), "the policy is the configured one")
    require(context.clock.monotonic() <= context.clock.monotonic(), "there is a clock")
    require(context.transformations is not None, "transformations are those of the engine")
    if context.transformations is not None:
        kept = [len(one) for group in lines("p", 0, 5).groups for one in context.transformations(group)]
        require(sum(kept) == 5, "transformations can be called")


def _counted(context: ConnectorContext | TaskContext, times: int) -> None:
    for _ in range(times):
        # The same name and labels are the same counter.
        context.metrics.counter("probe_calls", "Calls.", {"kind": "probe"}).inc()
    context.metrics.gauge("probe_level", "A level.").set(4)
    context.metrics.histogram("probe_seconds", "Seconds.", buckets=[1, 2]).observe(1.5)


# ---------------------------------------------------------------------- processors


class Marks:
    """A committer that records marks, for `check_processor`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.marked: dict[int, set[int]] = {}
        self.finished: list[int] = []

    def mark_processed(self, batch: Batch, place: int | None = None, offset: Offset | None = None) -> None:
        """Record the place, or all places of the batch."""
        with self._lock:
            places = range(batch.polled) if place is None else (place,)
            self.marked.setdefault(batch.number, set()).update(places)

    def mark_places(self, batch: Batch, places: Sequence[int]) -> None:
        """Record the places."""
        with self._lock:
            self.marked.setdefault(batch.number, set()).update(places)

    def mark_dropped(self, batch: Batch) -> None:
        """Record the places of dropped records."""
        with self._lock:
            missing = set(range(batch.polled)) - set(batch.places.tolist())
            self.marked.setdefault(batch.number, set()).update(missing)

    def mark_batch_finished(self, batch: Batch) -> None:
        """Record the batch's number."""
        with self._lock:
            self.finished.append(batch.number)

    def count(self) -> int:
        """Return the number of marked records."""
        with self._lock:
            return sum(len(places) for places in self.marked.values())


def check_processor(make: Callable[[Callable[[Any], None]], RecordProcessor]) -> None:
    """Check a record processor.

    :param make: returns a processor, not initialised, that calls the given function with each record,
        in order.
    """
    with ThreadPoolExecutor(2) as threads:
        seen: list[int] = []
        processor, marks = _initialised(make, lambda record: seen.append(record.after["number"]), threads)
        for first in range(0, 100, 10):
            processor.process(lines("p", first, first + 10))
        require(_drained(processor), "drain returns whether everything is delivered")
        require(seen == list(range(1, 101)), "each record is handed over once, in order")
        require(marks.count() == 100, "each record that was handed over is marked")
        processor.close()
        _check_failure(make, threads)
        _check_end(make, threads)


def _check_failure(
    make: Callable[[Callable[[Any], None]], RecordProcessor], threads: ThreadPoolExecutor
) -> None:
    def fail(record: Any) -> None:
        if record.after["number"] == 15:
            raise ValueError

    processor, marks = _initialised(make, fail, threads)
    batches = [lines("p", first, first + 10) for first in (0, 10, 20)]
    raised = _raised(processor, batches)
    processor.close()
    require(isinstance(raised, ValueError), "process or drain raises a handler's error")
    require(4 not in marks.marked.get(batches[1].number, ()), "what failed is not marked")


def _check_end(make: Callable[[Callable[[Any], None]], RecordProcessor], threads: ThreadPoolExecutor) -> None:
    def stop(record: Any) -> None:
        if record.after["number"] == 10:
            raise StopEngine

    processor, marks = _initialised(make, stop, threads)
    raised = _raised(processor, [lines("p", 0, 10)])
    processor.close()
    require(isinstance(raised, StopEngine), "process or drain raises a handler's StopEngine")
    require(marks.count() == 10, "the record whose handler raised StopEngine is marked")


def _initialised(
    make: Callable[[Callable[[Any], None]], RecordProcessor],
    handler: Callable[[Any], None],
    threads: ThreadPoolExecutor,
) -> tuple[RecordProcessor, Marks]:
    processor, marks = make(handler), Marks()
    require(isinstance(processor, RecordProcessor), "a processor has the methods of RecordProcessor")
    processor.initialize(threads, None, None, marks)
    return processor, marks


def _drained(processor: RecordProcessor) -> bool:
    return wait_until(lambda: processor.drain(0.1), SOON_S, 0.0)


def _raised(processor: RecordProcessor, batches: Sequence[Batch]) -> BaseException | None:
    try:
        for batch in batches:
            processor.process(batch)
        _drained(processor)
    except Exception as error:  # noqa: BLE001 - the caller checks it
        return error
    return None
