"""Key queues: order by key while delivery changes between one thread and several at any moment."""

from __future__ import annotations

import random
import threading
import time

import pytest

from tailrace.backoff import Backoff
from tailrace.engine.contracts import RetriableError
from tailrace.engine.processing import Order, on_record, queues, thread_executor
from tailrace.engine.processing.in_flight import InFlight
from tailrace.engine.processing.queues import PERIOD_S, DeliveryRate, QueuedRecords, Queues
from tailrace.engine.processing.stage import ReadyBatch
from tailrace.records.batch import Batch
from tailrace.records.making import SourceRecord
from tailrace.records.record import Record
from tests.support.engine.flowing import (
    PARTITION,
    SOON_S,
    assert_in_order_for_each_key,
    numbers,
    running,
    stream,
)
from tests.support.wait import wait_until


class _Fickle(DeliveryRate):
    """Reports at random that records are delivered quickly, or no longer."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance
        self.is_quick = True

    def measure(self, records: int, now_s: float) -> bool:
        self.is_quick = self._chance.random() < (0.995 if self.is_quick else 0.5)
        return self.is_quick

    def goes_on(self, records: int, began_s: float, now_s: float) -> bool:
        self.is_quick = self._chance.random() < 0.8
        return self.is_quick

    def pause(self, now_s: float) -> None:
        self.is_quick = False


@pytest.mark.parametrize("order", ["key", "unordered"])
@pytest.mark.parametrize("_", range(10))
def test_each_record_comes_once_and_in_order_of_its_key_whenever_threads_are_added(
    _: int, order: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    monkeypatch.setattr(thread_executor, "DeliveryRate", lambda: _Fickle(chance))
    monkeypatch.setattr(queues, "KEY_QUEUES_A_THREAD", 2)
    monkeypatch.setattr(thread_executor, "PERIOD_S", 0.001)
    monkeypatch.setattr(thread_executor, "SETTLE_RECORDS", 1 + seed % 5)
    monkeypatch.setattr(thread_executor, "_RUN_RECORDS", 1 + seed % 50)
    got: list[int] = []
    lock = threading.Lock()
    refused: set[int] = set()

    def one(record: Record) -> None:
        number: int = record.source["n"]
        if chance.random() < 0.1:
            time.sleep(chance.random() * 0.003)
        if number not in refused and chance.random() < 0.02:
            refused.add(number)
            raise RetriableError
        with lock:
            got.append(number)

    with running(on_record(one), order) as run:
        run.work_off(stream(seed)), seed
        assert run.committer.finish(SOON_S)
    if order == "key":
        assert_in_order_for_each_key(got, seed)
    assert sorted(got) == numbers(stream(seed)), seed


@pytest.mark.parametrize("order", ["key", "unordered"])
@pytest.mark.slow
def test_a_call_that_hangs_among_quick_ones_blocks_only_its_own_queue(order: Order) -> None:
    records, hanging = 60_000, 30_000
    release, reached = threading.Event(), threading.Event()
    got: list[int] = []

    def one(record: Record) -> None:
        if record.value == hanging:
            reached.set()
            assert release.wait(SOON_S)
        got.append(record.value)

    made = [SourceRecord(topic="t", offset={"at": n}, key={"id": n}, value=n) for n in range(records)]
    with running(on_record(one), order) as run:
        run.put([Batch.of_records(made, PARTITION)])
        assert reached.wait(SOON_S)
        wait_until(lambda: len(got) > 0.9 * records, SOON_S, "the other keys' records")
        assert hanging not in got
        release.set()
        assert run.processor.drain(SOON_S)
    assert sorted(got) == list(range(records))


def test_one_thread_is_enough_while_it_delivers_many_records() -> None:
    rate = DeliveryRate()
    rate.measure(0, 100.0)
    assert not rate.is_quick
    assert not rate.measure(10_000_000, 100.0 + PERIOD_S / 2)  # too soon to decide
    assert rate.measure(10_000_000, 100.0 + 2 * PERIOD_S)
    assert rate.goes_on(10_000, 200.0, 200.0 + PERIOD_S)
    assert not rate.goes_on(10, 200.0, 200.0 + PERIOD_S)
    # Other threads were added: they are not removed at once.
    assert not rate.measure(20_000_000, 200.0 + 2 * PERIOD_S)
    assert not rate.measure(20_000_100, 201.0)
    assert rate.measure(30_000_000, 202.0)
    assert not rate.measure(30_000_001, 203.0)


KEYS = 5


def _add(queues: Queues, first: int, last: int) -> None:
    """Add records with these numbers; each one's key is its number modulo `KEYS`."""
    made = [
        SourceRecord(topic="t", offset={"at": n}, key={"id": n % KEYS}, value=n) for n in range(first, last)
    ]
    batch = Batch.of_records(made, PARTITION)
    ready = ReadyBatch(batch, batch, ())
    [(begin, end, get)] = ready.runs(len(batch))
    dealing = queues.dealing(ready)
    queues.add(QueuedRecords(InFlight(batch, 0), get, range(begin, end), Backoff(0), dealing=dealing))


def _work_off(queues: Queues) -> list[int]:
    """Take every available queue, and return the values that one thread gets."""
    found: list[int] = []
    while queues.has_any():
        queue, part = queues.take(), None
        while (part := queues.next_in(queue, part)) is not None:
            found += [record.value for n in part.numbers for record in part.get(n)]
    return found


def test_the_record_being_delivered_holds_back_only_its_own_key_when_others_are_dealt_out() -> None:
    rate = DeliveryRate()
    rate.is_quick = True
    queues = Queues(50, rate)  # enough that no two keys share one
    _add(queues, 0, 20)
    queue = queues.take()
    part = queues.next_in(queue, None)
    assert part is not None
    assert [next(part.numbers), next(part.numbers)] == [0, 1]
    assert not queues.has_any()  # until they are dealt out, they are that thread's
    queues.deal_out()
    assert sorted(_work_off(queues)) == [n for n in range(2, 20) if n % KEYS != 1]
    _add(queues, 20, 30)  # not dealt out: behind all that were
    assert not queues.has_any()
    assert queues.next_in(queue, part) is None
    assert _work_off(queues) == [6, 11, 16, *range(20, 30)]


def test_a_record_that_waits_for_its_retry_holds_back_only_its_own_key() -> None:
    rate = DeliveryRate()
    rate.is_quick = True
    queues = Queues(50, rate)
    _add(queues, 0, 20)
    queue = queues.take()
    part = queues.next_in(queue, None)
    assert part is not None
    assert [next(part.numbers), next(part.numbers)] == [0, 1]
    held = queues.held_for_retry(queue)
    _add(queues, 20, 30)
    assert sorted(_work_off(queues)) == [n for n in range(2, 20) if n % KEYS != 1]
    held.parts.appendleft(QueuedRecords(part.in_flight, part.get, [1], part.backoff, (held,)))
    queues.release(held)
    assert _work_off(queues) == [1, 6, 11, 16, *range(20, 30)]
