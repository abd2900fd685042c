"""`python -m tests.support.script TEXT ...` runs TEXT as `python -c TEXT ...` does, but may be forked."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    program = sys.argv.pop(1)
    sys.argv[0] = "-c"
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
