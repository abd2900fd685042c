"""Waits until something becomes true, with a deadline: tests do this instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_S, POLL_S_MAX = 0.02, 0.5


def wait_until(condition: Callable[[], T], timeout_s: float = 60.0, what: str = "") -> T:
    """Return the first true value of `condition`, called every 20 ms.

    A slow condition, such as a command, is called again after a pause as long as it took, up to 0.5 s.

    :param what: description for the error; default: the condition's name.
    :raises AssertionError: if it does not become true in time; with the last value.
    """
    asked_s = time.monotonic()
    deadline = asked_s + timeout_s
    while not (value := condition()):
        if (now_s := time.monotonic()) >= deadline:
            name = what or getattr(condition, "__name__", repr(condition))
            raise AssertionError(f"waited {timeout_s:g} s for {name}: last seen {value!r}")
        time.sleep(min(max(POLL_S, now_s - asked_s), POLL_S_MAX))
        asked_s = time.monotonic()
    return value
