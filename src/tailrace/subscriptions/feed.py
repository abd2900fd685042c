"""The one thread that follows a log at its end and decodes each new part once, for all who are there."""

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

#: Between looks at the log's end, while something comes and once nothing has come for `BUSY_S`.
LOOK_S = 0.001
QUIET_LOOK_S = 0.01
BUSY_S = 0.5


class Feed:
    """Follows `log` from `at` on until `stop`.

    :param wanted: what is wanted by somebody now; where that takes no expression, it is looked for on this
        thread at once.
    :param deliver: takes each batch, in order, without a gap. On this thread, as the others.
    :param fail: takes what ended it, if not `stop`.
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
        """Ask for the end; returns at once. Something may be delivered yet."""
        self._stop.set()

    def _run(self) -> None:
        try:
            self._follow()
        except BaseException as error:  # noqa: BLE001 - it goes to those who are fed
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
        """Deliver what is new; return whether there was anything."""
        before = self._at
        for batch in self._log.batches(before):
            for wanted in self._wanted():
                if not wanted.where and batch.means(wanted):
                    # What fails for one who wants this fails again when it is looked at for that one alone.
                    with contextlib.suppress(TailraceError):
                        batch.look(wanted)
            self._at = batch.end
            self._deliver(batch)
            if self._stop.is_set():
                break
        return self._at > before
