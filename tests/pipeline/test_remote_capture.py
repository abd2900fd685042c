"""Communication of the driver and the capturing task, and when a job is restarted; without Spark."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tailrace.changelog import durable
from tailrace.changelog.writer import Tail
from tailrace.config import PipelineConfig
from tailrace.config.load import from_mapping
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.remote import attempt as attempt_module
from tailrace.pipeline.remote import capture
from tailrace.pipeline.remote import channel as channel_module
from tailrace.pipeline.remote.attempt import Attempt, Order
from tailrace.pipeline.remote.capture import RemoteCapture
from tailrace.pipeline.remote.channel import Channel, DesiredState, Report
from tailrace.sources.progress import CaptureProgress, SourceHealth, SourceWarning, TableProgress
from tailrace.spark.java import cores_of
from tests.support.wait import wait_until

PROGRESS = CaptureProgress(
    phase="snapshot",
    rows=7,
    bytes=1 << 40,
    appended=Tail(3, 2, 1),
    durable=Tail(2, 1, 0),
    source_end=1 << 60,
    acknowledged=5,
    snapshot={"public.a": TableProgress(10, 100, False, 4, 1, began_s=90.0, rows_before=3)},
    reconnects=2,
    error=TailraceError(Kind.SLOT_IN_USE, "start: it is in use", "wait", {"slot": "s"}),
    health=SourceHealth("reserved", 3, {"wal_status": "reserved", "active_pid": 9, "failover": False}),
    warnings=(SourceWarning("slot_at_risk", "it may be lost", "do something"),),
)


def pipeline(folder: Path) -> PipelineConfig:
    source = {
        "type": "postgresql", "host": "localhost", "user": "u", "dbname": "d", "tables": ["public.*"],
        "password": "${env:NOT_SET_HERE}", "reconnect_delay_s": 0.01, "reconnect_delay_s_max": 0.02,
    }  # fmt: skip
    return from_mapping({"name": "p", "source": source, "log": {"path": str(folder / "log")}}).pipelines[0]


def test_a_report_of_a_task_is_read_as_written_with_times_on_the_drivers_clock(tmp_path: Path) -> None:
    channel = Channel(tmp_path / "log")
    channel.prepare()
    assert channel.report() is None
    channel.put_report(Report.of("life", (1, 2), "pid 3 on host", 4, 100.0, PROGRESS))
    report = channel.report()
    assert report is not None
    assert (report.run_id, report.attempt, report.caught_up) == ("life", (1, 2), 4)
    found = report.progress(1000.0)
    assert found.snapshot["public.a"].began_s == 990.0
    found.snapshot["public.a"].began_s = 90.0
    assert str(found.error) == str(PROGRESS.error)
    for name in CaptureProgress.__dataclass_fields__:
        if name != "error":
            assert getattr(found, name) == getattr(PROGRESS, name), name
    path = tmp_path / ".log.task" / "report.json"
    path.write_bytes(path.read_bytes().replace(b'"rows":7', b'"rows":8'))
    assert channel.report() is None, "a damaged report is ignored"


class Host:
    """In place of the host of Spark: a number of cores, and jobs that end as the test says."""

    def __init__(self, cores: int, *ends: TailraceError | None) -> None:
        self.ends = list(ends)
        self.orders: list[Order] = []
        self.sparkContext = self
        self.defaultParallelism = cores
        self.master = f"local[{cores}]"

    def session(self, stop: threading.Event) -> Any:
        return None if stop.is_set() else self

    def require_shared(self, folders: dict[str, Path]) -> None:
        assert set(folders) == {"log.path"}

    def getConf(self) -> dict[str, str]:  # noqa: N802 - as Spark calls it
        return {}

    def capture(self, session: object, order: Order, group: object) -> None:
        self.orders.append(order)
        if self.ends and (error := self.ends.pop(0)) is not None:
            raise error


def died() -> TailraceError:
    return TailraceError(Kind.SPARK_FAILED, "run a Spark job: a worker crashed")


@pytest.mark.parametrize("last", [None, TailraceError(Kind.SLOT_MISSING, "resume: it is gone")])
def test_a_job_that_dies_is_restarted_and_one_that_ends_is_not(
    last: TailraceError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Host(2, died(), died(), last)
    monkeypatch.setattr(capture, "_capture", host.capture)
    remote = RemoteCapture(pipeline(tmp_path), host, 1)  # type: ignore[arg-type]
    if last is None:
        remote.run()
    else:
        with pytest.raises(TailraceError) as caught:
            remote.run()
        assert caught.value is last
    assert [order.round for order in host.orders] == [1, 2, 3]
    assert len({order.run_id for order in host.orders}) == 1
    assert "${env:NOT_SET_HERE}" in host.orders[0].pipeline, "secrets are resolved on the executor"
    shown = remote.progress()
    assert (shown.phase, shown.reconnects) == ("stopped", 2)


def test_a_full_disk_neither_ends_the_task_nor_hides_why_it_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's heartbeat needs no disk space, and a task that can't read its round reports why."""
    channel, write = Channel(tmp_path / "log"), durable.write_whole
    channel.prepare()
    channel.ask(DesiredState(run_id="run", round=1))
    full = True

    def write_if_there_is_room(path: Path, data: bytes) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(channel_module, "write_whole", write_if_there_is_room)
    monkeypatch.setattr(attempt_module, "SILENCE_S", 0.2)
    attempt = Attempt(pipeline(tmp_path), "run", (1, 0))
    until_s = time.monotonic() + 1
    while time.monotonic() < until_s:
        channel.beat()
        attempt._listen(None)  # type: ignore[arg-type]
        time.sleep(0.02)
    assert attempt.superseded is None
    time.sleep(0.3)
    attempt._listen(None)  # type: ignore[arg-type]
    assert attempt.superseded == "the driver was silent for too long"
    host = Host(2, None)
    monkeypatch.setattr(capture, "_capture", host.capture)
    remote = RemoteCapture(pipeline(tmp_path), host, 1)  # type: ignore[arg-type]
    thread = threading.Thread(target=remote.run)
    thread.start()
    wait_until(lambda: remote.progress().error is not None, 60, "the error")
    error = remote.progress().error
    assert error is not None
    assert error.kind is Kind.LOG_FULL
    assert host.orders == []
    full = False
    thread.join(60)
    assert not thread.is_alive()
    assert len(host.orders) == 1, "it goes on by itself"


def test_a_capture_that_would_leave_no_core_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TailraceError, match="3 tasks would take all 3 cores") as caught:
        RemoteCapture(pipeline(tmp_path), Host(3), 3).run()  # type: ignore[arg-type]
    assert caught.value.kind is Kind.CONFIG_INVALID


class Cluster(Host):
    """A cluster whose executors arrive one by one."""

    @property
    def defaultParallelism(self) -> int:  # noqa: N802 - as Spark calls it
        self.cores: int = min(self.cores + 1, self.cores_max)
        return self.cores

    @defaultParallelism.setter
    def defaultParallelism(self, cores: int) -> None:  # noqa: N802
        self.cores, self.cores_max = 0, cores


@pytest.mark.parametrize("conf", [{}, {"spark.dynamicAllocation.enabled": "true"}])
def test_the_start_waits_for_the_executors_of_a_cluster_unless_allocation_is_dynamic(
    conf: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Cluster(4, None)
    host.master = "spark://there:7077"
    monkeypatch.setattr(host, "getConf", lambda: conf)
    monkeypatch.setattr(capture, "_capture", host.capture)
    RemoteCapture(pipeline(tmp_path), host, 3).run()  # type: ignore[arg-type]
    assert len(host.orders) == 1
    assert host.cores == (1 if conf else 4)
    monkeypatch.setattr(capture, "CORES_S", 0.2)
    if not conf:
        with pytest.raises(TailraceError, match="4 tasks would take all 4 cores"):
            RemoteCapture(pipeline(tmp_path), host, 4).run()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("master", "cores"),
    [("local", 1), ("local[3]", 3), ("local[4, 2]", 4), ("local-cluster[2,1,1024]", None), ("yarn", None)],
)
def test_the_cores_of_a_local_master_are_known(master: str, cores: int | None) -> None:
    assert cores_of(master) == cores
    assert (cores_of("local[*]") or 0) >= 1


def test_the_drivers_requests_reach_the_task_and_its_reports_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = Channel(tmp_path / "log")
    seen: list[DesiredState] = []

    def task(session: object, order: Order, group: object) -> None:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s:
            wanted = channel.wanted()
            assert wanted is not None
            seen.append(wanted)
            progress = CaptureProgress("streaming", 1, 1, Tail(9, 9, 9), Tail(9, 9, 9), 9, 9, {}, 0, None)
            channel.put_report(
                Report.of(order.run_id, (order.round, 0), "here", wanted.position, 0.0, progress)
            )
            if wanted.stop:
                return
            time.sleep(0.01)

    monkeypatch.setattr(capture, "_capture", task)
    remote = RemoteCapture(pipeline(tmp_path), Host(2), 1)  # type: ignore[arg-type]
    thread = threading.Thread(target=remote.run)
    thread.start()
    until_s = time.monotonic() + 60
    while not remote.caught_up(77) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert remote.caught_up(77)
    assert remote.progress().phase == "streaming"
    assert remote.progress().durable == Tail(9, 9, 9)
    remote.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert seen[-1].stop
    assert remote.progress().phase == "stopped"
