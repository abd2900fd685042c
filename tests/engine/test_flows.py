"""Delivery: what handlers get, in what order, and what is committed, whatever goes wrong and when."""

from __future__ import annotations

import gc
import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.converters.debezium import JsonConverter
from tailrace.engine.commit_policies import Periodic
from tailrace.engine.contracts import Committer, RetriableError, StopEngine
from tailrace.engine.processing import Order, manual, on_batch, on_record, stage
from tailrace.errors import Kind, TailraceError
from tailrace.records.batch import Batch
from tailrace.records.events import OLD_KEY, Converted, Event, Events
from tailrace.records.group import Group
from tailrace.records.making import SourceRecord
from tailrace.records.record import Record
from tailrace.transforms.factory import build
from tests.support.decode.wire import insert, update
from tests.support.engine.flowing import (
    PARTITION,
    SOON_S,
    Remembering,
    assert_in_order_for_each_key,
    drop_thirds,
    numbers,
    running,
    stream,
    to_text,
)
from tests.support.transforms.groups import orders
from tests.support.wait import wait_until

ORDERS: list[Order] = ["ordered", "unordered", "key"]


def number_of(given: Record | Event) -> int:
    """The number of the change behind a record or event."""
    if isinstance(given, Event):
        assert given.value == str(given.record.source["n"])
        given = given.record
    found: int = given.source["n"]
    return found


def expected(seed: int, *, drops: bool) -> list[int]:
    """The result of a serial loop over the stream."""
    return [n for n in numbers(stream(seed)) if not drops or n % 3]


@pytest.mark.parametrize("converts", [False, True])
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("takes", ["batch", "record"])
def test_every_dispatcher_gives_the_result_of_a_serial_loop(
    takes: str, order: Order, drops: bool, converts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(1 << 30)
    monkeypatch.setattr(stage, "PART_RECORDS_MIN", 1 + seed % 9)  # groups are split, or merged
    chance = random.Random(seed)
    got: list[int] = []
    lock = threading.Lock()

    def one(given: Record | Event) -> None:
        if chance.random() < 0.02:
            time.sleep(0.001)
        with lock:
            got.append(number_of(given))

    def whole(batch: Batch | Events) -> None:
        assert isinstance(batch, Events if converts else Batch)
        assert len(batch)
        got.extend(number_of(given) for given in batch)

    with running(
        on_batch(whole) if takes == "batch" else on_record(one),
        order,
        transform=drop_thirds if drops else None,
        convert=to_text if converts else None,
    ) as run:
        run.work_off(stream(seed)), seed
        assert run.committer.finish(SOON_S)
    wanted = expected(seed, drops=drops)
    if order == "unordered" and takes == "record":
        got.sort()
    if order == "key" and takes == "record":
        assert_in_order_for_each_key(got, seed)
        got.sort()
    assert got == wanted, seed
    assert run.store.last == len(numbers(stream(seed))), seed
    assert [dict(offset) for offset in run.told] == [dict(w[0][1]) for w in run.store.writes]


@pytest.mark.parametrize("order", ORDERS)
def test_a_crash_between_the_two_records_of_a_changed_key_repeats_both(order: Order) -> None:
    """The offset committed while the second is handled is where a process killed there continues."""
    changed = orders(
        insert("1", "a", None), update("2", "b", "1.00", key=("1", None, None)), insert("3", "c", None)
    )
    first, then = (
        Batch(PARTITION, (changed,), 3, [{"at": begin + n} for n in (1, 2, 3)], {"at": begin + 3})
        for begin in (0, 3)
    )
    at_second, is_over = threading.Event(), threading.Event()

    def one(event: Event) -> None:
        if OLD_KEY in event.headers:
            at_second.set()
            assert is_over.wait(SOON_S)

    step = build([{"type": "extract_field", "field": "id", "apply_to": "key"}], splits_updates=True)
    with running(
        on_record(one), order, transform=step.apply, convert=JsonConverter().convert, batches_max=1
    ) as run:
        run.put([first])
        assert at_second.wait(SOON_S)
        waiting = threading.Thread(target=run.put, args=([then],))  # waits for a place
        waiting.start()
        until_s = time.monotonic() + 0.3
        while time.monotonic() < until_s:
            run.committer.tick()
        assert run.store.last <= 1
        is_over.set()
        waiting.join()
        assert run.processor.drain(SOON_S)
        assert run.committer.finish(SOON_S)
    assert run.store.last == 6


@pytest.mark.parametrize("order", ["unordered", "key"])
def test_records_of_different_keys_run_in_parallel_and_those_of_one_key_do_not(order: Order) -> None:
    running_now: dict[Any, int] = defaultdict(int)
    lock, together = threading.Lock(), threading.Event()
    most_of_one = 0

    def one(record: Record) -> None:
        nonlocal most_of_one
        key = record.key["id"] if record.key else record.topic
        with lock:
            running_now[key] += 1
            most_of_one = max(most_of_one, running_now[key])
            if sum(1 for count in running_now.values() if count) > 1:
                together.set()
        together.wait(0.02)
        with lock:
            running_now[key] -= 1

    with running(on_record(one), order) as run:
        run.work_off(stream(3, batches=4))
    assert together.is_set()
    if order == "key":
        assert most_of_one == 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("takes", ["batch", "record"])
def test_a_record_with_a_retriable_error_is_repeated_and_no_later_offset_is_stored_before_it(
    takes: str, order: Order
) -> None:
    seed, lock = 11, threading.Lock()
    got: list[int] = []
    refused: dict[int, int] = {}
    store = Remembering()

    def refuse(n: int) -> None:
        # Refuses each third record once or twice; no stored offset is beyond it meanwhile.
        with lock:
            refused[n] = refused.get(n, 0) + 1
        if n % 3 == 0 and refused[n] <= 1 + n % 2:
            assert store.last <= n
            raise RetriableError

    def one(record: Record) -> None:
        n = number_of(record)
        refuse(n)
        with lock:
            got.append(n)

    def whole(batch: Batch) -> None:
        listed = [number_of(record) for record in batch]
        refuse(listed[0])
        got.extend(listed)

    with running(on_batch(whole) if takes == "batch" else on_record(one), order, store=store) as run:
        run.work_off(stream(seed))
    if order == "key" and takes == "record":
        assert_in_order_for_each_key(got, seed)
    assert (sorted(got) if order != "ordered" else got) == expected(seed, drops=False)
    assert store.last == len(got)


@pytest.mark.parametrize("order", ORDERS)
def test_an_error_of_a_handler_fails_the_task_and_its_record_is_not_committed(order: Order) -> None:
    poison, got, lock = 100, [], threading.Lock()

    def one(record: Record) -> None:
        if number_of(record) == poison:
            raise KeyError("poison")
        with lock:
            got.append(number_of(record))

    with running(on_record(one), order) as run, pytest.raises(KeyError, match="poison") as raised:
        run.work_off(stream(5))
    [note] = raised.value.__notes__
    assert re.search(r"record \d+ of a batch of public\.\w+ was handled, which ends at {'at': 101}", note)
    assert run.store.last <= poison
    if order == "ordered":
        assert got == list(range(poison))
        assert run.store.last == poison


@pytest.mark.parametrize("kind", [on_batch, on_record])
@pytest.mark.parametrize("order", ORDERS)
def test_a_handler_whose_own_future_was_cancelled_has_failed(
    order: Order, kind: Callable[[Callable[[Any], Any]], Any]
) -> None:
    cancelled: Future[None] = Future()
    cancelled.cancel()
    with running(kind(lambda _: cancelled.result()), order) as run, pytest.raises(CancelledError):
        run.work_off(stream(5))
    assert run.store.last == 0


async def awaited(_: Any) -> None:
    """Does nothing until it is awaited."""


def promising(one: Any) -> Any:
    return awaited(one)


PROMISES: list[Callable[[Any], Any]] = [
    promising,
    lambda one: (each for each in [one]),
    lambda _: Future(),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [on_batch, on_record])
@pytest.mark.parametrize("promise", PROMISES, ids=["coroutine", "generator", "future"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_handler_that_returns_unfinished_work_is_refused(
    order: Order, promise: Callable[[Any], Any], kind: Callable[..., Any]
) -> None:
    with running(kind(promise), order) as run:
        with pytest.raises(TailraceError, match="the handler returned a") as raised:
            run.work_off(stream(5))
        assert run.committer.finish(SOON_S)
    assert raised.value.kind is Kind.CONFIG_INVALID
    assert run.store.last == 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("promise", PROMISES, ids=["coroutine", "generator", "future"])
def test_a_manual_handler_may_return_only_a_future_that_is_running(promise: Callable[[Any], Any]) -> None:
    with running(on_batch(manual(lambda batch, _: promise(batch)))) as run:
        if promise is PROMISES[-1]:
            run.work_off(stream(5))
            return
        with pytest.raises(TailraceError, match="the handler returned a") as raised:
            run.work_off(stream(5))
    assert raised.value.kind is Kind.CONFIG_INVALID


@pytest.mark.parametrize("order", ORDERS)
def test_other_results_of_a_handler_are_ignored(order: Order) -> None:
    with running(on_record(number_of), order) as run:
        run.work_off(stream(5))
        assert run.committer.finish(SOON_S)
    assert run.store.last == len(expected(5, drops=False))


def test_retries_are_limited_and_counted_from_zero_after_a_success() -> None:
    tries = 0

    def twice_each(batch: Batch) -> None:
        nonlocal tries
        tries += 1
        if tries % 3:
            raise RetriableError

    with running(on_batch(twice_each), retries=2) as run:
        run.work_off(stream(5))

    def never(batch: Batch) -> None:
        nonlocal tries
        tries += 1
        raise RetriableError

    tries = 0
    with running(on_batch(never), retries=2) as run, pytest.raises(RetriableError):
        run.work_off(stream(5))
    assert tries == 3
    assert run.store.last == 0


@pytest.mark.parametrize("order", ORDERS)
def test_the_record_at_which_a_handler_stops_the_engine_counts_and_is_the_last(order: Order) -> None:
    last, got, lock = 77, [], threading.Lock()

    def one(record: Record) -> None:
        with lock:
            got.append(number_of(record))
        if number_of(record) == last:
            raise StopEngine

    with running(on_record(one), order, transform=drop_thirds) as run, pytest.raises(StopEngine):
        run.work_off(stream(5))
    if order == "ordered":
        assert got == [n for n in range(last + 1) if n % 3]
        assert run.store.last == last + 2  # the one after it was dropped


def test_the_batch_at_which_a_handler_stops_the_engine_counts() -> None:
    def whole(batch: Batch) -> None:
        raise StopEngine

    first = next(batch for batch in stream(5) if len(batch))
    with running(on_batch(whole)) as run, pytest.raises(StopEngine):
        run.work_off([first])
    assert run.store.last == len(first)


def test_batches_without_records_after_transformations_are_committed_but_not_delivered() -> None:
    called = []
    with running(on_batch(called.append), transform=lambda _: []) as run:
        run.work_off(stream(5))
    assert not called
    assert run.store.last == len(numbers(stream(5)))


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_is_delivered_or_marked_after_the_processor_is_closed(order: Order) -> None:
    held, release = threading.Event(), threading.Event()
    calls: list[int] = []

    def one(record: Record) -> None:
        calls.append(number_of(record))
        held.set()
        assert release.wait(SOON_S)

    with running(on_record(one), order, policy=Periodic(1e9)) as run:
        run.put(stream(5)[:3])
        assert held.wait(SOON_S)
        assert not run.processor.drain(0)
        run.processor.close()
        before = len(calls)
        release.set()
        run.committer.finish(SOON_S)
    assert len(calls) == before
    assert run.store.last == 0
    assert run.committer.processed == 0


@pytest.mark.parametrize("order", ORDERS)
def test_processed_records_are_committed_while_the_handler_hangs_in_the_next_one(order: Order) -> None:
    hanging, release = 10, threading.Event()

    def one(record: Record) -> None:
        if number_of(record) == hanging:
            assert release.wait(SOON_S)

    with running(on_record(one), order) as run:
        run.put(stream(5)[:3])
        wait_until(lambda: run.processor.drain(0.01) or run.store.last == hanging, SOON_S, "the commit")
        release.set()
        assert run.processor.drain(SOON_S)


@pytest.mark.parametrize("order", ORDERS)
def test_records_processed_before_the_processor_is_closed_count(order: Order) -> None:
    hanging, entered, release = 10, threading.Event(), threading.Event()

    def one(record: Record) -> None:
        if number_of(record) == hanging:
            entered.set()
            assert release.wait(SOON_S)

    with running(on_record(one), order) as run:
        run.put(stream(5)[:1])
        assert entered.wait(SOON_S)
        wait_until(lambda: order == "ordered" or run.processor.drain(0.01) or run.store.last == hanging)
        run.processor.close()
        assert run.committer.finish(SOON_S)
        release.set()
    assert run.store.last == hanging


def _as_event_of_each(group: Group) -> Converted:
    return Converted(None, group.column("value").cast(pa.string()))


@pytest.mark.parametrize("convert", [None, _as_event_of_each], ids=["records", "events"])
@pytest.mark.parametrize("order", ORDERS)
def test_records_and_events_are_made_when_they_are_delivered(
    order: Order, convert: Callable[[Group], Converted] | None
) -> None:
    # Thousands of waiting objects would make the garbage collector scan the whole process.
    entered, release, topic = threading.Event(), threading.Event(), f"made late, {order}, {convert}"

    def one(_: Record | Event) -> None:
        entered.set()
        assert release.wait(SOON_S)

    made = [SourceRecord(topic=topic, offset={"at": n}, key={"id": n}, value=n) for n in range(3000)]
    with running(on_record(one), order, convert=convert) as run:
        run.put([Batch.of_records(made, PARTITION)])
        assert entered.wait(SOON_S)
        time.sleep(0.05)
        records = [each for each in gc.get_objects() if type(each) is Record]
        # Earlier tests may have left other records.
        assert sum(each.group.topic == topic for each in records) < 100
        release.set()
        assert run.processor.drain(SOON_S)


@pytest.mark.parametrize("bound", ["batches", "bytes"])
def test_polling_waits_while_the_queue_is_full(bound: str) -> None:
    release = threading.Event()
    put: list[int] = []
    batches = [batch for batch in stream(9, batches=20) if len(batch)]
    limits: dict[str, Any] = (
        {"batches_max": 3}
        if bound == "batches"
        else {"batches_max": 99, "bytes_max": batches[0].size_bytes + batches[1].size_bytes}
    )

    def whole(_: Batch) -> None:
        assert release.wait(SOON_S)

    def poll() -> None:
        for batch in batches:
            run.put([batch])
            put.append(len(batch))

    with running(on_batch(whole), **limits) as run:
        poller = threading.Thread(target=poll)
        poller.start()
        wanted = 3 if bound == "batches" else 2
        wait_until(lambda: len(put) == wanted, SOON_S, "the bound")
        assert not run.processor.drain(0.05)
        assert len(put) == wanted
        release.set()
        poller.join(SOON_S)
        assert len(put) == len(batches)
        assert run.processor.drain(SOON_S)


def test_waiting_for_the_queue_does_not_block_the_end() -> None:
    release = threading.Event()
    with running(on_batch(lambda _: release.wait(SOON_S) and None), batches_max=1) as run:
        run.put([stream(9)[0]])
        poller = threading.Thread(target=lambda: run.put([stream(9)[1]]))
        poller.start()
        run.stopping.set()
        poller.join(SOON_S)
        assert not poller.is_alive()
        release.set()
        assert run.processor.drain(SOON_S)


def test_one_batch_is_prepared_while_the_one_before_it_is_delivered() -> None:
    second_is_prepared = threading.Event()
    first, second = [batch for batch in stream(9) if len(batch)][:2]

    def prepare(group: Any) -> list[Any]:
        if group.column("source")[0].as_py()["n"] >= len(first):
            second_is_prepared.set()
        return [group]

    with running(on_batch(lambda _: second_is_prepared.wait(SOON_S) and None), transform=prepare) as run:
        run.work_off([first, second])
    assert second_is_prepared.is_set()


def test_preparation_is_repeated_after_a_retriable_error() -> None:
    seen: set[int] = set()
    got: list[int] = []

    def prepare(group: Any) -> list[Any]:
        first = group.column("source")[0].as_py()["n"]
        if first not in seen:
            seen.add(first)
            raise RetriableError
        return [group]

    with running(on_batch(lambda batch: got.extend(numbers([batch]))), transform=prepare) as run:
        run.work_off(stream(5, batches=4))
    assert got == numbers(stream(5, batches=4))


@pytest.mark.parametrize("order", ORDERS)
def test_preparation_is_not_repeated_after_another_error_and_nothing_is_committed(order: Order) -> None:
    tries, poison = 0, 100

    def prepare(group: Group) -> list[Group]:
        nonlocal tries
        if poison in group.columns.column("source").field(0).to_pylist():
            tries += 1
            raise KeyError
        return [group]

    with running(on_record(lambda _: None), order, transform=prepare) as run, pytest.raises(KeyError):
        run.work_off(stream(5))
    assert tries == 1
    assert run.store.last <= poison


def test_a_manual_handler_may_mark_late_in_any_order_and_with_its_own_offsets() -> None:
    kept: list[tuple[Batch, Committer]] = []
    with running(on_batch(manual(lambda batch, committer: kept.append((batch, committer))))) as run:
        run.work_off(stream(5)[:6])
        assert run.store.last == 0
        for batch, committer in reversed(kept[1:]):
            committer.mark_processed(batch)
            committer.mark_batch_finished(batch)
        assert run.store.last == 0
        batch, committer = kept[0]
        committer.mark_processed(batch, 0, {"at": 1000})
        committer.mark_batch_finished(batch)
        assert run.store.last == 1000
        for record in list(batch)[1:]:
            committer.mark_processed(batch, record.place)
        committer.mark_batch_finished(batch)
        assert run.store.last == sum(batch.polled for batch in stream(5)[:6])


def several(group: Group) -> Converted:
    """A converter that makes as many events of each change as its number modulo 3."""
    n = group.columns.column("source").field(0).to_numpy()
    rows = np.repeat(np.arange(len(group)), n % 3)
    return Converted(
        None, [(int(n[row]), int(k)) for row, k in zip(rows, _counted(n % 3), strict=True)], None, rows
    )


def _counted(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.arange(count) for count in counts]) if len(counts) else counts


@pytest.mark.parametrize("order", ORDERS)
def test_of_a_records_events_only_the_failed_one_is_repeated_and_the_last_one_commits_it(
    order: Order,
) -> None:
    got: list[tuple[int, int]] = []
    refused: set[tuple[int, int]] = set()
    lock = threading.Lock()

    def one(event: Event) -> None:
        with lock:
            if event.value not in refused and sum(event.value) % 4 == 0:
                refused.add(event.value)
                raise RetriableError
            got.append(event.value)

    wanted = [(n, k) for n in numbers(stream(5)) for k in range(n % 3)]
    with running(on_record(one), order, convert=several) as run:
        run.work_off(stream(5))
    assert refused
    assert (got if order == "ordered" else sorted(got)) == wanted
    for n in {n for n, _ in got}:
        assert [k for m, k in got if m == n] == list(range(n % 3))
    assert run.store.last == len(numbers(stream(5)))


@pytest.mark.parametrize("order", ORDERS)
def test_a_record_does_not_count_before_its_last_event_is_delivered(order: Order) -> None:
    def one(event: Event) -> None:
        if event.value == (5, 0):
            raise StopEngine

    with running(on_record(one), order, convert=several) as run, pytest.raises(StopEngine):
        run.work_off(stream(5))
    assert run.store.last <= 5
    if order == "ordered":
        assert run.store.last == 5


@given(st.lists(st.integers(1, 9000), max_size=12), st.integers(1, 4))
def test_groups_are_split_in_order_into_about_as_many_parts_as_threads(
    sizes: list[int], threads: int
) -> None:
    groups, at = [], 0
    for size in sizes:
        numbered = pa.record_batch({"value": pa.array(np.arange(at, at + size))})
        groups.append(Group.of_columns("t", np.arange(at, at + size), numbered))
        at += size
    parts = stage.parts_of(groups, threads)
    values = [v for part in parts for group in part for v in group.column("value").to_pylist()]
    assert values == list(range(at))
    assert all(part for part in parts)
    most = max(stage.PART_RECORDS_MIN, -(-at // threads))
    assert all(sum(len(group) for group in part) <= most + most // 4 for part in parts)
    assert len(parts) <= threads


@pytest.mark.slow
def test_no_thread_is_left_however_a_run_ended() -> None:
    def trouble(record: Record) -> None:
        n = number_of(record)
        if n % 50 == 49:
            raise [StopEngine, RetriableError, KeyError][n % 3]

    before = set(threading.enumerate())  # of tests whose committers were never finished
    for order in ORDERS:
        for seed in range(10):
            with running(on_record(trouble), order, retries=0) as run:
                try:
                    run.put(stream(seed))
                    run.processor.drain([0, SOON_S][seed % 2])
                except (StopEngine, RetriableError, KeyError):
                    pass

    def ours() -> list[str]:
        return [t.name for t in threading.enumerate() if "test" in t.name and t not in before]

    wait_until(lambda: not ours(), SOON_S, "the threads to end")


def test_a_key_of_another_type_waits_for_the_records_before_it() -> None:
    running_now, most = 0, 0
    lock, got = threading.Lock(), []

    def one(record: Record) -> None:
        nonlocal running_now, most
        with lock:
            running_now += 1
            most = max(most, running_now) if record.value >= 3 else most
        time.sleep(0.002)
        with lock:
            running_now -= 1
            got.append(record.value)

    def keyed(values: list[int], key: Callable[[int], Any]) -> Batch:
        made = [SourceRecord(topic="t", offset={"at": n}, key={"id": key(n)}, value=n) for n in values]
        return Batch.of_records(made, PARTITION)

    with running(on_record(one), "key") as run:
        run.work_off(
            [
                keyed([0, 1, 2], int),
                keyed([3], lambda n: Decimal(n) / 2),
                keyed([4], lambda _: Decimal("1.5")),
            ]
        )
    assert got[3:] == [3, 4]
    assert most == 1
