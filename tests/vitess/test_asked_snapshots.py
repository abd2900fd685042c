"""Requested snapshots, between a capture and a fake vtgate: real gRPC, a real log."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.protocol import frames
from tailrace.protocol.metadata_frames import kept_frames
from tailrace.sources.vitess.connection import vstream_pb2 as pb
from tailrace.sources.vitess.rows.copy_keys import before_all, common_key, key_text, some_key
from tailrace.sources.vitess.snapshots import VitessSnapshots
from tests.support.vitess.capturing import Capturing, capturing
from tests.support.vitess.end_to_end import pipeline_file, tailrace
from tests.support.vitess.fake_vtgate import TABLE, FakeVtgate
from tests.support.wait import wait_until

WHOLE = f"shop.{TABLE}"


def _wait_for_end(at: Path, state: str = "done") -> None:
    snapshots = VitessSnapshots(at / "log")
    wait_until(lambda: snapshots.known()[-1]["state"] in ("done", "failed"), 30, "the snapshot's end")
    assert snapshots.known()[-1]["state"] == state, snapshots.known()
    assert not snapshots.is_request_open


def _read_from(found: Capturing) -> int:
    in_force = dict(kept_frames(found.frames()))
    (facts,) = [frame for key, frame in in_force.items() if key.startswith("F")]
    return int(frames.control_json(facts).get("read_from", 0))


@pytest.mark.slow
def test_a_table_is_read_again_in_all_shards_while_its_changes_go_on(tmp_path: Path) -> None:
    with FakeVtgate("-80", "80-") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("-80", "80-")
        for key in range(10):
            vtgate.write("-80" if key % 2 else "80-", (key, 0))
        found.wait_for_rows(10)
        VitessSnapshots(tmp_path / "log").request([WHOLE], "")
        for key in range(10):
            vtgate.write("-80" if key % 2 else "80-", (key, 1))
        _wait_for_end(tmp_path)
        found.wait_for_shards("-80", "80-")
        for key in range(10):
            vtgate.write("-80" if key % 2 else "80-", (key, 2))
        found.wait_for_rows(40)
        assert _read_from(found) > 0
    ops = Counter(change.op for change in found.changes())
    assert ops["r"] == 10
    for counters in found.counters().values():
        # A row is read as its newest change left it; no change is lost or undone.
        assert counters == sorted(counters)
        assert set(counters) == {0, 1, 2}


@pytest.mark.slow
def test_only_the_keys_of_a_lost_shard_are_copied_again(tmp_path: Path) -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("-80", "80-")
            vtgate.write("-80", (1, 0))
            vtgate.write("80-", (2, 0))
            found.wait_for_rows(2)
        vtgate.write("80-", (2, 1))
        vtgate.reshard(["80-"], ["80-c0", "c0-"])
        vtgate.change("80-c0", rows={})
        vtgate.complete("80-")
        with capturing(tmp_path, vtgate.address) as found:
            wait_until(lambda: found.shards().get("80-") == "needs_snapshot", 30)
            (warning,) = found.capture.progress().warnings
            assert "tailrace snapshot FILE --lost" in warning.repair
            VitessSnapshots(tmp_path / "log").request([], "")
            _wait_for_end(tmp_path)
            found.wait_for_shards("-80", "80-c0", "c0-")
            vtgate.write("c0-", (2, 2))
            vtgate.write("-80", (1, 1))
            wait_until(lambda: found.counters().get(2, [])[-1:] == [2], 30)
            wait_until(lambda: found.counters()[1] == [0, 1], 30)
            # Rows of the other keys were not read again: it is unknown which rows are gone.
            assert _read_from(found) == 0
            assert not found.capture.progress().warnings
    assert found.counters() == {1: [0, 1], 2: [0, 1, 2]}
    assert Counter(change.op for change in found.changes())["r"] == 1
    assert found.states()["80-"].children == ("80-c0", "c0-")


@pytest.mark.parametrize("snapshot", ["initial", "never"])
@pytest.mark.slow
def test_a_shard_that_is_gone_at_the_next_start_needs_a_snapshot_even_if_it_was_caught_up(
    tmp_path: Path, snapshot: str
) -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        vtgate.write("80-", (2, 0))
        with capturing(tmp_path, vtgate.address, snapshot=snapshot) as found:
            now = time.time_ns() // 1000
            wait_until(lambda: found.capture.caught_up(now), 30)
        vtgate.reshard(["80-"], ["80-c0", "c0-"])
        vtgate.complete("80-")
        with capturing(tmp_path, vtgate.address, snapshot=snapshot) as found:
            found.wait_for_mode("needs_snapshot", "80-")


@pytest.mark.slow
def test_after_all_keys_were_copied_again_a_mirror_learns_which_rows_are_gone(tmp_path: Path) -> None:
    with FakeVtgate("0") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("0")
            vtgate.write("0", (1, 0), (2, 0))
            found.wait_for_rows(2)
        vtgate.write("0", (1, 1))
        vtgate.change("0", purged=len(vtgate.shards["0"].binlog), rows={1: 1})
        with capturing(tmp_path, vtgate.address) as found:
            wait_until(lambda: found.shards().get("0") == "needs_snapshot", 30)
        asked = VitessSnapshots(tmp_path / "log").request([], "")
        assert not asked["engine_runs"]
        with capturing(tmp_path, vtgate.address) as found:
            wait_until(lambda: found.counters()[1] == [0, 1], 60)
            found.wait_for_shards("0")
            wait_until(lambda: _read_from(found) > 0, 30)
    assert found.counters() == {1: [0, 1], 2: [0]}


@pytest.mark.slow
def test_a_request_made_while_nothing_runs_is_taken_and_kept_over_a_restart(tmp_path: Path) -> None:
    with FakeVtgate("0") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("0")
            vtgate.write("0", *((key, 0) for key in range(20)))
            found.wait_for_rows(20)
        VitessSnapshots(tmp_path / "log").request([WHOLE], "")
        file = pipeline_file(tmp_path, vtgate, TABLE)
        assert f"    {WHOLE}: 0 rows" in tailrace("snapshot", file, "--list").splitlines()
        assert VitessSnapshots(tmp_path / "log").known()[-1]["state"] == "waiting"
        with capturing(tmp_path, vtgate.address) as found:
            _wait_for_end(tmp_path)
        # The number of rows is not counted, so none is shown.
        assert f"    {WHOLE}" in tailrace("snapshot", file, "--list").splitlines()
        assert VitessSnapshots(tmp_path / "log").known()[-1]["tables"][0]["rows"] is None
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("0")
    assert found.counters() == {key: [0, 0] for key in range(20)}


@pytest.mark.slow
def test_a_request_for_an_unreadable_table_fails_alone(tmp_path: Path) -> None:
    with FakeVtgate("0") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("0")
        snapshots = VitessSnapshots(tmp_path / "log")
        snapshots.request(["shop.nothing"], "")
        _wait_for_end(tmp_path, "failed")
        assert [warning.key for warning in snapshots.warnings] == [
            f"snapshot_failed:{snapshots.known()[-1]['id']}"
        ]
        with pytest.raises(TailraceError) as refused:
            snapshots.request([WHOLE], "id > 5")
        assert refused.value.kind is Kind.CONFIG_INVALID
        vtgate.write("0", (1, 0))
        found.wait_for_rows(1)
        snapshots.request([WHOLE], "")
        _wait_for_end(tmp_path)
        assert not snapshots.warnings


def _key(*values: str, kinds: tuple[int, ...] = (265,)) -> str:
    row = pb.Row(lengths=[len(value) for value in values], values="".join(values).encode())
    return key_text("t", pb.QueryResult(fields=[pb.Field(type=kind) for kind in kinds], rows=[row]))


def test_the_copy_of_a_merged_shard_continues_after_the_key_that_all_parents_had() -> None:
    assert common_key([_key("9"), _key("10"), _key("11")]) == _key("9")
    assert common_key([_key("2", "9", kinds=(265, 265)), _key("2", "10", kinds=(265, 265))]) == _key(
        "2", "9", kinds=(265, 265)
    )
    assert common_key([None, None]) is None


def test_if_the_order_of_keys_is_unknown_all_rows_are_copied_again() -> None:
    assert common_key([_key("b", kinds=(6165,)), _key("a", kinds=(6165,))]) == _key("", kinds=(6165,))
    assert common_key([_key("9"), None]) == _key(str(-(1 << 63)))
    assert common_key([_key("9", kinds=(778,)), None]) == _key("-1", kinds=(778,))


def test_a_type_without_a_least_value_has_no_key_before_all_rows() -> None:
    assert before_all([pb.Field(type=2073)]) is None


def test_later_key_columns_have_values_of_types_that_mysql_can_compare() -> None:
    kinds = (265, 2062, 2063, 2064, 2061, 18, 6165)
    found = before_all([pb.Field(type=kind) for kind in kinds])
    assert found is not None
    texts = ["-9223372036854775808", "2000-01-01", "00:00:00", "2000-01-01", "2000-01-01", "0", ""]
    assert found.rows[0].lengths == list(map(len, texts))
    assert found.rows[0].values.decode() == "".join(texts)
    assert some_key([pb.Field(type=2062)]).rows[0].values == b"2000-01-01"
