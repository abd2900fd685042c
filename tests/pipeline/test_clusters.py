"""Spark with executors in other processes: a local cluster, and one with two workers."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyspark
import pytest
import yaml
from deltalake import DeltaTable

from tailrace.config import SparkConfig
from tailrace.spark.session import settings_of
from tailrace_servers.ports import free_port
from tests.support.postgres import Database
from tests.support.wait import wait_until

pytestmark = pytest.mark.ci

SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"
#: For each of a cluster's processes, which live for seconds: as tests/conftest.py starts drivers.
QUICK_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def test_the_driver_listens_on_loopback_for_masters_of_this_machine_only() -> None:
    for master, host in (
        ("local[2]", "127.0.0.1"),
        ("local-cluster[2,1,1024]", "127.0.0.1"),
        ("spark://there:7077", None),
        ("yarn", None),
    ):
        settings = settings_of(SparkConfig(master=master), "test")
        assert settings.get("spark.driver.host") == settings.get("spark.driver.bindAddress") == host
    chosen = SparkConfig(master="yarn", conf={"spark.driver.host": "10.0.0.1"})
    assert settings_of(chosen, "test")["spark.driver.host"] == "10.0.0.1"


@pytest.mark.timeout(1200)
def test_a_mirror_on_a_local_cluster_is_merged_by_spark(pg: Database, tmp_path: Path) -> None:
    # delta-rs does not merge into columns with such names, so Spark's MERGE does.
    pg.execute('create table note (id int primary key, "The text" text)')
    pg.execute("insert into note select i, 'first' from generate_series(1, 10) i")
    # The first rows need no Spark, whatever the master: this process writes them.
    run(write_file(pg, tmp_path, "local[2]", start="when_needed"))
    pg.execute("""update note set "The text" = 'second' where id <= 5""")
    pg.execute("delete from note where id = 10")
    run(write_file(pg, tmp_path, "local-cluster[2,1,1024]"))
    rows = DeltaTable(str(tmp_path / "lake" / "public.note")).to_pyarrow_table().to_pylist()
    assert sorted((row["id"], row["The~20text"]) for row in rows) == [
        (number, "second" if number <= 5 else "first") for number in range(1, 10)
    ]


@pytest.mark.timeout(900)
def test_an_executor_that_lacks_a_folder_is_reported_at_the_start(pg: Database, tmp_path: Path) -> None:
    if os.geteuid() != 0 and not os.environ.get("CI"):
        pytest.skip("only root can give a worker a file system of its own")
    pg.execute("create table note (id int primary key)")
    pg.execute("insert into note values (1)")
    folders = {what: tmp_path / what for what in ("log", "lake")}
    for folder in folders.values():
        folder.mkdir(0o700)
    with ExitStack() as stack:
        master = f"spark://127.0.0.1:{stack.enter_context(master_process(tmp_path))}"
        stack.enter_context(worker_process(master, tmp_path / "worker-1"))
        stack.enter_context(worker_process(master, tmp_path / "worker-2", hidden=folders.values()))
        for what, folder in folders.items():
            (root := tmp_path / f"without {what}").mkdir()
            ended = tailrace("run", write_file(pg, root, master, {what: folder}), "--until-caught-up")
            assert ended.returncode == 1, ended.stderr
            assert "environment_unfit" in ended.stderr
            assert f"on {socket.gethostname()}: {folder}: " in ended.stderr
            assert "on the driver and on every executor" in ended.stderr
            assert not list(folder.glob(".tailrace-probe*"))


def write_file(
    pg: Database,
    root: Path,
    master: str,
    elsewhere: Mapping[str, Path] = MappingProxyType({}),
    start: str = "eager",
) -> Path:
    conf = {
        "spark.driver.host": "127.0.0.1", "spark.executor.memory": "512m", "spark.cores.max": "2",
        "spark.executor.extraJavaOptions": QUICK_JAVA,
    }  # fmt: skip
    sections: dict[str, Any] = {
        "name": "-".join(["clusters", *elsewhere]),
        "source": {"type": "postgresql", "dsn": pg.dsn},
        "log": {"path": str(elsewhere.get("log", root / "log"))},
        "sinks": [{"type": "delta", "mode": "mirror", "path": str(elsewhere.get("lake", root / "lake"))}],
        "spark": {"master": master, "conf": conf, "start": start},
    }
    file = root / "pipeline.yaml"
    file.write_text(yaml.safe_dump(sections))
    return file


def run(file: Path) -> None:
    ended = tailrace("run", file, "--until-caught-up")
    assert ended.returncode == 0, ended.stderr
    status = json.loads(tailrace("status", file, "--json").stdout)
    assert [sink["lag_bytes"] for sink in status["sinks"]] == [0]


def tailrace(command: str, file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tailrace", command, str(file), *options],
        capture_output=True, text=True, check=False, timeout=540,
    )  # fmt: skip


class _Process:
    """A process of Spark in its own process session, which ends with the context."""

    def __init__(self, command: Sequence[str | Path], output: Path) -> None:
        self.output = output
        quick = {"SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA, "SPARK_LAUNCHER_OPTS": QUICK_JAVA}
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **quick},
            )  # fmt: skip

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.output.read_text(errors="replace"), 60, f"{text!r} in {self.output}")

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _spark(name: str, *options: str) -> list[str | Path]:
    return [
        SPARK_CLASS,
        f"org.apache.spark.deploy.{name}",
        "--host",
        "127.0.0.1",
        "--webui-port",
        "0",
        *options,
    ]


@contextmanager
def master_process(root: Path) -> Iterator[int]:
    """Start a standalone master; yield its port."""
    port = free_port()
    process = _Process(_spark("master.Master", "--port", str(port)), root / "master.log")
    try:
        process.wait_for("New state: ALIVE")
        yield port
    finally:
        process.close()


@contextmanager
def worker_process(master: str, folder: Path, hidden: Iterable[Path] = ()) -> Iterator[None]:
    """Start a worker with one core.

    :param hidden: folders that are empty for the worker and its executors.
    """
    folder.mkdir()
    command = _spark("worker.Worker", "--cores", "1", "--memory", "1g", "--work-dir", str(folder), master)
    if hidden:
        mounts = " && ".join(f"mount -t tmpfs none {shlex.quote(str(path))}" for path in hidden)
        command = ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh", *command]
    process = _Process(command, folder / "worker.log")
    try:
        process.wait_for("Successfully registered with master")
        yield
    finally:
        process.close()
