"""The state machine under all interleavings of a bounded size."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tailrace.kafka.producer import transaction
from tailrace.kafka.producer.transaction import (
    Command,
    ProducerEvent,
    ProducerState,
    Transaction,
)
from tailrace.state_machine import IllegalTransition
from tests.support.kafka.model import Broker, Producer, moves

CHANGES, LIVES = 3, 2


def _explore(changes: int, lives: int) -> int:
    """Visit every state that `lives` producers can reach; return how many there are.

    At any moment another producer may start, whether the newest one has died, is paused or is in the
    middle of anything; those before it go on as long as they are able to.
    """
    start: tuple[Broker, tuple[Producer, ...]] = (Broker(), (Producer(),))
    seen = {start}
    waiting = [start]
    while waiting:
        broker, producers = waiting.pop()
        _check(broker, producers)
        following = [
            (after, (*producers[:at], moved, *producers[at + 1 :]))
            for at, producer in enumerate(producers)
            for after, moved in moves(broker, producer, changes)
        ]
        if len(producers) < lives:
            following.append((broker, (*producers, Producer())))
        for found in following:
            if found not in seen:
                seen.add(found)
                waiting.append(found)
    return len(seen)


def _check(broker: Broker, producers: tuple[Producer, ...]) -> None:
    # Each change once, in order, and the offset agrees with them at every moment.
    assert broker.log == tuple(range(1, broker.offset + 1))
    assert all(producer.told <= broker.offset for producer in producers)


@pytest.mark.parametrize(("changes", "lives"), [(CHANGES, LIVES), pytest.param(1, 3, marks=pytest.mark.slow)])
def test_each_change_is_committed_once_despite_crashes_pauses_and_lost_answers(
    changes: int, lives: int
) -> None:
    assert _explore(changes, lives) > 10_000


@pytest.mark.parametrize(
    ("key", "planted"),
    [
        # Reads no offsets after fencing, so that it relies on outdated ones.
        ((ProducerState.FENCING, ProducerEvent.INITIALISED), (ProducerState.READY, ())),
        # Writes the offset outside of the transaction's end.
        ((ProducerState.OPEN, ProducerEvent.DUE), (ProducerState.COMMITTING, (Command.COMMIT,))),
        # Logs a failed commit and goes on.
        ((ProducerState.COMMITTING, ProducerEvent.REFUSED), (ProducerState.READY, (Command.TELL_SOURCE,))),
        # Treats no answer as success.
        ((ProducerState.COMMITTING, ProducerEvent.UNKNOWN), (ProducerState.READY, (Command.TELL_SOURCE,))),
    ],
)
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, key: Any, planted: Any) -> None:
    monkeypatch.setitem(transaction.TRANSITIONS, key, planted)
    with pytest.raises((AssertionError, IllegalTransition)):
        _explore(CHANGES, LIVES)


def test_no_transaction_begins_before_the_offsets_are_read() -> None:
    life = Transaction(ProducerState.READY)
    after, commands = life.step(ProducerEvent.DUE)
    assert after.state is ProducerState.READY
    assert commands == ()


def test_the_error_of_an_illegal_transition_lists_the_steps_and_can_be_pickled() -> None:
    life, _ = Transaction().step(ProducerEvent.START)
    with pytest.raises(IllegalTransition) as raised:
        life.step(ProducerEvent.COMMITTED)
    again = pickle.loads(pickle.dumps(raised.value))  # noqa: S301 - our own
    assert "NEW (start) → FENCING" in str(again)


def test_every_state_is_reached_and_every_end_is_final() -> None:
    reached = {after for after, _ in transaction.TRANSITIONS.values()} | {ProducerState.NEW}
    assert reached == set(ProducerState)
    final = {ProducerState.CLOSED, ProducerState.FAILED, ProducerState.IN_DOUBT, ProducerState.PREEMPTED}
    assert not [state for state, _ in transaction.TRANSITIONS if state in final]
