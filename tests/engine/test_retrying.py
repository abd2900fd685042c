"""Retries of errors that may pass; the behaviours of Debezium's RetryingCallableTest by their names."""

from __future__ import annotations

import threading

import pytest
import structlog

from tailrace.backoff import Backoff, is_retriable
from tailrace.engine.contracts import RetriableError
from tailrace.engine.failures import GivenUpError, Retrying
from tailrace.engine.threads import SystemClock
from tailrace.errors import Kind, TailraceError


class NoWaits(SystemClock):
    """Records waits, and returns at once."""

    def __init__(self):
        self.waits = []

    def wait(self, event, timeout_s):
        self.waits.append(timeout_s)
        return event.is_set()


class Failing:
    """Fails so many times, then returns the number of the call."""

    def __init__(self, times, error=RetriableError):
        self.times, self.error, self.calls = times, error, 0

    def __call__(self):
        self.calls += 1
        if self.calls <= self.times:
            raise self.error() if isinstance(self.error, type) else self.error
        return self.calls


def retrying(retries_max, clock=None, stopping=None, failed=lambda: None):
    backoff = Backoff(retries_max, first_s=0.3, longest_s=10.0)
    return Retrying("task 0: poll", backoff, clock or NoWaits(), stopping or threading.Event(), failed)


# RetryingCallableTest: shouldExecuteNeverFailing, shouldNotRetryWhenCallableDoesNotFail,
# shouldIgnoreInfiniteRetryWhenCallableDoesNotFail.
@pytest.mark.parametrize("retries_max", [0, 5, -1])
def test_a_function_that_succeeds_is_called_once(retries_max):
    action = Failing(0)
    assert retrying(retries_max).call(action) == 1
    assert action.calls == 1


# RetryingCallableTest: shouldRetryAsManyTimesAsRequested.
def test_a_function_is_called_again_until_it_succeeds():
    assert retrying(2).call(Failing(2)) == 3


# RetryingCallableTest: shouldRetryAsManyTimesAsRequestedWhenAlwaysFails.
def test_a_function_is_called_again_as_often_as_allowed():
    action = Failing(100)
    with structlog.testing.capture_logs() as logs, pytest.raises(RetriableError):
        retrying(5).call(action)
    assert action.calls == 6
    assert [entry["retry"] for entry in logs] == [1, 2, 3, 4, 5]


# RetryingCallableTest: shouldNotRetryWhenRetriesAreDisabled.
def test_without_retries_the_first_failure_is_final():
    action = Failing(1)
    with pytest.raises(RetriableError):
        retrying(0).call(action)
    assert action.calls == 1


# RetryingCallableTest: shouldKeepRetryingWhenRetryIsInfinite (there in 3 s, here at once).
def test_retries_may_be_unlimited():
    assert retrying(-1).call(Failing(500)) == 501


def test_waits_double_up_to_the_longest():
    clock = NoWaits()
    retrying(-1, clock).call(Failing(8))
    assert clock.waits == pytest.approx([0.3, 0.6, 1.2, 2.4, 4.8, 9.6, 10, 10])


def test_attempts_are_counted_from_zero_after_a_success():
    clock = NoWaits()
    tried = retrying(1, clock)
    for _ in range(5):
        assert tried.call(Failing(1)) == 2
    assert clock.waits == [0.3] * 5


def test_an_error_that_is_not_retriable_is_raised_at_once():
    for error in (ValueError(), TailraceError(Kind.SLOT_MISSING, "gone"), KeyboardInterrupt()):
        action = Failing(1, error)
        with pytest.raises(type(error)):
            retrying(-1).call(action)
        assert action.calls == 1


def test_tailrace_errors_are_retried_by_the_policy_of_their_kind():
    assert is_retriable(TailraceError(Kind.SOURCE_UNREACHABLE, "x"))
    assert not is_retriable(TailraceError(Kind.SOURCE_AUTH_FAILED, "x"))
    assert not is_retriable(ConnectionError())
    assert retrying(1).call(Failing(1, TailraceError(Kind.SOURCE_UNREACHABLE, "x"))) == 2


def test_a_wait_ends_when_the_engine_wants_to_stop():
    stopping = threading.Event()
    action = Failing(100)
    with pytest.raises(GivenUpError):
        retrying(-1, SystemClock(), stopping, failed=stopping.set).call(action)
    assert action.calls == 1


def test_the_log_has_no_messages_of_foreign_errors():
    with structlog.testing.capture_logs() as logs:
        retrying(1).call(Failing(1, RetriableError("the row says 4711")))
    assert "4711" not in str(logs)
