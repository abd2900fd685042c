"""The waits between attempts."""

from __future__ import annotations

from tailrace.backoff import Backoff
from tailrace.errors import Kind, TailraceError


def test_waits_double_to_a_bound_and_end():
    passing, waits = TailraceError(Kind.SINK_WRITE_FAILED, "x"), []
    backoff = Backoff(7, first_s=1, longest_s=10)
    while True:
        backoff, wait_s = backoff.after(passing)
        if wait_s is None:
            break
        waits.append(wait_s)
    assert waits == [1, 2, 4, 8, 10, 10, 10]
    assert backoff.after_success().after(passing)[1] == 1


def test_what_a_person_must_repair_is_not_tried_again():
    assert Backoff(7).after(TailraceError(Kind.SINK_FOREIGN, "x"))[1] is None


def test_one_that_never_gives_up_waits_ever_longer_to_a_bound():
    backoff = Backoff(first_s=0.25, longest_s=5.0)
    waits = []
    for _ in range(1_100):
        waits.append(backoff.wait_s)
        backoff = backoff.failed()
    assert waits[:6] == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0]
    assert set(waits[5:]) == {5.0}
