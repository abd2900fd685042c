"""A forked program behaves to its parent as one that was started in the usual way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import forked
from tests.support.wait import wait_until

pytestmark = pytest.mark.slow  # the process from which others are forked first imports everything

SCRIPT = [sys.executable, "-m", "tests.support.script"]

#: What a program can see of how it was started.
SEEN = """
import json, os, signal, sys
sys.stderr.write("said\\n")
print(json.dumps({
    "argv": sys.argv[1:], "stdin": sys.stdin.read(), "directory": os.getcwd(), "name": __name__,
    "environment": {name: os.environ.get(name) for name in ("HOME", "GIVEN", "TAILRACE_FAILPOINTS")},
    "session": os.getsid(0) == os.getpid(), "terminal": sys.stdout.isatty(), "encoding": sys.stdout.encoding,
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
}))
"""


@pytest.fixture(params=["forked", "usual"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that starts a program as other tests do; programs must not notice a difference."""
    if request.param == "usual":
        monkeypatch.setattr(subprocess, "Popen", forked._USUAL)
    return subprocess.Popen


def test_programs_are_forked() -> None:
    with subprocess.Popen([*SCRIPT, "pass"]) as program:
        assert getattr(program, "_forked", None) is not None
    with subprocess.Popen([sys.executable, "-c", "pass"]) as program:
        assert getattr(program, "_forked", None) is None


def test_sparks_workers_are_forked_until_spark_ends(tmp_path: Path) -> None:
    program = """
import os, sys, time
from tailrace.spark.session import session
def look(_):
    return os.getpid(), "tailrace.cli.run" in sys.modules
print(*session().sparkContext.parallelize([0], 1).map(look).collect()[0], flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([*SCRIPT, program], stdin=-1, stdout=-1, cwd=tmp_path) as spark:
        number, has_all = spark.stdout.readline().split()
        assert has_all == b"True"
        worker = psutil.Process(int(number))
    wait_until(lambda: not worker.is_running(), 10, "the worker's end")


def test_the_process_that_programs_are_forked_from_has_one_thread() -> None:
    subprocess.run([*SCRIPT, "pass"], check=True)
    server: Any = forkserver._forkserver
    assert len(os.listdir(f"/proc/{server._forkserver_pid}/task")) == 1


def test_a_program_gets_its_arguments_environment_and_streams(start: Any, tmp_path: Path) -> None:
    environment = {"GIVEN": "this", "PATH": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*SCRIPT, SEEN, "a", "b c"], input="hello", capture_output=True, text=True, cwd=tmp_path,
        env=environment, start_new_session=True, check=True,
    )  # fmt: skip
    assert done.stderr == "said\n"
    assert json.loads(done.stdout) == {
        "argv": ["a", "b c"], "stdin": "hello", "directory": str(tmp_path), "name": "__main__",
        "environment": {"HOME": None, "GIVEN": "this", "TAILRACE_FAILPOINTS": None},
        "session": True, "terminal": False, "encoding": "utf-8", "interrupt": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('why')", 1),
        ("1 / 0", 1),
        ("import os; os._exit(9)", 9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
    ],
)
def test_a_program_ends_with_its_status(start: Any, program: str, status: int) -> None:
    done = subprocess.run([*SCRIPT, program], capture_output=True, check=False)
    assert done.returncode == status


def test_a_program_ends_after_its_threads_and_registered_functions(start: Any) -> None:
    program = """
import atexit, threading, time
atexit.register(print, "registered")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
print("main")
"""
    done = subprocess.run([*SCRIPT, program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["main", "thread", "registered"]


def test_a_program_can_be_waited_for_and_killed(start: Any) -> None:
    with start([*SCRIPT, "print('here', flush=True); import time; time.sleep(100)"], stdout=-1) as program:
        assert program.stdout.readline() == b"here\n"
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.1)
        program.send_signal(signal.SIGTERM)
        assert program.wait(10) == -signal.SIGTERM
        assert program.poll() == -signal.SIGTERM


def test_a_programs_failpoints_are_those_of_its_environment(start: Any) -> None:
    program = "from tailrace import failpoints; failpoints.hit('log.before_fsync'); print('went on')"
    environment = {**os.environ, "TAILRACE_FAILPOINTS": "log.before_fsync=kill"}
    assert subprocess.run([*SCRIPT, program], env=environment, check=False).returncode == -9
    assert subprocess.run([*SCRIPT, program], check=False, capture_output=True).stdout == b"went on\n"


def test_a_program_that_may_import_other_modules_is_not_forked(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit(5)")
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    environment = {**os.environ, "PYTHONPATH": paths}
    assert subprocess.run([*SCRIPT, "import numpy"], env=environment, check=False).returncode == 5


def test_a_program_that_still_runs_does_not_delay_the_end_of_pytest() -> None:
    program = f"""
from tests.support import forked
print(forked.ForkedPopen({[*SCRIPT, "import time; time.sleep(600)"]!r}).pid)
forked.pytest_unconfigure()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, stdout=-1, timeout=60, check=True)
    wait_until(lambda: not psutil.pid_exists(int(done.stdout)), 10, "its end")
