"""The engine with a fake capture and real logs: no server, no Spark."""

from __future__ import annotations

import itertools
import json
import threading
import time

import pytest

from tailrace import Engine, TailraceError
from tailrace.changelog.retention.readers import Readers
from tailrace.config import EngineConfig
from tailrace.engine import tasks as tasks_module
from tailrace.errors import Kind
from tailrace.pipeline import connector as connector_module
from tailrace.pipeline import run as run_module
from tailrace.pipeline import source_worker as worker_module
from tailrace.pipeline.connector import PipelineConnector, PipelineTask
from tailrace.pipeline.log.consumer import LogConsumer, reader_name
from tailrace.pipeline.status.document import FILE_NAME, document
from tailrace.ranges import changes as changes_module
from tailrace.sources.postgres.source import PostgresSourceType
from tailrace.testing import conformance
from tailrace.testing.contexts import connector_context
from tests.support.orders_log import LogOfOrders
from tests.support.pipeline.staged import FakeCapture, FakeSink
from tests.support.wait import wait_until

QUICK = {"offset_commit": {"policy": "always"}, "errors_retry_delay_initial_ms": 1}


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Makes engines with fake captures; `stage.captures` has them by the log's path."""

    class Stage:
        captures = {}  # noqa: RUF012
        engines = []  # noqa: RUF012
        settings = {  # noqa: RUF012
            "name": "shop",
            "source": {"host": "127.0.0.1", "port": 1},
            "log": {"path": str(tmp_path / "log")},
        }
        end_lsn = 0

        def engine(self, more=None, **handlers):
            settings = self.settings | (more or {})
            handlers.setdefault("tasks_max", 1)
            file = (settings,) if handlers.pop("file", False) else ()
            self.engines.append(
                Engine(
                    *file,
                    connector=PipelineConnector,
                    settings=settings,
                    name="shop",
                    options=QUICK | handlers.pop("options", {}),
                    **handlers,
                )
            )
            return self.engines[-1]

        def capture_of(self, _source, path, _log, **_):
            before, number = self.captures.get(path), 0
            if before is not None:
                before.log.close()
                number = before.log.number
            self.captures[path] = FakeCapture(path)
            self.captures[path].log.number = number
            return self.captures[path]

        @property
        def capture(self):
            return self.captures[tmp_path / "log"]

    staged = Stage()
    staged.captures, staged.engines = {}, []
    monkeypatch.setattr(PostgresSourceType, "capture", lambda _, *args, **kw: staged.capture_of(*args, **kw))
    monkeypatch.setattr(worker_module, "refuse_if_written", lambda *_: None)
    monkeypatch.setattr(PostgresSourceType, "end", lambda *_: staged.end_lsn)
    yield staged
    for engine in staged.engines:
        if engine.state not in {"creating", "stopped"}:
            engine.close()
    for capture in staged.captures.values():
        capture.log.close()


def ids(seen):
    return lambda batch: seen.extend(record.after["id"] for record in batch)


def test_an_engine_delivers_the_log_and_the_next_one_continues(stage):
    seen = []
    with stage.engine(on_batch=ids(seen)) as engine:
        stage.capture.log.insert(1, 2, 3)
        wait_until(lambda: len(seen) == 3, 60, "three records")
        stage.capture.log.insert(4)
        wait_until(lambda: len(seen) == 4, 60, "the fourth")
    assert engine.state == "stopped"
    with stage.engine(on_batch=ids(seen)):
        end = stage.capture.log.insert(5)
        wait_until(lambda: len(seen) == 5, 60, "the fifth")
    assert seen == [1, 2, 3, 4, 5]
    assert Readers(stage.capture.log.directory).get(reader_name("shop")).offsets == {"0": end}


def test_a_batch_has_no_more_records_than_allowed(stage):
    sizes = []
    options = {"record_processing": {"batch_records_max": 3}}
    with stage.engine(on_batch=lambda batch: sizes.append(len(batch)), options=options):
        stage.capture.log.insert(1, 2, 3, 4, 5, 6, 7)
        wait_until(lambda: sum(sizes) == 7, 60, "seven records")
    assert sizes == [3, 3, 1]


@pytest.mark.slow
def test_only_unprocessed_records_come_again(stage):
    seen = []

    def third_fails(record):
        if record.after["id"] == 3:
            raise ValueError("not this one")
        seen.append(record.after["id"])

    engine = stage.engine(on_record=third_fails)
    engine.start()
    stage.capture.log.insert(1, 2, 3, 4)
    with pytest.raises(TailraceError) as raised:
        engine.wait(60)
    assert raised.value.kind is Kind.TASK_FAILED
    assert seen == [1, 2]
    with stage.engine(on_batch=ids(seen)):
        wait_until(lambda: len(seen) == 4, 60, "the rest")
    assert seen == [1, 2, 3, 4]


def test_until_caught_up_ends_after_the_last_record(stage):
    seen = []
    stage.end_lsn = 2000
    with stage.engine({"until_caught_up": True}, on_batch=ids(seen)) as engine:
        stage.capture.log.insert(1)
        stage.capture.log.insert(2)
        assert engine.wait(60)
    assert seen == [1, 2]


def test_a_capture_is_restarted_after_a_retriable_error_and_fails_the_engine_after_another(stage):
    seen = []
    engine = stage.engine(on_batch=ids(seen))
    engine.start()
    stage.capture.log.insert(1)
    wait_until(lambda: seen == [1], 60, "the first")
    first = stage.capture
    first.failure = TailraceError(Kind.SOURCE_UNREACHABLE, "away")
    wait_until(lambda: stage.capture is not first, 60, "a new capture")
    stage.capture.log.insert(2)
    wait_until(lambda: seen == [1, 2], 60, "the record behind it")
    stage.capture.failure = TailraceError(Kind.SLOT_MISSING, "it is gone")
    with pytest.raises(TailraceError) as raised:
        engine.wait(60)
    assert raised.value.kind is Kind.SLOT_MISSING


def test_retries_are_used_up_by_a_server_that_stays_away_and_reset_when_it_comes_back(stage, monkeypatch):
    monkeypatch.setattr(tasks_module, "POLL_S", 0.005)
    polls, begun, poll = itertools.count(), [], PipelineTask.poll
    polled = [0]

    def counted(task, timeout_s):
        found = poll(task, timeout_s)
        polled[0] = next(polls)
        return found

    def run(capture):
        begun.append(capture)
        capture.phase = "streaming" if len(begun) <= 4 else "connecting"
        before = polled[0]
        wait_until(lambda: polled[0] > before + 2, 60, "polls that gave nothing")
        raise TailraceError(Kind.SOURCE_UNREACHABLE, "away")

    monkeypatch.setattr(PipelineTask, "poll", counted)
    monkeypatch.setattr(FakeCapture, "run", run)
    with pytest.raises(TailraceError) as raised:
        stage.engine(on_batch=print, options={"errors_retries_max": 2}).run()
    assert raised.value.kind is Kind.SOURCE_UNREACHABLE
    # The fourth one has failed, and two attempts were left.
    assert len(begun) == 6


def test_several_sources_are_divided_among_tasks_and_a_failed_one_leaves_the_others_running(stage, tmp_path):
    seen = []
    several = {"sources": [{"name": f"s{k}", "host": "127.0.0.1", "port": k + 1} for k in range(3)]}
    stage.settings = {name: value for name, value in stage.settings.items() if name != "source"}
    by = {k: tmp_path / "log" / f"s{k}" for k in range(3)}
    engine = stage.engine(several, on_record=lambda record: seen.append(record.after["id"]))
    engine.start()
    stage.captures[by[0]].failure = TailraceError(Kind.SLOT_MISSING, "it is gone")
    for k in (1, 2):
        stage.captures[by[k]].log.insert(k)
    wait_until(lambda: sorted(seen) == [1, 2], 60, "the others' records")
    assert engine.state == "polling_tasks"
    # The failed one is visible long before the end.
    wait_until(lambda: engine.error is not None, 60, "the error")
    assert engine.error.kind is Kind.SLOT_MISSING
    [task] = engine.view().tasks
    assert [error.context["source"] for error in task.errors] == ["s0"]
    assert task.error.context == {"source": "s0", "task": 0}
    assert engine.status()["tasks"][0]["errors"][0]["kind"] == "slot_missing"
    assert 'source_errors{engine="shop",task="0"} 1.0' in engine.metrics.text()
    for k in (1, 2):
        stage.captures[by[k]].failure = TailraceError(Kind.SLOT_MISSING, "it is gone, too")
    with pytest.raises(TailraceError) as raised:
        engine.wait(60)
    assert raised.value.context["source"] == "s0"
    assert raised.value.context["failed_too"] == "s1, s2"


def test_the_failure_of_one_source_is_the_engines_failure_when_it_is_closed(stage, tmp_path):
    several = {"sources": [{"name": f"s{k}", "host": "127.0.0.1", "port": k + 1} for k in range(2)]}
    stage.settings = {name: value for name, value in stage.settings.items() if name != "source"}
    seen = []
    engine = stage.engine(several, on_batch=ids(seen))
    engine.start()
    stage.captures[tmp_path / "log" / "s0"].failure = TailraceError(
        Kind.SLOT_MISSING, "it is gone", "tailrace snapshot FILE --lost"
    )
    status = tmp_path / "log" / FILE_NAME
    wait_until(lambda: status.exists() and '"slot_missing"' in status.read_text(), 60, "the failure")
    stage.captures[tmp_path / "log" / "s1"].log.insert(1)
    wait_until(lambda: seen == [1], 60, "the other's record")
    engine.close()
    with pytest.raises(TailraceError) as raised:
        engine.wait()
    assert (raised.value.kind, raised.value.context["source"]) == (Kind.SLOT_MISSING, "s0")
    assert raised.value.hint.startswith("tailrace snapshot FILE --source s0 --lost")


def test_sinks_are_fed_with_and_without_a_handler(stage, monkeypatch):
    seen, got = [], []
    monkeypatch.setattr(worker_module, "build", lambda config, *_: FakeSink(config.name, got, None))
    sinks = {"sinks": [{"type": "python", "handler": "no.module:needed", "name": "one", "interval_ms": 0}]}
    with stage.engine(sinks, on_batch=ids(seen)):
        first = stage.capture.log.insert(1)
        wait_until(lambda: (seen, got) == ([1], [first]), 60, "both")
    with stage.engine(sinks, file=True):
        second = stage.capture.log.insert(2)
        wait_until(lambda: got == [first, second], 60, "the sink alone")
    assert seen == [1]
    reader = Readers(stage.capture.log.directory).get(reader_name("shop"))
    assert reader.offsets == {"0": first}  # the handler may come back


def test_the_status_shows_a_running_engine_its_handler_and_how_it_ended(stage, tmp_path):
    seen = []
    engine = stage.engine(on_batch=ids(seen))
    config = EngineConfig.model_validate(stage.settings)
    engine.start()
    stage.capture.phase = "streaming"
    end = stage.capture.log.insert(1)
    told = wait_until(
        lambda: (
            (
                (found := json.loads((tmp_path / "log" / FILE_NAME).read_text()))["sinks"][0]["position"]
                == end
                and found["state"] == "streaming"
                and found
            )
            if (tmp_path / "log" / FILE_NAME).exists()
            else None
        ),
        60,
        "the status",
    )
    (sink,) = told["sinks"]
    assert (sink["name"], sink["type"], sink["state"], sink["lag_bytes"]) == (
        reader_name("shop"), "engine", "running", 0,
    )  # fmt: skip
    stage.capture.failure = TailraceError(Kind.SLOT_MISSING, "it is gone")
    with pytest.raises(TailraceError):
        engine.wait(60)
    stage.capture.log.close()
    assert document(config)["state"] == "needs_snapshot"


def test_a_sink_that_fails_leaves_the_handler_running_and_is_reported_at_the_end(stage, monkeypatch):
    seen, failure = [], TailraceError(Kind.SINK_WRITE_FAILED, "for ever")
    monkeypatch.setattr(worker_module, "build", lambda config, *_: FakeSink(config.name, [], failure))
    sink = {"type": "python", "handler": "no.module:needed", "name": "one", "retry_attempts_max": 0}
    stage.end_lsn = 2000
    engine = stage.engine({"sinks": [sink], "until_caught_up": True}, on_batch=ids(seen))
    engine.start()
    stage.capture.log.insert(1)
    wait_until(lambda: seen == [1], 60, "the first")
    stage.capture.log.insert(2)
    with pytest.raises(TailraceError) as raised:
        engine.wait(60)
    assert seen == [1, 2]
    assert raised.value.kind is Kind.TASK_FAILED
    assert raised.value.context["sinks"] == "one"


def test_the_end_waits_only_once_for_a_sink_whose_target_hangs(stage, monkeypatch):
    writing, may_end = threading.Event(), threading.Event()

    class HangingSink(FakeSink):
        def write(self, spark, log, span, splits):
            writing.set()
            may_end.wait(120)
            return super().write(spark, log, span, splits)

    monkeypatch.setattr(run_module, "DRAIN_DEADLINE_S", 0.2)
    monkeypatch.setattr(run_module, "GIVE_UP_DEADLINE_S", 60.0)  # the deadline of Spark's jobs
    monkeypatch.setattr(worker_module, "build", lambda config, *_: HangingSink(config.name, [], None))
    sinks = [{"type": "python", "handler": "no.module:needed", "name": "one"}]
    engine = stage.engine({"sinks": sinks}, on_batch=lambda _: None)
    engine.start()
    stage.capture.log.insert(1)
    assert writing.wait(60)
    began_s = time.monotonic()
    engine.close(60)
    assert time.monotonic() - began_s < 30
    may_end.set()


@pytest.mark.slow
def test_connector_and_task_fulfil_the_contracts(stage, tmp_path, monkeypatch):
    monkeypatch.setattr(connector_module, "LogConsumer", lambda *of, **_: LogConsumer(*of, rows_max=3))
    monkeypatch.setattr(changes_module, "DECODED_BYTES_MAX", 1)
    log = LogOfOrders(tmp_path / "log")
    log.insert(1, 2, 3, 4, 5)
    log.insert(6)
    log.insert(7, 8)
    log.close()
    conformance.check_connector(PipelineConnector, stage.settings)
    connector = PipelineConnector()
    connector.start(connector_context(stage.settings, name="conformance"))
    (own,) = connector.task_settings(1)
    conformance.check_task(connector.create_task, own, records=8)
    connector.stop()
