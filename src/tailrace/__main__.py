"""The process of the command `tailrace`, also as `python -m tailrace`."""

from __future__ import annotations

import os
import signal


def _end_at_once(number: int, _frame: object) -> None:
    os._exit(128 + number)


# Ctrl-C during the imports below: nothing has begun, and a trace of imports helps nobody.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end_at_once)

import atexit  # noqa: E402
import io  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402

from tailrace.cli.main import app  # noqa: E402


def main() -> None:
    """Run the command, and end the process with its status.

    What is registered for the end runs, and what was printed is written; then the process ends at once. The
    interpreter's own end takes all modules apart first: a third of a second of work for nothing. And daemon
    threads may still be at work, such as the one that starts Spark while the run is over already. That end
    stops a thread where it next asks for the interpreter's lock: in the midst of C++ that aborts the process.
    """
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _prepare_streams()
        app()
    except KeyboardInterrupt:  # before the command's own handling of it
        os._exit(128 + signal.SIGINT)
    except SystemExit as end:
        others = [each for each in threading.enumerate() if each is not threading.main_thread()]
        # Threads that are no daemons are waited for, and a text is printed, by the interpreter.
        if not all(each.daemon for each in others) or isinstance(end.code, str):
            raise
        atexit._run_exitfuncs()  # noqa: SLF001 - as the interpreter would
        status = int(end.code or 0)
        for stream in filter(None, (sys.stdout, sys.stderr)):  # a process may have been started without
            try:
                stream.flush()
            except OSError:
                # The interpreter's own, for output that could not be written; an error's own comes first.
                status = status or 120
        os._exit(status)


def _prepare_streams() -> None:
    """Open the null device in place of standard streams that are closed: a file of ours that got one of their
    numbers, such as the log, would get what libraries print. And let no character stop the output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))  # the lowest free number
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
