"""The state of shards in the log, and its size."""

from __future__ import annotations

import json

import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.protocol import frames, metadata_frames
from tailrace.sources.vitess.resharding.shard_state import (
    VERSION,
    Begun,
    CopyChunk,
    CopyState,
    Journal,
    ShardState,
    inherited_copy,
)

GTID = "MySQL56/6a60d315-8e10-11eb-b894-04ed332e05c2:1-7731245"
JOURNAL = Journal.of(7, ["80-c0", "-80"], {"-c0": GTID})

STATES = {
    "streamed": ShardState(GTID),
    "begun": ShardState("", copy=CopyState(), begun=Begun.COPY),
    "at the newest position": ShardState("current", begun=Begun.POSITION),
    "copied": ShardState(GTID, copy=CopyState({"a": "k1", "b": "k2"}, frozenset({"a"}), is_again=True)),
    "of a reshard": ShardState(GTID, 2, ("-80", "80-c0")),
    "at a journal": ShardState(GTID, 1, ("0",), journal=JOURNAL),
    "retired": ShardState(GTID, 1, ("0",), children=("-c0",)),
    "lost": ShardState(GTID, lost="it is gone"),
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_a_state_is_read_as_it_was_written(state: ShardState) -> None:
    frame = frames.shard_frame("-80", state.as_json())
    in_force = {"S-80": frame}
    assert ShardState.from_json(metadata_frames.shard_states(in_force)["-80"]) == state
    assert hash(ShardState.from_json(json.loads(json.dumps(state.as_json())))) == hash(state)


def test_a_state_of_a_later_version_is_refused() -> None:
    with pytest.raises(TailraceError) as found:
        ShardState.from_json({"v": VERSION + 1, "gtid": GTID})
    assert found.value.kind is Kind.LOG_FORMAT_UNKNOWN


def test_a_state_with_chunks_has_a_version_that_older_readers_refuse() -> None:
    chunk = CopyChunk("apples", "id", None, 7, GTID, is_done=True)
    copied, ahead = ShardState(GTID, copy=CopyState(chunks=(chunk,))), ShardState(GTID, ahead=(chunk,))
    assert [state.as_json()["v"] for state in (ShardState(GTID), copied, ahead)] == [1, 2, 2]
    assert [ShardState.from_json(state.as_json()) for state in (copied, ahead)] == [copied, ahead]


def test_a_change_of_one_shard_of_a_thousand_writes_only_that_shard() -> None:
    one = len(frames.shard_frame("7f80-7fc0", ShardState(GTID, 3, ("7f80-8000",)).as_json()))
    assert one < 200
    # What the head of a segment repeats for a thousand shards, each of which resulted from a reshard.
    assert 1000 * one < 200_000


def test_w5_between_two_tables_the_copy_is_not_complete() -> None:
    copy = CopyState().after({"a": "a9"}).after({})
    state = ShardState(GTID, copy=copy)
    assert copy.done == {"a"}
    assert state.request == (GTID, {"a": "a9"})


def test_w6_a_finished_table_is_not_copied_again() -> None:
    copy = CopyState().after({"a": "a9"}).after({"b": "b3"})
    assert copy.done == {"a"}
    assert ShardState(GTID, copy=copy).request == (GTID, {"a": "a9", "b": "b3"})


def test_w4_the_state_of_a_copy_is_part_of_the_shards_state() -> None:
    kept = ShardState(GTID, copy=CopyState({"a": "a9"}))
    assert ShardState.from_json(kept.as_json()).request == (GTID, {"a": "a9"})


def test_a_state_that_repeats_the_keys_of_its_position_is_read() -> None:
    copy = {"keys": {"a": "a9"}, "done": []}
    before = {"v": 1, "gtid": GTID, "table_pks": ["a9"], "copy": copy}  # as older versions wrote it
    assert ShardState.from_json(before).request == (GTID, {"a": "a9"})


def test_a_copy_without_a_known_key_begins_again() -> None:
    assert ShardState(GTID, copy=CopyState()).request == ("", {})
    assert ShardState(GTID).request == (GTID, {})


def test_a_child_continues_its_parents_copy() -> None:
    whole = ShardState(GTID)
    half = ShardState(GTID, copy=CopyState({"a": "a9", "b": "b3"}, frozenset({"a"})))
    other = ShardState(GTID, copy=CopyState({"a": "a9", "b": "b7"}, frozenset({"a"})))
    assert inherited_copy([whole, whole]) is None
    assert inherited_copy([half]) == half.copy
    assert inherited_copy([half, whole]) == half.copy
    # If the parents differ, the table is copied from its start.
    assert inherited_copy([half, other]) == CopyState({"a": "a9"}, frozenset({"a"}))
    assert inherited_copy([half, ShardState("", copy=CopyState())]) == CopyState()
