"""Shards that can't be continued are detected, reported with the command that helps, and right after it."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from tailrace.errors import Kind, TailraceError
from tailrace.sources.vitess.snapshots import VitessSnapshots
from tailrace.sources.vitess.source import VitessSourceType
from tailrace.sources.vitess.streaming import keyspace_stream, serving_shards, shard_streams, silent_shards
from tailrace.sources.vitess.streaming.capture_task import VitessCapture
from tests.support.vitess.capturing import Capturing, capturing, frames_of, shard_states_of
from tests.support.vitess.end_to_end import lines_of, pipeline_file, tailrace
from tests.support.vitess.fake_vtgate import TABLE, FakeVtgate
from tests.support.vitess.reading import read
from tests.support.wait import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silent_shards, "PROBE_S", 0.3)


def _end_of_catching_up(found: Capturing) -> TailraceError:
    """Call `caught_up` until the capture ends by itself, with an error."""
    now = time.time_ns() // 1000
    wait_until(lambda: found.capture.caught_up(now) or found.failure is not None, 30)
    assert isinstance(found.failure, TailraceError)
    return found.failure


def _repair(found: Capturing, words: str) -> str:
    """Return the repair of the warning with these words. A slow start may have warnings of other shards."""
    return next(each.repair for each in found.capture.progress().warnings if words in each.message)


@pytest.mark.usefixtures("hurried")
def test_a_restored_shard_is_lost_and_its_keys_are_copied_again(tmp_path: Path) -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("-80", "80-")
            vtgate.write("80-", (2, 0))
            vtgate.write("80-", (2, 1))
            found.wait_for_rows(2)
            vtgate.restore("80-", 2)
            found.wait_for_mode("needs_snapshot", "80-")
            assert "tailrace snapshot FILE --lost" in _repair(found, "lacks transactions that were read")
            vtgate.write("-80", (1, 0))
            found.wait_for_rows(3)
            VitessSnapshots(tmp_path / "log").request([], "")
            found.wait_for_shards("-80", "80-")
            vtgate.write("80-", (3, 0))
            found.wait_for_rows(5)
        assert found.counters() == {1: [0], 2: [0, 1, 0], 3: [0]}


@pytest.mark.usefixtures("hurried")
def test_a_recreated_shard_that_no_longer_serves_does_not_block_a_reshard(tmp_path: Path) -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("-80", "80-")
            vtgate.write("-80", (1, 0))
            found.wait_for_rows(1)
        vtgate.change("-80", server="0000beef-0000-11eb-b894-04ed332e05c2")
        vtgate.reshard(["-80", "80-"], ["0"])
        with capturing(tmp_path, vtgate.address) as found:
            # vtgate refuses to query it and sends only heartbeats: our position is beyond the shard's.
            found.wait_for_mode("needs_snapshot", "-80")
            assert found.shards()["80-"] == "at_journal"
            VitessSnapshots(tmp_path / "log").request([], "")
            found.wait_for_shards("0")
            vtgate.write("0", (1, 1))
            found.wait_for_rows(2)
        assert found.counters() == {1: [0, 0, 1]}


@pytest.mark.usefixtures("hurried")
def test_a_lagging_replica_is_no_loss_as_long_as_the_primary_has_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeVtgate("0") as vtgate, capturing(tmp_path, vtgate.address, tablet_type="replica") as found:
        found.wait_for_shards("0")
        vtgate.write("0", (1, 0))
        found.wait_for_rows(1)
        vtgate.change("0", lag=1, is_silent=True)
        wait_until(lambda: vtgate.asked.count("shop:0@primary") > 4, 30, "the primary is asked")
        found.wait_for_shards("0")
        monkeypatch.setattr(silent_shards, "PROBE_S", 60.0)  # the stream must be opened first
        vtgate.change("0", lag=0, is_silent=False)
        vtgate.write("0", (1, 1))
        found.wait_for_rows(2)
    assert found.counters() == {1: [0, 1]}


@pytest.mark.usefixtures("hurried")
def test_a_replica_that_has_what_a_failover_lost_keeps_no_shard_from_being_lost(tmp_path: Path) -> None:
    with FakeVtgate("0") as vtgate, capturing(tmp_path, vtgate.address, tablet_type="replica") as found:
        found.wait_for_shards("0")
        vtgate.write("0", (1, 0))
        found.wait_for_rows(1)
        vtgate.change("0", is_silent=True, lag=-1)
        vtgate.restore("0", 1)
        found.wait_for_mode("needs_snapshot", "0", timeout_s=30)


@pytest.mark.usefixtures("hurried")
def test_a_restored_shard_is_never_caught_up_although_nothing_is_missing(
    tmp_path: Path,
) -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("-80", "80-")
            vtgate.write("80-", (2, 0))
            found.wait_for_rows(1)
        vtgate.restore("80-", 1)
        with capturing(tmp_path, vtgate.address) as found:
            error = _end_of_catching_up(found)
    assert (error.kind, error.context["key_ranges"]) == (Kind.SHARDS_LOST, "80-")


def test_catching_up_waits_for_what_the_primary_has_and_the_replica_that_is_read_lacks(
    tmp_path: Path,
) -> None:
    source, stop = VitessSourceType(), threading.Event()
    with FakeVtgate("0") as vtgate, capturing(tmp_path, vtgate.address, tablet_type="replica") as found:
        found.wait_for_shards("0")
        section = found.section
        before = source.end(section, stop)
        vtgate.change("0", lag=1, is_silent=True)
        vtgate.write("0", (1, 0))
        end = source.end(section, stop)
        assert end > before
        until_s = time.monotonic() + 2
        while time.monotonic() < until_s:
            assert not found.capture.caught_up(end)
            time.sleep(0.05)
        vtgate.change("0", lag=0, is_silent=False)
        wait_until(lambda: found.capture.caught_up(end), 30, "the primary's change")
    assert found.counters() == {1: [0]}


def test_catching_up_waits_for_pending_changes_before_it_fails_for_lost_ones(tmp_path: Path) -> None:
    with FakeVtgate("-40", "40-80", "80-") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("-40", "40-80", "80-")
            vtgate.write("40-80", (2, 0))
            found.wait_for_rows(1)
        # One of two participants still has changes and its journal, the other one's was purged.
        vtgate.write("40-80", (2, 1))
        vtgate.write("-40", (1, 0))
        vtgate.change("-40", purged=2)
        vtgate.reshard(["-40", "40-80"], ["-80"])
        vtgate.write("80-", (3, 0))
        with capturing(tmp_path, vtgate.address) as found:
            error = _end_of_catching_up(found)
        assert error.kind is Kind.SHARDS_LOST
        assert error.context == {"shards": "-40", "key_ranges": "-40"}
        assert "purged" in error.message
        assert "-40" in error.message
    assert found.counters() == {2: [0, 1], 3: [0]}
    assert found.states()["40-80"].journal is not None


@pytest.mark.follows("shards_lost")
def test_a_run_until_caught_up_ends_with_the_command_that_helps(tmp_path: Path) -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        file = pipeline_file(tmp_path, vtgate, TABLE, sinks=["jsonl"], snapshot="initial")
        vtgate.write("-80", (1, 0))
        vtgate.write("80-", (2, 0))
        tailrace("run", file, "--until-caught-up")
        vtgate.write("80-", (2, 1))
        vtgate.write("-80", (1, 1))
        vtgate.reshard(["80-"], ["80-c0", "c0-"])
        vtgate.change("80-c0", rows={})
        vtgate.complete("80-")
        slowly = (
            "import time; from tailrace.pipeline.sink_worker import SinkWorker; run = SinkWorker.run; "
            "SinkWorker.run = lambda self: (time.sleep(5), run(self))"
        )
        said = tailrace("run", file, "--until-caught-up", status=1, before=slowly)
        assert "shards_lost" in said
        assert "tailrace snapshot FILE --lost" in said
        # The sinks have everything that is not lost.
        counters = [(line["op"], line["after"]["counter"]) for line in _lines(tmp_path, 1)]
        assert counters == [("r", 0), ("c", 1)]
        status = json.loads(tailrace("status", file, "--json", status=None))
        assert status["error"]["context"]["key_ranges"] == "80-"
        tailrace("snapshot", file, "--lost")
        tailrace("run", file, "--until-caught-up")
    assert [line["after"]["counter"] for line in _lines(tmp_path, 2)] == [0, 1]


def _lines(at: Path, key: int) -> list[dict[str, dict[str, int]]]:
    return [line for line in lines_of(at, TABLE) if line["after"]["id"] == key]


@pytest.mark.follows("shards_lost")
@pytest.mark.parametrize(
    ("what", "setting"), [("statement", "binlog_format = ROW"), ("values", "binlog_row_image = FULL")]
)
def test_unreadable_changes_lose_their_shard_alone(tmp_path: Path, what: str, setting: str) -> None:
    with FakeVtgate("-80", "80-") as vtgate:
        file = pipeline_file(tmp_path, vtgate, TABLE, sinks=["jsonl"], snapshot="initial")
        vtgate.write("-80", (1, 0))
        tailrace("run", file, "--until-caught-up")
        vtgate.write("-80", (1, 1))
        vtgate.change("-80", unreadable={3: what})
        vtgate.write("80-", (2, 1))
        said = tailrace("run", file, "--until-caught-up", status=1)
        assert "shards_lost" in said
        assert f"SET PERSIST {setting} on the shard's MySQL servers" in said
        vtgate.write("-80", (1, 2))
        vtgate.write("80-", (2, 2))
        assert "shards_lost" in tailrace("run", file, "--until-caught-up", status=1)
        assert [line["after"]["counter"] for line in _lines(tmp_path, 2)] == [1, 2]
        tailrace("snapshot", file, "--lost")
        tailrace("run", file, "--until-caught-up")
        vtgate.write("-80", (1, 3))
        tailrace("run", file, "--until-caught-up")
    assert [line["after"]["counter"] for line in _lines(tmp_path, 1)] == [0, 2, 3]


@pytest.mark.parametrize(
    ("where", "rows"), [("is_unnamed", 1), ("is_unnamed", 200), ("is_altered_within", 200)]
)
def test_a_shard_whose_table_was_altered_meanwhile_is_lost_and_the_other_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, rows: int
) -> None:
    # A transaction of many rows goes into the log before it is complete.
    monkeypatch.setattr(keyspace_stream, "OPEN_BYTES_MAX", 300)
    monkeypatch.setattr(shard_streams, "SHARD_RESPONSES_MAX", 20)
    with FakeVtgate("-80", "80-") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("-80", "80-")
            vtgate.write("80-", (2, 0))
            found.wait_for_rows(1)
        vtgate.change("80-", is_cut=True)
        vtgate.write("80-", *((2, counter) for counter in range(1, 1 + rows)))
        vtgate.change("80-", **{where: True})
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_mode("needs_snapshot", "80-")
            assert _repair(found, "no longer knows the columns of a table")
            vtgate.write("-80", (1, 0))
            # Discarded rows count, too: the log is read.
            wait_until(lambda: found.counters().get(1) == [0], 30, "a row of the other shard")
            vtgate.change("80-", **{where: False})
            VitessSnapshots(tmp_path / "log").request([], "")
            found.wait_for_shards("-80", "80-")
            vtgate.write("80-", (2, rows + 1))
            wait_until(lambda: found.counters().get(2, [])[-1:] == [rows + 1], 30, "a row after the copy")
    assert found.counters() == {1: [0], 2: [0, rows, rows + 1]}


#: A transaction of many rows goes into the log before it is complete.
_SMALL = """
from tailrace.sources.vitess.streaming import keyspace_stream, shard_streams, silent_shards
keyspace_stream.OPEN_BYTES_MAX, shard_streams.SHARD_RESPONSES_MAX = 300, 20
"""


def test_a_kill_after_an_altered_tables_transaction_was_discarded_loses_only_its_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits = tmp_path / "hits"
    monkeypatch.setenv("TAILRACE_FAILPOINTS_LOG", str(hits))
    with FakeVtgate("-80", "80-") as vtgate:
        file = pipeline_file(tmp_path, vtgate, TABLE, sinks=["jsonl"], snapshot="never")
        tailrace("run", file, "--until-caught-up")
        vtgate.write("80-", (2, 0))
        tailrace("run", file, "--until-caught-up")
        before = shard_states_of(tmp_path / "log")
        vtgate.change("80-", is_cut=True, is_altered_within=True)
        vtgate.write("80-", *((2, counter) for counter in range(1, 201)))
        hits.unlink()
        run = ("run", file, "--until-caught-up")
        tailrace(*run, failpoints="vitess.after_discard=kill", status=-9, before=_SMALL)
        # The log had a part of the transaction, and has nothing of it now.
        assert hits.read_text().split().count("capture.after_append") > 5
        assert shard_states_of(tmp_path / "log") == before
        assert _counters_in_log(tmp_path) == {2: [0]}
        vtgate.write("-80", (1, 0))
        assert "shards_lost" in tailrace(*run, status=1, before=_SMALL)
        assert {name: bool(state.lost) for name, state in shard_states_of(tmp_path / "log").items()} == {
            "-80": False, "80-": True,
        }  # fmt: skip
        assert _counters_in_log(tmp_path) == {1: [0], 2: [0]}
        vtgate.change("80-", is_altered_within=False)
        tailrace("snapshot", file, "--lost")
        tailrace(*run)
    assert _counters_in_log(tmp_path) == {1: [0], 2: [0, 200]}
    assert [line["after"]["counter"] for line in _lines(tmp_path, 2)] == [0, 200]


def _counters_in_log(at: Path) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for change in read(frames_of(at / "log")):
        found.setdefault(int(change.row["id"] or 0), []).append(int(change.row["counter"] or 0))
    return found


def _are_listed(capture: VitessCapture, *names: str) -> bool:
    stream = capture._stream
    assert stream is not None
    shards = dict(stream.coordinator.shards)
    return all(shards[name].unlisted == 0 for name in names)


@pytest.mark.usefixtures("hurried")
def test_shards_replaced_without_a_journal_are_lost_and_their_keys_are_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_shards, "LIST_INTERVAL_S", 3600.0)
    with FakeVtgate("-80", "80-") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("-80", "80-")
        vtgate.write("-80", (1, 0))
        found.wait_for_rows(1)
        # A new shard that no list has had yet may be one that does not serve yet: until a list has it,
        # lists are requested in short intervals.
        wait_until(lambda: _are_listed(found.capture, "-80", "80-"), 30, "a list of shards that serve")
        monkeypatch.setattr(serving_shards, "LIST_INTERVAL_S", 0.3)
        vtgate.reshard(["-80", "80-"], ["0"], has_journal=False)
        vtgate.write("0", (1, 1))
        for shard in ("-80", "80-"):
            found.wait_for_mode("needs_snapshot", shard)
        for warning in found.capture.progress().warnings:
            assert "no journal of a reshard" in warning.message
        VitessSnapshots(tmp_path / "log").request([], "")
        found.wait_for_shards("0")
        vtgate.write("0", (1, 2))
        found.wait_for_rows(3)
    assert found.counters() == {1: [0, 1, 2]}


@pytest.mark.usefixtures("hurried")
def test_shards_are_listed_soon_after_a_reshard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_shards, "LIST_INTERVAL_S", 3600.0)
    with FakeVtgate("0") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("0")
        wait_until(lambda: _are_listed(found.capture, "0"), 30, "a list of shards that serve")
        vtgate.reshard(["0"], ["-80", "80-"])
        found.wait_for_shards("-80", "80-")
        wait_until(lambda: _are_listed(found.capture, "-80", "80-"), 30, "a list after the reshard")
