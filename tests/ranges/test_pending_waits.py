"""A reader that comes to rows of a table which capture has yet to learn."""

from __future__ import annotations

import threading

import pytest
import structlog

from tailrace.errors import Kind, TailraceError
from tailrace.ranges.changes import PendingWaits


def test_it_waits_and_says_so_once_for_each_place_and_raises_what_is_something_else() -> None:
    pending, stop = PendingWaits(), threading.Event()
    stop.set()  # it does not wait then
    error = TailraceError(Kind.SCHEMA_PENDING, "decode rows of public.items: the facts are pending", "wait")
    with structlog.testing.capture_logs() as logs:
        for at in (10, 10, 30, 30):
            pending.wait(error, at, stop)
    assert [entry["error"] for entry in logs] == [error.message] * 2
    damage = TailraceError(Kind.LOG_CORRUPT, "read a block: it is damaged", "restore it")
    with pytest.raises(TailraceError) as caught:
        pending.wait(damage, 30, stop)
    assert caught.value is damage
