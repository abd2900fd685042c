"""A consumer's two sides under all interleavings of a bounded size: no gap, no repeat, all in order.

A change may be repeated only if the process was killed before the change was handled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tailrace.realtime import switching
from tailrace.realtime.switching import (
    LogEvent,
    LogMode,
    LogSide,
    RealtimeCommand,
    RealtimeEvent,
    RealtimeMode,
    RealtimeSide,
)
from tailrace.state_machine import IllegalTransition
from tests.support.realtime.model import Budget, World, inner, outer

#: Together they have every switch, and a crash at every step of it.
BUDGETS = {
    "overflow and return": Budget(changes=3, overflows=1, on=2, off=0, crashes=0),
    "switched on and off": Budget(changes=2, overflows=0, on=2, off=1, crashes=0),
    "killed, with an overflow": Budget(changes=2, overflows=1, on=1, off=0, crashes=1),
    "killed and begun again": Budget(changes=1, overflows=1, on=2, off=1, crashes=1),
    "killed twice": Budget(changes=1, overflows=0, on=2, off=1, crashes=2),
}


def _explore(budget: Budget) -> int:
    """Visit every state that the world can reach; return how many there are."""
    seen = {World(budget)}
    waiting = list(seen)
    while waiting:
        world = waiting.pop()
        world.check()
        by_itself = [found for found in inner(world) if found != world]
        if not by_itself:
            assert world.next_change(world.handed) is None, "changes are left, and nothing goes on"
            assert world.handled == world.handed
            process = world.process
            if process.log.state is LogMode.ACTIVE or world.handled >= process.side.position:
                assert process.log.position == world.handled, (
                    "the position does not follow the handled changes"
                )
        for found in (*by_itself, *outer(world)):
            if found not in seen:
                seen.add(found)
                waiting.append(found)
    return len(seen)


@pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
@pytest.mark.ci
def test_each_change_is_sent_in_order_despite_switches_overflows_and_kills(budget: Budget) -> None:
    assert _explore(budget) > 1_000


_S, _E, _C = RealtimeMode, RealtimeEvent, RealtimeCommand
_GIVEN_UP = (_S.STOPPING, (_C.DROP, _C.MARK_STOP))

PLANTED = {
    "works before the log's side is passive": ((_S.STARTING, _E.START_DURABLE), (_S.ON, (_C.WORK,))),
    "fills the buffer behind the start marker": (
        (_S.OFF, _E.SWITCHED_ON),
        (_S.STARTING, (_C.KEEP, _C.MARK_START, _C.FILL)),
    ),
    "marks the start before it is kept": (
        (_S.OFF, _E.SWITCHED_ON),
        (_S.STARTING, (_C.FILL, _C.MARK_START, _C.KEEP)),
    ),
    "stops without waiting for what is sent": ((_S.ON, _E.OVERFLOWED), _GIVEN_UP),
    "is switched off without waiting for what is sent": ((_S.ON, _E.SWITCHED_OFF), _GIVEN_UP),
    "writes no stop marker": ((_S.STOPPING, _E.WORKER_ENDED), (_S.OFF, (_C.KEEP,))),
    "gives up a start without a stop marker": ((_S.STARTING, _E.OVERFLOWED), (_S.OFF, (_C.DROP, _C.KEEP))),
    "keeps that it is off before the stop marker": (
        (_S.STOPPING, _E.WORKER_ENDED),
        (_S.OFF, (_C.KEEP, _C.MARK_STOP)),
    ),
    "does not say what is handled": ((_S.ON, _E.HANDLED), (_S.ON, ())),
    "goes on with a buffer that has lost something": ((_S.ON, _E.OVERFLOWED), (_S.ON, (_C.FILL,))),
}

PLANTED_IN_LOG = {
    "stays passive": ((LogMode.PASSIVE, LogEvent.STOP_REALTIME), LogMode.PASSIVE),
    "stays active": ((LogMode.ACTIVE, LogEvent.TRY_START_REALTIME), LogMode.ACTIVE),
}


def _found_somewhere() -> None:
    for budget in BUDGETS.values():
        _explore(replace(budget, changes=2))


@pytest.mark.parametrize(("key", "planted"), PLANTED.values(), ids=PLANTED)
def test_a_bug_in_a_switch_is_found(monkeypatch: pytest.MonkeyPatch, key: Any, planted: Any) -> None:
    monkeypatch.setitem(switching.TRANSITIONS, key, planted)
    with pytest.raises((AssertionError, IllegalTransition)):
        _found_somewhere()


@pytest.mark.parametrize(("key", "planted"), PLANTED_IN_LOG.values(), ids=PLANTED_IN_LOG)
def test_a_bug_on_the_logs_side_is_found(monkeypatch: pytest.MonkeyPatch, key: Any, planted: Any) -> None:
    monkeypatch.setitem(switching.LOG_TRANSITIONS, key, planted)
    with pytest.raises((AssertionError, IllegalTransition)):
        _found_somewhere()


def _takes_over_at_what_is_handled(step: Callable[..., object]) -> Callable[..., object]:
    return lambda side, event, log_offset=-1: step(
        side, event, side.position if event is LogEvent.STOP_REALTIME else log_offset
    )


def _keeps_the_old_position(event: LogEvent) -> Callable[..., Callable[..., object]]:
    return lambda step: (
        lambda side, came, log_offset=-1: step(side, came, -1 if came is event else log_offset)
    )


def _moves_the_position_to_what_is_sent(step: Callable[..., LogSide]) -> Callable[..., object]:
    return lambda side, event, log_offset=-1: replace(
        step(side, event, log_offset), position=max(side.position, log_offset)
    )


def _does_not_seek(step: Callable[..., LogSide]) -> Callable[..., object]:
    return lambda side, event, log_offset=-1: replace(step(side, event, log_offset), read_from=side.read_from)


def _forgets_where_its_marker_is(step: Callable[..., object]) -> Callable[..., object]:
    return lambda side, event, log_offset=-1: step(
        side, event, 0 if event is _E.START_DURABLE else log_offset
    )


@pytest.mark.parametrize(
    ("side", "planted"),
    [
        (LogSide, _takes_over_at_what_is_handled),
        (LogSide, _does_not_seek),
        (LogSide, _keeps_the_old_position(LogEvent.HANDLED)),
        (LogSide, _keeps_the_old_position(LogEvent.REALTIME)),
        (LogSide, _moves_the_position_to_what_is_sent),
        (RealtimeSide, _forgets_where_its_marker_is),
    ],
)
def test_a_bug_in_the_use_of_positions_is_found(
    monkeypatch: pytest.MonkeyPatch, side: Any, planted: Callable[..., object]
) -> None:
    monkeypatch.setattr(side, "step", planted(side.step))
    with pytest.raises((AssertionError, IllegalTransition)):
        _found_somewhere()


def test_after_a_crash_the_stop_marker_is_written_first(monkeypatch: pytest.MonkeyPatch) -> None:
    side, commands = RealtimeSide.restored(True, 7)
    assert commands == (_C.MARK_STOP,)
    assert side.marker(_C.MARK_STOP, "c").log_offset == 7
    assert RealtimeSide.restored(False, 7)[1] == ()
    monkeypatch.setattr(
        RealtimeSide, "restored", classmethod(lambda cls, _, handled: (cls(position=handled), ()))
    )
    with pytest.raises(AssertionError, match="stop"):
        _explore(BUDGETS["killed twice"])


def test_every_mode_is_reached_and_every_command_given() -> None:
    assert {mode for mode, _ in switching.TRANSITIONS.values()} == set(RealtimeMode)
    assert {c for _, commands in switching.TRANSITIONS.values() for c in commands} == set(RealtimeCommand)
    assert {event for _, event in switching.TRANSITIONS} == set(RealtimeEvent)
    assert set(switching.LOG_TRANSITIONS.values()) == set(LogMode)
    assert {event for _, event in switching.LOG_TRANSITIONS} == set(LogEvent)
