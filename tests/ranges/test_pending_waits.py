"""A reader that reaches rows of a table whose facts are pending."""

from __future__ import annotations

import threading

import pytest
import structlog

from tailrace.errors import Kind, TailraceError
from tailrace.ranges.changes import PendingWaits


def test_a_wait_is_logged_once_for_each_position_and_other_errors_are_raised() -> None:
    pending, stop = PendingWaits(), threading.Event()
    stop.set()  # so that it does not wait
    error = TailraceError(Kind.SCHEMA_PENDING, "decode rows of public.items: the facts are pending", "wait")
    with structlog.testing.capture_logs() as logs:
        for at in (10, 10, 30, 30):
            pending.wait(error, at, stop)
    assert [entry["error"] for entry in logs] == [error.message] * 2
    damage = TailraceError(Kind.LOG_CORRUPT, "read a block: it is damaged", "restore it")
    with pytest.raises(TailraceError) as caught:
        pending.wait(damage, 30, stop)
    assert caught.value is damage
