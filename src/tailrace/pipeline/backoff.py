"""How long to wait before trying again, and when to give up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tailrace.errors import Policy, TailraceError


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double from `first_s` to `longest_s`, at most `attempts_max` in a row."""

    attempts_max: int
    first_s: float = 0.5
    longest_s: float = 30.0
    attempts: int = 0

    def after(self, error: TailraceError) -> tuple[Backoff, float | None]:
        """Return the next state and the seconds to wait; None: `error` is final."""
        if error.policy is Policy.STOP or self.attempts >= self.attempts_max:
            return self, None
        wait_s = min(self.longest_s, self.first_s * 2**self.attempts)
        return replace(self, attempts=self.attempts + 1), wait_s

    def after_success(self) -> Backoff:
        """Return the state in which all attempts are free again."""
        return replace(self, attempts=0)
