"""`python -m tests.support.script TEXT ...`, as `python -c TEXT ...`: a program that a test has as a text."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    program = sys.argv.pop(1)
    sys.argv[0] = "-c"
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
