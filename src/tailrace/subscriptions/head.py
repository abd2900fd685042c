"""The subscriptions at the head of a log, and a ring of the log's last ranges.

Pure. A subscription has a position in the log, and nothing is queued for it. It reads next

    from the ring   if its position is in the ring
    from the log    if its position is before the ring's start
    nothing         if it has everything: it waits

Subscriptions with the same filter are an audience, and a range is filtered once for each audience. If the
range has nothing for the audience, none of them is woken: one that waits has the position of its audience.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class RangeOfLog(Protocol):
    """A decoded part of the log: log offsets `[start, end)`."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


S = TypeVar("S", bound=RangeOfLog)
W = TypeVar("W", bound=Hashable)


class Ring(Generic[S]):
    """The last ranges of the log, without a gap: at least one, up to a number and a size in log bytes.

    :param at: the log offset at which the first one starts.
    """

    def __init__(self, at: int, *, ranges_max: int, bytes_max: int) -> None:
        self._ranges: deque[S] = deque()
        self._ranges_max, self._bytes_max = ranges_max, bytes_max
        self.start = self.end = at

    def __len__(self) -> int:
        return len(self._ranges)

    def append(self, range_: S) -> None:
        """Add the next range, and remove the oldest ones that exceed the limits.

        :raises ValueError: if the range does not start at the ring's end.
        """
        if range_.start != self.end:
            raise ValueError(f"a range starts at {range_.start}, but the ring ends at {self.end}")
        self._ranges.append(range_)
        self.end = range_.end
        while len(self._ranges) > 1 and (
            len(self._ranges) > self._ranges_max or self.end - self._ranges[0].start > self._bytes_max
        ):
            self._ranges.popleft()
        self.start = self._ranges[0].start

    def between(self, start: int, end: int) -> list[S]:
        """Return the ranges that overlap `[start, end)`, in order."""
        found: list[S] = []
        for range_ in reversed(self._ranges):  # nearly always only the last one
            if range_.end <= start:
                break
            if range_.start < end:
                found.append(range_)
        return found[::-1]


@dataclass(eq=False, slots=True)
class Audience(Generic[W]):
    """The subscriptions with the same filter. `at`: everything before it was filtered for them."""

    wanted: W
    at: int
    subscriptions: set[Subscription[W]] = field(default_factory=set)
    waiting: set[Subscription[W]] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Subscription(Generic[W]):
    """One subscription. `at`: it has everything before; while it waits, `LogHead.place` has its position."""

    audience: Audience[W]
    at: int


class Take(enum.Enum):
    """Where a subscription reads next."""

    RING = "ring"
    LOG = "log"
    NOTHING = "nothing"


class LogHead(Generic[S, W]):
    """The ring and the audiences. Not thread-safe.

    :param at: the log offset at which the first range starts.
    """

    def __init__(self, at: int, *, ranges_max: int, bytes_max: int) -> None:
        self.ring: Ring[S] = Ring(at, ranges_max=ranges_max, bytes_max=bytes_max)
        self._audiences: dict[W, Audience[W]] = {}
        #: The filters of all audiences; replaced, not modified, so that any thread may read it.
        self.wanted: tuple[W, ...] = ()

    @property
    def audiences(self) -> tuple[Audience[W], ...]:
        return tuple(self._audiences.values())

    def join(self, wanted: W, at: int) -> Subscription[W]:
        """Add a subscription that has everything before `at`."""
        audience = self._audiences.get(wanted)
        if audience is None:
            audience = self._audiences[wanted] = Audience(wanted, self.ring.end)
            self.wanted = tuple(self._audiences)
        subscription = Subscription(audience, at)
        audience.subscriptions.add(subscription)
        return subscription

    def leave(self, subscription: Subscription[W]) -> None:
        """Remove a subscription."""
        audience = subscription.audience
        audience.subscriptions.discard(subscription)
        audience.waiting.discard(subscription)
        if not audience.subscriptions and self._audiences.get(audience.wanted) is audience:
            del self._audiences[audience.wanted]
            self.wanted = tuple(self._audiences)

    def place(self, subscription: Subscription[W]) -> int:
        """Return the log offset to continue from if the subscription ends now."""
        audience = subscription.audience
        return max(subscription.at, audience.at) if subscription in audience.waiting else subscription.at

    def append(self, range_: S) -> list[Subscription[W]]:
        """Add a range; return the subscriptions to wake, whose audience was too slow: they read the log."""
        self.ring.append(range_)
        woken: list[Subscription[W]] = []
        for audience in self._audiences.values():
            if audience.at < self.ring.start:
                woken += self._wake(audience)
                audience.at = self.ring.end
        return woken

    def next_range(self, audience: Audience[W]) -> S | None:
        """Return the range to filter next for an audience; None: there is none."""
        return next(iter(self.ring.between(audience.at, self.ring.end)), None)

    def looked(self, audience: Audience[W], range_: S, *, found: bool) -> list[Subscription[W]]:
        """Record that a range was filtered for an audience; return the subscriptions to wake.

        :param found: whether the range has changes for the audience.
        """
        if range_.end <= audience.at:
            return []  # the ring has advanced past it meanwhile
        ahead = {each for each in audience.waiting if each.at >= range_.end} if found else audience.waiting
        woken = self._wake(audience, ahead) if found else []
        audience.at = range_.end
        return woken

    def step(self, subscription: Subscription[W]) -> tuple[Take, S | None]:
        """Return where a subscription reads next and, for the ring, the range that contains its position.

        After `NOTHING` it waits until it is woken. The range was filtered for the audience, unless it is
        older than the audience.
        """
        audience = subscription.audience
        subscription.at = self.place(subscription)
        audience.waiting.discard(subscription)
        if subscription.at < self.ring.start:
            return Take.LOG, None
        if subscription.at < audience.at and (ranges := self.ring.between(subscription.at, audience.at)):
            return Take.RING, ranges[0]
        audience.waiting.add(subscription)
        return Take.NOTHING, None

    def _wake(self, audience: Audience[W], but: set[Subscription[W]] | None = None) -> list[Subscription[W]]:
        woken = audience.waiting - (but or set())
        for subscription in woken:
            subscription.at = max(subscription.at, audience.at)
        audience.waiting -= woken
        return list(woken)
