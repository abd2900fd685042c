"""Offset commits: when the policy wants them, those that fail or hang, and the notification of the task."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tailrace.engine.commit_policies import (
    BY_NAME,
    AllOf,
    Always,
    AnyOf,
    AtTransactionEnds,
    EveryRecords,
    Periodic,
)
from tailrace.engine.contracts import CommitPolicy
from tailrace.engine.offsets.committer import OffsetCommitter
from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Batch, Offset, Partition
from tests.support.engine.flowing import PARTITION, SOON_S, Remembering
from tests.support.wait import wait_until


class MovedClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def time_us(self) -> int:
        return int(self.now_s * 1e6)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.wait(0.001)


class Bench:
    """A committer, and batches of ten records for it."""

    def __init__(self, policy: CommitPolicy, *, timeout_s: float = SOON_S, store: Remembering | None = None):
        self.clock, self.store = MovedClock(), store or Remembering()
        self.told: list[int] = []
        self.at = 0
        self.committer = OffsetCommitter(
            self.store, policy, self.clock, committed=self._record_commit, timeout_s=timeout_s, name="test"
        )

    def _record_commit(self, partition: Partition, offset: Offset) -> None:
        assert partition == PARTITION
        self.told.append(offset["at"])

    def take(
        self, ends: Sequence[int] | None = None, partition: Partition = PARTITION, records: int = 10
    ) -> Batch:
        marks = None if ends is None else np.isin(np.arange(records), ends)
        offsets = [{"at": self.at + k + 1} for k in range(records)]
        batch = Batch(partition, (), records, offsets, transaction_ends=marks)
        self.at += records
        self.committer.take(batch)
        return batch

    def done(self, ends: Sequence[int] | None = None) -> None:
        batch = self.take(ends)
        self.committer.mark_processed(batch)
        self.committer.mark_batch_finished(batch)

    @property
    def stored(self) -> list[int]:
        return [write[0][1]["at"] for write in self.store.writes]


def test_always_commits_after_each_batch_and_notifies_the_task() -> None:
    bench = Bench(Always())
    bench.done()
    bench.done()
    bench.committer.tick()
    assert bench.stored == bench.told == [10, 20]


def test_the_periodic_policy_waits_for_its_interval_also_without_new_records() -> None:
    bench = Bench(BY_NAME["periodic"](60, 0))
    bench.done()
    assert bench.stored == []
    bench.clock.now_s += 60
    bench.committer.tick()
    assert bench.stored == [10]
    bench.clock.now_s += 59
    bench.done()
    assert bench.stored == [10]
    bench.clock.now_s += 1
    bench.committer.tick()
    bench.clock.now_s += 1000
    bench.committer.tick()
    assert bench.stored == [10, 20]  # nothing new to commit: no write


def test_the_count_policy_counts_dropped_records_too() -> None:
    bench = Bench(BY_NAME["count"](0, 25))
    for _ in range(5):
        bench.done()
    assert bench.stored == [30]


def test_the_transaction_policy_never_commits_within_a_transaction() -> None:
    bench = Bench(AtTransactionEnds())
    bench.done(ends=[])
    assert bench.stored == []
    bench.done(ends=[3, 6])
    assert bench.stored == [17]
    bench.done(ends=[])
    bench.done(ends=[9])
    assert bench.stored == [17, 40]
    limited = Bench(BY_NAME["transaction"](60, 0))
    limited.done(ends=[3])
    assert limited.stored == []
    limited.clock.now_s += 60
    limited.committer.tick()
    assert limited.stored == [4]


@pytest.mark.parametrize(
    ("policy", "stored"),
    [
        (AtTransactionEnds(), [4]),
        (BY_NAME["transaction"](60, 0), [4]),
        (AllOf(AtTransactionEnds(), EveryRecords(100)), [4]),
        (BY_NAME["periodic"](60, 0), [20]),
        (BY_NAME["count"](0, 100), [20]),
        (AnyOf(AtTransactionEnds(), Periodic(60)), [4, 20]),
    ],
)
def test_the_last_commit_is_within_a_transaction_only_if_the_policy_allows_it(
    policy: CommitPolicy, stored: list[int]
) -> None:
    bench = Bench(policy)
    bench.done(ends=[3])
    bench.done(ends=[])
    assert bench.committer.finish(SOON_S)
    assert bench.stored == bench.told == stored


def test_a_policy_that_fails_does_not_prevent_the_last_commit() -> None:
    class Failing:
        def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
            raise ValueError

    bench = Bench(Failing())
    bench.committer.mark_processed(bench.take(ends=[3]))
    assert bench.committer.finish(SOON_S)
    assert bench.stored == [4]


class Counted:
    def __init__(self, answer: bool) -> None:
        self.answer, self.asked = answer, 0

    def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
        self.asked += 1
        return self.answer


def test_a_policy_may_look_how_far_its_task_is() -> None:
    class Looks:
        def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
            return bench.committer.processed >= 20

    bench = Bench(Looks())
    bench.done()
    assert bench.told == []
    bench.done()
    assert bench.told == [20]


def test_combined_policies_are_all_asked() -> None:
    yes, no = Counted(answer=True), Counted(answer=False)
    assert not AllOf(no, yes).is_due(1, True, 0)
    assert AnyOf(yes, no).is_due(1, True, 0)
    assert (yes.asked, no.asked) == (2, 2)
    own = AnyOf(EveryRecords(100), AllOf(Periodic(1), AtTransactionEnds()))
    assert not own.is_due(99, False, 9)
    assert own.is_due(1, True, 9)


def test_a_failed_write_is_repeated_after_a_later_batch_with_the_newest_offset() -> None:
    bench = Bench(Always())
    errors: list[Exception] = [TailraceError(Kind.OFFSETS_UNWRITABLE, "x"), KeyError("not one of ours")]

    def fails() -> None:
        if errors:
            raise errors.pop()

    bench.store.fails = fails
    bench.done()
    assert isinstance(bench.committer.failure, KeyError)
    bench.done()
    assert isinstance(bench.committer.failure, TailraceError)
    assert (bench.stored, bench.told) == ([], [])
    bench.done()
    assert (bench.stored, bench.told, bench.committer.failure) == ([30], [30], None)


def test_a_hanging_write_blocks_no_longer_than_its_timeout_and_counts_if_it_succeeds_later() -> None:
    release, entered = threading.Event(), threading.Event()
    bench = Bench(Always(), timeout_s=0.05)

    def hangs() -> None:
        entered.set()
        assert release.wait(SOON_S)

    bench.store.fails = hangs
    bench.done()
    assert entered.is_set()
    bench.done()  # no second write begins meanwhile
    assert bench.told == []
    release.set()
    wait_until(lambda: bench.told, SOON_S, "the write that came late")
    assert (bench.stored, bench.told) == ([10], [10])
    bench.committer.tick()
    wait_until(lambda: bench.told == [10, 20], SOON_S, "the next write")


def test_the_last_commit_ignores_the_policy_and_later_marks_are_ignored() -> None:
    bench = Bench(Periodic(1e9))
    bench.done()
    late = bench.take()
    assert bench.committer.finish(SOON_S)
    assert bench.stored == bench.told == [10]
    bench.committer.mark_processed(late)
    bench.committer.mark_batch_finished(late)
    assert bench.committer.finish(SOON_S)
    assert bench.stored == [10]


def test_the_last_commit_has_a_timeout_and_reports_a_failure() -> None:
    release = threading.Event()
    bench = Bench(Periodic(1e9))
    bench.store.fails = lambda: release.wait(SOON_S) and None  # type: ignore[assignment]
    bench.done()
    assert not bench.committer.finish(0.05)
    release.set()
    wait_until(lambda: bench.stored == [10], SOON_S)
    assert bench.told == []  # the task may have stopped by now
    failing = Bench(Periodic(1e9))

    def refuses() -> None:
        raise OSError

    failing.store.fails = refuses
    failing.done()
    assert not failing.committer.finish(SOON_S)


def test_an_error_of_the_tasks_commit_callback_changes_nothing() -> None:
    bench = Bench(Always())

    def raising(partition: Partition, offset: Offset) -> None:
        raise KeyError

    bench.committer._on_committed = raising
    bench.done()
    bench.done()
    assert bench.stored == [10, 20]


def test_each_partition_has_its_own_offset_and_all_are_written_together() -> None:
    bench = Bench(Periodic(60))
    other: dict[str, Any] = {"server": "other"}
    bench._record_commit = lambda *_: None  # type: ignore[method-assign]
    bench.committer._on_committed = lambda *_: None
    first, second, third = bench.take(), bench.take(partition=other), bench.take()
    bench.committer.mark_processed(third)
    bench.committer.mark_processed(second, 4)
    for place in range(4):
        bench.committer.mark_processed(second, place)
    bench.clock.now_s += 60
    bench.committer.tick()
    assert bench.store.writes == [[(other, {"at": 15})]]
    bench.committer.mark_processed(first)
    bench.committer.mark_processed(second)
    assert bench.committer.finish(SOON_S)
    assert bench.store.writes[1] == [(PARTITION, {"at": 30}), (other, {"at": 20})]


def test_marks_from_many_threads_are_all_counted() -> None:
    bench = Bench(Periodic(1e9))
    batches = [bench.take() for _ in range(100)]

    def mark(first: int) -> None:
        for batch in batches:
            for place in range(first, 10, 4):
                bench.committer.mark_processed(batch, place)
                bench.committer.tick()

    threads = [threading.Thread(target=mark, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert bench.committer.finish(SOON_S)
    assert bench.stored == [1000]


@pytest.mark.parametrize("name", BY_NAME)
def test_policies_are_chosen_by_the_names_in_the_configuration(name: str) -> None:
    assert not BY_NAME[name](60, 10).is_due(0, False, 0) or name == "always"


@pytest.mark.parametrize("order", ["in order", "backwards"])
def test_the_policy_may_commit_within_a_batch(order: str) -> None:
    bench = Bench(BY_NAME["count"](0, 500))
    batch = bench.take(records=2_000)
    for first in (0, 600, 1_200):
        places = range(first, first + 600)
        for place in places if order == "in order" else reversed(places):
            bench.committer.mark_processed(batch, place)
        left = first + 600 - 500
        wait_until(lambda: bench.committer.committed > left, what="a commit within the batch")  # noqa: B023
    assert bench.stored == sorted(bench.stored)
    assert bench.committer.processed == 1_800


def test_processed_records_are_committed_in_time_while_a_handler_hangs() -> None:
    bench = Bench(BY_NAME["periodic"](60, 0))
    batch = bench.take()
    for place in range(3):
        bench.committer.mark_processed(batch, place)
    assert bench.committer.processed == 3
    bench.clock.now_s += 61
    # From here on only the committer's own thread works.
    wait_until(lambda: bench.told == [3], what="a commit within the batch")
    assert bench.committer.committed == 3


def test_an_error_of_the_policy_within_a_batch_ends_the_task() -> None:
    class Broken:
        def is_due(self, processed: int, at_transaction_end: bool, since_commit_s: float) -> bool:
            raise ZeroDivisionError

    bench = Bench(Broken())
    bench.committer.mark_processed(bench.take(), 0)

    def raised() -> bool:
        try:
            bench.take()
        except ZeroDivisionError:
            return True
        return False

    wait_until(raised, what="the policy's error")
