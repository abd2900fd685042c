"""How long to wait before trying again, and when to give up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Doublings beyond this are not reckoned: the longest wait is reached long before.
_DOUBLINGS_MAX = 60


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double from `first_s` to `longest_s`, at most `attempts_max` in a row.

    :param attempts_max: negative: without an end.
    :param attempts: made since the last success.
    """

    attempts_max: int
    first_s: float = 0.3
    longest_s: float = 10.0
    attempts: int = 0

    def after_failure(self) -> tuple[Backoff, float | None]:
        """Return the next state and the seconds to wait; None: no attempt is left."""
        if 0 <= self.attempts_max <= self.attempts:
            return self, None
        wait_s = min(self.longest_s, self.first_s * 2.0 ** min(self.attempts, _DOUBLINGS_MAX))
        return replace(self, attempts=self.attempts + 1), wait_s

    def after_success(self) -> Backoff:
        """Return the state in which all attempts are free again."""
        return self if self.attempts == 0 else replace(self, attempts=0)
