"""The waits between attempts."""

from __future__ import annotations

from tailrace.backoff import Backoff
from tailrace.errors import Kind, TailraceError


def test_waits_double_up_to_a_maximum_and_end():
    passing, waits = TailraceError(Kind.SINK_WRITE_FAILED, "x"), []
    backoff = Backoff(7, first_s=1, longest_s=10)
    while True:
        backoff, wait_s = backoff.after(passing)
        if wait_s is None:
            break
        waits.append(wait_s)
    assert waits == [1, 2, 4, 8, 10, 10, 10]
    assert backoff.after_success().after(passing)[1] == 1


def test_an_error_that_a_person_must_resolve_is_not_retried():
    assert Backoff(7).after(TailraceError(Kind.SINK_FOREIGN, "x"))[1] is None


def test_unlimited_retries_wait_longer_up_to_a_maximum():
    backoff = Backoff(first_s=0.25, longest_s=5.0)
    waits = []
    for _ in range(1_100):
        waits.append(backoff.wait_s)
        backoff = backoff.failed()
    assert waits[:6] == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0]
    assert set(waits[5:]) == {5.0}
