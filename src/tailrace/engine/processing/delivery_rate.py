"""How quickly a task's records are delivered: whether one thread does as much as several would."""

from __future__ import annotations

#: For how long records are counted: many times as long as Python lets a thread have its lock.
PERIOD_S = 0.05

#: More records than this in a second are delivered quickly. Where the handler waits, or computes without
#: Python's lock, threads that call it come to as many only if a call lasts some 10 µs.
_QUICK_PER_S = 50_000
#: Fewer in a second than this by one thread, and others are called again.
_SLOW_PER_S = 40_000

#: Others had to be called again: for so long they stay.
_PAUSE_S = 0.2


class DeliveryRate:
    """Finds whether records are delivered quickly. Its caller has a lock.

    :ivar is_quick: whether they are; not before that was measured, and not while few come.
    """

    def __init__(self) -> None:
        self.is_quick = False
        self._records = 0
        self._since_s = 0.0

    def measure(self, records: int, now_s: float) -> bool:
        """Note how many records are delivered by now; return whether they are delivered quickly."""
        wait_s = now_s - self._since_s
        if wait_s < 0:
            self._records = records
        elif wait_s >= PERIOD_S:
            least_per_s = _SLOW_PER_S if self.is_quick else _QUICK_PER_S
            self.is_quick = records - self._records >= least_per_s * wait_s
            self._records, self._since_s = records, now_s
        return self.is_quick

    def goes_on(self, records: int, began_s: float, now_s: float) -> bool:
        """Return whether one thread goes on alone, which delivered so many records since `began_s`."""
        if records < _SLOW_PER_S * (now_s - began_s):
            self.pause(now_s)
        return self.is_quick

    def pause(self, now_s: float) -> None:
        """Have several threads deliver, for a while at least."""
        self.is_quick, self._since_s = False, now_s + _PAUSE_S
