"""The end of the command's process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, sys, threading
import tailrace.__main__ as process

class Finalised:
    def __del__(self):
        print("the interpreter was finalised")

kept = Finalised()
atexit.register(print, "what was registered has run")
if {busy}:
    threading.Thread(target=threading.Event().wait, daemon=True).start()

def app():
    print("done")
    sys.exit(3)

process.app = app
process.main()
"""


def ended(*, busy: bool) -> list[str]:
    command = [sys.executable, "-c", PROGRAM.format(busy=busy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 3, done.stderr
    return done.stdout.splitlines()


def test_daemon_threads_at_work_are_left_and_not_stopped_by_the_interpreters_end() -> None:
    assert ended(busy=True) == ["done", "what was registered has run"]


def test_without_them_the_end_is_the_interpreters() -> None:
    assert "the interpreter was finalised" in ended(busy=False)
