"""An embedded engine logs as a library does: nothing on standard output, all to Python's logging."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
logging.basicConfig(level=getattr(logging, sys.argv[1]), format="%(name)s %(levelname)s %(message)s")
import tailrace
from tailrace.testing import LinesSource
tailrace.Engine(connector=LinesSource(), on_record=lambda record: None, name="quiet").run()
"""


def said(level: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, level], capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


@pytest.mark.slow
def test_log_lines_go_to_pythons_logging() -> None:
    out, errors = said("INFO")
    assert out == ""
    assert "tailrace.engine.engine INFO engine " in errors
    assert "engine='quiet'" in errors
    assert " DEBUG " not in errors


@pytest.mark.slow
def test_nothing_is_printed_below_the_chosen_level() -> None:
    assert said("ERROR") == ("", "")
