"""An engine is known to run from its start to its end, even while it does not write its log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import structlog

from tailrace import config
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.format import Tail
from tailrace.config.load import from_mapping
from tailrace.errors import Kind, TailraceError
from tailrace.fair_semaphore import FairSemaphore
from tailrace.pipeline.offsets.commands import held_still
from tailrace.pipeline.run import Run
from tailrace.pipeline.source_worker import SourceWorker
from tailrace.pipeline.spark_host import SparkHost
from tailrace.pipeline.status.document import document, last_written
from tailrace.pipeline.status.publisher import StatusFile
from tailrace.pipeline.status.views import CaptureView, PipelineState, PipelineView, SinkView, SourceView
from tests.support.orders_log import LogOfOrders
from tests.support.pipeline.staged import running
from tests.support.torture import disk
from tests.support.wait import wait_until


@pytest.mark.slow
@pytest.mark.parametrize("begun", [True, False])
def test_an_engine_that_cannot_reach_its_source_is_known_to_run(tmp_path: Path, begun: bool) -> None:
    if begun:
        log = LogOfOrders(tmp_path / "log")
        log.insert(1, 2)
        log.close()
    file = tmp_path / "shop.yaml"
    file.write_text(
        "name: shop\nsource: {host: 127.0.0.1, port: 1}\nlog: {path: ./log}\n"
        "sinks: [{type: jsonl, path: ./out}]\nspark: {start: when_needed}\n"
    )
    loaded = config.load_engine(file)
    engine = Run(loaded)
    run = running(engine)

    def is_retrying() -> bool:
        [task] = document(loaded)["tasks"]
        return task["state"] == "connecting" and (task["error"] or {}).get("kind") == "source_unreachable"

    wait_until(is_retrying, 60, "a status that says what it waits for")
    assert document(loaded)["state"] == "starting"
    if begun:
        wait_until(lambda: list((tmp_path / "out").glob("public.orders/*.jsonl")), 60, "the sink")
    with pytest.raises(TailraceError, match="the pipeline is running") as refused:
        held_still(loaded, loaded.pipeline()).__enter__()
    assert refused.value.kind is Kind.LOG_LOCKED
    with pytest.raises(TailraceError) as refused:
        Run(loaded).run()
    assert refused.value.kind is Kind.LOG_LOCKED
    assert document(loaded)["tasks"][0]["state"] == "connecting"
    engine.stop()
    assert run.join(20)
    assert run.error is None
    assert document(loaded)["state"] == "stopped"
    with held_still(loaded, loaded.pipeline()):
        pass


def test_a_source_that_is_stopped_before_it_has_a_log_ends_without_an_error(tmp_path: Path) -> None:
    content = {"name": "shop", "source": {"host": "127.0.0.1", "port": 1}, "log": {"path": "log"},
               "sinks": [{"type": "jsonl", "path": "out"}]}  # fmt: skip
    loaded = from_mapping(content, tmp_path)
    worker = SourceWorker(
        loaded.pipeline(),
        0,
        SparkHost(loaded),
        beginning=FairSemaphore(1),
        writing=[FairSemaphore(1)],
        until_caught_up=False,
    )
    worker.stop()
    worker.start()
    wait_until(worker.sinks_ended, 60, "the sink's end")  # before the supervision looks
    wait_until(worker.turn, 60, "the end")
    assert worker.error is None


def test_a_file_in_place_of_the_log_is_reported_as_a_problem_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    content = {"name": "shop", "source": {"host": "127.0.0.1", "port": 1}, "log": {"path": "log"}}
    with pytest.raises(TailraceError, match="lock the change log") as refused:
        Run(from_mapping(content, tmp_path)).run()
    assert refused.value.kind is Kind.LOG_WRITE_FAILED


@pytest.mark.skipif(os.geteuid() != 0, reason="is root")
def test_root_leaves_no_files_in_the_log_of_another_users_pipeline(tmp_path: Path) -> None:
    LogOfOrders(tmp_path / "log").close()
    os.chown(tmp_path / "log" / "identity.json", 65534, 65534)
    held = sorted((tmp_path / "log").rglob("*"))
    source = {"host": "127.0.0.1", "port": 1, "reconnect_s_max": 0.1}
    content = {"name": "shop", "source": source, "log": {"path": "log"}}
    with pytest.raises(TailraceError, match="its files would be root's") as refused:
        Run(from_mapping(content, tmp_path)).run()
    assert refused.value.kind is Kind.ENVIRONMENT_UNFIT
    assert sorted((tmp_path / "log").rglob("*")) == held


def test_a_directory_with_other_files_is_refused_and_not_changed(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "letter.txt").write_text("dear")
    content = {"name": "shop", "source": {"host": "127.0.0.1", "port": 1}, "log": {"path": "log"}}
    with pytest.raises(TailraceError) as refused:
        Run(from_mapping(content, tmp_path)).run()
    assert refused.value.kind is Kind.LOG_FOREIGN
    assert [path.name for path in (tmp_path / "log").iterdir()] == ["letter.txt"]
    with pytest.raises(TailraceError):
        LogDirectory.open(tmp_path / "log")


@pytest.mark.skipif(not disk.can_mount(), reason="mounts a small disk, which needs root")
def test_on_a_full_disk_the_status_file_is_still_written(tmp_path: Path) -> None:
    with disk.small_disk(tmp_path / "disk", 1) as small:
        file = StatusFile(small)
        source = SourceView("", 0, CaptureView.at_rest("0", Tail(0, 0, 0)), (SinkView("lake", "jsonl"),))
        file.last(PipelineView("shop", PipelineState.STREAMING, (source,), None))
        disk.fill(small)
        for state in (PipelineState.SNAPSHOT, PipelineState.STOPPED):
            with structlog.testing.capture_logs() as said:
                file.last(PipelineView("shop", state, (source,), None))
            assert said == []
            written = last_written(small)
            assert written is not None
            assert written["state"] == str(state)
