"""The positions of clients at a log's head: random interleavings of all events, and planted bugs."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.subscriptions.head import LogHead, Ring, Subscription, Take
from tests.support.examples import examples

KINDS = "abc"


@dataclass(frozen=True, eq=False)
class Part:
    start: int
    end: int


@dataclass(eq=False)
class Client:
    subscription: Subscription[str]
    begin: int
    got: list[int] = field(default_factory=list)
    waits: bool = False


class World:
    """A log whose change at offset n has a kind, a feed, and clients that each want one kind."""

    def __init__(self, seed: int, head_type=LogHead) -> None:
        self.random = random.Random(seed)
        self.log: list[str] = [self.random.choice(KINDS) for _ in range(self.random.randint(0, 20))]
        self.fed = len(self.log)
        self.head: LogHead[Part, str] = head_type(self.fed, ranges_max=4, bytes_max=12)
        self.clients: list[Client] = []

    def act(self) -> None:
        act = self.random.choice(
            (self.commit, self.feed, self.look, self.take, self.take, self.join, self.leave)
        )
        act()

    def commit(self) -> None:
        self.log += [self.random.choice(KINDS) for _ in range(self.random.randint(1, 6))]

    def feed(self) -> None:
        if self.fed < len(self.log):
            end = self.random.randint(self.fed + 1, len(self.log))
            self.wake(self.head.append(Part(self.fed, end)))
            self.fed = end

    def look(self) -> None:
        if self.head.audiences:
            audience = self.random.choice(self.head.audiences)
            if (range_ := self.head.next_range(audience)) is not None:
                found = audience.wanted in self.log[range_.start : range_.end]
                self.wake(self.head.looked(audience, range_, found=found))

    def join(self) -> None:
        begin = self.random.randint(0, len(self.log))
        self.clients.append(Client(self.head.join(self.random.choice(KINDS), begin), begin))

    def leave(self) -> None:
        if len(self.clients) > 5:
            client = self.clients.pop(self.random.randrange(len(self.clients)))
            # A client that comes back continues where it was.
            self.check(client, self.head.place(client.subscription))
            self.head.leave(client.subscription)

    def take(self) -> None:
        ready = [client for client in self.clients if not client.waits]
        if not ready:
            return
        client = self.random.choice(ready)
        subscription, wanted = client.subscription, client.subscription.audience.wanted
        took, range_ = self.head.step(subscription)
        client.waits = took is Take.NOTHING
        if client.waits:
            return
        end = len(self.log) if range_ is None else range_.end
        assert range_ is None or range_.start <= subscription.at < range_.end
        most = self.random.randint(1, 4)
        places = [at for at in range(subscription.at, end) if self.log[at] == wanted]
        client.got += places[:most]
        subscription.at = places[most - 1] + 1 if len(places) > most else end

    def wake(self, subscriptions) -> None:
        for client in self.clients:
            if client.subscription in subscriptions:
                assert client.waits
                client.waits = False

    def check(self, client: Client, end: int) -> None:
        wanted = client.subscription.audience.wanted
        assert client.got == [at for at in range(client.begin, end) if self.log[at] == wanted]

    def finish(self) -> None:
        """Complete everything that is under way: then each client has everything, and waits."""
        for _ in range(2000):
            if self.fed == len(self.log) and all(client.waits for client in self.clients):
                break
            for act in (self.feed, self.look, self.take):
                act()
        while any(self.head.next_range(audience) for audience in self.head.audiences):
            self.look()
        for _ in range(2000):
            self.take()
        for client in self.clients:
            assert client.waits, "it has everything, but does not wait"
            assert self.head.place(client.subscription) == len(self.log)
            self.check(client, len(self.log))


def play(seed: int, head_type=LogHead) -> None:
    world = World(seed, head_type)
    for _ in range(world.random.randint(10, 150)):
        world.act()
    world.finish()


def play_all(seeds: range, head_type) -> None:
    for seed in seeds:
        play(seed, head_type)


@examples(300)
@given(st.integers(0, 2**32))
def test_each_client_gets_its_changes_once_and_in_order_in_any_interleaving(seed):
    play(seed)


class NoClientIsWoken(LogHead):
    def looked(self, audience, range_, *, found):
        super().looked(audience, range_, found=found)
        return []


class WaitersAreTakenToBeAtTheEnd(LogHead):
    def place(self, subscription):
        return self.ring.end if subscription in subscription.audience.waiting else subscription.at


class SlowGroupsAreNotMoved(LogHead):
    def append(self, range_):
        self.ring.append(range_)
        return []


class TheRingIsTakenForComplete(LogHead):
    def step(self, subscription):
        subscription.at = max(subscription.at, self.ring.start)
        return super().step(subscription)


@pytest.mark.parametrize(
    "planted",
    [NoClientIsWoken, WaitersAreTakenToBeAtTheEnd, SlowGroupsAreNotMoved, TheRingIsTakenForComplete],
)
def test_a_planted_bug_is_found(planted):
    with pytest.raises(AssertionError):
        play_all(range(500), planted)


def test_a_ring_keeps_the_last_ranges_within_its_bounds_but_at_least_one():
    ring: Ring[Part] = Ring(100, ranges_max=3, bytes_max=50)
    assert (ring.start, ring.end, len(ring)) == (100, 100, 0)
    for start, end in itertools.pairwise((100, 110, 120, 130, 140)):
        ring.append(Part(start, end))
    assert (ring.start, ring.end, len(ring)) == (110, 140, 3)
    assert [part.start for part in ring.between(115, 130)] == [110, 120]
    assert ring.between(140, 140) == []
    ring.append(Part(140, 1000))
    assert (ring.start, ring.end, len(ring)) == (140, 1000, 1)


def test_a_ring_has_no_gaps():
    ring: Ring[Part] = Ring(100, ranges_max=3, bytes_max=50)
    with pytest.raises(ValueError, match="but the ring ends at"):
        ring.append(Part(101, 110))
