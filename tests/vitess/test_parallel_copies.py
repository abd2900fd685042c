"""Copies by several streams at the same time, through a whole capture: interrupted, and resharded."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tailrace.sources.vitess.streaming import copy_plan, shard_copies, silent_shards
from tests.support.vitess.capturing import Capturing, capturing
from tests.support.vitess.fake_vtgate import KEYSPACE, TABLE, FakeVtgate
from tests.support.wait import wait_until

KEYS = 60


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_plan, "RANGE_ROWS_MIN", 5)


def _filters(vtgate: FakeVtgate) -> list[str]:
    return [
        rule.filter for request in vtgate.requests for rule in request.filter.rules if rule.match == TABLE
    ]


def _filled(*shards: str) -> FakeVtgate:
    vtgate = FakeVtgate(*shards)
    for place, shard in enumerate(shards):
        vtgate.shards[shard].rows = dict.fromkeys(range(KEYS * place, KEYS * place + KEYS), 0)
    return vtgate


def _all_last(found: Capturing) -> dict[int, int]:
    """Return the counter of the newest change of each key."""
    return {key: counters[-1] for key, counters in found.counters().items()}


def _assert_exact(found: Capturing, rows: Mapping[int, int]) -> None:
    """Check that each row was read once, and each later change of it comes once, in order."""
    by_key: dict[int, list[tuple[str, int]]] = {}
    for change in found.changes():
        by_key.setdefault(int(change.row["id"] or 0), []).append((change.op, int(change.row["counter"] or 0)))
    for key, counter in rows.items():
        ops = [op for op, _ in by_key[key]]
        assert ops.count("r") == 1, (key, by_key[key])
        at = ops.index("r")
        read = by_key[key][at][1]
        assert [value for _, value in by_key[key][at:]] == list(range(read, counter + 1)), (key, by_key[key])
        before = [value for _, value in by_key[key][:at]]
        assert before == list(range(read + 1 - len(before), read + 1)), (key, by_key[key])


def _assert_whole(found: Capturing, *transactions: Sequence[tuple[int, int]]) -> None:
    """Check that the log has the rows of a transaction, besides rows that were read, as one transaction."""
    changes = [change for change in found.changes() if change.op != "r"]
    for written in transactions:
        places = {
            change.position
            for change in changes
            if (int(change.row["id"] or 0), int(change.row["counter"] or 0)) in written
        }
        assert len(places) <= 1, (written, places)


@pytest.mark.slow
def test_ranges_are_copied_in_parallel_and_one_stream_continues(tmp_path: Path) -> None:
    with _filled("0") as vtgate:
        vtgate.change("0", allowed=4)
        with capturing(tmp_path, vtgate.address, snapshot="initial") as found:
            found.wait_for_rows(0)
            wait_until(lambda: vtgate.open_streams == 4, 30)
            for number in range(1, 4):
                vtgate.write("0", *((key, number) for key in range(0, KEYS, 7)))
                vtgate.change("0", allowed=10 * number)
            vtgate.change("0", allowed=None)
            found.wait_for_shards("0")
            vtgate.write("0", (7, 4))
            wait_until(lambda: _all_last(found) == vtgate.shards["0"].rows, 30, "all changes")
            wait_until(lambda: vtgate.open_streams == 1, 30)
        assert sorted(_filters(vtgate)) == [
            f"select * from `{TABLE}` where `id` < 15",
            f"select * from `{TABLE}` where `id` >= 15 and `id` < 30",
            f"select * from `{TABLE}` where `id` >= 30 and `id` < 45",
            f"select * from `{TABLE}` where `id` >= 45",
        ]
        _assert_exact(found, vtgate.shards["0"].rows)


@pytest.mark.parametrize("questions", [1, 2, 4])
@pytest.mark.slow
def test_queries_during_a_switch_of_traffic_are_repeated(tmp_path: Path, questions: int) -> None:
    with _filled("-80", "80-") as vtgate:
        vtgate.change("80-", switching=questions)
        with capturing(tmp_path, vtgate.address, snapshot="initial") as found:
            found.wait_for_shards("-80", "80-")
            rows = vtgate.shards["-80"].rows | vtgate.shards["80-"].rows
            wait_until(lambda: _all_last(found) == rows, 30, "all rows")
        assert vtgate.shards["80-"].switching == 0
        _assert_exact(found, rows)


@pytest.mark.parametrize("lost", [1, 4])
@pytest.mark.slow
def test_the_copy_of_a_range_without_rows_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    monkeypatch.setattr(shard_copies, "ROWLESS_S", 2.0)
    with _filled("0") as vtgate:
        vtgate.change("0", lost_copies=lost)
        with capturing(tmp_path, vtgate.address, snapshot="initial") as found:
            found.wait_for_shards("0")
            wait_until(lambda: _all_last(found) == vtgate.shards["0"].rows, 30, "all rows")
        assert len([each for each in _filters(vtgate) if each]) == 4 + lost
        _assert_exact(found, vtgate.shards["0"].rows)


@pytest.mark.parametrize("cuts", [(7,), (20, 15), (35, 5, 9), (63,)])
@pytest.mark.slow
def test_a_copy_of_ranges_continues_where_it_was_interrupted(tmp_path: Path, cuts: Sequence[int]) -> None:
    with _filled("0") as vtgate:
        counters = itertools.count(1)
        for cut in cuts:
            vtgate.change("0", allowed=cut)
            with capturing(tmp_path, vtgate.address, snapshot="initial") as found:
                wait_until(lambda: vtgate.shards["0"].allowed == 0, 30, "the cut")
            vtgate.write("0", *((key, next(counters)) for key in (0,)))
            vtgate.write("0", *((key, vtgate.shards["0"].rows[key] + 1) for key in range(3, KEYS, 5)))
        vtgate.change("0", allowed=None)
        with capturing(tmp_path, vtgate.address, snapshot="initial") as found:
            found.wait_for_shards("0")
            vtgate.write("0", (59, vtgate.shards["0"].rows[59] + 1))
            vtgate.write("0", (0, next(counters)))
            wait_until(lambda: _all_last(found) == vtgate.shards["0"].rows, 30, "all changes")
        _assert_exact(found, vtgate.shards["0"].rows)
        assert found.states()["0"].ahead == ()


@pytest.mark.parametrize("cuts", [(7,), (20, 15)])
@pytest.mark.slow
def test_an_interrupted_copy_of_negative_keys_is_continued(tmp_path: Path, cuts: Sequence[int]) -> None:
    keys = range(-KEYS, KEYS // 2)
    with FakeVtgate("0") as vtgate:
        vtgate.shards["0"].rows = dict.fromkeys(keys, 0)
        for cut in cuts:
            vtgate.change("0", allowed=cut)
            with capturing(tmp_path, vtgate.address, snapshot="initial") as found:
                wait_until(lambda: vtgate.shards["0"].allowed == 0, 10, "the cut")
            vtgate.write("0", *((key, vtgate.shards["0"].rows[key] + 1) for key in keys[::5]))
        vtgate.change("0", allowed=None)
        with capturing(tmp_path, vtgate.address, snapshot="initial") as found:
            found.wait_for_shards("0")
            vtgate.write("0", (-1, vtgate.shards["0"].rows[-1] + 1))
            wait_until(lambda: _all_last(found) == vtgate.shards["0"].rows, 30, "all changes")
        _assert_exact(found, vtgate.shards["0"].rows)


@pytest.mark.parametrize("cuts", [(7,), (20, 15), (35, 5, 9), (63,)])
@pytest.mark.slow
def test_a_transaction_is_complete_although_the_copy_was_interrupted(
    tmp_path: Path, cuts: Sequence[int]
) -> None:
    with _filled("0") as vtgate:
        written: list[list[tuple[int, int]]] = []
        for number, cut in enumerate(cuts, 1):
            vtgate.change("0", allowed=cut)
            with capturing(tmp_path, vtgate.address, snapshot="initial") as found:
                wait_until(lambda: vtgate.shards["0"].allowed == 0, 30, "the cut")
            written += [[(key, 100 * number + place) for key in range(KEYS)] for place in range(3)]
            for changes in written[-3:]:
                vtgate.write("0", *changes)
        vtgate.change("0", allowed=None)
        with capturing(tmp_path, vtgate.address, snapshot="initial") as found:
            found.wait_for_shards("0")
            vtgate.write("0", (59, 1000))
            wait_until(lambda: _all_last(found) == vtgate.shards["0"].rows, 30, "all changes")
        _assert_whole(found, *written)


@pytest.mark.slow
def test_a_copy_that_is_interrupted_too_often_is_continued_by_one_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_plan, "PARTS_MAX", 0)
    with _filled("0") as vtgate:
        vtgate.change("0", allowed=20)
        with capturing(tmp_path, vtgate.address, snapshot="initial") as found:
            found.wait_for_rows(12)
        vtgate.write("0", *((key, 1) for key in range(3, KEYS, 5)))
        vtgate.change("0", allowed=None)
        with capturing(tmp_path, vtgate.address, snapshot="initial") as found:
            found.wait_for_shards("0")
            vtgate.write("0", (59, 1))
            wait_until(lambda: _all_last(found) == vtgate.shards["0"].rows, 30, "all changes")
        assert len(_filters(vtgate)) == 4


@pytest.mark.parametrize("allowed", [1, 6, 20, 50])
@pytest.mark.slow
def test_a_reshard_while_ranges_are_copied_leaves_every_row_right(tmp_path: Path, allowed: int) -> None:
    with _filled("0") as vtgate:
        vtgate.change("0", allowed=0)
        with capturing(tmp_path, vtgate.address, snapshot="initial") as found:
            wait_until(lambda: vtgate.open_streams == 4, 30)
            vtgate.change("0", allowed=allowed)
            vtgate.write("0", *((key, 1) for key in range(0, KEYS, 7)))
            vtgate.reshard(["0"], ["-80", "80-"])
            vtgate.change("0", allowed=None)
            found.wait_for_shards("-80", "80-", timeout_s=90)
            vtgate.write("-80", (7, 2))
            vtgate.write("80-", (8, 1))
            rows = vtgate.shards["0"].rows | {7: 2, 8: 1}
            wait_until(lambda: _all_last(found) == rows, 30, "all changes")


@pytest.mark.parametrize(("release", "connections", "filters"), [(21, 4, 1), (22, 1, 0), (22, 2, 2)])
@pytest.mark.slow
def test_ranges_are_used_only_with_servers_that_support_them(
    tmp_path: Path, release: int, connections: int, filters: int
) -> None:
    with _filled("0") as vtgate:
        vtgate.release = release
        with capturing(
            tmp_path, vtgate.address, snapshot="initial", snapshot_connections=connections
        ) as found:
            found.wait_for_shards("0")
        assert len(_filters(vtgate)) == filters
        assert all("where" in each for each in _filters(vtgate)) == (release >= 22)
        assert Counter(change.op for change in found.changes()) == {"r": KEYS}


@pytest.mark.parametrize(("connections", "tells_position_first"), [(1, False), (1, True), (4, True)])
@pytest.mark.slow
def test_a_copy_whose_first_row_takes_longer_than_the_silence_timeout_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections: int, tells_position_first: bool
) -> None:
    monkeypatch.setattr(silent_shards, "PROBE_S", 0.3)
    monkeypatch.setattr(shard_copies, "ROWLESS_S", 0.3)
    with FakeVtgate("0") as vtgate:
        vtgate.write("0", *((key, 0) for key in range(9)))
        vtgate.change("0", sorts_s=600.0, tells_position_first=tells_position_first)
        settings = {"snapshot": "initial", "snapshot_connections": connections}
        with capturing(tmp_path, vtgate.address, **settings) as found:
            wait_until(lambda: len(vtgate.requests) > 1, 30, "an attempt too short")
            vtgate.change("0", sorts_s=1.0)
            vtgate.write("0", (9, 0))  # so that its position stays the same
            found.wait_for_rows(10, 90)
            found.wait_for_shards("0")
        assert _all_last(found) == vtgate.shards["0"].rows


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.slow
def test_a_shard_without_a_table_is_streamed_from_its_position(tmp_path: Path, connections: int) -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        vtgate.change("80-", has_table=False)
        vtgate.write("-80", (1, 0))
        settings = {"snapshot": "initial", "snapshot_connections": connections}
        with capturing(tmp_path, vtgate.address, **settings) as found:
            found.wait_for_shards("-80", "80-", timeout_s=10)
            asked_us = time.time_ns() // 1000
            wait_until(lambda: found.capture.caught_up(asked_us), 10, "all is there")
            vtgate.change("80-", has_table=True)
            vtgate.write("80-", (2, 0))
            found.wait_for_rows(2)
            assert not found.capture.progress().warnings
        assert [(change.op, change.row["id"]) for change in found.changes()] == [("r", "1"), ("c", "2")]
        assert found.states()["80-"].copy is None


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.slow
def test_a_copy_excludes_views(tmp_path: Path, connections: int) -> None:
    with FakeVtgate("0") as vtgate:
        vtgate.change("0", rows=dict.fromkeys(range(9), 0), has_view=True)
        settings = {"snapshot": "initial", "snapshot_connections": connections}
        with capturing(tmp_path, vtgate.address, **settings) as found:
            found.wait_for_shards("0")
            found.wait_for_rows(9)
        assert {change.table for change in found.changes()} == {f"{KEYSPACE}.{TABLE}"}
        assert found.counters() == {key: [0] for key in range(9)}


@pytest.mark.slow
def test_shards_share_the_streams(tmp_path: Path) -> None:
    with (
        _filled("-80", "80-") as vtgate,
        capturing(tmp_path, vtgate.address, snapshot="initial", snapshot_connections=5) as found,
    ):
        found.wait_for_shards("-80", "80-")
        found.wait_for_rows(2 * KEYS)
        assert len(_filters(vtgate)) == 4
        assert found.counters() == {key: [0] for key in range(2 * KEYS)}


@pytest.mark.parametrize("loses_journal", [True, False])
@pytest.mark.parametrize("allowed", [6, 30, 66])
@pytest.mark.slow
def test_a_merge_and_a_kill_while_chunks_are_copied_leave_every_row_right(
    tmp_path: Path, allowed: int, loses_journal: bool
) -> None:
    settings = {"snapshot": "initial", "snapshot_connections": 8}
    with _filled("-80", "80-") as vtgate:
        vtgate.change("-80", allowed=allowed, loses_journal=loses_journal)
        vtgate.change("80-", allowed=2 * allowed)
        with capturing(tmp_path, vtgate.address, **settings) as found:
            found.wait_for_rows(1)
            vtgate.write("-80", *((key, 1) for key in range(0, KEYS, 7)))
            vtgate.write("80-", *((key, 1) for key in range(KEYS, 2 * KEYS, 7)))
        vtgate.reshard(["-80", "80-"], ["0"])
        for shard in ("-80", "80-"):
            vtgate.change(shard, allowed=None)
        with capturing(tmp_path, vtgate.address, **settings) as found:
            found.wait_for_shards("0", timeout_s=90)
            vtgate.write("0", (7, 2), (8, 1))
            wait_until(lambda: _all_last(found) == vtgate.shards["0"].rows, 30, "all changes")


@pytest.mark.slow
def test_one_stream_that_vtgate_continues_at_another_tablet_is_opened_again(tmp_path: Path) -> None:
    settings = {"snapshot": "initial", "snapshot_connections": 1}
    with _filled("0") as vtgate:
        before = vtgate.shards["0"].gtid()
        vtgate.change("0", allowed=9, is_reopened=True)
        with capturing(tmp_path, vtgate.address, **settings) as found:
            wait_until(lambda: vtgate.shards["0"].allowed == 0, 30, "some rows")
            vtgate.write("0", (0, 1), (50, 1))
            vtgate.change("0", allowed=None)
            found.wait_for_shards("0")
            wait_until(lambda: _all_last(found) == vtgate.shards["0"].rows, 30, "all changes")
        _, again = vtgate.requests
        assert [(each.gtid, len(each.table_pks)) for each in again.vgtid.shard_gtids] == [(before, 1)]
        _assert_exact(found, vtgate.shards["0"].rows)


@pytest.mark.parametrize("is_idle", [True, False])
@pytest.mark.slow
def test_one_stream_that_vtgate_continues_without_a_copy_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_idle: bool
) -> None:
    monkeypatch.setattr(shard_copies, "ROWLESS_S", 1.0)
    with _filled("0") as vtgate:
        vtgate.change("0", lost_copies=1)
        with capturing(tmp_path, vtgate.address, snapshot="initial", snapshot_connections=1) as found:
            wait_until(lambda: len(vtgate.requests) == 1, 30, "the first stream")
            while not is_idle and len(vtgate.requests) == 1:
                vtgate.write("0", (3, vtgate.shards["0"].rows[3] + 1))
                time.sleep(0.1)
            found.wait_for_shards("0")
            wait_until(lambda: _all_last(found) == vtgate.shards["0"].rows, 30, "all rows")


@pytest.mark.slow
def test_a_table_that_was_empty_when_one_stream_copied_it_is_named_when_it_has_rows(tmp_path: Path) -> None:
    settings = {"snapshot": "initial", "snapshot_connections": 1}
    with FakeVtgate("0") as vtgate:
        vtgate.change("0", lost_copies=1)
        with capturing(tmp_path, vtgate.address, **settings) as found:
            wait_until(lambda: len(vtgate.requests) == 1, 30, "the first stream")
            vtgate.write("0", (1, 0))
            found.wait_for_rows(1)
        copy = found.states()["0"].copy
        assert copy is not None
        assert copy.keys.keys() == {TABLE}
        with capturing(tmp_path, vtgate.address, **settings) as found:
            vtgate.write("0", (1, 1))
            found.wait_for_shards("0")
            found.wait_for_rows(2)
        (again,) = vtgate.requests[1].vgtid.shard_gtids
        assert (again.gtid, len(again.table_pks)) == (vtgate.shards["0"].gtid(2), 1)
        assert [(change.op, change.row["counter"]) for change in found.changes()] == [
            ("c", "0"), ("c", "1"), ("r", "1"),
        ]  # fmt: skip
