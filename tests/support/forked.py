"""Python programs that tests run in other processes, forked from one that has imported everything.

Importing what a pipeline needs takes a second of CPU time, and a run of the suite starts hundreds of
programs. They are the real programs in real processes, which are killed and waited for as usual. Tests of how
a program starts, what it imports or how much memory it uses start it by `-c` or by its file: those are not
forked.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import io
import json
import multiprocessing
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import connection, forkserver, reduction
from typing import Any

import pytest

from tests.support.spark_workers import sitecustomize

PROCESSES = multiprocessing.get_context("forkserver")
#: For the process that others are forked from: libraries start no threads there, whose locks a fork could
#: copy.
_NO_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "_RJEM_MALLOC_CONF": "background_thread:false",  # delta-rs
}
_PACKAGES = ("tailrace", "tailrace_bench", "tests")
#: Variables that Python reads when it starts.
_READ_AT_START = ("PYTHON", "NUMBA", "LD_", "GRPC", "MALLOC", "ARROW")

#: Where that process looks for modules; tests may change it for themselves and their subprocesses.
_PATHS = [path for path in sys.path if path]

#: The parts that are used below are not public.
_USUAL: Any = subprocess.Popen
_parameters = inspect.signature(_USUAL._execute_child)


class _Descriptors:
    """File descriptors that a forked process gets copies of."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)

    def __getstate__(self) -> list[Any]:
        return [reduction.DupFd(number) for number in self.numbers]

    def __setstate__(self, copies: list[Any]) -> None:
        self.numbers = [each.detach() for each in copies]


class ForkedPopen(_USUAL):  # type: ignore[misc]
    """As `subprocess.Popen`; `python -m ...` is forked, anything else is started as usual."""

    returncode: Any
    _forked: Any = None

    def _execute_child(self, *given: Any) -> None:
        named = _parameters.bind(self, *given).arguments
        environment = dict(os.environ if named["env"] is None else named["env"])
        if not _may_be_forked(named, environment):
            super()._execute_child(*given)
            return
        ends = [("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2)]
        standard = _Descriptors(*(usual if named[name] == -1 else named[name] for name, usual in ends))
        options = {
            "words": [os.fsdecode(word) for word in named["args"][2:]],
            "environment": environment,
            "directory": os.fspath(named["cwd"] or os.getcwd()),
            "new_session": named["start_new_session"],
        }
        _ensure_server()
        self._forked = PROCESSES.Process(target=_run, args=(standard,), kwargs=options)
        self._forked.start()
        self.pid = self._forked.pid
        self._child_created = True
        own = [named[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        self._close_pipe_fds(*own)

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._forked is None:
            return super()._internal_poll(*arguments, **options)
        with self._waitpid_lock:
            if self.returncode is None:
                self.returncode = self._forked.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._forked is None:
            return super()._wait(timeout)
        if self.returncode is None:
            connection.wait([self._forked.sentinel], timeout)
            if self._internal_poll() is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode


def _may_be_forked(named: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    words = named["args"]
    if isinstance(words, str | bytes | os.PathLike) or list(words[:2]) != [sys.executable, "-m"]:
        return False
    if words[2].partition(".")[0] not in _PACKAGES:
        return False
    if named["preexec_fn"] or named["shell"] or named["pass_fds"] or named["process_group"] != -1:
        return False
    if not set(environment.get("PYTHONPATH", "").split(os.pathsep)) <= {*_PATHS, ""}:
        return False  # another module may be imported already under that name
    return all(
        environment.get(name, "") == os.environ.get(name, "")
        for name in {*environment, *os.environ} - {"PYTHONPATH"}
        if name.startswith(_READ_AT_START)
    )


def _run(
    standard: _Descriptors,
    *,
    words: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
    new_session: bool,
) -> None:
    """Run `python -m words` in this process, which has just been forked.

    :param standard: the three standard streams, and what is closed at the end.
    """
    for number, copy in enumerate(standard.numbers[:3]):
        os.dup2(copy, number)
        os.close(copy)
    if new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[0] = directory
    paths = list(filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path += [path for path in paths if path not in sys.path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*sitecustomize.PATHS, *paths])  # of Spark
    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), _writer(1), _writer(2)  # noqa: SIM115
    _read_environment_again()
    module, *arguments = words
    sys.argv = ["-m", *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def _writer(number: int) -> io.TextIOWrapper:
    """Return standard output or standard error as Python opens it, with lines written at once."""
    errors = "backslashreplace" if number == 2 else "strict"
    writer: Any = open(number, "w", encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
    writer.reconfigure(line_buffering=number == 2 or writer.isatty())
    return writer


def _read_environment_again() -> None:
    # What modules read from the environment when they were imported.
    from tailrace import failpoints

    failpoints._log_path = os.environ.get("TAILRACE_FAILPOINTS_LOG", "")
    failpoints.arm(os.environ.get("TAILRACE_FAILPOINTS", ""))


def pytest_configure() -> None:
    """Make Python programs of tests fork."""
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    os.environ[sitecustomize.ADDRESS] = _listen()


def pytest_unconfigure() -> None:
    """Kill what failed tests have left: this process would wait for it."""
    for process in multiprocessing.active_children():
        process.kill()


def _listen() -> str:
    """Fork on request of `sitecustomize`, in a thread; return the name of the socket for the requests."""
    name = f"tailrace-tests-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"\0{name}")  # no file, so nothing to remove
    listener.listen()
    threading.Thread(target=_serve, args=(listener,), name="forks", daemon=True).start()
    return name


def _serve(listener: socket.socket) -> None:
    while True:
        asked, _ = listener.accept()
        with asked:
            _, user, _ = struct.unpack("3i", asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.getuid():  # an abstract socket has no permissions
                continue
            text, streams, _, _ = socket.recv_fds(asked, 1 << 20, 3)
            if len(streams) == 3:
                options = {**json.loads(text), "new_session": False}
                _ensure_server()
                held = _Descriptors(*streams, asked.fileno())
                PROCESSES.Process(target=_run, args=(held,), kwargs=options).start()
            for number in streams:
                os.close(number)


@functools.cache
def _ensure_server() -> None:
    PROCESSES.set_forkserver_preload(["tests.support.preloaded", __name__])
    with pytest.MonkeyPatch.context() as patched:
        # The server imports the preloaded modules before it gets this process's sys.path.
        patched.setenv("PYTHONPATH", os.pathsep.join(_PATHS))
        for name, value in _NO_THREADS.items():
            patched.setenv(name, value)
        forkserver.ensure_running()


@pytest.fixture(scope="session")
def processes() -> Any:
    """Return the class of processes that are forked from one that has imported our modules."""
    _ensure_server()
    return PROCESSES.Process
