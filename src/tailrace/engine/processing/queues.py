"""The queues of records that several threads deliver: one for all, or many that keep the order of each key.

Everything here but making what `adding` returns is called under the executor's lock.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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

    :ivar parts: threads that deliver take from the left, the dispatching thread adds to the right.
    :ivar is_busy: of a queue of keys: whether a thread has it, or will be given it, or it waits for others.
    """

    parts: deque[QueuedRecords] = field(default_factory=deque)
    is_busy: bool = False


class QueuedRecords:
    """Records of a batch that wait one behind the other. The thread that delivers them takes their numbers.

    :param get: returns what the handler gets of a record, by its number in the batch.
    :param numbers: of the records.
    :param queues: in which they wait: they are delivered once they are first in all of them.
    :param dealing: of records of many keys, which wait in all queues: deals them out.
    """

    __slots__ = ("backoff", "count", "dealing", "first_in", "get", "in_flight", "last", "numbers", "queues")

    def __init__(
        self,
        in_flight: InFlight,
        get: GetRecord,
        numbers: Sequence[int],
        backoff: Backoff,
        queues: Sequence[Queue],
        dealing: _Dealing | None = None,
    ) -> None:
        self.in_flight = in_flight
        self.get = get
        self.count, self.last = len(numbers), numbers[-1]
        self.numbers = iter(numbers)
        self.backoff = backoff
        self.queues = queues
        self.dealing = dealing
        #: Of several queues those in which they came first, in this order.
        self.first_in: Sequence[Queue] = []

    @property
    def waits(self) -> bool:
        """Whether they are not yet known to be first in all of several queues."""
        return len(self.first_in) < len(self.queues) > 1


#: Puts the records of a batch from a first to before a last into queues, with what returns what a handler
#: gets of each.
Add = Callable[[int, int, GetRecord], None]


class Queues(Protocol):
    """All queues of an executor."""

    def adding(self, ready: ReadyBatch, in_flight: InFlight, backoff: Backoff) -> Add:
        """Return what puts records of a batch into queues. Without the lock."""

    def has_any(self) -> bool:
        """Return whether there is a queue to take."""

    def take(self) -> Queue:
        """Return a queue with records for a thread that has none."""

    def release(self, queue: Queue) -> None:
        """Have a queue taken again if there is something in it."""

    def comes_first(self, part: QueuedRecords, queue: Queue) -> bool:
        """Note that a part that waits is the first in a queue; return whether it is so in all of its queues.

        If not, the queue waits for the others.
        """

    def end(self, part: QueuedRecords, queue: Queue) -> None:
        """Remove a part that is delivered from `queue`, which a thread has, and have its others go on."""

    def deal_out(self) -> None:
        """Have records of many keys that wait in one another's way wait for those of their own keys only."""


class FreeQueue:
    """One queue, which all threads take from at the same time (`Queues`)."""

    def __init__(self) -> None:
        self._queue = Queue()

    def adding(self, ready: ReadyBatch, in_flight: InFlight, backoff: Backoff) -> Add:
        def add(first: int, last: int, get: GetRecord) -> None:
            part = QueuedRecords(in_flight, get, range(first, last), backoff, (self._queue,))
            self._queue.parts.append(part)

        return add

    def has_any(self) -> bool:
        return bool(self._queue.parts)

    def take(self) -> Queue:
        return self._queue

    def release(self, queue: Queue) -> None:
        """As `Queues.release`: threads take from it all the time."""

    def comes_first(self, part: QueuedRecords, queue: Queue) -> bool:
        """As `Queues.comes_first`: there is one queue."""
        return True

    def end(self, part: QueuedRecords, queue: Queue) -> None:
        """As `Queues.end`: of threads that find the part at its end, the first removes it."""
        if queue.parts and queue.parts[0] is part:
            queue.parts.popleft()

    def deal_out(self) -> None:
        """As `Queues.deal_out`: there are no keys."""


class KeyQueues:
    """Queues that keep the order of each key (`Queues`): a record waits in that of its key's hash.

    An update that changed the key waits in the queues of both keys; a TRUNCATE, and the first record of a
    table whose key has another type than before, in all. While one thread delivers more than several would,
    the records of many keys wait together in all queues: they are delivered in the source's order, their keys
    are not looked at, and memory is read in the order in which it was written.
    """

    def __init__(self, threads: int, rate: DeliveryRate) -> None:
        self._rate = rate
        self._key_types = KeyTypes()
        self._queues = [Queue() for _ in range(KEY_QUEUES_A_THREAD * threads)]
        self._ready: deque[Queue] = deque()

    def adding(self, ready: ReadyBatch, in_flight: InFlight, backoff: Backoff) -> Add:
        dealing = _Dealing(ready, self._queues, self._key_types)
        if not self._rate.is_quick:
            _ = dealing.keys  # found while the lock is free

        def add(first: int, last: int, get: GetRecord) -> None:
            if self._rate.is_quick:
                together = QueuedRecords(in_flight, get, range(first, last), backoff, self._queues, dealing)
                self._append(together)
            else:
                for numbers, queues in dealing.deal(first, last):
                    self._append(QueuedRecords(in_flight, get, numbers, backoff, queues))

        return add

    def _append(self, part: QueuedRecords) -> None:
        for queue in part.queues:
            queue.parts.append(part)
            if not queue.is_busy:
                self.release(queue)

    def has_any(self) -> bool:
        return bool(self._ready)

    def take(self) -> Queue:
        return self._ready.popleft()

    def release(self, queue: Queue) -> None:
        queue.is_busy = bool(queue.parts)
        if queue.is_busy:
            self._ready.append(queue)

    def comes_first(self, part: QueuedRecords, queue: Queue) -> bool:
        part.first_in = [*part.first_in, queue]
        return not part.waits

    def end(self, part: QueuedRecords, queue: Queue) -> None:
        if not (queue.parts and queue.parts[0] is part):
            return  # it was dealt out before this thread looked at it
        queue.parts.popleft()
        for other in part.queues:
            if other is not queue:
                other.parts.popleft()
                self.release(other)

    def deal_out(self) -> None:
        for part in [part for part in self._queues[0].parts if part.dealing is not None]:
            self._deal_out(part)

    def _deal_out(self, together: QueuedRecords) -> None:
        # The record that is being delivered, or is to be tried again, holds the queues of its key, and the
        # one from which it was taken. All other queues go on.
        dealing, left = together.dealing, list(together.numbers)
        assert dealing is not None
        held: list[Queue] = [] if together.waits else list(together.first_in[-1:])
        if len(left) < together.count:
            held += dealing.queues_of(left[0] - 1 if left else together.last)
        parts = defaultdict(list)
        for numbers, queues in dealing.deal(left[0], left[-1] + 1) if left else ():
            part = QueuedRecords(together.in_flight, together.get, numbers, together.backoff, queues)
            for queue in queues:
                parts[queue].append(part)
        for queue in self._queues:
            before, after = _split(queue.parts, together)
            queue.parts = deque((*before, *([together] if queue in held else ()), *parts[queue], *after))
            if queue in together.first_in and queue not in held:
                self.release(queue)
        together.dealing = None
        together.queues = list(dict.fromkeys(held))
        together.first_in = together.queues


def _split(
    parts: deque[QueuedRecords], at: QueuedRecords
) -> tuple[Sequence[QueuedRecords], Sequence[QueuedRecords]]:
    found = list(parts)
    number = found.index(at)
    return found[:number], found[number + 1 :]


class _Dealing:
    # Finds the queues of a batch's records; their keys are not looked at before.
    def __init__(self, ready: ReadyBatch, queues: Sequence[Queue], key_types: KeyTypes) -> None:
        self._ready = ready
        self._queues = queues
        self._key_types = key_types

    @functools.cached_property
    def keys(self) -> _QueueNumbers:
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
        keys = self.keys
        if keys.in_all[number]:
            return self._queues
        return [self._queues[one] for one in {int(keys.own[number]), int(keys.other[number])}]

    def deal(self, first: int, last: int) -> Iterator[tuple[Sequence[int], Sequence[Queue]]]:
        # Yields numbers of records from `first` to before `last`, and the queues in which they wait.
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
