"""Who may go next, where only so many may at a time: first come, first served."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

#: How often somebody who waits looks whether to stop.
_LOOK_S = 0.1


class FairSemaphore:
    """At most `places` of its users at work at a time; the others wait in the order they came.

    Any thread. A user that has a place and asks for another waits for itself: don't.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, stop: threading.Event) -> Iterator[bool]:
        """Wait for a place and hold it while the context is open.

        Yields False if `stop` was set before there was one: then nothing is held, and what the
        place was for must not be done.
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
        """Whether who came now would have to wait."""
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
