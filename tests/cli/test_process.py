"""The beginning and the end of the command's process."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
import tailrace.__main__ as process

class Finalised:
    def __del__(self):
        print("the interpreter was finalised")

def work():
    time.sleep({seconds})
    print("the thread is through")

kept = Finalised()
atexit.register(print, "what was registered has run")
if {seconds}:
    threading.Thread(target=work, daemon={daemon}).start()

def app():
    print("done")
    sys.exit(3)

process.app = app
process.main()
"""


def ended(*, seconds: float, daemon: bool = False) -> list[str]:
    command = [sys.executable, "-c", PROGRAM.format(seconds=seconds, daemon=daemon)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3, done.stderr
    return done.stdout.splitlines()


def test_the_process_ends_at_once_after_registered_functions() -> None:
    assert ended(seconds=0) == ["done", "what was registered has run"]


def test_busy_daemon_threads_do_not_disturb_the_end_of_the_process() -> None:
    assert ended(seconds=100, daemon=True) == ["done", "what was registered has run"]


def test_the_end_waits_for_other_threads() -> None:
    assert ended(seconds=0.2) == [
        "done",
        "the thread is through",
        "what was registered has run",
        "the interpreter was finalised",
    ]


INTERRUPTED = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
import tailrace.__main__ as process

def app():
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()

process.app = app
process.main()
"""


@pytest.mark.parametrize("at", ["typer", "tailrace.errors", "the command"])
def test_an_interrupt_before_the_command_begins_ends_the_process_without_a_trace(at: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, at]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
