"""The contexts of connectors and tasks: their offset writers, and their metrics."""

from __future__ import annotations

import json
import threading
import urllib.request

import pytest

from tailrace import Engine
from tailrace.engine.contracts import RetriableError
from tailrace.engine.metrics import OWN_PREFIX, SERIES_MAX
from tailrace.engine.offsets.commits import Commits
from tailrace.engine.offsets.partitions import ConnectorOffsets
from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Batch
from tailrace.records.making import SourceRecord
from tailrace.testing import Fault, LinesSource, conformance
from tailrace.testing.contexts import connector_context, metrics_of, task_context
from tests.support.engine_runs import Leaks
from tests.support.engines import QUICK, Seen, Store, engine_of
from tests.support.wait import wait_until

ALWAYS = {**QUICK, "offset_commit": {"policy": "always"}}


class KeepsAll:
    def apply(self, group):
        return [group]

    def close(self):
        pass


def test_the_engine_fulfils_the_contract_of_contexts():
    def run(connector, store, handler):
        engine = Engine(
            connector=connector,
            name=conformance.NAME,
            offsets=store,
            on_record=handler,
            options=ALWAYS,
            transformations=[KeepsAll()],
        )
        engine.run()
        return engine.metrics.text()

    conformance.check_contexts(run)


def test_the_contract_check_finds_an_engine_that_commits_too_early():
    def run(connector, store, handler):

        def early(record):
            store.write([({"partition": "0-0"}, {"line": 20})], 1)
            handler(record)

        Engine(
            connector=connector,
            name=conformance.NAME,
            offsets=store,
            on_record=early,
            options=ALWAYS,
            transformations=[KeepsAll()],
        ).run()

    with pytest.raises(TailraceError) as raised:
        conformance.check_contexts(run)
    assert isinstance(raised.value.__cause__, AssertionError)


# ------------------------------------------------------------------ offsets


@pytest.mark.slow
def test_an_offset_that_a_task_writes_waits_for_the_batch_being_handled():
    """Also from another thread and very often; an offset of another partition does not wait."""
    store, held, going = Store(), threading.Event(), threading.Event()

    def handler(_):
        going.set()
        assert held.wait(60)

    source = LinesSource(5, batch=5, ends=False)
    engine = engine_of(source, handler, offsets=store)
    with engine:
        assert going.wait(60)
        writer = engine.run_with_task(lambda task: task._context.offset_writer)
        for at in range(20_000):
            writer.write({"partition": "0-0"}, {"line": 5, "at": at})
        writer.write({"other": "x"}, {"at": 1})
        wait_until(lambda: json.dumps({"other": "x"}) in store.kept, 60, "the other partition's offset")
        assert store.line() == 0
        assert engine.view().tasks[0].processed == 0
        held.set()
        wait_until(lambda: store.line() == 5, 60, "a commit")
        wait_until(
            lambda: store.kept[json.dumps({"partition": "0-0"})].get("at") == 19_999, 60, "the newest offset"
        )
    assert engine.view().tasks[0].processed == 5
    assert engine.view().tasks[0].committed == 5


def test_an_offset_that_a_task_wrote_is_committed_at_the_end():
    """The policy does not want it yet, so it is committed at the end; later writes are ignored."""
    store = Store()
    engine = engine_of(
        LinesSource(0, ends=False),
        Seen().record,
        offsets=store,
        options={"offset_commit": {"policy": "periodic"}},
    )
    with engine:
        writer = engine.run_with_task(lambda task: task._context.offset_writer)
        writer.write({"other": "x"}, {"at": 1})
    assert store.kept == {json.dumps({"other": "x"}): {"at": 1}}
    writer.write({"other": "x"}, {"at": 2})
    assert store.kept == {json.dumps({"other": "x"}): {"at": 1}}


class PollsLate:
    """A task whose second poll returns when the engine ends; it then writes an offset after that batch."""

    def __init__(self, dropped, written):
        self._polled, self._dropped, self._written = 0, dropped, written

    def start(self, context):
        self._context = context

    def poll(self, timeout_s):
        if self._polled == 2 or (self._polled == 1 and not self._context.stopping.wait(timeout_s)):
            return None
        self._polled += 1
        if self._polled == 2:
            threading.Thread(target=self._write).start()
        record = SourceRecord(
            topic="t", offset={"line": self._polled}, key=None, value={"number": self._polled}
        )
        return Batch.of_records([record], partition={"partition": "0-0"})

    def _write(self):
        assert self._dropped.wait(60)
        self._context.offset_writer.write({"partition": "0-0"}, {"line": 2})
        self._written.set()

    def commit(self, partition, offset):
        pass

    def stop(self):
        pass


def test_no_offset_after_a_batch_dropped_at_the_end_is_committed(monkeypatch):
    store, got, dropped, written = Store(), [], threading.Event(), threading.Event()
    source, drop = LinesSource(0, ends=False), Commits.drop

    def noted(commits):
        drop(commits)
        dropped.set()

    monkeypatch.setattr(Commits, "drop", noted)
    monkeypatch.setattr(source, "create_task", lambda: PollsLate(dropped, written))

    def handler(record):
        got.append(record.value["number"])
        assert written.wait(60)

    with engine_of(source, handler, offsets=store):
        wait_until(lambda: got, 60, "the first record")
    assert written.is_set()
    assert got == [1]
    assert store.kept == {json.dumps({"partition": "0-0"}): {"line": 1}}


def test_a_connector_writes_offsets_of_partitions_without_a_task_at_once():
    store = Store()
    offsets = ConnectorOffsets(store, 5)
    offsets.write({"a": "1"}, {"at": 1})
    offsets.claim({"a": "1"})
    offsets.write({"b": "1"}, {"at": 2})
    with pytest.raises(TailraceError, match="is a task's") as raised:
        offsets.write({"a": "1"}, {"at": 3})
    assert raised.value.kind is Kind.ENGINE_MISUSED
    offsets.close()
    with pytest.raises(TailraceError, match="the engine stops"):
        offsets.write({"b": "1"}, {"at": 3})
    assert store.kept == {'{"a": "1"}': {"at": 1}, '{"b": "1"}': {"at": 2}}


def test_a_task_claims_a_partition_after_the_connectors_write_of_it():
    writing, go_on, order = threading.Event(), threading.Event(), []

    def hold():
        writing.set()
        assert go_on.wait(60)
        order.append("written")

    offsets = ConnectorOffsets(Store(hold), 60)
    writer = threading.Thread(target=offsets.write, args=({"a": "1"}, {"at": 1}))
    writer.start()
    assert writing.wait(60)
    offsets.claim({"a": "2"})
    claimer = threading.Thread(target=lambda: (offsets.claim({"a": "1"}), order.append("claimed")))
    claimer.start()
    go_on.set()
    writer.join(60)
    claimer.join(60)
    assert order == ["written", "claimed"]

    go_on.clear()
    hung = ConnectorOffsets(Store(hold), 0.01)
    writer = threading.Thread(target=hung.write, args=({"a": "1"}, {"at": 1}))
    writing.clear()
    writer.start()
    assert writing.wait(60)
    with pytest.raises(TailraceError, match="hangs") as raised:
        hung.claim({"a": "1"})
    assert raised.value.kind is Kind.OFFSETS_UNWRITABLE
    go_on.set()
    writer.join(60)


# ------------------------------------------------------------------ metrics


class Drops:
    """Drops every second line."""

    def apply(self, group):
        return [group.take((group.index % 2 == 1).nonzero()[0])]

    def close(self):
        pass


def samples(engine):
    """The metrics of the engine's task 0, by name."""
    return {
        sample.name.removeprefix(OWN_PREFIX): sample.value
        for family in engine.metrics.registry.collect()
        for sample in family.samples
        if sample.labels.get("task") == "0" and sample.value and sample.labels["engine"] == "engine"
    }


@pytest.mark.parametrize(
    ("handler", "order"),
    [("on_batch", "ordered"), ("on_record", "ordered"), ("on_record", "unordered"), ("on_record", "key")],
)
def test_an_engine_has_counters_of_its_tasks(handler, order):
    failed = threading.Event()

    def once(given):
        if not failed.is_set():
            failed.set()
            raise RetriableError

    engine = engine_of(
        LinesSource(100, batch=10, faults=[Fault("poll", 3, error=RetriableError())]),
        **{handler: once},
        transformations=[Drops()],
        options={"record_processing": {"order": order}},
    )
    assert "records_polled_total" not in samples(engine)
    engine.run()
    found = samples(engine)
    counted = {name: value for name, value in found.items() if "seconds" not in name}
    assert counted == {
        "records_polled_total": 100,
        "batches_polled_total": 10,
        "records_delivered_total": 50,
        "records_dropped_total": 50,
        "records_processed_total": 100,
        "records_committed_total": 100,
        "retries_total": 2,
        "task_state": 1,
    }
    assert found["poll_seconds_total"] > 0
    assert found["handler_seconds_total"] > 0
    view = engine.status()["tasks"][0]
    assert (view["delivered"], view["dropped"], view["committed"]) == (50, 50, 100)
    assert f'{OWN_PREFIX}state{{engine="engine",state="stopped"}} 1.0' in engine.metrics.text()


def test_metrics_show_records_under_way_until_they_are_cancelled():
    held, going = threading.Event(), threading.Event()

    def handler(_):
        going.set()
        assert held.wait(60)

    engine = engine_of(
        LinesSource(100, batch=10),
        handler,
        options={"record_processing": {"shutdown_timeout_ms": 0, "queue_batches_max": 3}},
    )
    engine.start()
    assert going.wait(60)
    wait_until(lambda: samples(engine).get("queue_batches") == 3, 60, "a full queue")
    assert samples(engine)["queue_bytes"] > 0
    engine.close()
    assert "queue_batches" not in samples(engine)
    assert engine.view().tasks[0].delivered == 0
    held.set()


@pytest.mark.parametrize("order", ["ordered", "unordered", "key"])
def test_a_batch_that_is_being_committed_frees_its_place_in_the_queue(order):
    hold = threading.Event()
    engine = engine_of(
        LinesSource(100, batch=10),
        lambda _: None,
        offsets=Store(fault=lambda: hold.wait(60)),
        options={"record_processing": {"queue_batches_max": 1, "order": order, "threads": 1}},
    )
    with engine:
        try:
            # One batch is being committed, one waits, and one was polled and waits for a place.
            wait_until(lambda: engine.view().tasks[0].polled == 30, 60, "three batches")
            assert samples(engine)["queue_batches"] == 2
            assert engine.view().tasks[0].committed == 0
        finally:
            hold.set()
        engine.wait(60)
    assert engine.view().tasks[0].committed == 100


@pytest.mark.parametrize("order", ["ordered", "unordered", "key"])
def test_commits_within_a_large_batch_follow_the_policy_and_are_counted(order):
    store, hold = Store(), threading.Event()

    def handler(record):
        if record.after["number"] == 700:
            assert hold.wait(60)

    engine = engine_of(
        LinesSource(3000, batch=1000),
        handler,
        offsets=store,
        options={
            "record_processing": {"queue_batches_max": 1, "order": order, "threads": 2},
            "offset_commit": {"policy": "count", "records": 500},
        },
    )
    with engine:
        try:
            # No more is polled, and the first batch does not end.
            wait_until(lambda: store.line() >= 500, 60, "a commit within a batch")
            wait_until(lambda: engine.view().tasks[0].processed == 699, 60, "what is processed")
            wait_until(lambda: samples(engine)["records_committed_total"] == store.line(), 60)
            assert 500 <= store.line() <= 699
        finally:
            hold.set()
        engine.wait(60)


def test_counters_continue_over_restarts_of_a_task():
    def handler(record):
        if record.after["number"] == 35 and engine.view().tasks[0].restarts == 0:
            raise ValueError

    engine = engine_of(LinesSource(60, batch=10), handler, options={"on_task_failure": "restart"})
    engine.run()
    found = samples(engine)
    assert found["restarts_total"] == 1
    assert found["records_committed_total"] == found["records_processed_total"] == 60
    # The batch in which it failed was delivered completely only after the restart, from line 35 on.
    assert found["records_delivered_total"] == 30 + 26


def test_metrics_of_tasks_and_connectors_are_in_the_registry_of_their_engine():
    one, two = metrics_of("one"), metrics_of("two")
    task = task_context({}, name="one", number=3, metrics=one)
    for _ in range(2):
        task.metrics.counter("rows_seen", "Rows.", {"table": "a", "kind": "x"}).inc(2)
    task.metrics.counter("rows_seen", "Rows.", {"kind": "x", "table": "b"}).inc()
    connector_context({}, name="two", metrics=two).metrics.gauge("lag_bytes", "Lag.").set(7)
    task.metrics.histogram("size_bytes", "Size.", buckets=[10, 100]).observe(50)
    labels = {"engine": "one", "task": "3"}
    value = one.registry.get_sample_value
    assert value("rows_seen_total", {**labels, "table": "a", "kind": "x"}) == 4
    assert value("rows_seen_total", {**labels, "table": "b", "kind": "x"}) == 1
    assert value("size_bytes_bucket", {**labels, "le": "100.0"}) == 1
    assert value("size_bytes_bucket", {**labels, "le": "10.0"}) == 0
    assert two.registry.get_sample_value("lag_bytes", {"engine": "two", "task": ""}) == 7
    assert value("lag_bytes", {"engine": "two", "task": ""}) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: m.gauge("rows", "Other kind."), "another kind"),
        (lambda m: m.counter("rows", "Other labels.", {"table": "a"}), "other labels"),
        (lambda m: m.counter("a b", "No name."), "'a b'"),
        (lambda m: m.counter("a", "No label.", {"1-": "a"}), "'a'"),
        (lambda m: m.gauge("rows_total", "One that a counter shows."), "rows_total"),
        (lambda m: m.counter("mine", "Ours.", {"task": "9"}), "labels engine and task"),
        (lambda m: m.counter("tailrace_engine_mine", "Ours."), "the engine's own"),
        (lambda m: [m.counter("many", "", {"n": str(n)}) for n in range(SERIES_MAX + 1)], "series already"),
    ],
)
def test_invalid_metrics_are_refused(make, message):
    metrics = metrics_of("one").of("0")
    metrics.counter("rows", "Rows.")
    with pytest.raises(TailraceError, match=message) as raised:
        make(metrics)
    assert raised.value.kind is Kind.ENGINE_MISUSED


@pytest.mark.follows("environment_unfit")
@pytest.mark.slow
def test_metrics_are_served_while_the_engine_runs_and_no_longer():
    leaks = Leaks()
    engine = engine_of(LinesSource(10, ends=False), Seen().record, options={"metrics_port": 0})
    assert engine.metrics.port is None
    with engine:
        url = f"http://127.0.0.1:{engine.metrics.port}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            assert f'{OWN_PREFIX}records_polled_total{{engine="engine",task="0"}}' in answer.read().decode()
        other = engine_of(LinesSource(), Seen().record, options={"metrics_port": engine.metrics.port})
        with pytest.raises(TailraceError, match="serve metrics at") as raised:
            other.run()
        assert raised.value.kind is Kind.ENVIRONMENT_UNFIT
        assert "choose another engine.metrics_port or metrics_host, or leave metrics_port out" in str(
            raised.value
        )
        elsewhere = {"metrics_port": engine.metrics.port, "metrics_host": "127.0.0.2"}
        for way in ({"metrics_port": 0}, elsewhere, {}):
            engine_of(LinesSource(), Seen().record, options=way).run()
    assert engine.metrics.port is None
    leaks.check()


@pytest.mark.parametrize("order", ["ordered", "unordered", "key"])
def test_a_handler_that_hangs_in_one_task_does_not_block_other_tasks(order):
    seen, hold = Seen(), threading.Event()

    def handler(record):
        if record.after["partition"] == "0-0":
            assert hold.wait(60)
        seen.record(record)

    engine = engine_of(
        LinesSource(5000, tasks=2, batch=500),
        handler,
        options={"record_processing": {"order": order, "threads": 2}},
        transformations=[KeepsAll()],
    )
    with engine:
        try:
            wait_until(lambda: engine.view().tasks[1].processed == 5000, 60, "the end of the other task")
            assert not seen.lines["0-0"]
        finally:
            hold.set()
        engine.wait(60)
    assert len(set(seen.lines["0-0"])) == len(seen.lines["1-0"]) == 5000
