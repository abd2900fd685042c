"""How much the next batch of a sink should hold. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tailrace.model import Pacing

#: Where it begins, and the least it comes down to, with a time to keep to. A single transaction of the source
#: may have more.
_ROWS_FIRST, _BYTES_FIRST = 10_000, 8 << 20
_ROWS_MIN, _BYTES_MIN = 1_000, 64 * 1024
#: From one batch to the next it is multiplied or divided by this at most: one measurement may be off.
_STEP_MAX = 4.0


@dataclass(frozen=True, slots=True)
class BatchGoal:
    """The rows, and the bytes of the log, that a batch should hold at most.

    Without `Pacing.within_s` these are its limits; else what is written in about that time, by the
    batches before.
    """

    pacing: Pacing
    rows: int
    bytes: int

    @classmethod
    def first(cls, pacing: Pacing) -> BatchGoal:
        """Return the goal before anything is known."""
        if pacing.within_s is None or pacing.begins_full:
            return cls(pacing, pacing.rows_max, pacing.bytes_max)
        return cls(pacing, min(_ROWS_FIRST, pacing.rows_max), min(_BYTES_FIRST, pacing.bytes_max))

    def after(self, rows: int, size: int, took_s: float) -> BatchGoal:
        """Return the goal after a batch of so many rows and bytes that took so long.

        What a small one took teaches nothing, unless it was too long.
        """
        if self.pacing.within_s is None:
            return self
        share = max(rows / self.rows, size / self.bytes)
        factor = self.pacing.within_s / max(took_s, 1e-3)
        return self if share < 0.5 and factor > 1 else self._times(factor * min(share, 1.0))

    def after_failure(self, took_s: float) -> BatchGoal:
        """Return the goal after a batch that failed, and so late that there may have been too much in it."""
        if self.pacing.within_s is None or took_s < self.pacing.within_s:
            return self
        # Down to one transaction, at last: that one may get more time, where several get less to write.
        return replace(
            self, rows=max(int(self.rows / _STEP_MAX), 1), bytes=max(int(self.bytes / _STEP_MAX), 1)
        )

    def _times(self, factor: float) -> BatchGoal:
        factor = min(max(factor, 1 / _STEP_MAX), _STEP_MAX)
        return replace(
            self,
            rows=min(max(int(self.rows * factor), _ROWS_MIN), self.pacing.rows_max),
            bytes=min(max(int(self.bytes * factor), _BYTES_MIN), self.pacing.bytes_max),
        )
