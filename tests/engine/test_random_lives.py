"""Runs of a task that end at random moments: only processed records were committed, and none is skipped."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import pytest

from tailrace.engine.commit_policies import Always, AnyOf, AtTransactionEnds, EveryRecords, Periodic
from tailrace.engine.contracts import CommitPolicy, RetriableError, StopEngine
from tailrace.engine.processing import Order, on_batch, on_record
from tailrace.records.batch import Batch, Offset, Partition
from tailrace.records.record import Record
from tests.support.engine.flowing import SOON_S, Remembering, drop_thirds, running, stream

STREAMS = 4
LIVES_MAX = 400


class Watched(Remembering):
    """A store that fails at times, and knows what must not be stored yet."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance = chance
        self.lock = threading.Lock()
        self.missing: set[int] = set()  # changes that no handler has processed
        self.wrong: list[str] = []

    def write(self, offsets: Sequence[tuple[Partition, Offset]], timeout_s: float) -> None:
        if self.chance.random() < 0.2:
            raise OSError("refused")
        [(_, offset)] = offsets
        with self.lock:
            passed = {n for n in self.missing if n < offset["at"]}
        if passed:
            self.wrong.append(f"{offset} passes over {sorted(passed)}")
        if offset["at"] < self.last:
            self.wrong.append(f"{offset} after {self.last}")
        super().write(offsets, timeout_s)


class Troubled:
    """A handler that at random is slow, fails, asks for a retry or stops the engine."""

    def __init__(self, chance: random.Random, store: Watched) -> None:
        self.chance = chance
        self.store = store
        self.lives: list[list[int]] = []

    def trouble(self) -> None:
        what = self.chance.random()
        if what < 0.03:
            time.sleep(0.001)
        elif what < 0.05:
            raise RetriableError
        elif what < 0.055:
            raise KeyError("poison")

    def one(self, record: Record) -> None:
        self.trouble()
        self.got([record.source["n"]])

    def whole(self, batch: Batch) -> None:
        for _ in range(4):
            self.trouble()
        self.got([record.source["n"] for record in batch])

    def got(self, listed: list[int]) -> None:
        with self.store.lock:
            self.lives[-1].extend(listed)
            self.store.missing.difference_update(listed)
        if self.chance.random() < 0.002:
            raise StopEngine


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("kind", ["batches", "ordered", "unordered", "key"])
@pytest.mark.slow
def test_whatever_happens_everything_is_delivered_and_nothing_is_skipped(kind: str, drops: bool) -> None:
    for seed in random.sample(range(1 << 30), STREAMS):
        live(kind, drops, seed)


def live(kind: str, drops: bool, seed: int) -> None:
    """Process one stream in as many runs as it needs."""
    chance = random.Random(seed)
    order: Order = "ordered" if kind in ("batches", "ordered") else kind  # type: ignore[assignment]
    batches = stream(seed, batches=25)
    wanted = {n for n in range(sum(b.polled for b in batches)) if not drops or n % 3}
    store = Watched(chance)
    store.missing = set(wanted)
    handler = Troubled(chance, store)
    policies: list[CommitPolicy] = [
        Always(),
        EveryRecords(40),
        Periodic(0.002),
        AnyOf(AtTransactionEnds(), EveryRecords(100)),
    ]
    for life in range(LIVES_MAX):
        if store.last == sum(b.polled for b in batches):
            break
        handler.lives.append([])
        with running(
            on_batch(handler.whole) if kind == "batches" else on_record(handler.one),
            order,
            transform=drop_thirds if drops else None,
            policy=policies[life % 4],
            store=store,
            retries=3,
        ) as run:
            try:
                for batch in rest(batches, store.last):
                    run.put([batch])
                    if chance.random() < 0.05:
                        break
                run.processor.drain(chance.choice([0, 0.001, SOON_S]))
            except (KeyError, RetriableError, StopEngine):
                pass
        if order == "ordered":
            assert handler.lives[-1] == sorted(handler.lives[-1]), seed
    assert not store.wrong, seed
    assert not store.missing, (seed, "lives", len(handler.lives))
    assert wanted == {n for life in handler.lives for n in life}, seed


def rest(batches: list[Batch], at: int) -> list[Batch]:
    """The stream from an offset on, as a task would poll it after a restart."""
    found: list[Batch] = []
    first = 0
    for batch in batches:
        if first + batch.polled > at:
            skipped = max(0, at - first)
            groups = [g.take((g.index >= skipped).nonzero()[0]) for g in batch.groups]
            left = [type(g).of_columns(g.topic, g.index - skipped, g.columns) for g in groups if len(g)]
            size = batch.polled - skipped
            offsets = [{"at": first + skipped + k + 1} for k in range(size)]
            found.append(Batch(batch.partition, tuple(left), size, offsets, batch.end))
        first += batch.polled
    return found
