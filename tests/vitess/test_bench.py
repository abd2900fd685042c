"""`tailrace bench vitess` measures, and its servers end with it, however it is ended."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from tailrace.cli.main import app
from tailrace_bench import vitess as bench
from tests.support.wait import wait_until

pytestmark = pytest.mark.vitess


def test_the_benchmark_prints_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TURNS", 1)
    monkeypatch.setattr(bench, "_thousand", lambda: {"start_s": 1})
    result = CliRunner().invoke(app, ["bench", "vitess", "--rows", "3000", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["name"] == "vitess"
    assert document["ratio"] > 0
    assert document["details"]["single_row_ratio"] > 0
    assert document["details"]["two_tasks_to_one"] > 0
    # The peer is measured only where it was fetched.
    assert document["details"].get("peer_ratio", 1) > 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("program", ["mysqlctl", "mysqld", "vtgate"])
def test_the_benchmarks_servers_end_with_it(program: str, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tailrace", "bench", "vitess", "--rows", "200000"]
    # As a shell starts it in the background: with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, before)
    directory = ""
    try:
        directory = wait_until(lambda: _directory(process.pid), 60, "etcd")
        wait_until(lambda: program in set(_servers(directory)), 120, program)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
        assert process.returncode not in {0, -number}, said
        wait_until(lambda: not list(_servers(directory)), 20, "the end of all servers")
        assert not Path(directory).exists()
    finally:
        process.kill()
        process.wait()


def _directory(pid: int) -> str:
    """Return the directory of a process's cluster; empty: its first server does not run yet."""
    for child in psutil.Process(pid).children():
        words = child.cmdline()
        if "--data-dir" in words:
            return str(Path(words[words.index("--data-dir") + 1]).parent)
    return ""


def _servers(directory: str) -> Iterator[str]:
    """Yield the names of the processes in a directory, whichever process started them."""
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and any(
                f"{directory}/" in word for word in process.cmdline()
            ):
                yield process.name()
        except psutil.Error:
            continue
