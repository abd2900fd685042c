"""Telling callbacks what happens, on a thread of their own: they hold up nothing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import structlog

from tailrace.engine.contracts import Callbacks
from tailrace.engine.failures import named
from tailrace.engine.threads import adopt

log = structlog.get_logger(__name__)

#: What waits while a callback hangs; beyond it, what happens is only logged.
WAITING_MAX = 10_000


class CallbackDispatcher:
    """Calls callbacks one after another, in the order of what happened. Any thread may tell.

    :param engine: what the thread belongs to, so that a callback may close it.
    """

    def __init__(self, callbacks: Callbacks, name: str, engine: object) -> None:
        self._callbacks = callbacks
        self._engine = engine
        self._nothing = Callbacks()
        self._waiting: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue(WAITING_MAX)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._started = False

    def notify(self, what: str, *arguments: Any) -> None:
        """Have the callback `what` called; at once if there is none. Returns at once."""
        if getattr(self._callbacks, what) is getattr(self._nothing, what):
            return
        with self._lock:
            if not self._started:
                self._started = True
                self._thread.start()
        self._put((what, arguments))

    def finish(self, timeout_s: float) -> bool:
        """Wait until all were called, at most `timeout_s`; tell whether they were. Called at the end."""
        if not self._started:
            return True
        self._put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, item: tuple[str, tuple[Any, ...]] | None) -> None:
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            log.warning("a callback hangs, and those after it are not called", callback=item and item[0])

    def _run(self) -> None:
        adopt(self._engine)
        while (item := self._waiting.get()) is not None:
            what, arguments = item
            callback: Callable[..., None] = getattr(self._callbacks, what)
            try:
                callback(*arguments)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is theirs
                log.warning("a callback failed", callback=what, error=named(error))
