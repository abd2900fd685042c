"""The engine over several sources: started, supervised and stopped together."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import threading
from typing import Any

import pytest
import yaml

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.durable import make_directory
from tailrace.config import EngineConfig, EngineOptions
from tailrace.errors import Kind, TailraceError
from tailrace.model import SourceFingerprint
from tailrace.pipeline import run as run_module
from tailrace.pipeline import source_worker as worker_module
from tailrace.pipeline.log.root import check_roots, take_root
from tailrace.pipeline.preflight.preflight import preflight
from tailrace.pipeline.remote.channel import Channel
from tailrace.pipeline.run import Run
from tailrace.pipeline.status.display import Pace, ProgressDisplay, line
from tailrace.pipeline.status.document import document
from tailrace.pipeline.status.views import PipelineState, SinkState
from tailrace.sources.postgres.slot.way_out import with_way_out
from tailrace.sources.postgres.source import PostgresSourceType
from tests.support.pipeline.staged import FakeCapture, FakeSink, FakeSpark, running
from tests.support.wait import wait_until

NAMES = ("a", "b", "c")


def pipeline(root):
    return EngineConfig.model_validate(
        {
            "name": "shop",
            "sources": [{"name": name, "host": "127.0.0.1", "port": 1} for name in NAMES],
            "tasks_max": 2,
            "log": {"path": str(root / "log")},
            "sinks": [
                {"type": "jsonl", "name": name, "path": str(root / name), "interval_ms": 0}
                for name in ("one", "two")
            ],
        }
    )


class HeldSink(FakeSink):
    """Writes once it is released, and tells that it waits."""

    def __init__(self, name, spans, order, key):
        super().__init__(name, spans, None)
        self.order, self.key = order, key
        self.at_it, self.may = threading.Event(), threading.Event()

    def write(self, spark, log, span, splits):
        self.at_it.set()
        assert self.may.wait(60)
        self.order.append(self.key)
        return super().write(spark, log, span, splits)


class Stage:
    """Captures by source; the ranges that sinks got, and their behaviour, by sink and source."""

    def __init__(self, root):
        self.config = pipeline(root)
        self.captures = {name: FakeCapture(self.config.log.path / name) for name in NAMES}
        self.got = {}
        self.failures = {}
        self.held = {}
        self.order = []  # the batches of held sinks

    def capture(self, source, *_, **__):
        return self.captures[source.name]

    def sink(self, config, *_):
        key = (config.name, config.path.name)
        if key in self.held:
            return self.held[key]
        return FakeSink(config.name, self.got.setdefault(key, []), self.failures.get(key))

    def hold(self, sink, source):
        key = (sink, source)
        self.held[key] = HeldSink(sink, self.got.setdefault(key, []), self.order, key)
        return self.held[key]

    def all_stream(self):
        for capture in self.captures.values():
            capture.phase = "streaming"

    def close_logs(self):
        for capture in self.captures.values():
            capture.log.close()


@pytest.fixture
def stage(tmp_path, monkeypatch):
    staged = Stage(tmp_path)
    monkeypatch.setattr(PostgresSourceType, "capture", lambda _, *args, **more: staged.capture(*args, **more))
    monkeypatch.setattr(worker_module, "build", staged.sink)
    monkeypatch.setattr(worker_module, "refuse_if_written", lambda *_: None)
    monkeypatch.setattr(run_module, "SparkHost", FakeSpark)
    yield staged
    staged.close_logs()


def test_all_sources_run_in_parallel_and_stop_together(stage):
    engine = Run(stage.config)
    ends = {}
    for number, (name, capture) in enumerate(stage.captures.items(), 1):
        ends[name] = capture.log.insert(*range(number))
    run = running(engine)
    stage.captures["a"].phase = stage.captures["b"].phase = "streaming"
    wanted = {(sink, name): [ends[name]] for sink in ("one", "two") for name in NAMES}
    wait_until(lambda: stage.got == wanted, 60, "every sink of every source")
    assert engine.view().state is PipelineState.STARTING  # as the last of them
    stage.all_stream()
    wait_until(lambda: engine.view().state is PipelineState.STREAMING, 60, "streaming")
    told = wait_until(
        lambda: (found := document(stage.config))["state"] == "streaming" and found, 60, "the status"
    )
    assert [(task["name"], task["engine_task"], task["log_end"]) for task in told["tasks"]] == [
        ("a", 0, ends["a"]), ("b", 1, ends["b"]), ("c", 0, ends["c"]),
    ]  # fmt: skip
    assert [(sink["source"], sink["name"]) for sink in told["sinks"]] == [
        (name, sink) for name in NAMES for sink in ("one", "two")
    ]
    engine.stop()
    assert run.join(10)
    assert run.error is None
    assert all(capture.stopping.is_set() for capture in stage.captures.values())


def test_a_failed_source_is_reported_and_the_others_go_on(stage):
    engine = Run(stage.config)
    end = stage.captures["b"].log.insert(1)
    run = running(engine)
    stage.all_stream()
    stage.captures["b"].failure = TailraceError(Kind.SLOT_MISSING, "it is gone", "start again")
    wait_until(lambda: engine.view().error is not None, 60, "the failure")
    # The others go on, and sinks still get what was captured of the failed one.
    ends = {name: stage.captures[name].log.insert(1) for name in ("a", "c")}
    wait_until(lambda: all(stage.got.get(("one", name)) == [ends[name]] for name in ends), 60, "the others")
    wait_until(lambda: stage.got.get(("two", "b")) == [end], 60, "what was captured")
    assert engine.view().state is PipelineState.STREAMING
    told = wait_until(
        lambda: (found := document(stage.config))["error"] and found, 60, "the failure in the status"
    )
    assert (told["state"], told["error"]["context"]) == ("streaming", {"source": "b"})
    assert [task["state"] for task in told["tasks"]] == ["streaming", "needs_snapshot", "streaming"]
    assert [task["error"] and task["error"]["kind"] for task in told["tasks"]] == [None, "slot_missing", None]
    # Its error is the run's: so is the exit status.
    stage.captures["c"].failure = TailraceError(Kind.SOURCE_CHANGED, "another server")
    wait_until(lambda: engine.view().sources[2].task.state == "failed", 60, "the second failure")
    engine.stop()
    assert run.join(10)
    assert (run.error.kind, run.error.context) == (Kind.SLOT_MISSING, {"source": "b", "failed_too": "c"})
    stage.close_logs()
    left = document(stage.config)
    assert (left["state"], left["error"]["kind"]) == ("needs_snapshot", "slot_missing")
    assert [task["state"] for task in left["tasks"]] == ["stopped", "needs_snapshot", "failed"]


def test_a_failed_source_ends_the_run_if_so_configured(stage):
    options = EngineOptions(on_task_failure="stop")
    engine = Run(stage.config.model_copy(update={"engine": options}))
    run = running(engine)
    stage.all_stream()
    stage.captures["b"].failure = TailraceError(Kind.SLOT_MISSING, "it is gone", "begin again")
    assert run.join(10)
    assert (run.error.kind, run.error.context["source"]) == (Kind.SLOT_MISSING, "b")
    assert all(capture.stopping.is_set() for capture in stage.captures.values())


def test_a_source_that_cannot_be_stopped_fails_and_the_others_are_stopped(stage):
    def broken():
        stage.captures["a"].stopping.set()
        raise ZeroDivisionError

    stage.captures["a"].stop = broken
    engine = Run(stage.config)
    run = running(engine)
    stage.all_stream()
    wait_until(lambda: engine.view().state is PipelineState.STREAMING, 60, "streaming")
    engine.stop()
    assert run.join(10)
    assert run.error.context == {"source": "a"}
    assert isinstance(run.error.__cause__, ZeroDivisionError)
    assert all(capture.stopping.is_set() for capture in stage.captures.values())


def test_a_run_whose_sources_have_all_failed_ends(stage):
    engine = Run(stage.config)
    run = running(engine)
    stage.all_stream()
    for name, capture in stage.captures.items():
        capture.failure = TailraceError(Kind.SOURCE_CHANGED, f"{name} is another server")
    assert run.join(10)
    assert run.error.kind is Kind.SOURCE_CHANGED
    assert engine.view().state is PipelineState.FAILED


def test_until_caught_up_ends_with_the_error_of_the_one_that_failed(stage, monkeypatch):
    monkeypatch.setattr(
        PostgresSourceType, "end", lambda _, source, *__: 10**9 if source.name == "b" else 1000
    )
    engine = Run(stage.config, until_caught_up=True)
    ends = {name: capture.log.insert(1) for name, capture in stage.captures.items()}
    stage.captures["b"].failure = TailraceError(Kind.SOURCE_CHANGED, "another server")
    run = running(engine)
    assert run.join(10)
    assert run.error.context == {"source": "b"}
    assert {name: stage.got["two", name] for name in NAMES} == {name: [end] for name, end in ends.items()}


@pytest.mark.slow
def test_sinks_that_hang_for_every_source_share_one_deadline(stage, monkeypatch):
    monkeypatch.setattr(run_module, "DRAIN_DEADLINE_S", 0.2)
    monkeypatch.setattr(run_module, "GIVE_UP_DEADLINE_S", 0.2)
    held = [stage.hold(sink, name) for sink in ("one", "two") for name in ("a", "b")]
    engine = Run(stage.config)
    run = running(engine)
    stage.all_stream()
    for name in NAMES:
        stage.captures[name].log.insert(1)
    for each in held:
        wait_until(each.at_it.is_set, 60, "the batches that hang")
    engine.stop()
    # One deadline for all of them, and capture stops in order after it.
    assert run.join(10)
    assert all(capture.phase == "stopped" for capture in stage.captures.values())
    for each in held:
        each.may.set()


@pytest.mark.slow
def test_until_caught_up_waits_for_the_last_source(stage, monkeypatch):
    monkeypatch.setattr(PostgresSourceType, "end", lambda _, source, __: 1000 if source.name != "c" else 2000)
    engine = Run(stage.config, until_caught_up=True)
    for capture in stage.captures.values():
        capture.log.insert(1)
    run = running(engine)
    wait_until(lambda: stage.captures["a"].phase == stage.captures["b"].phase == "stopped", 60, "a and b")
    assert not run.join(0.2)
    end = stage.captures["c"].log.insert(2)
    assert run.join(10)
    assert run.error is None
    assert stage.got["two", "c"][-1] == end


def test_a_sink_that_failed_for_one_source_goes_on_for_the_others(stage):
    stage.failures["one", "a"] = TailraceError(Kind.SINK_FOREIGN, "not ours")
    engine = Run(stage.config)
    run = running(engine)
    stage.all_stream()
    ends = {name: capture.log.insert(1) for name, capture in stage.captures.items()}
    wait_until(lambda: stage.got.get(("one", "b")) == [ends["b"]], 60, "the other source")
    wait_until(lambda: stage.got.get(("two", "a")) == [ends["a"]], 60, "the other sink")
    wait_until(lambda: engine.view().sources[0].sinks[0].state is SinkState.FAILED, 60, "the failure")
    assert not run.ended
    engine.stop()
    assert run.join(10)
    assert run.error.kind is Kind.SINK_FOREIGN
    assert run.error.context == {"source": "a", "sinks": "one"}


def test_a_batch_of_one_source_that_hangs_in_a_sink_does_not_block_other_sources(stage):
    hanging = stage.hold("one", "a")
    engine = Run(stage.config)
    run = running(engine)
    stage.all_stream()
    stage.captures["a"].log.insert(1)
    wait_until(hanging.at_it.is_set, 60, "the batch that hangs")
    ends = {name: stage.captures[name].log.insert(1) for name in ("b", "c")}
    wait_until(lambda: all(stage.got.get(("one", name)) == [ends[name]] for name in ends), 60, "the others")
    hanging.may.set()
    engine.stop()
    assert run.join(10)


def test_a_quiet_source_gets_its_turn_among_busy_ones(stage):
    held = {name: stage.hold("one", name) for name in NAMES}
    held["c"].may.set()
    engine = Run(stage.config)
    run = running(engine)
    stage.all_stream()
    for name in ("a", "b"):
        stage.captures[name].log.insert(1)
    for name in ("a", "b"):
        wait_until(held[name].at_it.is_set, 60, "both places to be taken")
    # The busy ones already have more when the quiet one gets a change.
    for name in ("a", "b"):
        stage.captures[name].log.insert(2)
    end = stage.captures["c"].log.insert(1)
    queue = engine._resources.writing[0]._waiting
    wait_until(lambda: len(queue) == 1, 60, "the quiet one to wait")
    held["a"].may.set()
    wait_until(lambda: stage.got["one", "a"][1:], 60, "the busy one's second batch")
    assert stage.got["one", "c"] == [end]
    assert stage.order[:3] == [("one", "a"), ("one", "c"), ("one", "a")]
    held["b"].may.set()
    engine.stop()
    assert run.join(10)


@pytest.mark.slow
def test_one_engine_at_a_time_holds_the_logs(stage):
    engine = Run(stage.config)
    lock = take_root(stage.config)
    with pytest.raises(TailraceError) as caught:
        engine.run()
    assert caught.value.kind is Kind.LOG_LOCKED
    os.close(lock)
    engine = Run(stage.config)
    run = running(engine)
    engine.stop()
    assert run.join(10)
    assert run.error is None


def test_each_source_has_its_own_progress_line_if_it_made_progress(stage, capsys):
    views = []
    engine = Run(stage.config, observe=views.append)
    stage.captures["a"].log.insert(1)
    run = running(engine)
    view: Any = wait_until(
        lambda: next((view for view in views if len(view.sources) == 3), None), 60, "a view"
    )
    engine.stop()
    assert run.join(10)
    assert "  a:  connecting  " in line(view.state, view.sources[0], Pace())
    with ProgressDisplay() as progress:
        progress.turn(view)
    shown = capsys.readouterr().out.splitlines()
    assert [part.split()[1] for part in shown] == ["a:", "b:", "c:"]


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        ("log/identity.json", Kind.LOG_FOREIGN),
        ("log/holiday.jpg", Kind.LOG_FOREIGN),
        ("log/photos/a.jpg", Kind.LOG_FOREIGN),
        ("one/_tailrace/identity.json", Kind.SINK_FOREIGN),
    ],
)
def test_directories_of_a_single_source_or_of_other_sources_are_refused(tmp_path, made, kind):
    config = pipeline(tmp_path)
    for part in config.pipelines:
        make_directory(part.log.path)
        Channel(part.log.path).prepare()  # captures on executors leave these files
    check_roots(config)
    (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / made).write_text("{}")
    with pytest.raises(TailraceError) as caught:
        check_roots(config)
    assert caught.value.kind is kind
    assert not (tmp_path / "log" / "lock").exists()


def test_a_log_that_was_moved_aside_does_not_cost_its_source_the_slot(tmp_path):
    (tmp_path / "shop.yaml").write_text(
        yaml.safe_dump(pipeline(tmp_path).model_dump(mode="json", exclude_unset=True))
    )
    for folder, slot in (("a", "tailrace_shop_a"), ("a.before", "tailrace_shop_a"), ("z", "tailrace_shop_z")):
        LogDirectory.create_or_open(
            tmp_path / "log" / folder, SourceFingerprint("postgresql", "1", "db", slot)
        )
    findings = preflight(tmp_path / "shop.yaml")
    aside, gone = [each for each in findings if "does not name" in each.message]
    assert "'a.before'" in aside.message
    assert "slot" not in aside.message + aside.repair
    assert "pg_drop_replication_slot('tailrace_shop_z')" in gone.repair


def test_the_way_to_a_new_log_works_again_and_again(tmp_path):
    part = pipeline(tmp_path).pipelines[0]
    for _ in range(3):
        for path in (part.log.path, *(sink.path for sink in part.folders)):
            (path / "kept").mkdir(parents=True)
        hint = with_way_out(TailraceError(Kind.SLOT_MISSING, "look at the slot"), part).hint
        steps = re.findall(r"\(\d\) (mv .+?)(?= \(\d\))", hint)
        assert len(steps) == 3
        for step in steps:
            subprocess.run(shlex.split(step), check=True)
    assert {path.name for path in part.log.path.parent.iterdir()} == {"a.before", "a.before2", "a.before3"}


def test_status_before_the_first_run_lists_every_source(tmp_path):
    told = document(pipeline(tmp_path))
    assert (told["state"], told["error"], len(told["sinks"])) == ("stopped", None, 6)
    assert [(task["name"], task["log_end"]) for task in told["tasks"]] == [(name, None) for name in NAMES]
    assert {key for task in told["tasks"] for key in task} == {
        "name", "task", "state", "source_lag_bytes", "source_lag_s", "log_end", "error", "position", "slot",
        "warnings", "snapshot",
    }  # fmt: skip
    assert json.dumps(told)
