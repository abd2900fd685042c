"""Reshards, silences and errors, between a capture and a fake vtgate: real gRPC, a real log."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from tailrace.changelog.format import Tail
from tailrace.cli.status import words
from tailrace.pipeline.status.views import CaptureView, PipelineState, PipelineView, SourceView
from tailrace.protocol.metadata_frames import kept_frames
from tailrace.sources.progress import SourceHealth
from tailrace.sources.vitess.rows.tables import LogTables
from tailrace.sources.vitess.streaming import keyspace_stream, silent_shards
from tests.support.vitess.capturing import Capturing, capturing
from tests.support.vitess.fake_vtgate import KEYSPACE, TABLE, FakeVtgate
from tests.support.wait import wait_until


def _assert_once_and_in_order(found: Capturing, changes: dict[int, int]) -> None:
    assert found.counters() == {key: list(range(count)) for key, count in changes.items()}


@pytest.mark.slow
def test_a_split_and_a_merge_are_followed(tmp_path: Path) -> None:
    with FakeVtgate("0") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("0")
        vtgate.write("0", (1, 0), (2, 0))
        vtgate.reshard(["0"], ["-80", "80-"])
        found.wait_for_shards("-80", "80-")
        vtgate.write("-80", (1, 1))
        vtgate.write("80-", (2, 1))
        vtgate.reshard(["-80", "80-"], ["0"])
        vtgate.write("0", (1, 2), (2, 2))
        found.wait_for_rows(6)
        found.wait_for_shards("0")
    _assert_once_and_in_order(found, {1: 3, 2: 3})
    states = found.states()
    assert (states["0"].epoch, states["0"].parents) == (2, ("-80", "80-"))
    assert states["-80"].children == ("0",)


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.slow
def test_w1_a_merge_is_followed_whether_its_journal_is_lost_or_not(tmp_path: Path, is_lost: bool) -> None:
    with FakeVtgate("-40", "40-80", "80-") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("-40", "40-80", "80-")
        vtgate.write("-40", (1, 0))
        for name in ("-40", "40-80"):
            vtgate.change(name, loses_journal=is_lost)
        vtgate.reshard(["-40", "40-80"], ["-80"])
        vtgate.write("-80", (1, 1))
        found.wait_for_shards("-80", "80-")
        found.wait_for_rows(2)
    _assert_once_and_in_order(found, {1: 2})
    junctions = [request for request in vtgate.requests if len(request.vgtid.shard_gtids) > 1]
    assert bool(junctions) == is_lost


@pytest.mark.slow
def test_a_change_of_a_table_yet_to_be_copied_is_not_forgotten_at_a_journal_right_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyspace_stream, "APPEND_INTERVAL_S", 2.0)
    settings = {"snapshot": "initial", "snapshot_connections": 1}
    with FakeVtgate("-40", "40-80", "80-") as vtgate:
        vtgate.change("-40", lost_copies=1)
        with capturing(tmp_path, vtgate.address, **settings) as found:
            wait_until(lambda: not vtgate.shards["-40"].lost_copies, 30, "a copy without rows")
            found.wait_for_mode("streaming", "40-80", "80-")
            vtgate.change("-40", is_silent=True)  # what follows comes at once
            vtgate.write("-40", (1, 0))
            vtgate.reshard(["-40", "40-80"], ["-80"])
            vtgate.change("-40", is_silent=False)
            journal = vtgate.shards["-80"].gtid()
            found.wait_for_shards("-80", "80-")
    (request, *_) = (each for each in vtgate.requests if each.vgtid.shard_gtids[0].shard == "-80")
    (position,) = request.vgtid.shard_gtids
    assert position.gtid == journal  # from a later one, a delete in between would be lost
    assert [key.table_name for key in position.table_pks] == [TABLE]


@pytest.mark.slow
def test_a_capture_that_was_stopped_during_two_reshards_follows_them(tmp_path: Path) -> None:
    with FakeVtgate("0") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("0")
            vtgate.write("0", (1, 0))
            found.wait_for_rows(1)
        vtgate.reshard(["0"], ["-80", "80-"])
        vtgate.write("80-", (1, 1))
        vtgate.reshard(["80-"], ["80-c0", "c0-"])
        vtgate.write("80-c0", (1, 2))
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("-80", "80-c0", "c0-")
            found.wait_for_rows(2)
        _assert_once_and_in_order(found, {1: 3})


@pytest.mark.slow
def test_an_added_columns_old_value_is_known_after_a_missed_switch(tmp_path: Path) -> None:
    with FakeVtgate("0") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("0")
            vtgate.write("0", (1, 0))
            found.wait_for_rows(1)
        vtgate.change("0", altered=len(vtgate.shards["0"].binlog))
        vtgate.write("0", (1, 1))
        vtgate.reshard(["0"], ["-80", "80-"])
        # The shard no longer says what older rows have in the column: it does not serve.
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("-80", "80-")
    assert [change.row for change in found.changes()] == [
        {"id": "1", "counter": "0"},
        {"id": "1", "counter": "1", "extra": "0"},
    ]
    tables = LogTables(dict(kept_frames(found.frames())))
    assert tables.shape(KEYSPACE, TABLE).columns[2].missing == "5"


@pytest.mark.slow
def test_after_missing_a_whole_reshard_the_keys_are_reported_and_the_others_go_on(tmp_path: Path) -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("-80", "80-")
        vtgate.reshard(["80-"], ["80-c0", "c0-"])
        vtgate.complete("80-")
        with capturing(tmp_path, vtgate.address) as found:
            wait_until(lambda: found.shards().get("80-") == "needs_snapshot", 30)
            assert [warning.key for warning in found.capture.progress().warnings] == [
                "shard_needs_snapshot 80-"
            ]
            vtgate.write("-80", (1, 0))
            vtgate.write("c0-", (2, 0))
            found.wait_for_rows(1)
        _assert_once_and_in_order(found, {1: 1})
        assert found.states()["80-"].lost


@pytest.mark.slow
def test_w10_a_stream_that_ends_normally_is_opened_again(tmp_path: Path) -> None:
    with FakeVtgate("0") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("0")
        for number, code in enumerate([grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL]):
            vtgate.change("0", errors=[(code, "stream ended unexpectedly")])
            vtgate.write("0", (1, number))
            found.wait_for_rows(number + 1)
    _assert_once_and_in_order(found, {1: 2})


@pytest.mark.slow
def test_w10_heartbeats_alone_do_not_count_as_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_shards, "PROBE_S", 1.0)
    with FakeVtgate("0") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("0")
        vtgate.change("0", is_silent=True)
        vtgate.write("0", (1, 0))
        streams = len(vtgate.requests)
        wait_until(lambda: len(vtgate.requests) > streams, 30, "the stream is opened again")
        vtgate.change("0", is_silent=False)
        found.wait_for_rows(1)
    _assert_once_and_in_order(found, {1: 1})


@pytest.mark.slow
def test_w14_purged_binlogs_are_reported_with_the_shard(tmp_path: Path) -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("-80", "80-")
        vtgate.write("80-", (2, 0))
        vtgate.change("80-", purged=2)
        with capturing(tmp_path, vtgate.address) as found:
            wait_until(lambda: found.shards().get("80-") == "needs_snapshot", 30)
            vtgate.write("-80", (1, 0))
            found.wait_for_rows(1)


@pytest.mark.slow
def test_status_shows_the_lineage_of_shards_and_the_watermark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_shards, "PROBE_S", 0.5)

    def watermark() -> str:
        health = found.capture.progress().health
        return "" if health is None else health.details["watermark"] or ""

    with FakeVtgate("0") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("0")
        vtgate.reshard(["0"], ["-80", "80-"])
        found.wait_for_shards("-80", "80-")
        health = found.capture.progress().health
        assert health is not None
        shards = health.details["shards"]
        assert (shards["0"]["to"], shards["80-"]["from"]) == (["-80", "80-"], ["0"])
        assert (shards["0"]["epoch"], shards["80-"]["epoch"]) == (0, 1)
        assert "  shards          1 retired, 2 streaming" in _words_of(health)
        # Silent shards are asked for their position: changes that they do not have are not waited for.
        began = wait_until(watermark, 30)
        wait_until(lambda: watermark() > began, 30)
        vtgate.change("80-", is_silent=True)
        vtgate.write("80-", (1, 0))
        streams = len(vtgate.requests)
        wait_until(lambda: len(vtgate.requests) > streams, 30, "the silence is found")
        stands, streams = watermark(), len(vtgate.requests)
        wait_until(lambda: len(vtgate.requests) > streams, 30, "it is silent still")
        assert watermark() == stands
        vtgate.change("80-", is_silent=False)
        wait_until(lambda: watermark() > stands, 30)


@pytest.mark.slow
def _words_of(health: SourceHealth) -> list[str]:
    """Return what `tailrace status` prints of a source."""
    task = replace(CaptureView.at_rest("0", Tail(1, 2, 3)), slot=health)
    view = PipelineView("shop", PipelineState.STREAMING, (SourceView("", 0, task, ()),), None)
    return words(view.as_json())


def test_status_describes_sources_without_a_slot_and_shards_with_an_unknown_mode() -> None:
    assert len(_words_of(SourceHealth("reading", None, {"data_lag": 0}))) == 2
    at_rest = SourceHealth("serving", None, {"shards": {"-80": {"executed": ""}, "80-": {"executed": ""}}})
    assert _words_of(at_rest)[-1] == "  shards          2 serving"


def test_a_restart_of_vtgate_loses_nothing(tmp_path: Path) -> None:
    with FakeVtgate("-80", "80-") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("-80", "80-")
        for number in range(3):
            vtgate.write("-80", (1, number))
            vtgate.restart()
            vtgate.write("80-", (2, number))
        wait_until(lambda: found.capture.progress().rows >= 6, 30)
    _assert_once_and_in_order(found, {1: 3, 2: 3})


@pytest.mark.slow
def test_w5_w6_a_copy_continues_where_it_was_interrupted(tmp_path: Path) -> None:
    with FakeVtgate("0") as vtgate:
        for key in range(50):
            vtgate.write("0", (key, 0))
        with capturing(tmp_path, vtgate.address, snapshot="initial") as found:
            found.wait_for_shards("0")
            vtgate.write("0", (7, 1))
            found.wait_for_rows(51)
        _assert_once_and_in_order(found, {key: 2 if key == 7 else 1 for key in range(50)})


@pytest.mark.parametrize("tasks_max", [1, 16])
@pytest.mark.ci
def test_a_thousand_shards_share_a_few_connections(tmp_path: Path, tasks_max: int) -> None:
    bounds = ["", *(f"{number:03x}0" for number in range(4, 0x1000, 4)), ""]
    shards = [f"{start}-{end}" for start, end in itertools.pairwise(bounds)]
    settings = {"heartbeat_interval_s": 30, "tasks_max": tasks_max}
    with FakeVtgate(*shards) as vtgate, capturing(tmp_path, vtgate.address, **settings) as found:
        assert len(shards) == 1024
        found.wait_for_shards(*shards, timeout_s=240)
        for number, shard in enumerate(shards):
            vtgate.shards[shard].rows = {}
            if number % 100 == 0:
                vtgate.write(shard, (number, 0))
        found.wait_for_rows(11, 120)
        assert len(vtgate.peers) == tasks_max <= 20
        assert vtgate.open_streams <= len(shards)
