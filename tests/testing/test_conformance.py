"""The conformance checks for third parties: they pass for correct extensions and find broken ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tailrace.backoff import Backoff
from tailrace.engine.contracts import StopEngine
from tailrace.engine.offsets.stores import FileOffsetStore, MemoryOffsetStore
from tailrace.engine.processing import ProcessingConfig, on_batch, on_record, processor_for
from tailrace.engine.processing.processors import NullProcessor
from tailrace.engine.threads import SystemClock
from tailrace.testing import LinesSource, conformance


class OneByOne:
    """The smallest processor that fulfils the contract."""

    def __init__(self, handler):
        self._handler = handler

    def initialize(self, executor, transform, convert, committer):
        self._committer = committer

    def process(self, batch):
        for record in batch:
            try:
                self._handler(record)
            except StopEngine:
                self._committer.mark_processed(batch, record.place)
                raise
            self._committer.mark_processed(batch, record.place)
        self._committer.mark_batch_finished(batch)

    def drain(self, timeout_s):
        return True

    def close(self):
        pass


def broken(kind: type, **methods: Callable) -> type:
    return type(f"Broken{kind.__name__}", (kind,), methods)


# ------------------------------------------------------------------ stores


def test_our_stores_fulfil_the_contract(tmp_path):
    shared = MemoryOffsetStore()
    conformance.check_offset_store(lambda: shared)
    conformance.check_offset_store(lambda: FileOffsetStore(tmp_path / "offsets", "shop"))


@pytest.mark.parametrize(
    ("methods", "rule"),
    [
        ({"write": lambda *_: None}, "read as it was written"),
        ({"read": lambda *_: {0: {}}}, "never written"),
        (
            {"read": lambda self, asked: dict(enumerate(MemoryOffsetStore.read(self, asked).values()))},
            "by the index",
        ),
        ({"stop": lambda self: self.__init__()}, "next attempt"),
    ],
)
def test_a_store_that_breaks_the_contract_is_found(methods, rule):
    store = broken(MemoryOffsetStore, **methods)()
    with pytest.raises(AssertionError, match=rule):
        conformance.check_offset_store(lambda: store)


# ------------------------------------------------------------------ connectors and tasks


def test_the_source_of_lines_fulfils_the_contract():
    conformance.check_connector(lambda: LinesSource(20), {}, tasks_max=4)
    for partitions in (1, 3):
        source = LinesSource(30, partitions=partitions, batch=7)
        settings = source.task_settings(1)[0]
        conformance.check_task(source.create_task, settings, records=30 * partitions)


class Forgetful(LinesSource):
    """Begins from the start, whatever the offsets say."""

    def create_task(self):
        task = super().create_task()
        start = task.start

        def started(context):
            start(context)
            task._given = dict.fromkeys(task._given, 0)

        task.start = started  # type: ignore[method-assign]
        return task


def test_a_task_that_ignores_its_offsets_is_found():
    source = Forgetful(30)
    with pytest.raises(AssertionError, match="continues after it"):
        conformance.check_task(source.create_task, source.task_settings(1)[0], records=30)


@pytest.mark.parametrize(
    ("methods", "rule"),
    [
        ({"task_settings": lambda *_: []}, "at least one task"),
        ({"task_settings": lambda *_: [{}] * 9}, "at most tasks_max"),
        ({"create_task": lambda _: object()}, "methods of SourceTask"),
        (
            {
                "task_settings": lambda _, most: [{"task": n, "partitions": ["0-0"]} for n in range(most)],
            },
            "belongs to two tasks",
        ),
    ],
)
def test_a_connector_that_breaks_the_contract_is_found(methods, rule):
    with pytest.raises(AssertionError, match=rule):
        conformance.check_connector(lambda: broken(LinesSource, **methods)(20), {}, tasks_max=4)


# ------------------------------------------------------------------ processors


def flow(handler, order="ordered"):
    from threading import Event

    return processor_for(
        ProcessingConfig(
            handler=handler,
            clock=SystemClock(),
            stopping=Event(),
            order=order,
            backoff=Backoff(0),
            threads=2,
        )
    )


def each(handler):
    def handle(batch):
        for record in batch:
            handler(record)

    return handle


def test_our_processors_fulfil_the_contract():
    conformance.check_processor(lambda handler: flow(on_record(handler)))
    conformance.check_processor(lambda handler: flow(on_batch(each(handler))))
    conformance.check_processor(OneByOne)


def test_a_processor_that_breaks_the_contract_is_found():
    with pytest.raises(AssertionError, match="handed over once"):
        conformance.check_processor(lambda _: NullProcessor())

    def swallow(self, batch):
        self._committer.mark_processed(batch)
        for record in batch:
            self._handler(record)

    with pytest.raises(AssertionError, match="what failed is not marked"):
        conformance.check_processor(broken(OneByOne, process=swallow))
