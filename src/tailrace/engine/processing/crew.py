"""Delivery of single records side by side, on the pool: without any order, or in order for each key.

A record that waits for nothing is ready, and workers take what is ready, one record at a time: a slow
one holds up no more than its own worker. With lanes (`lanes`), a record waits until it is the first
in each lane that it stands in. Batches run into one another.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import structlog

from tailrace.engine.backoff import Backoff
from tailrace.engine.contracts import StopEngine
from tailrace.engine.processing.handlers import check_done, where
from tailrace.engine.processing.lanes import KeyTypes, in_order
from tailrace.engine.processing.stage import Ready, Stager, Staging
from tailrace.engine.processing.terms import Means, Terms
from tailrace.engine.retrying import GivenUpError
from tailrace.records.batch import Batch

log = structlog.get_logger(__name__)

#: Records that are made objects and not delivered yet, at most.
TAKEN_IN_MAX = 4096

#: A worker lets others have its thread after so many records.
TURN_RECORDS = 128

#: The delivering thread looks up at least so often.
_IDLE_S = 60.0

#: Records that are taken in together.
_RUN = 64

#: The lane in which only those stand that stand in all; fingerprints are not negative.
_WALLS = -1
#: Where records stand that need no lanes.
_NOWHERE = (0, 0, False)


class _Batch:
    # A batch that is being delivered.
    __slots__ = ("batch", "left", "size_bytes")

    def __init__(self, ready: Ready, size_bytes: int) -> None:
        self.batch = ready.batch
        self.left = len(ready.batch)
        self.size_bytes = size_bytes


class _Item:
    # A record on its way: what the handler gets of it, how much of that it got, and how many lanes it
    # is not the first of.
    __slots__ = ("at", "backoff", "given", "lanes", "of", "place", "waits")

    def __init__(self, of: _Batch, place: int, given: Sequence[Any], backoff: Backoff) -> None:
        self.of = of
        self.place = place
        self.given = given
        self.at = 0
        self.backoff = backoff
        self.lanes: list[int] = []
        self.waits = 0


class Lines:
    """Who waits for whom: the records in each lane, in order. For one thread at a time."""

    def __init__(self) -> None:
        self._lines: dict[int, deque[_Item]] = {}
        self._wall: _Item | None = None  # the last record that stands in all lanes, until it is done

    def join(self, item: _Item, own: int, other: int) -> None:
        """Put a record behind those in one lane, or two."""
        self._stand(item, own)
        if other != own:
            self._stand(item, other)

    def join_all(self, item: _Item) -> None:
        """Put a record behind all, and in front of all that come later."""
        for lane in {*self._lines, _WALLS}:
            self._stand(item, lane)
        self._wall = item

    def done(self, item: _Item) -> list[_Item]:
        """Take a record out; return those that are ready now."""
        ready: list[_Item] = []
        for lane in item.lanes:
            line = self._lines[lane]
            line.popleft()
            if not line:
                del self._lines[lane]
                continue
            line[0].waits -= 1
            if not line[0].waits:
                ready.append(line[0])
        if self._wall is item:
            self._wall = None
        return ready

    def _stand(self, item: _Item, lane: int) -> None:
        line = self._lines.get(lane)
        if line is None:
            line = self._lines[lane] = deque()
            if self._wall is not None:
                self._wall.lanes.append(lane)
                line.append(self._wall)
        if line:
            item.waits += 1
        line.append(item)
        item.lanes.append(lane)


class Crew:
    """Delivers records by several workers at once.

    :param keeps_lanes: whether records wait for those before them in their lanes.
    """

    def __init__(self, terms: Terms, means: Means, stager: Stager | None, *, keeps_lanes: bool) -> None:
        self._terms = terms
        self._stager = stager
        self._call = terms.handler.call
        self._room = means.room
        self._committer = means.committer
        self._clock = terms.clock
        self._executor = means.executor
        self._keeps_lanes = keeps_lanes
        self._staging = means.retrying(terms, "transformation and conversion")
        self._waiting: deque[Staging] = deque()
        self._wake = threading.Event()
        self._ended = False
        self._key_types = KeyTypes()
        # What follows is under the lock.
        self._lock = threading.Lock()
        self._lines = Lines()
        self._ready: deque[_Item] = deque()
        self._again: list[tuple[float, int, _Item]] = []  # failed; by the time to try again
        self._numbers = itertools.count()
        self._workers = 0
        self._taken_in = 0

    def put(self, batch: Batch) -> None:
        """Have a batch staged, and delivered."""
        staging = Staging(batch, self._stager)
        staging.when_done(self._wake.set)
        self._waiting.append(staging)
        self._wake.set()

    def wake(self) -> None:
        """Have `run` return."""
        self._ended = True
        self._wake.set()

    def run(self) -> None:
        """Take records in, and have those tried again whose time has come, until `wake`."""
        coming: Iterator[None] | None = None
        while True:
            self._wake.clear()
            if self._ended:
                return
            try:
                wait_s = self._try_again()
                if coming is None and self._waiting and self._waiting[0].is_done:
                    coming = self._take_in(self._waiting.popleft())
                if coming is not None and next(coming, self) is self:
                    coming = None
                    continue
            except GivenUpError:
                coming = None
            except BaseException as error:  # noqa: BLE001 - the task's thread raises it
                self._room.fail(error)
                coming = None
            if self._room.shut.is_set():
                while self._waiting:
                    self._waiting.popleft().cancel()
                coming = None
            self._clock.wait(self._wake, wait_s)

    def _take_in(self, staging: Staging) -> Iterator[None]:
        # Yields whenever as many are taken in as may be.
        ready = self._staging.call(staging.result)
        of = _Batch(ready, staging.size_bytes)
        if not len(ready.given):
            self._room.mark(self._committer.mark_processed, ready.batch)
            self._finish(of)
            return
        self._room.mark(self._committer.mark_dropped, ready.batch)
        stands = self._standing(ready) if self._keeps_lanes else itertools.repeat(_NOWHERE)
        standing = zip(ready.by_record(), stands, strict=False)
        while run := list(itertools.islice(standing, _RUN)):
            while self._taken_in >= TAKEN_IN_MAX:
                yield
            with self._lock:
                self._taken_in += len(run)
                items = [
                    self._stand(_Item(of, place, given, self._terms.backoff), *lanes)
                    for (place, given), lanes in run
                ]
                self._now_ready([item for item in items if not item.waits])

    def _standing(self, ready: Ready) -> Iterator[tuple[int, int, bool]]:
        # Where the records of a batch stand, in its order.
        for group, lanes in zip(ready.batch.groups, ready.lanes, strict=True):
            self._key_types.hear(group.topic, lanes)
        return in_order(ready.lanes, ready.batch.rows)

    def _stand(self, item: _Item, own: int, other: int, in_all: bool) -> _Item:
        if in_all:
            self._lines.join_all(item)
        elif self._keeps_lanes:
            self._lines.join(item, own, other)
        return item

    def _now_ready(self, items: list[_Item]) -> None:
        # Under the lock. A worker that finds nothing ready ends, so those that there are have work.
        self._ready.extend(items)
        for _ in range(min(len(items), self._terms.threads - self._workers)):
            self._workers += 1
            self._executor.submit(self._work)

    def _work(self) -> None:
        # On the pool.
        began_s = time.monotonic()
        try:
            if self._deliver_ready():
                self._executor.submit(self._work)
        except BaseException as error:  # noqa: BLE001 - the task's thread raises it
            self._room.fail(error)
        finally:
            self._room.handled(began_s)

    def _deliver_ready(self) -> bool:
        # Delivers what is ready, for a turn; tells whether there may be more.
        for _ in range(TURN_RECORDS):
            with self._lock:
                if not self._ready or self._room.shut.is_set():
                    self._workers -= 1
                    return False
                item = self._ready.popleft()
            self._deliver(item)
        return True

    def _deliver(self, item: _Item) -> None:
        room, mark = self._room, self._committer.mark_processed
        last = len(item.given) - 1
        if last < 0:
            room.mark(mark, item.of.batch, item.place)
        while item.at <= last:
            if not room.enter():
                return
            done = (mark, item.of.batch, item.place) if item.at == last else (_nothing,)
            try:
                if (returned := self._call(item.given[item.at])) is not None:
                    check_done(returned)
            except StopEngine as stop:
                room.leave(*done)
                room.fail(stop)
            except BaseException as error:  # noqa: BLE001 - tried again, or the task's thread raises it
                room.leave()
                self._failed(item, error)
                return
            else:
                room.leave(*done)
            item.at += 1
        self._done(item)

    def _done(self, item: _Item) -> None:
        with self._lock:
            self._taken_in -= 1
            item.of.left -= 1
            is_last = not item.of.left
            if item.lanes:
                self._now_ready(self._lines.done(item))
            has_room = self._taken_in == TAKEN_IN_MAX // 2
        if is_last:
            self._finish(item.of)
        if has_room:
            self._wake.set()

    def _finish(self, of: _Batch) -> None:
        self._committer.mark_batch_finished(of.batch)
        self._room.give_back(of.size_bytes, delivered=len(of.batch), polled=of.batch.polled)

    def _failed(self, item: _Item, error: BaseException) -> None:
        item.backoff, wait_s = item.backoff.after(error)
        if wait_s is None:
            where(error, item.of.batch, item.place)
            self._room.fail(error)
            self._wake.set()
            return
        self._room.tried_again()
        log.warning(
            "failed, tried again",
            what=f"{self._terms.name}: handler",
            error=type(error).__name__,
            retry=item.backoff.attempts,
            wait_s=wait_s,
        )
        with self._lock:
            heapq.heappush(self._again, (self._clock.monotonic() + wait_s, next(self._numbers), item))
        self._wake.set()

    def _try_again(self) -> float:
        # Returns how long to wait for the next one.
        now_s = self._clock.monotonic()
        with self._lock:
            due: list[_Item] = []
            while self._again and self._again[0][0] <= now_s:
                due.append(heapq.heappop(self._again)[2])
            self._now_ready(due)
            return self._again[0][0] - now_s if self._again else _IDLE_S


def _nothing() -> None:
    pass
