"""Time as it is."""

from __future__ import annotations

import threading
import time


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        """Return seconds that only rise."""
        return time.monotonic()

    def time_us(self) -> int:
        """Return microseconds since 1970."""
        return time.time_ns() // 1000

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait for `event`, at most `timeout_s`; tell whether it is set."""
        return event.wait(timeout_s)
