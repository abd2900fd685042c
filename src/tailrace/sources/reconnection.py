"""Reconnection: opens connections until one ends without an error or all have failed for too long."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import structlog

from tailrace.backoff import Backoff
from tailrace.config.source.section import SourceSection
from tailrace.errors import Policy, TailraceError

log = structlog.get_logger(__name__)

#: Seconds after which a connection counts as good: the error that ends it is a first failure.
STEADY_S = 60.0


class Reconnection:
    """Runs connections as configured with a source's `reconnect_…` settings.

    :param name: the pipeline's name, for messages.
    :param position: returns the log's position: a connection that increased it was a good one.
    :param is_heard: returns whether anything was received over the present or the last connection.
    """

    def __init__(
        self,
        source: SourceSection,
        stopping: threading.Event,
        *,
        name: str,
        position: Callable[[], int],
        is_heard: Callable[[], bool],
    ) -> None:
        self._source = source
        self._stopping = stopping
        self._name = name
        self._position = position
        self._is_heard = is_heard
        #: Number of reconnections.
        self.count = 0
        #: The error of the last connection; None: the present one works. `connect` sets it to None.
        self.error: TailraceError | None = None

    def run(self, connect: Callable[[], None]) -> None:
        """Call `connect` until it returns or the task stops; after a transient error call it again.

        :raises TailraceError: an error that the user must repair, or a transient one that lasted longer
            than `source.reconnect_s_max`.
        """
        source = self._source
        failing_since: float | None = None
        backoff = Backoff(first_s=source.reconnect_delay_s, longest_s=source.reconnect_delay_s_max)
        while not self._stopping.is_set():
            before, began = self._position(), time.monotonic()
            try:
                connect()
            except TailraceError as error:
                if error.policy is not Policy.RETRY:
                    raise
                if self._stopping.is_set():
                    return
                now = time.monotonic()
                is_steady = self._is_heard() and now - began > STEADY_S
                if failing_since is None or is_steady or self._position() > before:
                    failing_since, backoff = now, backoff.after_success()
                self._give_up_or_note(error, now - failing_since)
                self._stopping.wait(backoff.wait_s * random.uniform(0.5, 1.0))  # noqa: S311 - not a secret
                backoff = backoff.failed()
            else:
                return

    def _give_up_or_note(self, error: TailraceError, failing_s: float) -> None:
        bound_s = self._source.reconnect_s_max
        if bound_s and failing_s > bound_s:
            raise error.changed(message=f"{error.message} (tried for {failing_s:.0f} s)") from error
        self.error = error
        self.count += 1
        log.warning(
            "the connection ended; connecting again",
            pipeline=self._name,
            kind=str(error.kind),
            message=error.message,
            hint=error.hint,
            reconnects=self.count,
        )
