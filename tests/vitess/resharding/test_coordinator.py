"""The coordinator of shards: what it does at one event, and what Debezium's connector with many tasks does
not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.resharding.coordinator import (
    JUNCTION_DEADLINE_S,
    JUNCTION_WAIT_S,
    Coordinator,
)
from tailrace.sources.vitess.resharding.events import (
    CancelStream,
    ChunkReached,
    ChunksGathered,
    Command,
    CopyCompleted,
    CopyPlanned,
    EndReason,
    JournalReached,
    Keep,
    ListShards,
    OpenStream,
    PositionReached,
    Probed,
    ProbeFailed,
    ShardsListed,
    ShardStreamEnded,
    SnapshotRequested,
)
from tailrace.sources.vitess.resharding.gtid_sets import TO_COPY
from tailrace.sources.vitess.resharding.refusals import BEHIND_MAX, PURGED_MAX, UNDESCRIBED_MAX
from tailrace.sources.vitess.resharding.shard_state import CopyChunk, CopyState, Journal, ShardState
from tailrace.sources.vitess.resharding.transitions import ShardMode
from tailrace.sources.vitess.streaming.capture_task import shard_warnings

ONE, TWO = "6a60d315-8e10-11eb-b894-04ed332e05c2", "629442b7-8e10-11eb-a0bb-04ed332e05c2"


def _gtid(last: int, server: str = ONE) -> str:
    return f"MySQL56/{server}:1-{last}"


def _running(*shards: str, tasks: Sequence[int] = (0,), at: int = 1) -> Coordinator:
    found = Coordinator({name: ShardState(_gtid(at)) for name in shards}, tasks)
    found.start()
    return found


def _opened(commands: Sequence[Command]) -> dict[str, OpenStream]:
    return {command.shard: command for command in commands if isinstance(command, OpenStream)}


def _kept(commands: Sequence[Command]) -> dict[str, ShardState]:
    return {
        name: state for found in commands if isinstance(found, Keep) for name, state in found.states.items()
    }


def _reach(found: Coordinator, shard: str, journal: Journal, last: int = 9) -> tuple[Command, ...]:
    return found.step(JournalReached(shard, found.shards[shard].attempt, journal, _gtid(last)))


def _end(found: Coordinator, shard: str, reason: EndReason, *participants: str) -> tuple[Command, ...]:
    return found.step(
        ShardStreamEnded(shard, found.shards[shard].attempt, reason, participants, "so it says")
    )


def _listed(found: Coordinator, *shards: str) -> tuple[Command, ...]:
    return found.step(ShardsListed(shards))


MERGE = Journal.of(5, ["-40", "40-80"], {"-80": _gtid(30, TWO)})


def test_w1_a_merge_across_tasks_is_followed() -> None:
    found = _running("-40", "40-80", "80-", tasks=(0, 1, 2))
    assert {found.shards[name].task for name in ("-40", "40-80")} == {0, 1}
    commands = _reach(found, "-40", MERGE)
    assert _kept(commands)["-40"].journal == MERGE
    assert not _opened(commands)
    assert any(isinstance(command, CancelStream) for command in commands)
    commands = _reach(found, "40-80", MERGE)
    # In one transaction of the log: both parents retire, and the child has its position.
    kept = _kept(commands)
    assert kept["-40"].children == kept["40-80"].children == ("-80",)
    assert kept["-80"] == ShardState(_gtid(30, TWO), 1, ("-40", "40-80"))
    assert _opened(commands)["-80"].positions == {"-80": _gtid(30, TWO)}


def test_w2_children_are_assigned_to_the_tasks() -> None:
    found = _running("0", tasks=(0, 1))
    commands = _reach(found, "0", Journal.of(5, ["0"], {"-80": _gtid(3), "80-": _gtid(4, TWO)}))
    assert sorted(opened.task for opened in _opened(commands).values()) == [0, 1]


def test_w3_another_number_of_tasks_moves_no_position() -> None:
    states = {name: ShardState(_gtid(number)) for number, name in enumerate(["-40", "40-80", "80-"], 1)}
    for tasks in range(1, 9):
        opened = _opened(Coordinator(states, range(tasks)).start())
        assert {name: stream.positions[name] for name, stream in opened.items()} == {
            name: state.gtid for name, state in states.items()
        }


def test_w7_w8_a_copy_is_recorded_at_each_position_and_ends_by_shard() -> None:
    found = Coordinator({})
    found.start()
    opened = _opened(_listed(found, "-80", "80-"))
    assert {(stream.positions[name], *stream.keys) for name, stream in opened.items()} == {(TO_COPY,)}
    attempt = found.shards["-80"].attempt
    found.step(PositionReached("-80", attempt, _gtid(3), {"a": "a1"}))
    found.step(CopyCompleted("-80", attempt))
    assert found.shards["-80"].state is ShardMode.STREAMING
    assert found.shards["80-"].state is ShardMode.COPYING


@pytest.mark.parametrize(
    ("reason", "times"),
    [(EndReason.PURGED, PURGED_MAX), (EndReason.UNDESCRIBED, UNDESCRIBED_MAX), (EndReason.UNSENT, 1)],
)
def test_w14_an_unusable_position_is_reported_and_only_its_keys_are_copied_again(
    reason: EndReason, times: int
) -> None:
    found = _running("-80", "80-")
    for _ in range(times):
        assert not found.needs_snapshot
        _end(found, "80-", reason)
    assert [str(part) for part in found.needs_snapshot] == ["80-"]
    assert [warning.key for warning in shard_warnings(found, {})] == ["shard_needs_snapshot 80-"]
    found.step(SnapshotRequested())
    commands = _listed(found, "-80", "80-")
    assert _opened(commands)["80-"].positions == {"80-": ""}
    assert _kept(commands)["80-"].copy == CopyState(is_again=True)
    assert _kept(commands)["80-"].epoch == 1
    assert "-80" not in _kept(commands)


def test_w16_epochs_rise_with_each_reshard() -> None:
    found = _running("0")
    _reach(found, "0", Journal.of(5, ["0"], {"-80": _gtid(3), "80-": _gtid(4)}))
    back = Journal.of(5, ["-80", "80-"], {"0": _gtid(40)})
    _reach(found, "-80", back)
    commands = _reach(found, "80-", back)
    assert _kept(commands)["0"].epoch == 2
    assert _kept(commands)["0"].parents == ("-80", "80-")


def test_a_lost_journal_is_read_in_one_stream_with_all_participants() -> None:
    found = _running("-40", "40-80", "80-")
    commands = _end(found, "-40", EndReason.PARTICIPANTS_ABSENT, "-40", "40-80")
    opened = _opened(commands)["-40"]
    assert opened.positions == {"-40": _gtid(1), "40-80": _gtid(1)}
    assert (opened.wait_s, opened.deadline_s) == (JUNCTION_WAIT_S, JUNCTION_DEADLINE_S)
    again = _opened(_end(found, "-40", EndReason.INTERRUPTED))["-40"]
    assert again.positions.keys() == opened.positions.keys()
    _reach(found, "-40", MERGE)
    _reach(found, "40-80", MERGE)
    assert found.shards["-80"].state is ShardMode.STREAMING


@pytest.mark.parametrize(
    ("reason", "mode"),
    [(EndReason.PURGED, ShardMode.STREAMING), (EndReason.UNSENT, ShardMode.NEEDS_SNAPSHOT)],
)
def test_in_one_stream_with_all_participants_only_a_failure_of_its_own_shard_loses_it(
    reason: EndReason, mode: ShardMode
) -> None:
    found = _running("-40", "40-80", "80-")
    _end(found, "-40", EndReason.PARTICIPANTS_ABSENT, "-40", "40-80")
    _end(found, "-40", reason)
    assert found.shards["-40"].state is mode


def test_events_of_a_stream_after_its_end_are_refused() -> None:
    found = _running("0")
    attempt = found.shards["0"].attempt
    _end(found, "0", EndReason.INTERRUPTED)
    assert not found.accepts("0", attempt)
    assert found.step(PositionReached("0", attempt, _gtid(7))) == ()
    assert found.shards["0"].kept.gtid == _gtid(1)


def test_after_missing_a_whole_reshard_key_ranges_are_reported_and_copied_on_request() -> None:
    found = _running("-80", "80-")
    assert isinstance(_end(found, "80-", EndReason.SHARD_UNKNOWN)[-1], ListShards)
    assert not _opened(_listed(found, "-80", "80-c0", "c0-"))
    assert [str(part) for part in found.needs_snapshot] == ["80-"]
    assert found.shards["-80"].state is ShardMode.STREAMING
    found.step(SnapshotRequested())
    commands = _listed(found, "-80", "80-c0", "c0-")
    assert _opened(commands).keys() == {"80-c0", "c0-"}
    assert _kept(commands)["80-"].children == ("80-c0", "c0-")
    assert not found.needs_snapshot


def test_a_shard_that_vtgate_does_not_know_for_a_moment_goes_on() -> None:
    found = _running("0")
    _end(found, "0", EndReason.SHARD_UNKNOWN)
    assert _opened(_listed(found, "0"))["0"].positions == {"0": _gtid(1)}


def test_the_same_journal_after_a_restart_is_followed_once() -> None:
    found = _running("-40", "40-80", "80-")
    kept = _kept(_reach(found, "-40", MERGE))
    again = Coordinator({name: kept.get(name, shard.kept) for name, shard in found.shards.items()})
    assert _opened(again.start()).keys() == {"40-80", "80-"}
    _reach(again, "40-80", MERGE)
    assert again.shards["-80"].state is ShardMode.STREAMING


def test_different_journals_with_one_id_are_distinguished() -> None:
    found = _running("-40", "40-80", "80-")
    later = Journal.of(MERGE.id, MERGE.participants, {"-80": _gtid(90, TWO)})
    _reach(found, "-40", MERGE)
    _reach(found, "40-80", later)
    assert "-80" not in found.shards
    assert [str(part) for part in found.needs_snapshot] == ["-80"]


def test_a_journal_that_omits_keys_is_refused() -> None:
    found = _running("0")
    with pytest.raises(TailraceError) as error:
        _reach(found, "0", Journal.of(5, ["0"], {"-80": _gtid(3)}))
    assert error.value.kind is Kind.PROTOCOL_VIOLATION


def test_a_list_of_shards_that_omits_keys_is_refused() -> None:
    found = Coordinator({})
    found.start()
    with pytest.raises(TailraceError) as error:
        _listed(found, "-40", "80-")
    assert error.value.kind is Kind.PROTOCOL_VIOLATION
    assert "40-80" in str(error.value)


@pytest.mark.parametrize(
    ("executed", "purged", "expected"),
    [
        (_gtid(5), "", []),  # nothing was written meanwhile
        (_gtid(9), _gtid(3), [CancelStream, OpenStream]),  # the stream hangs
        (_gtid(4), "", [CancelStream, OpenStream]),  # a tablet that is behind: another one may not be
        (_gtid(9), _gtid(7), [CancelStream, OpenStream]),  # purged: another tablet may have it
        (_gtid(9, TWO), "", [Keep, CancelStream]),  # another server
    ],
)
def test_a_silent_shard_is_asked_for_its_position(executed: str, purged: str, expected: list[Any]) -> None:
    found = _running("0", at=5)
    commands = found.step(Probed("0", found.shards["0"].attempt, executed, purged))
    assert [type(command) for command in commands] == expected


def test_a_shard_that_reports_a_purge_three_times_in_a_row_is_lost() -> None:
    found = _running("0", at=5)

    def answer(purged: str) -> None:
        found.step(Probed("0", found.shards["0"].attempt, _gtid(9), purged))

    # The second replica has what the first one has purged.
    for purged in (_gtid(7), _gtid(7), _gtid(3), _gtid(7), _gtid(7)):
        answer(purged)
        assert found.shards["0"].state is ShardMode.STREAMING
    answer(_gtid(7))
    assert found.shards["0"].state is ShardMode.NEEDS_SNAPSHOT
    assert "purged" in found.shards["0"].kept.lost


def _lag(found: Coordinator, shard: str, executed: str) -> Sequence[Command]:
    return found.step(Probed(shard, found.shards[shard].attempt, executed, ""))


def test_a_silent_shard_without_an_answer_is_reported_until_it_answers() -> None:
    found = _running("-80", "80-", at=5)
    before = found.shards["80-"].attempt
    commands = found.step(ProbeFailed("80-", before, "no healthy tablet"))
    # It is opened again, with nothing lost: events of the former stream no longer count.
    assert _opened(commands)["80-"].positions == {"80-": _gtid(5)}
    assert not found.accepts("80-", before)
    assert [warning.key for warning in shard_warnings(found, {})] == ["shard_delayed 80-"]
    assert found.step(ProbeFailed("80-", before, "no healthy tablet")) == ()
    found.step(Probed("80-", found.shards["80-"].attempt, _gtid(5), ""))
    assert not [*shard_warnings(found, {})]


def test_a_junction_stays_open_if_its_shard_does_not_answer() -> None:
    found = _running("-40", "40-80", "80-")
    _end(found, "-40", EndReason.PARTICIPANTS_ABSENT, "-40", "40-80")
    assert found.step(ProbeFailed("-40", found.shards["-40"].attempt, "it is being resharded")) == ()
    assert found.shards["-40"].state is ShardMode.JUNCTION


def test_a_shard_that_lacks_transactions_already_read_is_reported_and_only_its_keys_are_copied_again() -> (
    None
):
    found = _running("-80", "80-", at=5)
    for _ in range(BEHIND_MAX):
        assert not found.needs_snapshot
        _lag(found, "80-", _gtid(4))
    assert [str(part) for part in found.needs_snapshot] == ["80-"]
    (warning,) = shard_warnings(found, {})
    assert "lacks transactions" in warning.message
    assert "tailrace snapshot FILE --lost" in warning.repair
    assert found.waits_for_snapshot("80-", ["-80", "80-"])
    assert not found.waits_for_snapshot("-80", ["-80", "80-"])
    found.step(SnapshotRequested())
    assert not found.waits_for_snapshot("80-", ["-80", "80-"])
    assert _opened(_listed(found, "-80", "80-")).keys() == {"80-"}


def test_a_tablet_that_lags_is_no_loss() -> None:
    found = _running("0", at=5)
    _end(found, "0", EndReason.BEHIND)
    assert found.shards["0"].behind == 1  # its primary is asked
    for _ in range(BEHIND_MAX):
        _lag(found, "0", _gtid(5))
        assert found.shards["0"].behind == 0
        _lag(found, "0", _gtid(4))
    _lag(found, "0", _gtid(4))
    _end(found, "0", EndReason.BEHIND)
    assert found.step(PositionReached("0", found.shards["0"].attempt, _gtid(6)))
    assert (found.shards["0"].behind, found.shards["0"].state) == (0, ShardMode.STREAMING)


def test_serving_shards_wait_for_a_snapshot_only_once_none_of_their_sources_proceeds() -> None:
    found = _running("-40", "40-80", "80-")
    for _ in range(PURGED_MAX):
        _end(found, "-40", EndReason.PURGED)
    serving = ["-80", "80-"]
    assert not found.waits_for_snapshot("-80", serving)  # the other one goes on to its journal
    _reach(found, "40-80", MERGE)
    assert found.waits_for_snapshot("-80", serving)
    assert not found.waits_for_snapshot("80-", serving)


def test_a_capture_that_lags_behind_follows_two_reshards_in_a_row() -> None:
    found = _running("0")
    _reach(found, "0", Journal.of(1, ["0"], {"-80": _gtid(3), "80-": _gtid(4)}))
    _reach(found, "80-", Journal.of(2, ["80-"], {"80-c0": _gtid(5), "c0-": _gtid(6)}))
    across = Journal.of(3, ["-80", "80-c0"], {"-c0": _gtid(7)})
    _reach(found, "80-c0", across)
    assert [warning.key for warning in shard_warnings(found, {})] == ["shard_waits 80-c0"]
    _reach(found, "-80", across)
    read = {name for name, shard in found.shards.items() if shard.state is ShardMode.STREAMING}
    assert read == {"-c0", "c0-"}


# ------------------------------------------------------------------ copies by several streams

CHUNKS = (CopyChunk("a", "id", None, 5), CopyChunk("a", "id", 5), CopyChunk("b"))


def _copied() -> Coordinator:
    found = Coordinator({}, (0,))
    found.start()
    _listed(found, "0")
    found.step(CopyPlanned("0", found.shards["0"].attempt, CHUNKS))
    return found


def _chunk(found: Coordinator, number: int, last: int, key: str = "", *, is_done: bool = False) -> Any:
    event = ChunkReached("0", found.shards["0"].attempt, number, _gtid(last), key, is_done)
    return found.step(event)


def _restored(found: Coordinator) -> ShardState:
    """Return the state that a restart finds if a frame had the position of a chunk."""
    return ShardState.from_json({**found.shards["0"].kept.as_json(), "gtid": _gtid(99)})


def test_the_position_of_a_copy_in_chunks_is_that_of_the_chunk_least_far() -> None:
    found = _copied()
    _chunk(found, 0, 3)
    assert not found.shards["0"].kept.is_read, "a snapshot without rows in the log may be taken again"
    _chunk(found, 1, 7, "k1")
    _chunk(found, 0, 5, is_done=True)
    assert found.shards["0"].kept.gtid == _gtid(5)
    assert _restored(found) == found.shards["0"].kept
    # Some chunks are missing.
    again = Coordinator({"0": _restored(found)}, (0,))
    (opened,) = _opened(again.start()).values()
    assert opened.positions == {"0": TO_COPY}
    assert found.shards["0"].kept.copy is not None
    assert found.shards["0"].kept.copy.copied == frozenset()


def test_once_all_chunks_are_copied_one_stream_continues_at_the_first_ones_position() -> None:
    found = _copied()
    for number, last in enumerate((5, 9, 7)):
        _chunk(found, number, last, f"k{number}", is_done=True)
    commands = found.step(ChunksGathered("0", found.shards["0"].attempt, is_whole=True))
    (opened,) = _opened(commands).values()
    assert (dict(opened.positions), dict(opened.keys)) == ({"0": _gtid(5)}, {})
    assert found.shards["0"].kept.copy is None
    kept = _kept(commands)["0"]
    assert [(chunk.table, chunk.gtid) for chunk in kept.ahead] == [("a", _gtid(9)), ("b", _gtid(7))]
    assert ShardState.from_json(kept.as_json()) == kept
    assert not found.is_whole
    for last, ahead in ((6, ["a", "b"]), (7, ["a"]), (9, [])):
        found.step(PositionReached("0", found.shards["0"].attempt, _gtid(last)))
        assert [chunk.table for chunk in found.shards["0"].kept.ahead] == ahead
    assert found.is_whole


@pytest.mark.parametrize("is_ended", [True, False])
def test_after_a_journal_during_the_copy_of_chunks_one_stream_continues_the_copy(is_ended: bool) -> None:
    found = _copied()
    _chunk(found, 0, 5, "k0")
    _chunk(found, 1, 9, "k1", is_done=True)
    _chunk(found, 2, 7, "k2", is_done=True)
    if is_ended:
        commands = _end(found, "0", EndReason.PARTICIPANTS_ABSENT, "0", "1")
    else:
        commands = found.step(ChunksGathered("0", found.shards["0"].attempt))
    (opened,) = _opened(commands).values()
    assert (opened.positions["0"], dict(opened.keys)) == (_gtid(5), {"a": "k0", "b": "k2"})
    kept = found.shards["0"].kept
    assert (kept.ahead, kept.copy) == ((), CopyState({"a": "k0", "b": "k2"}, frozenset("b")))


def test_a_table_whose_later_chunk_alone_was_begun_continues_from_a_key_before_all_rows() -> None:
    copy = CopyState(chunks=(CHUNKS[0], CopyChunk("a", "id", 5, gtid=_gtid(5), key="k1", is_done=True)))
    found = copy.by_one_stream(lambda keys: f"before {keys[0]}" if None in keys else None)
    assert found == CopyState({"a": "before k1"})


def test_a_copy_without_rows_in_the_log_is_planned_again() -> None:
    found = _copied()
    _chunk(found, 0, 3)
    _end(found, "0", EndReason.INTERRUPTED)
    kept = found.shards["0"].kept
    assert (kept.gtid, kept.copy) == ("", CopyState())
