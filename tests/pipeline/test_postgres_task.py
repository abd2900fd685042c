"""The connector and its task on a real server, without an engine."""

from __future__ import annotations

import threading
import time

import pytest

from tailrace.engine.contracts import KeepsOffsets, OffsetStore, SourceConnector, SourceTask
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.connector import PipelineConnector
from tailrace.testing.contexts import connector_context, task_context
from tests.support.postgres import Database
from tests.support.wait import wait_until


class Life:
    """A connector with one task, driven as by the engine."""

    def __init__(self, settings, name="shop"):
        self.connector = PipelineConnector()
        self.store = self.connector.offset_store(name, settings)
        self.errors, self.finished, self.stopping = [], threading.Event(), threading.Event()
        self.connector.start(
            connector_context(settings, name=name, offsets=self.store, report=self.errors.append)
        )
        (own,) = self.connector.task_settings(4)
        self.task = self.connector.create_task()
        self.context = task_context(
            own, name=name, offsets=self.store, stopping=self.stopping, finish=self.finished.set
        )

    def __enter__(self):
        self.task.start(self.context)
        return self

    def __exit__(self, *_):
        self.stopping.set()
        self.task.stop()
        self.connector.stop()
        self.store.stop()

    def poll(self, enough, timeout_s=60.0):
        """Poll until there are `enough` records; return the records with their batches."""
        found = []

        def polled():
            batch = self.task.poll(0.2)
            if batch is not None:
                found.extend((batch, record) for record in batch)
            return enough(found)

        wait_until(polled, timeout_s, "records")
        return found

    def commit(self, batch, offset):
        self.store.write([(batch.partition, offset)], 5)
        self.task.commit(batch.partition, offset)


@pytest.fixture
def settings(pg: Database, tmp_path):
    pg.execute("create table orders(id int primary key, qty int); create table lines(id int primary key)")
    return {
        "name": "shop",
        "source": {"type": "postgresql", "dsn": pg.dsn, "tables": ["public.*"], "slot": f"s_{pg.name}"},
        "log": {"path": str(tmp_path / "log")},
    }


def values(found):
    return [(record.topic, record.op, record.after["id"]) for _, record in found]


def test_snapshot_and_stream_are_polled_and_continue_inside_a_transaction(pg: Database, settings) -> None:
    pg.execute("insert into orders select n, n from generate_series(1, 500) n")
    with Life(settings) as life:
        assert isinstance(life.connector, SourceConnector)
        assert isinstance(life.connector, KeepsOffsets)
        assert isinstance(life.task, SourceTask)
        assert isinstance(life.store, OffsetStore)
        found = life.poll(lambda found: len(found) == 500)
        assert {op for _, op, _ in values(found)} == {"r"}
        pg.execute(
            "insert into orders values (501, 1); insert into lines values (1); "
            "insert into orders values (502, 1)"
        )
        found = life.poll(lambda found: len(found) == 3)
        assert values(found) == [
            ("public.orders", "c", 501), ("public.lines", "c", 1), ("public.orders", "c", 502),
        ]  # fmt: skip
        batch, record = found[1]
        assert list(batch.transaction_ends[-3:]) == [False, False, True]
        life.commit(batch, batch.offsets[record.place])
    with Life(settings) as life:
        assert values(life.poll(len)) == [("public.orders", "c", 502)]
    with Life(settings, name="another") as life:
        assert len(life.poll(lambda found: len(found) >= 503)) == 503


def test_only_one_engine_captures_and_a_task_that_has_caught_up_finishes(pg: Database, settings) -> None:
    with Life(settings) as life:
        pg.execute("insert into lines values (1)")
        life.poll(len)
        with pytest.raises(TailraceError) as raised:
            Life(settings, name="another")
        assert raised.value.kind is Kind.LOG_LOCKED
    pg.execute("insert into orders select n, n from generate_series(1, 9) n")
    with Life({**settings, "until_caught_up": True}) as life:
        found = life.poll(lambda _: life.finished.is_set())
        assert values(found)[-1] == ("public.orders", "c", 9)
        assert life.task.poll(0.0) is None


def test_a_failed_capture_is_restarted_by_the_next_poll(own_pg, tmp_path) -> None:
    own_pg.execute("create table orders(id int primary key)")
    settings = {
        "source": {
            "dsn": own_pg.dsn(),
            "tables": ["public.*"],
            "reconnect_s_max": 0.2,
            "reconnect_delay_s": 0.05,
        },
        "log": {"path": str(tmp_path / "log")},
    }
    with Life(settings) as life:
        own_pg.execute("insert into orders values (1)")
        life.poll(lambda found: len(found) == 1)
        own_pg.stop()
        kinds = []

        def given_up():
            try:
                life.task.poll(0.1)
            except TailraceError as error:
                kinds.append(error.kind)
            return len(kinds) >= 2

        wait_until(given_up, 60, "two errors")
        assert set(kinds) <= {Kind.SOURCE_UNREACHABLE, Kind.SOURCE_SHUTTING_DOWN}
        own_pg.start()
        own_pg.execute("insert into orders values (2)")
        found = []

        def polled():
            try:
                found.extend(life.task.poll(0.1) or ())
            except TailraceError as error:
                kinds.append(error.kind)
                time.sleep(0.05)
            return found

        wait_until(polled, 60, "the record behind the error")
        assert [record.after["id"] for record in found] == [2]


def test_all_wrong_settings_are_reported_at_once() -> None:
    with pytest.raises(TailraceError) as raised:
        PipelineConnector().offset_store("shop", {"source": {"port": "x"}, "sinks": 3})
    assert raised.value.kind is Kind.CONFIG_INVALID
    for name in ("source.port", "sinks", "log"):
        assert name in raised.value.message
