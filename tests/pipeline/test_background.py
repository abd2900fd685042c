"""Which failure a foreign error is; a Spark that is gone, or starts late."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.changelog.durable import write_failure
from tailrace.config import PipelineConfig
from tailrace.errors import Kind, Policy, TailraceError
from tailrace.pipeline.background import Background, as_failure
from tailrace.pipeline.spark_host import SparkHost
from tailrace.sinks.target import writing
from tests.support.wait import wait_until

SOON_S = 60.0


def met(function: Any) -> BaseException:
    with pytest.raises(AttributeError) as caught:
        function()
    return caught.value


def code_in(module: str) -> Any:
    """Return a function, as of `module`, that uses a context that is gone."""
    place: dict[str, Any] = {"__name__": module}
    exec("def parallelize():\n    return jsc.sc()\njsc = None", place)  # noqa: S102 - written here
    return place["parallelize"]


def test_an_error_of_a_spark_that_is_gone_is_retried_and_one_of_our_code_is_not() -> None:
    found = as_failure(met(code_in("pyspark.core.context")))
    assert (found.kind, found.policy) == (Kind.SPARK_FAILED, Policy.RETRY)
    assert as_failure(met(code_in("tailrace.sinks.kafka.sink"))).kind is Kind.INTERNAL
    assert as_failure(AttributeError("raised nowhere")).kind is Kind.INTERNAL


def test_a_limit_of_open_files_is_blamed_on_no_disk() -> None:
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    assert "ulimit -n" in as_failure(error).hint
    assert "ulimit -n" in write_failure(error, "make a file", Path("x")).hint
    with pytest.raises(TailraceError) as caught, writing("lake", "make a file"):
        raise error
    assert "ulimit -n" in caught.value.hint


def test_jobs_of_a_spark_that_is_gone_need_no_cancelling() -> None:
    config: PipelineConfig = SimpleNamespace(name="shop", spark=None)  # type: ignore[assignment]
    host = SparkHost(config)
    host.cancel_jobs(["one"])
    gone = code_in("pyspark.core.context")
    host._spark.found = SimpleNamespace(  # type: ignore[assignment]
        sparkContext=SimpleNamespace(cancelJobsWithTag=lambda _: gone())
    )
    host.cancel_jobs(["one"])


class _Session:
    """A session that counts how often it was stopped."""

    def __init__(self) -> None:
        self.stopped = 0

    def stop(self) -> None:
        self.stopped += 1


@pytest.mark.parametrize("is_own", [True, False])
def test_a_session_that_starts_after_the_stop_is_stopped_if_the_host_created_it(
    is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: PipelineConfig = SimpleNamespace(name="shop", spark=None)  # type: ignore[assignment]
    host, session = SparkHost(config), _Session()
    starting, may_be_there, warmed = threading.Event(), threading.Event(), []

    def session_or_new(*_: object) -> tuple[_Session, bool]:
        starting.set()
        assert may_be_there.wait(SOON_S)
        return session, is_own

    monkeypatch.setattr("tailrace.spark.session.session_or_new", session_or_new)
    monkeypatch.setattr("tailrace.spark.session.warm", warmed.append)
    host.start()
    assert starting.wait(SOON_S)
    host.stop()
    may_be_there.set()
    wait_until(lambda: host.is_ready, SOON_S, "the end of the start")
    assert (session.stopped, warmed) == (int(is_own), [])


def test_a_session_whose_first_job_failed_is_stopped_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    config: PipelineConfig = SimpleNamespace(name="shop", spark=None)  # type: ignore[assignment]
    host, session = SparkHost(config), _Session()
    starts, failures = iter([(session, True), (session, False)]), iter([OSError("no room")])

    def warm(_: object) -> None:
        for failure in failures:
            raise failure

    monkeypatch.setattr("tailrace.spark.session.session_or_new", lambda *_: next(starts))
    monkeypatch.setattr("tailrace.spark.session.is_alive", lambda _: True)
    monkeypatch.setattr("tailrace.spark.session.warm", warm)
    host.start()
    wait_until(lambda: host.is_ready, SOON_S, "the end of the first start")
    assert host.session(threading.Event()) is session
    host.stop()
    assert session.stopped == 1


def test_a_host_that_was_stopped_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config: PipelineConfig = SimpleNamespace(name="shop", spark=None)  # type: ignore[assignment]
    host, started = SparkHost(config), []
    monkeypatch.setattr("tailrace.spark.session.session_or_new", lambda *_: started.append(1))
    host.stop()
    assert host.session(threading.Event()) is None
    assert not started


def test_a_timeout_without_a_file_is_not_reported_as_a_failed_write() -> None:
    assert as_failure(TimeoutError()).kind is Kind.INTERNAL
    assert as_failure(TimeoutError(110, "Connection timed out", "/mnt/lake")).kind is Kind.SINK_WRITE_FAILED
    assert as_failure(OSError("words of a library")).kind is Kind.SINK_WRITE_FAILED


def test_an_error_of_the_operating_system_is_reported_by_the_part_that_met_it() -> None:
    def fail() -> None:
        raise FileNotFoundError(2, "No such file or directory", "/mnt/shards")

    capture = Background("capture", fail, Kind.SOURCE_UNREACHABLE)
    capture.start()
    assert capture.join(SOON_S)
    assert capture.error is not None
    assert capture.error.kind is Kind.SOURCE_UNREACHABLE
    assert capture.error.context == {"file": "/mnt/shards"}


def test_a_broken_connection_to_java_is_not_reported_as_a_failed_write() -> None:
    def refused(module: str) -> Any:
        place: dict[str, Any] = {"__name__": module}
        exec("def connect():\n    raise ConnectionRefusedError(111, 'Connection refused')", place)  # noqa: S102
        return place["connect"]

    for module, kind in (("py4j.clientserver", Kind.SPARK_FAILED), ("json", Kind.SINK_WRITE_FAILED)):
        with pytest.raises(ConnectionRefusedError) as caught:
            refused(module)()
        assert as_failure(caught.value).kind is kind
