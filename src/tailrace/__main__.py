"""The process of the command `tailrace`, also as `python -m tailrace`."""

from __future__ import annotations

import atexit
import os
import sys
import threading

from tailrace.cli.main import app


def main() -> None:
    """Run the command, and end the process with its status.

    Daemon threads may still be at work, such as the one that starts Spark while the run is over already. The
    interpreter's own end stops a thread where it next asks for its lock: in the midst of C++ that aborts the
    process. So it ends without that, after what is registered for the end has run.
    """
    try:
        app()
    except SystemExit as end:
        others = [each for each in threading.enumerate() if each is not threading.main_thread()]
        if not others or not all(each.daemon for each in others) or isinstance(end.code, str):
            raise
        atexit._run_exitfuncs()  # noqa: SLF001 - as the interpreter would
        status = int(end.code or 0)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                status = 120  # the interpreter's own, for output that could not be written
        os._exit(status)


if __name__ == "__main__":
    main()
