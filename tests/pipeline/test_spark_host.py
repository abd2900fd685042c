"""The Spark session that an engine's sinks share, and the cancelling of jobs."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.config.load import from_mapping
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.spark_host import SparkHost
from tailrace.spark import session as spark_session
from tailrace.spark.jobs import with_tags_of
from tests.support.wait import wait_until

LATE_S = 240.0


SHOP = {
    "name": "shop",
    "source": {"type": "postgresql", "dsn": "postgresql://nobody@127.0.0.1:1/none", "tables": ["public.a"]},
}


@pytest.fixture
def host(spark: Any, tmp_path: Path) -> SparkHost:
    return SparkHost(from_mapping(SHOP | {"log": {"path": str(tmp_path / "log")}}))


class Job(threading.Thread):
    """A job of one task, which runs until a file exists."""

    def __init__(self, host: SparkHost, tag: str, folder: Path) -> None:
        super().__init__(daemon=True)
        self._host = host
        self._tag = tag
        self._folder = folder
        self.outcome: Any = None

    def run(self) -> None:
        folder, tag = str(self._folder), self._tag

        def work(_: object) -> list[str]:
            Path(folder, f"{tag} began").touch()
            until_s = time.monotonic() + LATE_S
            while not Path(folder, f"{tag} may end").exists() and time.monotonic() < until_s:
                time.sleep(0.05)
            return [tag]

        try:
            session = self._host.session(threading.Event(), self._tag)
            assert session is not None
            self.outcome = session.sparkContext.parallelize([0], 1).mapPartitions(work).collect()
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.outcome = error


def test_jobs_are_cancelled_by_their_tags_and_others_go_on(host: SparkHost, tmp_path: Path) -> None:
    host.cancel_jobs(["nothing was started"])
    given_up, going_on = Job(host, "one", tmp_path), Job(host, "two", tmp_path)
    for job in (given_up, going_on):
        job.start()
    wait_until(lambda: len(list(tmp_path.glob("* began"))) == 2, LATE_S, "both jobs")
    host.cancel_jobs(["one", "nobody's"])
    given_up.join(LATE_S)
    assert isinstance(given_up.outcome, Exception)
    assert going_on.is_alive()
    (tmp_path / "two may end").touch()
    going_on.join(LATE_S)
    assert going_on.outcome == ["two"]
    host.stop()
    session = host.session(threading.Event())
    assert session is not None
    assert session.range(3).count() == 3, "a session that ran before is left running"


def test_jobs_of_a_sinks_own_threads_have_its_tag(host: SparkHost) -> None:
    def beside() -> set[str]:
        session = host.session(threading.Event(), "three")
        assert session is not None
        with ThreadPoolExecutor(1, initializer=with_tags_of(session)) as pool:
            found: set[str] = set(pool.submit(session.sparkContext.getJobTags).result(LATE_S))
        return found

    # In a thread that ends with the test: tags belong to the thread.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(beside).result(LATE_S) == {"three"}


def test_after_a_failed_start_the_next_request_starts_spark_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[str] = []

    def start(_: object, name: str) -> tuple[Any, bool]:
        starts.append(name)
        if len(starts) < 3:
            raise TailraceError(Kind.SPARK_FAILED, f"start Spark: no room, {len(starts)}")
        return SimpleNamespace(), False

    monkeypatch.setattr(spark_session, "session_or_new", start)
    monkeypatch.setattr(spark_session, "warm", lambda _: None)
    monkeypatch.setattr(spark_session, "is_alive", lambda _: True)
    host = SparkHost(from_mapping(SHOP | {"log": {"path": str(tmp_path / "log")}}))
    host.start()
    wait_until(lambda: host.is_ready, 60, "the first start")
    with pytest.raises(TailraceError, match="no room, 2"):
        host.session(threading.Event())
    assert host.session(threading.Event()) is host.session(threading.Event()) is not None
    assert len(starts) == 3
    host.stop()
