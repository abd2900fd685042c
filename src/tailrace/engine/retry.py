"""Trying again what may pass: with growing waits, bounded, and without holding up the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import structlog

from tailrace.backoff import Backoff
from tailrace.engine.contracts import Clock
from tailrace.errors import TailraceError

log = structlog.get_logger(__name__)

T = TypeVar("T")


class GivenUpError(Exception):
    """The engine wants to stop, and what failed is not tried again: neither done nor an error."""


class Retrying:
    """Calls functions again that fail with errors that may pass. For one thread at a time.

    Attempts are counted again after each success.

    :param what: what is tried, for the log: `task 3: poll`.
    :param stopping: ends a wait.
    :param failed: called at each failure that is tried again.
    :param passed: tells of what was returned whether it is a success.
    """

    def __init__(
        self,
        what: str,
        backoff: Backoff,
        clock: Clock,
        stopping: threading.Event,
        failed: Callable[[], None] = lambda: None,
        passed: Callable[[Any], bool] = lambda _: True,
    ) -> None:
        self._what = what
        self._backoff = backoff
        self._clock = clock
        self._stopping = stopping
        self._failed = failed
        self._passed = passed
        #: What failed last, until it succeeds.
        self.error: Exception | None = None

    def call(self, action: Callable[[], T]) -> T:
        """Return what `action` returns at last.

        :raises GivenUpError: it failed, and the engine wants to stop before it is tried again.
        :raises BaseException: what `action` raised when that is final, or no attempt is left.
        """
        while True:
            try:
                found = action()
            except Exception as error:  # noqa: BLE001 - what is final is raised again
                self._wait_or_raise(error)
            else:
                if self._backoff.attempts and self._passed(found):
                    self._backoff = self._backoff.after_success()
                    self.error = None
                return found

    def _wait_or_raise(self, error: Exception) -> None:
        backoff, wait_s = self._backoff.after(error)
        self.error = None if wait_s is None else error
        if wait_s is None:
            raise error
        self._backoff = backoff
        self._failed()
        log.warning(
            "failed, tried again",
            what=self._what,
            error=str(error) if isinstance(error, TailraceError) else type(error).__name__,
            retry=backoff.attempts,
            wait_s=wait_s,
        )
        if self._clock.wait(self._stopping, wait_s):
            raise GivenUpError from error
