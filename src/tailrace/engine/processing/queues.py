"""The queues of records that several threads deliver: one of all records, and those of ordering keys."""

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

#: Period of a measurement, in seconds: many times as long as Python lets a thread hold its lock.
PERIOD_S = 0.05

#: Rate above which delivery is quick, in records per second. If the handler waits, or computes without
#: Python's lock, several threads reach this rate only if a call lasts some 10 µs.
_QUICK_PER_S = 50_000
#: Rate of one thread below which other threads are used again, in records per second.
_SLOW_PER_S = 40_000

#: Minimum time for which other threads are used once they are used again, in seconds.
_PAUSE_S = 0.2


class DeliveryRate:
    """Measures whether records are delivered quickly. The caller locks.

    :ivar is_quick: whether they are; false before the first measurement, and while few records arrive.
    """

    def __init__(self) -> None:
        self.is_quick = False
        self._records = 0
        self._since_s = 0.0

    def measure(self, records: int, now_s: float) -> bool:
        """Note the number of records delivered by now; return whether they are delivered quickly."""
        wait_s = now_s - self._since_s
        if wait_s < 0:
            self._records = records
        elif wait_s >= PERIOD_S:
            least_per_s = _SLOW_PER_S if self.is_quick else _QUICK_PER_S
            self.is_quick = records - self._records >= least_per_s * wait_s
            self._records, self._since_s = records, now_s
        return self.is_quick

    def goes_on(self, records: int, began_s: float, now_s: float) -> bool:
        """Return whether one thread, which delivered `records` since `began_s`, continues alone."""
        if records < _SLOW_PER_S * (now_s - began_s):
            self.pause(now_s)
        return self.is_quick

    def pause(self, now_s: float) -> None:
        """Use several threads, for `_PAUSE_S` at least."""
        self.is_quick, self._since_s = False, now_s + _PAUSE_S


#: Number of key queues per thread. A slow record delays those behind it in its queue, also of other keys.
#: With many more queues, a thread would take too few records at once.
KEY_QUEUES_A_THREAD = 16


@dataclass(slots=True, eq=False)
class Queue:
    """Records that are delivered one after another.

    :param parts: taken from the left, added on the right.
    :ivar is_busy: whether a thread has it, it is ready for one, or its first record waits for other queues.
    """

    parts: deque[QueuedRecords] = field(default_factory=deque)
    is_busy: bool = False


class QueuedRecords:
    """Records of a batch that wait one behind the other. The thread that delivers them takes their numbers.

    :param get: returns the handler's arguments for a record, by its number in the batch.
    :param numbers: of the records.
    :param queues: in which they wait: they are delivered once they are first in all of them.
    :param dealing: distributes them to key queues, while they wait in one queue with those of other keys.
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
        #: Number of queues in which a thread has found them first.
        self.first_in = 0


class Queues:
    """All queues of an executor. All methods except `dealing` are called under its lock.

    Records are added to one queue, in the source's order. In unordered delivery, that is all: threads take
    from it concurrently. In keyed delivery, records are dealt out into key queues: a record waits in the
    queue of its ordering key, an update that changed the key in the queues of both keys; a TRUNCATE, and the
    first record of a table whose key has another type than before, in all queues.

    While one thread delivers faster than several would, records are not dealt out: it takes them from the one
    queue, once all records dealt out before are delivered. Then their keys need not be computed, and memory
    is read in the order in which it was written.

    :param threads: number of threads of keyed delivery; 0: delivery is unordered.
    """

    def __init__(self, threads: int, rate: DeliveryRate) -> None:
        self._rate = rate
        self._key_types = KeyTypes()
        self._undealt = Queue()
        self._of_keys = [Queue() for _ in range(KEY_QUEUES_A_THREAD * threads)]
        self._ready: deque[Queue] = deque()
        #: Records that were dealt out while the thread that holds `_undealt` was delivering one of them.
        self._held: QueuedRecords | None = None

    def dealing(self, ready: ReadyBatch) -> Dealing | None:
        """Return the object that deals out a batch's records; None: delivery is unordered."""
        return Dealing(ready, self._of_keys, self._key_types) if self._of_keys else None

    def add(self, part: QueuedRecords) -> None:
        """Add records behind all others."""
        part.queues = (self._undealt,)
        self._undealt.parts.append(part)
        if not self._rate.is_quick:
            self.deal_out()

    def deal_out(self) -> None:
        """Move records from the one queue to key queues, where they wait only for records of their keys."""
        while self._of_keys and self._undealt.parts:
            part = self._undealt.parts.popleft()
            dealing, left = part.dealing, list(part.numbers)
            assert dealing is not None
            if self._undealt.is_busy and len(left) < part.count:
                # A record that is being delivered holds the queues of its key, which are empty so far.
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
        """Return the records that the thread that holds a queue delivers next.

        None: it no longer holds the queue, which is empty or whose first records wait for other queues.
        :param ended: the records that it has delivered.
        """
        # Of several threads that find the end of a part, the first removes it.
        if ended is not None and queue.parts and queue.parts[0] is ended:
            self._end(ended, queue)
        if not (self._has_undealt() if queue is self._undealt else queue.parts):
            self.release(queue)
            return None
        found = queue.parts[0]
        found.first_in += 1
        # It is delivered by the thread that finds it first in the last of its queues.
        return found if found.first_in >= len(found.queues) else None

    def release(self, queue: Queue) -> None:
        """Make a queue available again, if it is not empty."""
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
        """Deal out, and return the queue in which the failed record waits for its retry: the last record that
        a thread took from `queue`. The returned queue is not released; the others are not blocked.
        """
        self.deal_out()
        if queue is not self._undealt or self._held is None:
            return queue
        held, self._held = self._held, None
        queue.is_busy = False
        held.first_in = len(held.queues)
        return held.queues[0]

    def _has_undealt(self) -> bool:
        # Whether there are records that may be delivered without being dealt out.
        return bool(self._undealt.parts) and not any(queue.parts for queue in self._of_keys)

    def _end(self, part: QueuedRecords, kept: Queue) -> None:
        # Removes a part from all of its queues, and releases them except for the one that a thread keeps.
        for queue in part.queues:
            queue.parts.popleft()
            if queue is not kept:
                self.release(queue)


class Dealing:
    """Finds the queues of a batch's records; computes their ordering keys on first use."""

    def __init__(self, ready: ReadyBatch, queues: Sequence[Queue], key_types: KeyTypes) -> None:
        self._ready = ready
        self._queues = queues
        self._key_types = key_types

    @functools.cached_property
    def keys(self) -> _QueueNumbers:
        """The numbers of the records' queues. To be computed batch after batch, in their order."""
        batch = self._ready.batch
        keys = self._ready.ordering_keys or [ordering_keys_of(one, moved_of(one)) for one in batch.groups]
        for group, found in zip(batch.groups, keys, strict=True):
            self._key_types.note(group.topic, found)
        now, before, in_all = in_order(keys, batch.rows)
        # numpy sorts 16-bit integers by radix sort.
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
        """Yield numbers of records from `first` (inclusive) to `last` (exclusive), and their queues."""
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
    # For each record, the number of its queue and of its former key's queue, and whether it waits in all
    # queues; and the records that wait in several.
    own: npt.NDArray[np.uint16]
    other: npt.NDArray[np.uint16]
    in_all: npt.NDArray[np.bool_]
    in_several: Places
