"""Who is where at the head of a log: a ring of what came last, and who waits for what comes next.

Pure. A subscription has a place in the log, and nothing is queued for it: what it takes next is

    from the ring   if the ring still holds its place
    from the log    if it has fallen behind the ring, however far
    nothing         if it has everything: it waits

Subscriptions that want the same are an audience, and a range is looked at once for each. Where it holds
nothing for an audience, none of its subscriptions notices: those that wait stand where the audience stands.
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
    """The last ranges of the log without a gap: up to a number, and so many bytes of the log; at least one.

    :param at: the log offset at which the first one will start.
    """

    def __init__(self, at: int, *, ranges_max: int, bytes_max: int) -> None:
        self._ranges: deque[S] = deque()
        self._ranges_max, self._bytes_max = ranges_max, bytes_max
        self.start = self.end = at

    def __len__(self) -> int:
        return len(self._ranges)

    def append(self, range_: S) -> None:
        """Add what follows on the end, and let go of what there is no room for.

        :raises ValueError: if it leaves something out.
        """
        if range_.start != self.end:
            raise ValueError(f"a range from {range_.start} on does not follow on {self.end}")
        self._ranges.append(range_)
        self.end = range_.end
        while len(self._ranges) > 1 and (
            len(self._ranges) > self._ranges_max or self.end - self._ranges[0].start > self._bytes_max
        ):
            self._ranges.popleft()
        self.start = self._ranges[0].start

    def between(self, start: int, end: int) -> list[S]:
        """Return the ranges that hold something of `[start, end)`, in order."""
        found: list[S] = []
        for range_ in reversed(self._ranges):  # what is wanted is nearly always the last
            if range_.end <= start:
                break
            if range_.start < end:
                found.append(range_)
        return found[::-1]


@dataclass(eq=False, slots=True)
class Audience(Generic[W]):
    """The subscriptions that want the same. `at`: everything before it was looked at for them."""

    wanted: W
    at: int
    subscriptions: set[Subscription[W]] = field(default_factory=set)
    waiting: set[Subscription[W]] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Subscription(Generic[W]):
    """One reader. `at`: it has everything before. `LogHead.place` tells of one that waits how far it is."""

    audience: Audience[W]
    at: int


class Take(enum.Enum):
    """Where a subscription takes what comes next."""

    RING = "ring"
    LOG = "log"
    NOTHING = "nothing"


class LogHead(Generic[S, W]):
    """The ring and the audiences. Not thread-safe.

    :param at: the log offset at which the first range will start.
    """

    def __init__(self, at: int, *, ranges_max: int, bytes_max: int) -> None:
        self.ring: Ring[S] = Ring(at, ranges_max=ranges_max, bytes_max=bytes_max)
        self._audiences: dict[W, Audience[W]] = {}
        #: What is wanted by somebody; replaced whole, so that any thread may read it.
        self.wanted: tuple[W, ...] = ()

    @property
    def audiences(self) -> tuple[Audience[W], ...]:
        return tuple(self._audiences.values())

    def join(self, wanted: W, at: int) -> Subscription[W]:
        """Begin a subscription that has everything before `at`."""
        audience = self._audiences.get(wanted)
        if audience is None:
            audience = self._audiences[wanted] = Audience(wanted, self.ring.end)
            self.wanted = tuple(self._audiences)
        subscription = Subscription(audience, at)
        audience.subscriptions.add(subscription)
        return subscription

    def leave(self, subscription: Subscription[W]) -> None:
        """End a subscription."""
        audience = subscription.audience
        audience.subscriptions.discard(subscription)
        audience.waiting.discard(subscription)
        if not audience.subscriptions and self._audiences.get(audience.wanted) is audience:
            del self._audiences[audience.wanted]
            self.wanted = tuple(self._audiences)

    def place(self, subscription: Subscription[W]) -> int:
        """Return where to go on if the subscription ends now."""
        audience = subscription.audience
        return max(subscription.at, audience.at) if subscription in audience.waiting else subscription.at

    def append(self, range_: S) -> list[Subscription[W]]:
        """Add what came; return the subscriptions to wake, whose audience was too slow: they read the log."""
        self.ring.append(range_)
        woken: list[Subscription[W]] = []
        for audience in self._audiences.values():
            if audience.at < self.ring.start:
                woken += self._wake(audience)
                audience.at = self.ring.end
        return woken

    def next_range(self, audience: Audience[W]) -> S | None:
        """Return what is to be looked at next for an audience; None: nothing is."""
        return next(iter(self.ring.between(audience.at, self.ring.end)), None)

    def looked(self, audience: Audience[W], range_: S, *, found: bool) -> list[Subscription[W]]:
        """Note that a range was looked at for an audience; return the subscriptions to wake.

        :param found: whether it holds something of what the audience wants.
        """
        if range_.end <= audience.at:
            return []  # the ring went on without it meanwhile
        ahead = {each for each in audience.waiting if each.at >= range_.end} if found else audience.waiting
        woken = self._wake(audience, ahead) if found else []
        audience.at = range_.end
        return woken

    def step(self, subscription: Subscription[W]) -> tuple[Take, S | None]:
        """Return where a subscription takes what comes next; from the ring, the range that holds it, too.

        After `NOTHING` it waits until it is among those to wake. A range was looked at for its audience, or
        was there before that.
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
