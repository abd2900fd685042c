"""The coordinator of shards under all interleavings of up to three reshards, crashes, and messages that are
lost, late or in another order: the log has each change of each key once and in order, or the change is known
to be missing.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tailrace.errors import TailraceError
from tailrace.sources.vitess.resharding import coordinator as coordination
from tailrace.sources.vitess.resharding import shard_state, transitions
from tailrace.sources.vitess.resharding.coordinator import Coordinator
from tailrace.sources.vitess.resharding.events import TablesRequested
from tailrace.sources.vitess.resharding.gtid_sets import CURRENT
from tailrace.sources.vitess.resharding.shard_state import (
    CommonKey,
    CopyChunk,
    CopyState,
    Journal,
    ShardState,
)
from tailrace.sources.vitess.resharding.transitions import ShardCommand, ShardEvent, ShardMode
from tailrace.state_machine import IllegalTransition
from tests.support.examples import USUAL, WHOLE
from tests.support.vitess.model import (
    TABLE,
    Budget,
    World,
    began,
    check,
    check_at_rest,
    inner,
    looking,
    outer,
    running,
)

ONE, TWO = ("0",), ("-80", "80-")
SPLIT, MERGE = (ONE, TWO), (TWO, ONE)
THREE = ("-40", "40-c0", "c0-")
UPPER = (("80-",), ("80-c0", "c0-"))
ACROSS = (("-80", "80-c0"), ("-c0",))

#: Beginning with the first start.
STARTS = {
    "split": began(ONE, (SPLIT,), Budget(("90", "90"))),
    "split of a copy": began(ONE, (SPLIT,), Budget(("90",)), copies=True),
    "split of a copy, killed": began(ONE, (SPLIT,), Budget(("90",), crashes=1), copies=True),
    "merge": began(TWO, (MERGE,), Budget(("20", "90"))),
    "merge of copies": began(TWO, (MERGE,), Budget(("90",)), copies=True),
    "split, completed at once": began(ONE, (SPLIT,), Budget(("90",), completes=1), copies=True),
}

#: Beginning with a capture that streams all shards.
RUNS = {
    "split": (ONE, (SPLIT,), Budget(("20", "90"), crashes=2)),
    "merge": (TWO, (MERGE,), Budget(("20", "90"), crashes=2)),
    "2 to 3": (TWO, ((TWO, THREE),), Budget(("20", "90"), crashes=1)),
    "3 to 2": (THREE, ((THREE, TWO),), Budget(("90",), crashes=1)),
    "split and back": (ONE, (SPLIT, MERGE), Budget(("90", "90"), crashes=1)),
    "merge, back, and merge": (TWO, (MERGE, SPLIT, MERGE), Budget(("90",))),
    "split, split, merge": (ONE, (SPLIT, UPPER, ACROSS), Budget(("90",))),
    "late messages": (TWO, (MERGE,), Budget(("20", "90"), interruptions=1, late=2)),
    "late messages after a move": (TWO, (MERGE,), Budget(("90",), tasks=1, late=1)),
    "tasks": (ONE, (SPLIT,), Budget(("20", "90"), tasks=2, crashes=1)),
    "completed": (ONE, (SPLIT,), Budget(("90", "90"), completes=1, snapshots=1)),
    "merge, completed": (TWO, (MERGE,), Budget(("20", "90"), completes=1, snapshots=1)),
    "back, completed": (ONE, (SPLIT, MERGE), Budget(("90",), completes=1, snapshots=1)),
    "purged": (ONE, (SPLIT,), Budget(("90", "90"), purges=1, snapshots=1)),
    "read again, split": (ONE, (SPLIT,), Budget(("20", "90"), tables=1, crashes=1)),
    "read again, merge": (TWO, (MERGE,), Budget(("20", "90"), tables=1)),
    "read again, 3 to 2": (THREE, ((THREE, TWO),), Budget(("90",), tables=1)),
    "purged before a merge": (TWO, (MERGE,), Budget(("90", "90"), purges=1, snapshots=1)),
}

#: Beginning with the first start, with copies by several streams, a range of keys each.
CHUNKS = {
    "a copy": began(ONE, (), Budget(("20", "90"), crashes=1, interruptions=1), chunks=True),
    "split, interrupted": began(ONE, (SPLIT,), Budget(interruptions=1), chunks=True),
    "merge": began(TWO, (MERGE,), Budget(), chunks=True),
}
#: The same for `make torture`.
MORE_CHUNKS = {
    "split, written": began(ONE, (SPLIT,), Budget(("90",)), chunks=True),
    "split, written and interrupted": began(ONE, (SPLIT,), Budget(("d0",), interruptions=1), chunks=True),
    "split, killed": began(ONE, (SPLIT,), Budget(crashes=1), chunks=True),
    "merge, written": began(TWO, (MERGE,), Budget(("90",)), chunks=True),
}
IS_TORTURE = USUAL >= WHOLE

#: Those with few states, of each kind; and those with the most.
QUICK = {"split", "2 to 3", "merge, completed", "split and back"}
LONG = {
    "read again, 3 to 2",
    "split of a copy, killed",
    "merge of copies",
    "back, completed",
    "split, interrupted",
    *MORE_CHUNKS,
}


def each(worlds: dict[str, Any]) -> list[Any]:
    """Return parameters for a test, one for each world."""
    marks = {name: [pytest.mark.ci if name in LONG else pytest.mark.slow] for name in {*worlds} - QUICK}
    return [pytest.param(given, id=name, marks=marks.get(name, [])) for name, given in worlds.items()]


def explore(first: World, states_max: int = 400_000) -> int:
    """Visit every state that the world can reach; return how many there are.

    From each one, what happens by itself leads to rest at some time, and then all is well.
    """
    seen, waiting = {first}, [first]
    before: defaultdict[World, list[World]] = defaultdict(list)
    resting = []
    while waiting:
        world = waiting.pop()
        check(world)
        by_themselves = [found for found in inner(world) if found != world]
        if not by_themselves:
            check_at_rest(world)
            resting.append(world)
        for found in by_themselves:
            before[found].append(world)
        for found in (*by_themselves, *outer(world)):
            if found not in seen:
                seen.add(found)
                waiting.append(found)
                assert len(seen) < states_max, "no state is at rest"
    goes_on = set(resting)
    while resting:
        for found in before[resting.pop()]:
            if found not in goes_on:
                goes_on.add(found)
                resting.append(found)
    assert goes_on == seen, f"no way leads to rest from {next(iter(seen - goes_on))}"
    return len(seen)


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    """States are kept to the end and have no cycles: the garbage collector has nothing to do."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("world", each(STARTS))
def test_a_reshard_while_the_capture_starts_loses_nothing(world: World) -> None:
    assert explore(world) > 100


@pytest.mark.parametrize("world", each(CHUNKS | (MORE_CHUNKS if IS_TORTURE else {})))
def test_a_reshard_while_chunks_are_copied_loses_nothing(world: World) -> None:
    assert explore(world) > 100


@pytest.mark.parametrize("run", each(RUNS))
def test_each_change_comes_once_and_in_order(run: tuple[Any, Any, Budget]) -> None:
    assert explore(running(*run)) > 100


#: The same with checks whether shards still serve.
LOOKS = {
    "split": (ONE, (SPLIT,), Budget(("90",), crashes=1)),
    "merge": (TWO, (MERGE,), Budget(("20",), crashes=1)),
    "split and back": (ONE, (SPLIT, MERGE), Budget(("90",))),
    "completed": (ONE, (SPLIT,), Budget(("90",), completes=1, snapshots=1)),
}


@pytest.mark.parametrize("run", each(LOOKS))
def test_checking_for_shards_that_do_not_serve_loses_none_that_reaches_its_journal(
    run: tuple[Any, Any, Budget],
) -> None:
    assert explore(looking(running(*run))) > 100


@pytest.mark.parametrize("reshard", [SPLIT, MERGE, UPPER], ids=["split", "merge", "part"])
@pytest.mark.ci
def test_a_switch_without_a_journal_is_detected(reshard: Any) -> None:
    first = {SPLIT: ONE, MERGE: TWO, UPPER: TWO}[reshard]
    budget = Budget(("90", "90"), crashes=1, snapshots=1)
    world = running(first, (reshard,), budget, has_journals=False)
    assert explore(looking(world)) > 100
    with pytest.raises(AssertionError, match=r"changes|others serve"):
        explore(world)


_M, _E, _C = ShardMode, ShardEvent, ShardCommand

#: Wrong transitions in the table, and the runs in which that must show.
PLANTED = {
    "goes on past the journal": (
        (_M.STREAMING, _E.JOURNAL),
        (_M.STREAMING, (_C.KEEP, _C.OPEN)),
        "split",
    ),
    "does not keep that it is retired": (
        (_M.AT_JOURNAL, _E.ALL_AT_JOURNAL),
        (_M.RETIRED, ()),
        "split",
    ),
    "takes the end at a journal for the journal": (
        (_M.STREAMING, _E.PARTICIPANTS_ABSENT),
        (_M.UNCONFIRMED, (_C.LIST,)),
        "merge",
    ),
    "does not open a stream again": ((_M.STREAMING, _E.INTERRUPTED), (_M.STREAMING, ()), "late messages"),
    "gives up a shard without a word": (
        (_M.UNCONFIRMED, _E.NOT_LISTED),
        (_M.RETIRED, (_C.KEEP,)),
        "completed",
    ),
    "opens no child": ((_M.RETIRED, _E.STARTED), (_M.COPYING, (_C.KEEP,)), "split and back"),
    "takes a lost shard for retired": ((_M.STREAMING, _E.LOST), (_M.RETIRED, (_C.KEEP,)), "purged"),
}


def _explore_run(name: str) -> int:
    return explore(running(*RUNS[name]))


@pytest.mark.parametrize(("key", "planted", "run"), PLANTED.values(), ids=PLANTED)
def test_a_bug_in_the_table_is_found(
    monkeypatch: pytest.MonkeyPatch, key: Any, planted: Any, run: str
) -> None:
    monkeypatch.setitem(transitions.TRANSITIONS, key, planted)
    with pytest.raises((AssertionError, IllegalTransition, TailraceError)):
        _explore_run(run)


def _does_not_wait_for_participants(monkeypatch: pytest.MonkeyPatch) -> None:
    def switch(self: Coordinator, journal: Journal) -> None:
        mine = [name for name in journal.participants if self.is_at(name, journal)]
        for name in mine:
            self._retire(name, _E.ALL_AT_JOURNAL, tuple(dict(journal.targets)))
        for name, gtid in journal.targets:
            if name not in self.shards or self.shards[name].state is _M.RETIRED:
                self._begin(name, gtid, journal.participants, (), None, is_at_journal=True)
        self._assign()

    monkeypatch.setattr(Coordinator, "_switch_if_all_are_there", switch)


def _accepts_events_of_ended_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coordinator, "accepts", lambda self, shard, _: shard in self.shards)


def _starts_children_at_the_newest_position(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Coordinator._begin
    monkeypatch.setattr(
        Coordinator,
        "_begin",
        lambda self, name, gtid, *rest, **more: begin(self, name, CURRENT if more else gtid, *rest, **more),
    )


def _forgets_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShardState, "request", property(lambda self: (self.gtid, {})))


def _assumes_that_the_copy_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "inherited_copy", lambda *_: None)


def _reads_again_from_the_newest_position(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self: Coordinator, event: TablesRequested) -> None:
        for name in event.keys:
            kept = replace(self.shards[name].kept, copy=CopyState())
            self._move(name, _E.REQUESTED, kept=kept)

    monkeypatch.setattr(Coordinator, "_copy_tables", copy)


IN_CODE: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a child starts before all parents are at the journal": (_does_not_wait_for_participants, "merge"),
    "what comes late counts": (_accepts_events_of_ended_streams, "late messages"),
    "children start at the newest position": (_starts_children_at_the_newest_position, "completed"),
    "tables are read again from the newest position": (
        _reads_again_from_the_newest_position,
        "read again, split",
    ),
}

IN_COPIES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a copy goes on from its position alone": _forgets_what_is_copied,
    "children take the copy for done": _assumes_that_the_copy_is_complete,
}


@pytest.mark.parametrize(("plant", "run"), IN_CODE.values(), ids=IN_CODE)
def test_a_bug_in_the_code_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], run: str
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, IllegalTransition, TailraceError)):
        _explore_run(run)


def _repeats_changes_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_state, "ahead_of", lambda *_: ())


def _continues_at_the_newest_chunks_position(monkeypatch: pytest.MonkeyPatch) -> None:
    def newest(chunks: Iterable[CopyChunk]) -> str:
        return max((chunk.gtid for chunk in chunks), default="")

    monkeypatch.setattr(shard_state, "common_position", newest)


def _skips_chunks_that_were_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_one_stream(self: CopyState, common: CommonKey) -> CopyState:
        keys = [chunk.key for chunk in self.chunks if chunk.key]
        return CopyState({TABLE: keys[-1]} if keys else {}, frozenset(), self.is_again)

    monkeypatch.setattr(CopyState, "by_one_stream", by_one_stream)


IN_CHUNKS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], World]] = {
    "changes that chunks had come again": (_repeats_changes_of_chunks, CHUNKS["a copy"]),
    "one stream goes on from the newest position": (
        _continues_at_the_newest_chunks_position,
        CHUNKS["a copy"],
    ),
}
if IS_TORTURE:
    IN_CHUNKS["children pass over chunks that were not begun"] = (
        _skips_chunks_that_were_not_begun,
        CHUNKS["split, interrupted"],
    )


@pytest.mark.parametrize(("plant", "world"), IN_CHUNKS.values(), ids=IN_CHUNKS)
def test_a_bug_in_copies_of_chunks_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], world: World
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, IllegalTransition, TailraceError)):
        explore(world)


@pytest.mark.parametrize("plant", IN_COPIES.values(), ids=IN_COPIES)
@pytest.mark.slow
def test_a_bug_in_copies_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, IllegalTransition, TailraceError)):
        explore(began(ONE, (SPLIT,), Budget((), crashes=1), copies=True))


def test_every_mode_is_reached_and_every_command_given() -> None:
    assert {mode for mode, _ in transitions.TRANSITIONS.values()} == set(ShardMode)
    assert {found for _, commands in transitions.TRANSITIONS.values() for found in commands} == set(
        ShardCommand
    )
