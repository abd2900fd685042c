"""The engine with a fake capture and fake sinks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from types import SimpleNamespace

import pytest

from tailrace.changelog.format import Tail
from tailrace.changelog.reader import LogReader
from tailrace.config import EngineConfig
from tailrace.errors import Kind, TailraceError
from tailrace.model import LogRange
from tailrace.pipeline import run as run_module
from tailrace.pipeline import source_worker as worker_module
from tailrace.pipeline.preflight.preflight import _targets
from tailrace.pipeline.run import Run
from tailrace.pipeline.source_worker import task_view
from tailrace.pipeline.status.display import Pace, Sample, duration, line, size
from tailrace.pipeline.status.document import FILE_NAME, document
from tailrace.pipeline.status.views import PipelineState, SinkState
from tailrace.ranges.plan import InputSplit
from tailrace.sinks.build import build
from tailrace.sources.postgres.source import PostgresSourceType
from tests.support.pipeline.staged import FakeCapture, FakeProgress, FakeSink, FakeSpark, running
from tests.support.wait import wait_until


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """Makes engines with a fake capture, Spark and sinks; `stage.sinks` has what they got."""

    class Stage:
        sinks = {"one": [], "two": []}  # noqa: RUF012
        failures = {}  # noqa: RUF012
        capture = None

        def engine(self, settings=None, **options):
            config = EngineConfig.model_validate(
                {
                    "name": "shop",
                    "source": {"host": "127.0.0.1", "port": 1},
                    "log": {"path": str(tmp_path / "log")},
                    "sinks": [
                        {"type": "jsonl", "name": name, "path": str(tmp_path / name), "interval_ms": 0}
                        for name in self.sinks
                    ],
                    "engine": settings or {},
                }
            )
            self.config = config
            self.capture = FakeCapture(config.log.path)
            monkeypatch.setattr(PostgresSourceType, "capture", lambda *_, **__: self.next_capture())
            return Run(config, **options)

        def next_capture(self):
            """The capture that was created; if its run has ended, another one on the same log."""
            if self.capture.failure is not None:
                self.capture = FakeCapture(None, self.capture.log)
            return self.capture

    staged = Stage()
    staged.sinks = {"one": [], "two": []}
    staged.failures = {}
    monkeypatch.setattr(run_module, "SparkHost", FakeSpark)
    monkeypatch.setattr(worker_module, "refuse_if_written", lambda *_: None)
    monkeypatch.setattr(
        worker_module,
        "build",
        lambda config, *_: FakeSink(config.name, staged.sinks[config.name], staged.failures.get(config.name)),
    )
    yield staged
    if staged.capture is not None:
        staged.capture.log.close()


def test_a_log_that_lacks_changes_of_a_sink_does_not_grow(stage, tmp_path):
    """Otherwise the sink would continue, at a later start, after changes that it does not have."""
    engine = stage.engine()
    log, older = stage.capture.log, tmp_path / "older"
    (sink, _) = stage.config.sinks
    log.insert(1)
    shutil.copytree(log.directory.path, older)
    end = log.insert(2)
    target = build(sink, stage.config.pipelines[0].source, log.directory.path)
    target.open(log.directory.identity, "shop")
    with LogReader.open(log.directory, "0") as reader:
        split = InputSplit("0", 0, 0, end, tuple(reader.blocks(0, end)))
    target.write(None, log.directory.path, LogRange("0", 0, end), [split])
    target.close()
    log.close()
    shutil.rmtree(log.directory.path)
    older.rename(log.directory.path)
    stage.capture.run = lambda: pytest.fail("capture began")
    run = running(engine)
    assert run.join(60)
    assert run.error.kind is Kind.SINK_AHEAD_OF_LOG
    assert any(finding.kind is Kind.SINK_AHEAD_OF_LOG for finding in _targets(stage.config))


def test_a_source_stops_at_a_sink_elsewhere_that_has_more_than_its_log(stage):
    stage.failures["one"] = TailraceError(Kind.SINK_AHEAD_OF_LOG, "ahead")
    run = running(stage.engine())
    stage.capture.phase = "streaming"
    stage.capture.log.insert(1)
    assert run.join(60)
    assert run.error.kind is Kind.SINK_AHEAD_OF_LOG


def test_a_source_that_connects_again_is_shown_as_connecting_without_a_lag():
    broken = TailraceError(Kind.SOURCE_UNREACHABLE, "the stream ended")
    progress = FakeProgress("streaming", durable=Tail(1, 1, 1), source_end=1, error=broken)
    view = task_view(SimpleNamespace(progress=lambda: progress))
    assert (view.state, view.source_lag_bytes, view.error) == ("connecting", None, broken)


def test_a_stop_ends_everything_without_an_error(stage):
    engine = stage.engine()
    end = stage.capture.log.insert(1)
    run = running(engine)
    stage.capture.phase = "streaming"
    wait_until(lambda: stage.sinks == {"one": [end], "two": [end]}, 60, "both sinks")
    wait_until(lambda: engine.view().state is PipelineState.STREAMING, 60, "streaming")
    engine.stop()
    assert run.join(10)
    assert run.error is None
    assert engine.view().state is PipelineState.STOPPED
    assert stage.capture.stopping.is_set()


def test_a_failed_sink_stops_neither_the_source_nor_other_sinks(stage):
    stage.failures["one"] = TailraceError(Kind.SINK_FOREIGN, "not ours")
    engine = stage.engine()
    run = running(engine)
    stage.capture.phase = "streaming"
    end = stage.capture.log.insert(1)
    wait_until(lambda: stage.sinks["two"] == [end], 60, "the neighbour")
    later = stage.capture.log.insert(2)
    wait_until(lambda: stage.sinks["two"][-1] == later, 60, "the neighbour again")
    one, two = (lambda: engine.view().sources[0].sinks[0]), (lambda: engine.view().sources[0].sinks[1])
    wait_until(lambda: one().state is SinkState.FAILED, 60, "the failure")
    assert two().state is SinkState.RUNNING
    assert not run.ended
    engine.stop()
    assert run.join(10)
    # It is reported at the end, so that the exit status is that of a failure.
    assert run.error is not None
    assert (run.error.kind, run.error.context["sinks"]) == (Kind.SINK_FOREIGN, "one")


def test_the_run_fails_when_all_sinks_have(stage):
    for name in stage.sinks:
        stage.failures[name] = TailraceError(Kind.SINK_FOREIGN, f"{name} is not ours", "hint")
    engine = stage.engine()
    stage.capture.log.insert(1)
    run = running(engine)
    assert run.join(10)
    assert run.error.kind is Kind.SINK_FOREIGN
    assert run.error.context["sinks"] == "one, two"
    assert run.error.hint == "hint"


def test_a_lost_slot_ends_the_run_and_the_status_says_what_to_do(stage):
    engine = stage.engine()
    stage.capture.log.insert(1)
    stage.capture.failure = TailraceError(Kind.SLOT_MISSING, "it is gone", "start again")
    run = running(engine)
    assert run.join(10)
    assert run.error.kind is Kind.SLOT_MISSING
    assert engine.view().state is PipelineState.NEEDS_SNAPSHOT
    written = json.loads((stage.config.log.path / FILE_NAME).read_text())
    assert (written["state"], written["error"]["kind"]) == ("needs_snapshot", "slot_missing")
    stage.capture.log.close()
    told = document(stage.config)
    assert (told["state"], told["error"]["kind"]) == ("needs_snapshot", "slot_missing")


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"errors_retries_max": 2}, Kind.SOURCE_UNREACHABLE),
        ({"on_task_failure": "restart"}, Kind.SLOT_MISSING),
    ],
)
def test_a_failed_capture_is_restarted_as_often_as_configured(stage, settings, kind):
    engine = stage.engine({"errors_retry_delay_initial_ms": 1, **settings})
    stage.capture.failure = TailraceError(kind, "away")
    run = running(engine)
    wait_until(lambda: stage.capture.failure is None and stage.capture.phase == "connecting", 60, "another")
    stage.capture.phase = "streaming"
    end = stage.capture.log.insert(1)
    wait_until(lambda: stage.sinks["one"] == [end], 60, "what came after the failure")
    wait_until(lambda: engine.view().state is PipelineState.STREAMING, 60, "streaming again")
    assert not run.ended
    engine.stop()
    assert run.join(10)
    assert run.error is None


@pytest.mark.slow
def test_metrics_of_a_run_without_a_handler_have_sinks_and_sources(stage):
    engine = stage.engine({"metrics_port": 0})
    run = running(engine)
    stage.capture.phase = "streaming"
    stage.capture.log.insert(1)
    port = wait_until(lambda: engine._metrics.port, 60, "the port")

    def numbers():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return answer.read().decode()

    wait_until(lambda: re.search(r'tailrace_sink_rows_total\{.*sink="one".*\} 1.0', numbers()), 60, "the row")
    found = numbers()
    assert 'tailrace_engine_task_state{engine="shop",state="polling",task="0"} 1.0' in found
    assert 'tailrace_engine_source_errors{engine="shop",task="0"} 0.0' in found
    for counted in ("records_", "batches_", "queue_", "retries", "restarts", "_seconds"):
        assert not re.search(rf"tailrace_engine_\w*{counted}", found), "of records that no handler polls"
    engine.stop()
    assert run.join(10)
    assert engine._metrics.port is None


def test_until_caught_up_ends_when_every_sink_is_at_the_logs_end(stage, monkeypatch):
    monkeypatch.setattr(PostgresSourceType, "end", lambda *_: 3000)
    engine = stage.engine(until_caught_up=True)
    run = running(engine)
    for number in range(2):
        stage.capture.log.insert(number)
    assert not run.join(0.3)
    end = stage.capture.log.insert(3)
    assert run.join(10)
    assert run.error is None
    assert [sink.position for sink in engine.view().sources[0].sinks] == [end, end]


def test_until_caught_up_fails_if_one_sink_has(stage, monkeypatch):
    monkeypatch.setattr(PostgresSourceType, "end", lambda *_: 1000)
    stage.failures["two"] = TailraceError(Kind.SINK_FOREIGN, "not ours")
    engine = stage.engine(until_caught_up=True)
    end = stage.capture.log.insert(1)
    run = running(engine)
    assert run.join(10)
    assert run.error.kind is Kind.SINK_FOREIGN
    assert stage.sinks["one"] == [end]


def test_until_caught_up_repeats_its_query_while_the_source_is_away(stage, monkeypatch):
    answers = [TailraceError(Kind.SOURCE_UNREACHABLE, "away"), 1000]
    monkeypatch.setattr(worker_module, "_ASK_AGAIN_S", 0.01)

    def wal_end(*_):
        answer = answers.pop(0)
        if isinstance(answer, TailraceError):
            raise answer
        return answer

    monkeypatch.setattr(PostgresSourceType, "end", wal_end)
    engine = stage.engine(until_caught_up=True)
    stage.capture.log.insert(1)
    run = running(engine)
    assert run.join(10)
    assert run.error is None
    assert answers == []


def test_a_completed_capture_ends_the_run_once_the_sinks_have_everything(stage):
    engine = stage.engine()
    end = stage.capture.log.insert(1)
    stage.capture.stop()
    run = running(engine)
    assert run.join(10)
    assert run.error is None
    assert stage.sinks == {"one": [end], "two": [end]}


def test_the_status_of_a_running_engine_is_read_from_its_file(stage):
    engine = stage.engine()
    end = stage.capture.log.insert(1)
    run = running(engine)
    stage.capture.phase = "streaming"
    told = wait_until(
        lambda: (found := document(stage.config))["sinks"][0]["position"] == end and found, 60, "status"
    )
    assert set(told) >= {"name", "state", "tasks", "sinks", "error"}
    assert (told["state"], told["pid"]) == ("streaming", os.getpid())
    (task,) = told["tasks"]
    assert (task["state"], task["log_end"], task["source_lag_bytes"] > 0) == ("streaming", end, True)
    assert task["source_lag_s"] > 0
    assert told["sinks"][0]["lag_bytes"] == 0
    assert told["sinks"][0]["lag_s"] == 0.0
    assert set(told) == {"name", "state", "pid", "updated_us", "tasks", "sinks", "error"}
    assert set(task) == {
        "task", "state", "source_lag_bytes", "source_lag_s", "log_end", "position", "acknowledged", "rows",
        "bytes", "reconnects", "error", "slot", "warnings", "snapshot",
    }  # fmt: skip
    assert set(told["sinks"][0]) == {
        "name", "type", "state", "position", "lag_bytes", "lag_s", "rows", "dead_letters", "error",
        "realtime",
    }  # fmt: skip
    assert oct((stage.config.log.path / FILE_NAME).stat().st_mode)[-3:] == "600"
    engine.stop()
    assert run.join(10)


def test_an_observer_sees_every_state(stage):
    seen = []
    engine = stage.engine(observe=lambda view: seen.append(view.state))
    run = running(engine)
    wait_until(lambda: PipelineState.STARTING in seen, 60, "starting")
    stage.capture.phase = "snapshot"
    wait_until(lambda: PipelineState.SNAPSHOT in seen, 60, "snapshot")
    stage.capture.phase = "streaming"
    wait_until(lambda: PipelineState.STREAMING in seen, 60, "streaming")
    stage.capture.phase = "connecting"
    wait_until(lambda: engine.view().state is PipelineState.STARTING, 60, "starting again")
    engine.stop()
    assert run.join(10)
    assert seen[-1] is PipelineState.STOPPED


def test_rates_are_means_over_the_window_and_give_the_time_left():
    pace = Pace()
    for second in range(30):
        pace.note(Sample(float(second), second * 100, second * 1000, 50_000, (second * 1000,)))
    assert pace.rows_per_s == pytest.approx(100)
    assert pace.bytes_per_s == pytest.approx(1000)
    assert pace.eta_s(0) == pytest.approx(21)


def test_no_time_left_is_shown_without_progress():
    pace = Pace()
    assert pace.rows_per_s == 0
    for second in range(3):
        pace.note(Sample(float(second), 0, 0, 1000 * second, (0,)))
    assert pace.eta_s(0) is None


def test_the_progress_line_shows_state_rates_and_lag(stage):
    views = []
    engine = stage.engine(observe=views.append)
    stage.capture.log.insert(1)
    run = running(engine)
    view = wait_until(lambda: next((view for view in views if view.sources), None), 60, "a view")
    engine.stop()
    assert run.join(10)
    shown = line(view.state, view.sources[0], Pace())
    for word in ("starting", "rows/s", "behind source", "one ", "behind log"):
        assert word in shown
    assert (size(1536), size(10), duration(59), duration(3700)) == ("1.5 KiB", "10 B", "59 s", "1:01:40")


@pytest.mark.slow
def test_a_run_without_a_handler_imports_no_module_of_the_engine_for_handlers():
    code = (
        "import sys, tailrace.cli.run; print(*(name for name in sys.modules if name.startswith('tailrace.')))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "tailrace.pipeline.source_worker" in loaded.split()
    assert not {
        "tailrace.engine.engine",
        "tailrace.engine.tasks",
        "tailrace.pipeline.connector",
    } & set(loaded.split())
