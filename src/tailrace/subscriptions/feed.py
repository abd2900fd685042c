"""The thread that follows a log at its end and decodes each new part once, for all subscriptions there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection

from tailrace.errors import TailraceError
from tailrace.pipeline.background import as_failure
from tailrace.ranges.changes import PendingWaits
from tailrace.subscriptions.events import DecodedRange
from tailrace.subscriptions.filters import ChangeFilter
from tailrace.subscriptions.served_log import ServedLog

#: Intervals of reading the log's end, in seconds: normally, and after `BUSY_S` without new data.
LOOK_S = 0.001
QUIET_LOOK_S = 0.01
BUSY_S = 0.5


class Feed:
    """Follows `log` from `at` on until `stop`. All callbacks are called on its thread.

    :param wanted: returns the filters of the current subscriptions; those without an expression are applied
        on this thread at once.
    :param deliver: is called with each batch, in order, without a gap.
    :param fail: is called with the error that ended it, if not `stop`.
    """

    def __init__(
        self,
        log: ServedLog,
        at: int,
        *,
        wanted: Callable[[], Collection[ChangeFilter]],
        deliver: Callable[[DecodedRange], None],
        fail: Callable[[TailraceError], None],
    ) -> None:
        self._log, self._at = log, at
        self._wanted, self._deliver, self._fail = wanted, deliver, fail
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="subscriptions", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Request the end; returns at once. A batch may still be delivered afterwards."""
        self._stop.set()

    def _run(self) -> None:
        try:
            self._follow()
        except BaseException as error:  # noqa: BLE001 - it ends the subscriptions
            self._fail(as_failure(error))

    def _follow(self) -> None:
        came_s, pending = 0.0, PendingWaits()
        while not self._stop.is_set():
            try:
                came = self._take()
            except TailraceError as error:
                pending.wait(error, self._at, self._stop)
                continue
            now_s = time.monotonic()
            if came:
                came_s = now_s
            else:
                self._stop.wait(LOOK_S if now_s - came_s < BUSY_S else QUIET_LOOK_S)

    def _take(self) -> bool:
        """Deliver the new batches; return whether there were any."""
        before = self._at
        for batch in self._log.batches(before):
            for wanted in self._wanted():
                if not wanted.where and batch.means(wanted):
                    # An error is raised again, and reported, when the batch is read for this filter alone.
                    with contextlib.suppress(TailraceError):
                        batch.look(wanted)
            self._at = batch.end
            self._deliver(batch)
            if self._stop.is_set():
                break
        return self._at > before
