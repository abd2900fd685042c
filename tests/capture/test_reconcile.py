"""The start-up decision, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tailrace.errors import Kind, Policy, TailraceError
from tailrace.model import SourceFingerprint
from tailrace.sources.postgres.streaming.reconcile import (
    Action,
    CapturePhase,
    CaptureState,
    LogFacts,
    ServerState,
    SlotFacts,
    Start,
    decide,
)

POSITION = 5000
SLOT = SlotFacts(
    "pgoutput", "shop", temporary=False, active_pid=None, restart_lsn=4000, confirmed_flush_lsn=4900
)
SOURCE = ServerState("77", "shop", timeline=3, flush_lsn=9000, slot=SLOT)
FINGERPRINT = SourceFingerprint("postgresql", "77", "shop", "s")
STATE = CaptureState(CapturePhase.STREAMING, "77", 3, 100, 200)
LOG = LogFacts(FINGERPRINT, POSITION, STATE)
NEW = LogFacts(FINGERPRINT, 0, None)
BEGINNING = replace(STATE, phase=CapturePhase.BEGINNING)
UNFINISHED = LogFacts(FINGERPRINT, 0, BEGINNING)


def slot(**changes: object) -> ServerState:
    return replace(SOURCE, slot=replace(SLOT, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "log", "start"),
    [
        (replace(SOURCE, slot=None), NEW, Start(Action.FRESH)),
        (replace(SOURCE, slot=None), UNFINISHED, Start(Action.FRESH)),
        (slot(confirmed_flush_lsn=200), UNFINISHED, Start(Action.RESTART)),
        (
            slot(confirmed_flush_lsn=150),
            replace(UNFINISHED, state=replace(BEGINNING, consistent_point=0)),
            Start(Action.RESTART),
        ),
        (SOURCE, LOG, Start(Action.RESUME, POSITION)),
        (slot(confirmed_flush_lsn=POSITION), LOG, Start(Action.RESUME, POSITION)),
        (replace(SOURCE, flush_lsn=POSITION), LOG, Start(Action.RESUME, POSITION)),
        # the snapshot's end is in the log, so an older state file does not restart it
        (SOURCE, replace(LOG, state=BEGINNING), Start(Action.RESUME, POSITION)),
        (SOURCE, replace(LOG, state=None), Start(Action.RESUME, POSITION)),
        (replace(SOURCE, timeline=4, left_stored_timeline_at=POSITION), LOG, Start(Action.RESUME, POSITION)),
    ],
)
def test_a_matching_slot_and_log_go_on(source: ServerState, log: LogFacts, start: Start) -> None:
    assert decide(source, log, "initial") == start


@pytest.mark.parametrize(
    ("source", "log", "kind"),
    [
        (replace(SOURCE, system_identifier="78"), LOG, Kind.SOURCE_CHANGED),
        (replace(SOURCE, database="other"), LOG, Kind.SOURCE_CHANGED),
        (replace(SOURCE, system_identifier="78"), NEW, Kind.SOURCE_CHANGED),
        (replace(SOURCE, timeline=2), LOG, Kind.SOURCE_TIMELINE_CHANGED),
        (replace(SOURCE, timeline=4), LOG, Kind.SOURCE_TIMELINE_CHANGED),
        (
            replace(SOURCE, timeline=4, left_stored_timeline_at=POSITION - 1),
            LOG,
            Kind.SOURCE_TIMELINE_CHANGED,
        ),
        (replace(SOURCE, flush_lsn=POSITION - 1), LOG, Kind.SOURCE_BEHIND_LOG),
        (replace(SOURCE, slot=None), LOG, Kind.SLOT_MISSING),
        (replace(SOURCE, slot=None), replace(NEW, state=STATE), Kind.SLOT_MISSING),
        (SOURCE, replace(NEW, state=STATE), Kind.SLOT_AHEAD_OF_LOG),
        (SOURCE, NEW, Kind.SLOT_FOREIGN),
        (slot(confirmed_flush_lsn=201), UNFINISHED, Kind.SLOT_FOREIGN),
        (
            slot(confirmed_flush_lsn=99),
            replace(UNFINISHED, state=replace(BEGINNING, consistent_point=0)),
            Kind.SLOT_FOREIGN,
        ),
        (slot(plugin="wal2json"), LOG, Kind.SLOT_FOREIGN),
        (slot(database="other"), LOG, Kind.SLOT_FOREIGN),
        (slot(temporary=True), LOG, Kind.SLOT_FOREIGN),
        (slot(invalidation="wal_removed"), LOG, Kind.SLOT_INVALIDATED),
        (slot(confirmed_flush_lsn=POSITION + 1), LOG, Kind.SLOT_AHEAD_OF_LOG),
        (slot(restart_lsn=POSITION + 1), LOG, Kind.SLOT_AHEAD_OF_LOG),
        (slot(confirmed_flush_lsn=None), LOG, Kind.SLOT_AHEAD_OF_LOG),
        (slot(active_pid=42), LOG, Kind.SLOT_IN_USE),
        (slot(confirmed_flush_lsn=200, active_pid=42), UNFINISHED, Kind.SLOT_IN_USE),
    ],
)
def test_a_mismatch_has_its_own_error_with_a_hint(source: ServerState, log: LogFacts, kind: Kind) -> None:
    with pytest.raises(TailraceError) as raised:
        decide(source, log, "initial")
    assert raised.value.kind is kind
    assert raised.value.hint
    assert (raised.value.policy is Policy.RETRY) == (kind is Kind.SLOT_IN_USE)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (replace(SOURCE, slot=None), Kind.SLOT_MISSING),
        (slot(invalidation="wal_removed"), Kind.SLOT_INVALIDATED),
        (slot(confirmed_flush_lsn=POSITION + 1), Kind.SLOT_AHEAD_OF_LOG),
        (slot(confirmed_flush_lsn=None), Kind.SLOT_AHEAD_OF_LOG),
    ],
)
def test_when_needed_a_lost_slot_begins_again_in_the_same_log(source: ServerState, kind: Kind) -> None:
    start = decide(source, LOG, "when_needed")
    assert (start.action, start.position) == (Action.RENEW, POSITION)
    assert start.lost is not None
    assert start.lost.kind is kind
    assert decide(SOURCE, LOG, "when_needed") == Start(Action.RESUME, POSITION)
    assert decide(replace(SOURCE, slot=None), NEW, "when_needed") == Start(Action.FRESH)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        (replace(SOURCE, system_identifier="78"), Kind.SOURCE_CHANGED),
        (replace(SOURCE, flush_lsn=POSITION - 1, slot=None), Kind.SOURCE_BEHIND_LOG),
        (replace(SOURCE, timeline=4, slot=None), Kind.SOURCE_TIMELINE_CHANGED),
        (slot(plugin="wal2json"), Kind.SLOT_FOREIGN),
        (slot(confirmed_flush_lsn=POSITION + 1, active_pid=9), Kind.SLOT_IN_USE),
        (slot(active_pid=9), Kind.SLOT_IN_USE),
    ],
)
def test_when_needed_ignores_no_other_mismatch(source: ServerState, kind: Kind) -> None:
    with pytest.raises(TailraceError) as failure:
        decide(source, LOG, "when_needed")
    assert failure.value.kind is kind


@pytest.mark.parametrize(("flushed", "is_refused"), [(4000, True), (4500, True), (4501, False)])
def test_a_server_that_was_behind_the_log_is_taken_back_once_its_slot_was_advanced(
    flushed: int, is_refused: bool
) -> None:
    log = replace(LOG, state=replace(STATE, behind_at=4500))
    if not is_refused:
        assert decide(slot(confirmed_flush_lsn=flushed), log, "initial") == Start(Action.RESUME, POSITION)
        return
    with pytest.raises(TailraceError, match="at an earlier start") as failure:
        decide(slot(confirmed_flush_lsn=flushed), log, "when_needed")
    assert failure.value.kind is Kind.SOURCE_BEHIND_LOG


def test_a_standby_that_has_not_replayed_what_the_log_has_is_waited_for() -> None:
    with pytest.raises(TailraceError, match="the standby has replayed WAL up to") as failure:
        decide(replace(SOURCE, flush_lsn=POSITION - 1, standby=True), LOG, "initial")
    assert failure.value.policy is Policy.RETRY


def test_a_standby_without_the_slot_is_lost_changes_only_to_a_log_of_a_standby() -> None:
    standby = replace(SOURCE, slot=None, standby=True)
    with pytest.raises(TailraceError, match="is a standby without it") as failure:
        decide(standby, LOG, "when_needed")
    assert failure.value.policy is Policy.RETRY
    with pytest.raises(TailraceError) as failure:
        decide(standby, replace(LOG, state=replace(STATE, standby=True)), "initial")
    assert failure.value.kind is Kind.SLOT_MISSING


@pytest.mark.parametrize("temporary", [True, False])
def test_a_standby_that_follows_the_slot_of_its_primary_is_waited_for(temporary: bool) -> None:
    source = replace(slot(synced=True, temporary=temporary), standby=True)
    with pytest.raises(TailraceError, match="follows its primary's slot") as failure:
        decide(source, LOG, "when_needed")
    assert failure.value.policy is Policy.RETRY


def test_a_slot_in_use_names_the_process() -> None:
    with pytest.raises(TailraceError, match="42"):
        decide(slot(active_pid=42), LOG, "initial")


def test_snapshot_only_is_done_once_the_snapshot_is_in_the_log() -> None:
    assert decide(replace(SOURCE, slot=None), LOG, "only") == Start(Action.FINISHED, POSITION)


def test_the_state_is_written_and_read() -> None:
    state = replace(STATE, own_publication=True, behind_at=7)
    assert CaptureState.from_json(state.as_json()) == state
