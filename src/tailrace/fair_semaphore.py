"""A semaphore that serves waiting threads in the order in which they came."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

#: Interval at which a waiting thread checks its `stop` event, in seconds.
_LOOK_S = 0.1


class FairSemaphore:
    """Lets at most `places` users work at a time; the others wait in the order they came.

    Any thread. A user that has a place must not ask for another: it may wait for itself.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, stop: threading.Event) -> Iterator[bool]:
        """Wait for a place and hold it while the context is open.

        Yields False if `stop` was set before a place was free: then no place is held, and the
        caller must not do its work.
        """
        given = self._take(stop)
        try:
            yield given
        finally:
            if given:
                with self._changed:
                    self._free += 1
                    self._changed.notify_all()

    @property
    def must_wait(self) -> bool:
        """Whether a new user would have to wait."""
        return self._free == 0 or bool(self._waiting)

    def _take(self, stop: threading.Event) -> bool:
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while not stop.is_set():
                    if self._free and self._waiting[0] is ticket:
                        self._free -= 1
                        return True
                    self._changed.wait(_LOOK_S)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        return False
