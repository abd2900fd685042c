"""Computes the waits between attempts and when to give up. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tailrace.errors import Policy, RetriableError, TailraceError

#: Most doublings of the wait: with so many, any `longest_s` is reached.
_DOUBLINGS_MAX = 40


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double from `first_s` to `longest_s`, at most `attempts_max` in a row; -1: no limit.

    :param attempts: successive failures so far.
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
        """Return the next state and the seconds to wait after any error; None: no attempts are left."""
        if 0 <= self.attempts_max <= self.attempts:
            return self, None
        return self.failed(), self.wait_s

    def after_success(self) -> Backoff:
        """Return the state with all attempts available again."""
        return replace(self, attempts=0) if self.attempts else self


def is_retriable(error: BaseException) -> bool:
    """Return whether an operation that failed with `error` is retried."""
    return isinstance(error, RetriableError) or (
        isinstance(error, TailraceError) and error.policy is Policy.RETRY
    )
