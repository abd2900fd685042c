"""The engine's life as a table, and the waits between attempts."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.engine.backoff import Backoff
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline.status.lifecycle import (
    TRANSITIONS,
    IllegalPipelineTransition,
    PipelineEvent,
    PipelineLifecycle,
    PipelineState,
    toward,
)


def lived(*events):
    life = PipelineLifecycle()
    for event in events:
        life = life.step(event)
    return life


def test_a_first_run_takes_a_snapshot_streams_and_stops():
    life = lived(PipelineEvent.SNAPSHOT_BEGAN, PipelineEvent.STREAM_BEGAN)
    assert life.state is PipelineState.STREAMING
    life = life.step(PipelineEvent.STOP_CALLED)
    assert not life.is_running
    assert life.step(PipelineEvent.EVERYTHING_STOPPED).state is PipelineState.STOPPED


def test_a_failure_stops_everything_before_it_is_called_failed():
    life = lived(PipelineEvent.STREAM_BEGAN, PipelineEvent.FAILURE)
    assert life.state is PipelineState.STOPPING
    assert life.step(PipelineEvent.EVERYTHING_STOPPED).state is PipelineState.FAILED


def test_a_failure_while_stopping_is_not_forgotten():
    assert (
        lived(PipelineEvent.STOP_CALLED, PipelineEvent.FAILURE, PipelineEvent.EVERYTHING_STOPPED).state
        is PipelineState.FAILED
    )


def test_an_illegal_move_tells_its_story_also_after_pickling():
    with pytest.raises(IllegalPipelineTransition) as caught:
        lived(PipelineEvent.STREAM_BEGAN, PipelineEvent.SNAPSHOT_BEGAN)
    told = str(pickle.loads(pickle.dumps(caught.value)))  # noqa: S301
    assert told == (
        "the engine is streaming: SNAPSHOT_BEGAN is not allowed here "
        "(story: starting+STREAM_BEGAN -> streaming+SNAPSHOT_BEGAN)"
    )


@given(st.lists(st.sampled_from(PipelineEvent), max_size=40))
def test_no_order_of_events_leads_out_of_the_table(events):
    life = PipelineLifecycle()
    for event in events:
        if (life.state, event) in TRANSITIONS:
            life = life.step(event)
        else:
            with pytest.raises(IllegalPipelineTransition):
                life.step(event)
    assert life.state is not PipelineState.STOPPED or not life.failed
    assert life.state is not PipelineState.FAILED or life.failed


_PHASES = ("connecting", "queued", "snapshot", "streaming", "waiting_for_disk", "stopped")


@given(st.lists(st.lists(st.sampled_from(_PHASES), min_size=3, max_size=3), max_size=30))
def test_the_engine_follows_the_least_advanced_of_its_sources(looks):
    life = PipelineLifecycle()
    for phases in looks:
        for _ in range(2):  # a look that missed a step takes two
            if (event := toward(life.state, phases)) is not None:
                life = life.step(event)
        assert toward(life.state, phases) is None
        ranks = [PipelineState.STARTING, PipelineState.SNAPSHOT, PipelineState.STREAMING]
        meant = {"connecting": 0, "queued": 0, "snapshot": 1, "streaming": 2}
        known = [meant[phase] for phase in phases if phase in meant]
        assert not known or life.state is ranks[min(known)]


def test_waits_double_to_a_bound_and_end():
    passing, waits = TailraceError(Kind.SINK_WRITE_FAILED, "x"), []
    backoff = Backoff(7, first_s=1, longest_s=10)
    while True:
        backoff, wait_s = backoff.after(passing)
        if wait_s is None:
            break
        waits.append(wait_s)
    assert waits == [1, 2, 4, 8, 10, 10, 10]
    assert backoff.after_success().after(passing)[1] == 1


def test_what_a_person_must_repair_is_not_tried_again():
    assert Backoff(7).after(TailraceError(Kind.SINK_FOREIGN, "x"))[1] is None
