"""Waits with a time limit, for a condition and for the end of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    look: Callable[[], T], timeout_s: float, look_s: float, stop: threading.Event | None = None
) -> T:
    """Call `look` until it returns a true value, at most for `timeout_s`; return its last result.

    :param look: called at least once, on this thread, and the last time when the time is up.
    :param look_s: time from the end of a call to the next one.
    :param stop: once it is set, there is no further call.
    """
    until_s = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() >= until_s:
            break
        if stop is None:
            time.sleep(look_s)
        elif stop.wait(look_s):
            break
    return found


def join_all(threads: Sequence[threading.Thread], timeout_s: float | None) -> bool:
    """Wait for the end of all `threads`, at most `timeout_s` in total; return whether all have ended."""
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
