"""The queues of records that several threads deliver: one for all, and those that keep each key's order."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tailrace.backoff import Backoff
from tailrace.engine.processing.in_flight import InFlight
from tailrace.engine.processing.ordering_keys import KeyTypes, in_order, moved_of, ordering_keys_of
from tailrace.engine.processing.stage import GetRecord, ReadyBatch
from tailrace.records.group import Places

#: For how long records are counted: many times as long as Python lets a thread have its lock.
PERIOD_S = 0.05

#: More records than this in a second are delivered quickly. Where the handler waits, or computes without
#: Python's lock, threads that call it come to as many only if a call lasts some 10 µs.
_QUICK_PER_S = 50_000
#: Fewer in a second than this by one thread, and others are called again.
_SLOW_PER_S = 40_000

#: Others had to be called again: for so long they stay.
_PAUSE_S = 0.2


class DeliveryRate:
    """Finds whether records are delivered quickly. Its caller has a lock.

    :ivar is_quick: whether they are; not before that was measured, and not while few come.
    """

    def __init__(self) -> None:
        self.is_quick = False
        self._records = 0
        self._since_s = 0.0

    def measure(self, records: int, now_s: float) -> bool:
        """Note how many records are delivered by now; return whether they are delivered quickly."""
        wait_s = now_s - self._since_s
        if wait_s < 0:
            self._records = records
        elif wait_s >= PERIOD_S:
            least_per_s = _SLOW_PER_S if self.is_quick else _QUICK_PER_S
            self.is_quick = records - self._records >= least_per_s * wait_s
            self._records, self._since_s = records, now_s
        return self.is_quick

    def goes_on(self, records: int, began_s: float, now_s: float) -> bool:
        """Return whether one thread goes on alone, which delivered so many records since `began_s`."""
        if records < _SLOW_PER_S * (now_s - began_s):
            self.pause(now_s)
        return self.is_quick

    def pause(self, now_s: float) -> None:
        """Have several threads deliver, for a while at least."""
        self.is_quick, self._since_s = False, now_s + _PAUSE_S


#: Queues of keys for each thread. A slow record holds up those behind it in its queue, other keys' among
#: them. With many more, what a thread takes at once would be too little to be worth the taking.
KEY_QUEUES_A_THREAD = 16


@dataclass(slots=True, eq=False)
class Queue:
    """Records that are delivered one after another.

    :param parts: taken from the left; what comes is added to the right.
    :ivar is_busy: whether a thread has it, or will be given it, or it waits for others.
    """

    parts: deque[QueuedRecords] = field(default_factory=deque)
    is_busy: bool = False


class QueuedRecords:
    """Records of a batch that wait one behind the other. The thread that delivers them takes their numbers.

    :param get: returns what the handler gets of a record, by its number in the batch.
    :param numbers: of the records.
    :param queues: in which they wait: they are delivered once they are first in all of them.
    :param dealing: deals them out by their keys, where they wait in one queue with those of other keys.
    """

    __slots__ = ("backoff", "count", "dealing", "first_in", "get", "in_flight", "last", "numbers", "queues")

    def __init__(
        self,
        in_flight: InFlight,
        get: GetRecord,
        numbers: Sequence[int],
        backoff: Backoff,
        queues: Sequence[Queue] = (),
        dealing: Dealing | None = None,
    ) -> None:
        self.in_flight = in_flight
        self.get = get
        self.count, self.last = len(numbers), numbers[-1]
        self.numbers = iter(numbers)
        self.backoff = backoff
        self.queues = queues
        self.dealing = dealing
        #: Of how many queues a thread has found them first.
        self.first_in = 0


class Queues:
    """All queues of an executor. Everything but `dealing` is called under its lock.

    Records come into one queue, in the source's order. Without order, that is all: threads take from it at
    the same time. With order for each key, they are dealt out into queues of keys: a record waits in that of
    its key's hash, an update that changed the key in the queues of both; a TRUNCATE, and the first record of
    a table whose key has another type than before, in all.

    While one thread delivers more than several would, they are not dealt out: it takes them from the one
    queue, once all that were dealt out before are delivered. Then their keys are not looked at, and memory is
    read in the order in which it was written.

    :param threads: that deliver records in order for each key; 0: there is no order.
    """

    def __init__(self, threads: int, rate: DeliveryRate) -> None:
        self._rate = rate
        self._key_types = KeyTypes()
        self._undealt = Queue()
        self._of_keys = [Queue() for _ in range(KEY_QUEUES_A_THREAD * threads)]
        self._ready: deque[Queue] = deque()
        #: Records that were dealt out while the thread that has `_undealt` delivered one of them.
        self._held: QueuedRecords | None = None

    def dealing(self, ready: ReadyBatch) -> Dealing | None:
        """Return what deals out records of a batch; None: there is no order."""
        return Dealing(ready, self._of_keys, self._key_types) if self._of_keys else None

    def add(self, part: QueuedRecords) -> None:
        """Add records that come after all others."""
        part.queues = (self._undealt,)
        self._undealt.parts.append(part)
        if not self._rate.is_quick:
            self.deal_out()

    def deal_out(self) -> None:
        """Have records that wait for all before them wait for those of their own keys only."""
        while self._of_keys and self._undealt.parts:
            part = self._undealt.parts.popleft()
            dealing, left = part.dealing, list(part.numbers)
            assert dealing is not None
            if self._undealt.is_busy and len(left) < part.count:
                # A record that is being delivered holds the queues of its key. Nothing is in them yet.
                part.queues = dealing.queues_of(left[0] - 1 if left else part.last)
                for queue in part.queues:
                    queue.parts.append(part)
                    queue.is_busy = True
                self._held = part
            for numbers, queues in dealing.deal(left[0], left[-1] + 1) if left else ():
                dealt = QueuedRecords(part.in_flight, part.get, numbers, part.backoff, queues)
                for queue in queues:
                    queue.parts.append(dealt)
                    if not queue.is_busy:
                        self.release(queue)

    def has_any(self) -> bool:
        """Return whether there is a queue to take."""
        is_taken = self._of_keys and self._undealt.is_busy
        return bool(self._ready) or (not is_taken and self._has_undealt())

    def take(self) -> Queue:
        """Return a queue with records for a thread that has none."""
        if self._ready:
            return self._ready.popleft()
        self._undealt.is_busy = True
        return self._undealt

    def next_in(self, queue: Queue, ended: QueuedRecords | None) -> QueuedRecords | None:
        """Return what the thread that has a queue delivers next.

        None: it has the queue no longer; there is nothing in it, or that waits for other queues.
        :param ended: what it has delivered.
        """
        # Of threads that find a part at its end, the first removes it.
        if ended is not None and queue.parts and queue.parts[0] is ended:
            self._end(ended, queue)
        if not (self._has_undealt() if queue is self._undealt else queue.parts):
            self.release(queue)
            return None
        found = queue.parts[0]
        found.first_in += 1
        # The thread that finds it the first in the last of its queues delivers it.
        return found if found.first_in >= len(found.queues) else None

    def release(self, queue: Queue) -> None:
        """Have a queue taken again if there is something in it."""
        if queue is not self._undealt:
            queue.is_busy = bool(queue.parts)
            if queue.is_busy:
                self._ready.append(queue)
            return
        queue.is_busy = False
        if self._held is not None:
            held, self._held = self._held, None
            self._end(held, queue)

    def held_for_retry(self, queue: Queue) -> Queue:
        """Deal out, and return the queue in which the record that a thread took last of `queue`, and that has
        failed, waits to be tried again. It is not released, and others are not held up by it.
        """
        self.deal_out()
        if queue is not self._undealt or self._held is None:
            return queue
        held, self._held = self._held, None
        queue.is_busy = False
        held.first_in = len(held.queues)
        return held.queues[0]

    def _has_undealt(self) -> bool:
        # Whether there is something that may be delivered before it is dealt out.
        return bool(self._undealt.parts) and not any(queue.parts for queue in self._of_keys)

    def _end(self, part: QueuedRecords, kept: Queue) -> None:
        # Removes a part from all of its queues, and has them go on but for the one that a thread keeps.
        for queue in part.queues:
            queue.parts.popleft()
            if queue is not kept:
                self.release(queue)


class Dealing:
    """Finds the queues of a batch's records; their keys are not looked at before."""

    def __init__(self, ready: ReadyBatch, queues: Sequence[Queue], key_types: KeyTypes) -> None:
        self._ready = ready
        self._queues = queues
        self._key_types = key_types

    @functools.cached_property
    def keys(self) -> _QueueNumbers:
        """The records' queues by their numbers. Of one batch after another, in their order."""
        batch = self._ready.batch
        keys = self._ready.ordering_keys or [ordering_keys_of(one, moved_of(one)) for one in batch.groups]
        for group, found in zip(batch.groups, keys, strict=True):
            self._key_types.note(group.topic, found)
        now, before, in_all = in_order(keys, batch.rows)
        # As 16 bits numpy sorts them by radix.
        own = (now % len(self._queues)).astype(np.uint16)
        other = (before % len(self._queues)).astype(np.uint16)
        return _QueueNumbers(own, other, in_all, np.flatnonzero(in_all | (own != other)))

    def queues_of(self, number: int) -> Sequence[Queue]:
        """Return the queues in which a record waits."""
        keys = self.keys
        if keys.in_all[number]:
            return self._queues
        return [self._queues[one] for one in {int(keys.own[number]), int(keys.other[number])}]

    def deal(self, first: int, last: int) -> Iterator[tuple[Sequence[int], Sequence[Queue]]]:
        """Yield numbers of records from `first` to before `last`, and the queues in which they wait."""
        in_several = self.keys.in_several
        begin, end = np.searchsorted(in_several, (first, last))
        for number in in_several[begin:end].tolist():
            yield from self._deal_singly(first, number)
            yield (number,), self.queues_of(number)
            first = number + 1
        yield from self._deal_singly(first, last)

    def _deal_singly(self, first: int, last: int) -> Iterator[tuple[Sequence[int], Sequence[Queue]]]:
        own = self.keys.own
        order = np.argsort(own[first:last], kind="stable") + first
        ends = [*(np.flatnonzero(np.diff(own[order])) + 1).tolist(), last - first]
        numbers, begin = order.tolist(), 0
        for end in ends if numbers else ():
            yield numbers[begin:end], (self._queues[own[numbers[begin]]],)
            begin = end


@dataclass(frozen=True, slots=True, eq=False)
class _QueueNumbers:
    # Of each record the number of its queue, and of its key's before; whether it waits in all; and the
    # records that wait in several.
    own: npt.NDArray[np.uint16]
    other: npt.NDArray[np.uint16]
    in_all: npt.NDArray[np.bool_]
    in_several: Places
