"""Errors of an engine and its tasks, without texts of foreign errors; retries of temporary failures."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from tailrace.backoff import Backoff
from tailrace.config import EngineOptions
from tailrace.config.engine_options import TASK_RESTARTS_MAX
from tailrace.engine.contracts import Clock
from tailrace.errors import Kind, TailraceError


def raised_elsewhere(error: BaseException, place: str) -> None:
    """Set the text that `named` returns for an error of another process, which arrives without its trace."""
    error.__dict__["raised_at"] = place


def named(error: BaseException) -> str:
    """Return the error's class and where it was raised, but not its message, which may quote a row."""
    if isinstance(elsewhere := getattr(error, "raised_at", None), str):
        return elsewhere
    frames = traceback.extract_tb(error.__traceback__)
    name = type(error).__name__
    return f"{name} in {os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}" if frames else name


def as_task_failure(error: BaseException, number: int, doing: str) -> TailraceError:
    """Return the failure of a task; `error` is its cause.

    :param doing: the operation that failed: `poll`.
    """
    if isinstance(error, TailraceError):
        found = error.changed({"task": number})
    else:
        found = TailraceError(
            Kind.TASK_FAILED,
            f"{doing}: task {number} failed with {named(error)}",
            "the cause of this error has its message and traceback",
            {"task": number},
        )
    found.__cause__ = error
    return found


def as_engine_failure(error: BaseException, doing: str) -> TailraceError:
    """Return the failure of an operation that belongs to no task; `error` is its cause."""
    if isinstance(error, TailraceError):
        return error
    found = TailraceError(
        Kind.TASK_FAILED,
        f"{doing}: failed with {named(error)}",
        "the cause of this error has its message and traceback",
    )
    found.__cause__ = error
    return found


def unkept(cause: BaseException | None) -> TailraceError:
    """Return the error of an engine that could not store its last offsets at the end.

    :param cause: the error of the last write; None: the write has not ended.
    """
    if isinstance(cause, TailraceError):
        return cause
    what = "the write has not ended in time" if cause is None else f"the store failed with {named(cause)}"
    found = TailraceError(
        Kind.OFFSETS_UNWRITABLE,
        f"store offsets at the end: {what}",
        "records processed since the last commit are delivered again; check where offsets are stored, and "
        "engine.offset_commit.timeout_ms",
    )
    found.__cause__ = cause
    return found


def timed_out(
    attempt: str, tasks: list[int], limit_s: float, limit: str = "task_management_timeout_ms"
) -> TailraceError:
    """Return the error of an operation that took too long.

    :param limit: name of the setting or parameter that limits it.
    """
    return TailraceError(
        Kind.TASK_TIMED_OUT,
        f"{attempt}: not done after {limit_s:g} s",
        f"find what it waits for in the log; {limit} is the limit",
        {"tasks": tasks} if tasks else {},
    )


log = structlog.get_logger(__name__)

T = TypeVar("T")


def backoff_of(options: EngineOptions) -> Backoff:
    """Return the back-off between attempts."""
    return Backoff(
        options.errors_retries_max,
        options.errors_retry_delay_initial_ms / 1000,
        options.errors_retry_delay_max_ms / 1000,
    )


def restarts_of(options: EngineOptions) -> Backoff:
    """Return the back-off before restarts of a task that failed with a final error."""
    return replace(backoff_of(options), attempts_max=TASK_RESTARTS_MAX)


class GivenUpError(Exception):
    """The engine stops, so that the failed operation is not retried: neither a success nor an error."""


class Retrying:
    """Retries functions that fail with retriable errors. For one thread at a time.

    Attempts are counted from zero after each success.

    :param what: name of the operation, for the log: `task 3: poll`.
    :param stopping: ends a wait.
    :param failed: called at each failure that is retried.
    :param passed: returns whether a returned value is a success.
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
        #: The last retried error, until a success.
        self.error: Exception | None = None

    def call(self, action: Callable[[], T]) -> T:
        """Call `action` until it succeeds; return its result.

        :raises GivenUpError: it failed, and the engine stops before the retry.
        :raises BaseException: the error of `action`, if that is final or no attempt is left.
        """
        while True:
            try:
                found = action()
            except Exception as error:  # noqa: BLE001 - a final error is raised again
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
            "failed, retrying",
            what=self._what,
            error=str(error) if isinstance(error, TailraceError) else type(error).__name__,
            retry=backoff.attempts,
            wait_s=wait_s,
        )
        if self._clock.wait(self._stopping, wait_s):
            raise GivenUpError from error
