"""When a heartbeat is due: so long after the last one, or after the start."""

from __future__ import annotations

import time
from collections.abc import Callable


class Heartbeats:
    """Counts the time between heartbeats.

    :param interval_s: 0: there are none.
    :param clock: seconds, rising.
    """

    def __init__(self, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._last_s = clock()

    @property
    def is_due(self) -> bool:
        """Whether one is to be sent now."""
        return self._interval_s > 0 and self._clock() - self._last_s >= self._interval_s

    def sent(self) -> None:
        """Count from now on."""
        self._last_s = self._clock()
