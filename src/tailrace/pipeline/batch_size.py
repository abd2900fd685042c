"""Computes the size of a sink's next batch. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tailrace.model import Pacing

#: The first goal and the smallest one if `Pacing.within_s` is set. A single transaction of the source may be
#: larger.
_ROWS_FIRST, _BYTES_FIRST = 10_000, 8 << 20
_ROWS_MIN, _BYTES_MIN = 1_000, 64 * 1024
#: Largest factor between the goals of two successive batches: one measurement may be off.
_STEP_MAX = 4.0


@dataclass(frozen=True, slots=True)
class BatchGoal:
    """The largest number of rows, and of bytes of the log, that a batch should hold.

    Without `Pacing.within_s` these are the limits of `pacing`; otherwise the amount that takes about that
    time to write, estimated from earlier batches.
    """

    pacing: Pacing
    rows: int
    bytes: int

    @classmethod
    def first(cls, pacing: Pacing) -> BatchGoal:
        """Return the goal of the first batch."""
        if pacing.within_s is None or pacing.begins_full:
            return cls(pacing, pacing.rows_max, pacing.bytes_max)
        return cls(pacing, min(_ROWS_FIRST, pacing.rows_max), min(_BYTES_FIRST, pacing.bytes_max))

    def after(self, rows: int, size: int, took_s: float) -> BatchGoal:
        """Return the goal after a batch of `rows` and `size` bytes that took `took_s` to write.

        A batch of less than half the goal changes it only if it took too long.
        """
        if self.pacing.within_s is None:
            return self
        share = max(rows / self.rows, size / self.bytes)
        factor = self.pacing.within_s / max(took_s, 1e-3)
        return self if share < 0.5 and factor > 1 else self._times(factor * min(share, 1.0))

    def after_failure(self, took_s: float) -> BatchGoal:
        """Return the goal after a failed batch; smaller if it failed after `Pacing.within_s` or later."""
        if self.pacing.within_s is None or took_s < self.pacing.within_s:
            return self
        # Down to one transaction in the end, so `_ROWS_MIN` and `_BYTES_MIN` don't apply.
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
