"""How many rows the next batch of a sink should hold. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tailrace.config.sinks import Pacing

#: Where it begins, and the least it comes down to, with a time to keep to.
_ROWS_FIRST = 10_000
_ROWS_MIN = 1_000
#: From one batch to the next it is multiplied or divided by this at most: one measurement may be off.
_STEP_MAX = 4.0


@dataclass(frozen=True, slots=True)
class BatchGoal:
    """The rows that a batch should hold at most.

    Without `Pacing.within_s` that is its `rows_max`; else what is written in about that time, by the
    batches before.
    """

    pacing: Pacing
    rows: int

    @classmethod
    def first(cls, pacing: Pacing) -> BatchGoal:
        """Return the goal before anything is known."""
        return cls(pacing, pacing.rows_max if pacing.within_s is None else min(_ROWS_FIRST, pacing.rows_max))

    def after(self, rows: int, took_s: float) -> BatchGoal:
        """Return the goal after a batch of `rows` that took so long; small ones teach nothing."""
        if self.pacing.within_s is None or rows * 2 < self.rows:
            return self
        factor = self.pacing.within_s / max(took_s, 1e-3) * rows / self.rows
        wanted = int(self.rows * min(max(factor, 1 / _STEP_MAX), _STEP_MAX))
        return replace(self, rows=min(max(wanted, _ROWS_MIN), self.pacing.rows_max))
