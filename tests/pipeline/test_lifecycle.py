"""A pipeline's state as a function of its captures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import NEEDS_SNAPSHOT, Kind, TailraceError
from tailrace.pipeline.status.views import ENDED, PipelineState, state_at_end, state_while_running

_RUNNING = [PipelineState.STARTING, PipelineState.SNAPSHOT, PipelineState.STREAMING]
_PHASES = {
    "connecting": 0,
    "queued": 0,
    "snapshot": 1,
    "streaming": 2,
    "waiting_for_disk": None,
    "stopped": None,
}


@given(st.lists(st.sampled_from(sorted(_PHASES)), max_size=4), st.sampled_from(_RUNNING))
def test_a_pipelines_state_is_that_of_its_least_advanced_capture(phases, before):
    ranks = [rank for phase in phases if (rank := _PHASES[phase]) is not None]
    assert state_while_running(phases, before) is (_RUNNING[min(ranks)] if ranks else before)


@given(st.lists(st.one_of(st.none(), st.sampled_from(Kind)), max_size=4))
def test_how_it_ends_depends_on_its_worst_failure(kinds):
    state = state_at_end(None if kind is None else TailraceError(kind, "x") for kind in kinds)
    assert state in ENDED
    assert (state is PipelineState.STOPPED) == (not any(kinds))
    assert (state is PipelineState.NEEDS_SNAPSHOT) == (not NEEDS_SNAPSHOT.isdisjoint(kinds))
