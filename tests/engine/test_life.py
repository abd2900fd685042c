"""The engine's life cycle as a table of states and events."""

from __future__ import annotations

import copy
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.engine.lifecycle import TRANSITIONS, EngineEvent, EngineLifecycle, State
from tailrace.errors import Kind, TailraceError

ENDS = (EngineEvent.CLOSE_CALLED, EngineEvent.STOP_ASKED, EngineEvent.TASKS_FINISHED, EngineEvent.FAILURE)
WAY = (
    EngineEvent.RUN_CALLED,
    EngineEvent.CONNECTOR_STARTED,
    EngineEvent.TASKS_CREATED,
    EngineEvent.STARTS_ENDED,
)


def lived(*events):
    life = EngineLifecycle()
    for event in events:
        life = life.step(event)
    return life


def test_an_undisturbed_engine_passes_all_states():
    states = [lived(*WAY[:n]).state for n in range(5)]
    assert states == list(State)[:5]
    assert lived(*WAY, EngineEvent.CLOSE_CALLED).state is State.STOPPING
    assert lived(*WAY, EngineEvent.CLOSE_CALLED, EngineEvent.EVERYTHING_STOPPED).state is State.STOPPED


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_any_state_may_be_ended(steps, end):
    life = lived(*WAY[:steps], end)
    assert (life.state, life.ending, life.failed) == (State.STOPPING, end, end is EngineEvent.FAILURE)


@pytest.mark.parametrize("end", ENDS)
def test_an_end_during_the_start_waits_until_every_task_has_started_or_failed(end):
    life = lived(*WAY[:3], end)
    assert life.state is State.STARTING_TASKS
    assert not life.goes_on
    assert life.step(EngineEvent.STARTS_ENDED).state is State.STOPPING


@pytest.mark.parametrize("event", EngineEvent)
def test_nothing_happens_to_an_engine_that_has_stopped(event):
    life = lived(*WAY, EngineEvent.FAILURE, EngineEvent.EVERYTHING_STOPPED)
    with pytest.raises(TailraceError) as caught:
        life.step(event)
    assert caught.value.kind is Kind.ENGINE_MISUSED
    assert copy.copy(caught.value).message == caught.value.message


def test_the_error_lists_the_steps_before_it():
    with pytest.raises(TailraceError, match="it has stopped") as caught:
        lived(
            EngineEvent.RUN_CALLED,
            EngineEvent.FAILURE,
            EngineEvent.EVERYTHING_STOPPED,
            EngineEvent.CLOSE_CALLED,
        )
    story = "CREATING (run called) → INITIALIZING (failure) → STOPPING (everything stopped) → STOPPED"
    assert story in caught.value.message
    assert "create another" in caught.value.hint


def test_no_engine_runs_twice():
    with pytest.raises(TailraceError, match="it was started already"):
        lived(EngineEvent.RUN_CALLED, EngineEvent.RUN_CALLED)


@given(st.lists(st.sampled_from(EngineEvent), max_size=40))
def test_any_sequence_of_events_keeps_the_rules(events):
    life, seen = EngineLifecycle(), [State.CREATING]
    for event in events:
        try:
            life = life.step(event)
        except TailraceError:
            continue
        seen.append(life.state)
    order = list(State)
    # A state never comes back, and only the end is reached from anywhere.
    for before, after in itertools.pairwise(seen):
        assert after is before or order.index(after) == order.index(before) + 1 or after is State.STOPPING
    assert State.STOPPED not in seen or State.STOPPING in seen
    assert (life.ending is None) == (life.state not in (State.STOPPING, State.STOPPED)) or (
        life.state is State.STARTING_TASKS
    )
    assert len(life.steps) <= 20


def test_every_state_but_the_last_can_be_left():
    assert {state for state, _ in TRANSITIONS} == set(State) - {State.STOPPED}
