"""How long to wait before trying again, and when to give up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tailrace.errors import Policy, RetriableError, TailraceError

#: Doubled no more than this often: beyond it, any longest wait is reached.
_DOUBLINGS_MAX = 40


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double from `first_s` to `longest_s`, at most `attempts_max` in a row; -1: for ever.

    :param attempts: failures in a row so far.
    """

    attempts_max: int = -1
    first_s: float = 0.5
    longest_s: float = 30.0
    attempts: int = 0

    @property
    def wait_s(self) -> float:
        """Seconds to wait after the next failure."""
        return min(self.longest_s, self.first_s * 2.0 ** min(self.attempts, _DOUBLINGS_MAX))

    def failed(self) -> Backoff:
        """Return the state after one more failure, for loops that never give up."""
        return replace(self, attempts=self.attempts + 1)

    def after(self, error: BaseException) -> tuple[Backoff, float | None]:
        """Return the next state and the seconds to wait; None: `error` is final."""
        return self.after_failure() if is_retriable(error) else (self, None)

    def after_failure(self) -> tuple[Backoff, float | None]:
        """As `after`, whatever the error was."""
        if 0 <= self.attempts_max <= self.attempts:
            return self, None
        return self.failed(), self.wait_s

    def after_success(self) -> Backoff:
        """Return the state in which all attempts are free again."""
        return replace(self, attempts=0) if self.attempts else self


def is_retriable(error: BaseException) -> bool:
    """Tell whether what failed so is tried again."""
    return isinstance(error, RetriableError) or (
        isinstance(error, TailraceError) and error.policy is Policy.RETRY
    )
