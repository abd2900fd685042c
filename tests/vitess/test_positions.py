"""The shard and the position of each row: over reshards, restarts and large transactions."""

from __future__ import annotations

import functools
import itertools
import time
from pathlib import Path

import pytest

from tailrace.changelog import runs
from tailrace.changelog.reader import LogReader
from tailrace.ranges.changes import decoded_batches
from tailrace.ranges.plan import InputSplit
from tailrace.sources.vitess.streaming import keyspace_stream, shard_streams, silent_shards
from tests.support.vitess import fake_vtgate
from tests.support.vitess.capturing import capturing
from tests.support.vitess.events import events_in, events_of, gtid_of, rank_of
from tests.support.vitess.fake_vtgate import FakeVtgate
from tests.support.wait import wait_until


@pytest.mark.slow
def test_epochs_rise_with_each_reshard_and_ranks_within_them_over_restarts(tmp_path: Path) -> None:
    with FakeVtgate("0") as vtgate:
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("0")
            vtgate.write("0", (1, 0), (2, 0))
            vtgate.write("0", (1, 1))
            found.wait_for_rows(3)
        vtgate.reshard(["0"], ["-80", "80-"])
        vtgate.write("-80", (1, 2))
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("-80", "80-")
            found.wait_for_rows(1)
            vtgate.write("-80", (1, 3))
            vtgate.write("80-", (2, 1))
            found.wait_for_rows(3)
            vtgate.reshard(["-80", "80-"], ["0"])
            vtgate.write("0", (1, 4))
            found.wait_for_rows(4)
        with capturing(tmp_path, vtgate.address) as found:
            found.wait_for_shards("0")
            vtgate.write("0", (1, 5))
            found.wait_for_rows(1)
    events = events_of(tmp_path / "log")
    rows = [
        (event["source"]["shard"], event["transaction"]["transaction_epoch"], event["after"]["counter"])
        for event in events
        if event["after"]["id"] == 1
    ]
    assert rows == [("0", 0, 0), ("0", 0, 1), ("-80", 1, 2), ("-80", 1, 3), ("0", 2, 4), ("0", 2, 5)]
    ordered = [
        (event["transaction"]["transaction_epoch"], rank_of(event))
        for event in events
        if event["after"]["id"] == 1
    ]
    assert ordered == sorted(set(ordered))
    assert all(event["transaction"]["id"] == event["source"]["vgtid"] for event in events)
    assert [gtid_of(event).rpartition(":")[2] for event in events[:3]] == ["1-2", "1-2", "1-3"]


@pytest.mark.slow
def test_all_rows_of_a_transaction_larger_than_a_block_have_its_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyspace_stream, "OPEN_BYTES_MAX", 300)
    monkeypatch.setattr(shard_streams, "SHARD_RESPONSES_MAX", 20)  # so many at a time, however fast they come
    monkeypatch.setattr(runs, "RUN_BYTES_MAX", 1)  # each block is decoded alone
    with FakeVtgate("0") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("0")
        vtgate.change("0", is_cut=True)
        vtgate.write("0", (1, 0))
        vtgate.write("0", *((key, 1) for key in range(200)))
        vtgate.write("0", (1, 2))
        found.wait_for_rows(202)
    with LogReader.open(tmp_path / "log", "0") as reader:
        start, end = reader.start, reader.end().offset
        blocks = reader.blocks(start, end)
        splits = [
            InputSplit("0", number, block.header.log_offset, block.header.end, (block,))
            for number, block in enumerate(blocks)
        ]
        assert sum(block.header.open_at_end is not None for block in blocks) > 3
        events = events_in(reader, splits)
    assert [gtid_of(event).rpartition(":")[2] for event in events] == ["1-2", *["1-3"] * 200, "1-4"]
    assert {rank_of(event) for event in events[1:-1]} == {3}


@pytest.mark.slow
def test_a_silent_shards_watermark_is_a_whole_second_like_commit_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_shards, "PROBE_S", 0.1)

    def watermark() -> str | None:
        health = found.capture.progress().health
        return None if health is None else health.details["watermark"]

    with FakeVtgate("0") as vtgate, capturing(tmp_path, vtgate.address) as found:
        assert wait_until(watermark, 15, "the watermark").endswith(".000+00:00")


@pytest.mark.slow
def test_what_a_replica_lacks_holds_the_watermark_of_a_silent_shard_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silent_shards, "PROBE_S", 0.1)

    def complete_until() -> int:
        stream = found.capture._stream
        return 0 if stream is None or "0" not in stream.shards else stream.shards["0"].whole_until_us

    settings = {"tablet_type": "replica", "snapshot": "never"}
    with FakeVtgate("0") as vtgate, capturing(tmp_path, vtgate.address, **settings) as found:
        wait_until(complete_until, 15, "an answer of the primary")
        vtgate.change("0", is_silent=True, lag=1)
        vtgate.write("0", (1, 0))
        committed_us = time.time_ns() // 1000
        time.sleep(1.5)  # times are whole seconds
        asked = len(vtgate.asked)
        wait_until(lambda: len(vtgate.asked) > asked + 4, 30, "replica and primary are asked")
        assert complete_until() < committed_us
        [told] = found.capture.progress().warnings
        assert (told.key, "its replica lacks" in told.message) == ("shard_delayed 0", True)
        vtgate.change("0", is_silent=False, lag=0)
        found.wait_for_rows(1)
        assert not found.capture.progress().warnings


@pytest.mark.slow
def test_no_later_row_is_older_than_a_rows_watermark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyspace_stream, "WATERMARK_INTERVAL_US", 0)
    clock = itertools.count(1_700_000_000)
    with FakeVtgate("-80", "80-") as vtgate, capturing(tmp_path, vtgate.address) as found:
        found.wait_for_shards("-80", "80-")
        for number in range(24):
            monkeypatch.setattr(fake_vtgate, "_now_s", functools.partial(int, next(clock)))
            # The second shard has transactions only at the beginning and the end.
            vtgate.write("80-" if number in {1, 20} else "-80", (number, 0))
            found.wait_for_rows(number + 1)
    with LogReader.open(tmp_path / "log", "0") as reader:
        start, end = reader.start, reader.end().offset
        split = InputSplit("0", 0, start, end, tuple(reader.blocks(start, end)))
        sources = [
            source
            for decoded in decoded_batches(reader, split)
            for changes in decoded.changes
            for source in changes.source().to_pylist()
        ]
    assert len(sources) == 24
    for number, source in enumerate(sources):
        if source["watermark"] is not None:
            assert all(later["commit_ts"] >= source["watermark"] for later in sources[number:])
    marks = [source["watermark"] for source in sources]
    commits = [source["commit_ts"] for source in sources]
    # None before both shards have sent something; then it waits for the second shard, and rises with it.
    assert marks == [None, None, commits[0], *[commits[1]] * 18, commits[19], commits[20], commits[20]]
