"""An engine's handler gets changes from memory and from the log in turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.realtime.buffer import BlockBuffer
from tailrace.realtime.path import RealtimePath
from tailrace.realtime.switching import MarkerKind, RealtimeEvent, RealtimeMode
from tests.support.realtime.engine import BUFFER_BYTES, CONSUMER, WIDE, Running, Shard, announced
from tests.support.realtime.markers import markers_in
from tests.support.wait import wait_until


@pytest.fixture
def shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shard:
    monkeypatch.syspath_prepend(str(announced(tmp_path)))
    return Shard(tmp_path / "shard")


def _markers(log: Path) -> list[MarkerKind]:
    with LogReader.open(log, "0") as reader:
        blocks = reader.blocks(reader.start, reader.end().offset)
        found = [marker for block in blocks for _, marker in markers_in(reader.read(block))]
    assert {marker.consumer for marker in found} <= {CONSUMER}
    return [marker.kind for marker in found]


@pytest.mark.slow
def test_real_time_is_switched_on_and_off_and_every_row_comes_once(tmp_path: Path, shard: Shard) -> None:
    shard.commit(3)
    with Running(shard, tmp_path / "log", False, offset_commit={"policy": "always"}) as running:
        running.wait_for_rows()
        running.wait_for(mode="off", log_mode="active", switches=0)
        running.command(on=True)
        running.wait_for(mode="on", log_mode="passive", because="log side passive")
        for _ in range(5):
            shard.commit(2)
            running.wait_for_rows()
        wait_until(lambda: MarkerKind.REALTIME in _markers(tmp_path / "log"), 60, "a marker")
        running.command(on=False)
        running.wait_for(mode="off", log_mode="active", because="switched off")
        shard.commit(2)
        running.wait_for_rows()
    kinds = _markers(tmp_path / "log")
    assert kinds[0] is MarkerKind.TRY_START_REALTIME
    assert kinds[-1] is MarkerKind.STOP_REALTIME


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.slow
def test_a_handler_that_stalls_is_fed_from_the_log_until_it_has_caught_up(
    tmp_path: Path, shard: Shard, *, awaited: bool
) -> None:
    section = {"enabled": True, "buffer_bytes": BUFFER_BYTES, "return_automatically": True}
    options: dict[str, Any] = {"awaited": awaited, "record_processing": {"queue_batches_max": 1}}
    with Running(shard, tmp_path / "log", section, **options) as running:
        for falls in range(1, 4):
            running.wait_for(mode="on")
            running.may_go_on.clear()
            for _ in range(12):
                shard.commit(1, WIDE)
            running.wait_for(fall_backs=falls)
            running.may_go_on.set()
            running.wait_for_rows()
        running.wait_for(mode="on")
        shard.commit(1)
        running.wait_for_rows()


@pytest.mark.ci
def test_each_sink_is_fed_from_memory_independently_and_gets_each_row_once(
    tmp_path: Path, shard: Shard
) -> None:
    lake = tmp_path / "lake"
    sinks = [{"type": "jsonl", "path": str(lake), "name": "lake", "interval_ms": 0}]
    with Running(
        shard, tmp_path / "log", {"enabled": True, "buffer_bytes": BUFFER_BYTES}, sinks=sinks
    ) as run:
        run.watched = "lake"
        shard.commit(2)
        run.wait_for(mode="on")
        for _ in range(3):
            shard.commit(2)
            wait_until(lambda: len(_rows(lake)) == shard.count, 60, "the rows")
        run.command(on=False)
        run.wait_for(mode="off", because="switched off")
        shard.commit(1)
        run.command(on=True)
        for run.watched in ("lake", CONSUMER):
            run.wait_for(mode="on")
        run.may_go_on.clear()
        for _ in range(12):
            shard.commit(1, WIDE)
        wait_until(lambda: len(_rows(lake)) == shard.count, 60, "the rows")
        run.wait_for(fall_backs=1)
    assert _rows(lake) == list(range(1, shard.count + 1))


def _rows(lake: Path) -> list[int]:
    files = sorted(lake.glob("public.orders/*.jsonl"))
    return [json.loads(line)["after"]["id"] for file in files for line in file.read_text().splitlines()]


def test_the_check_finds_a_buffer_that_drops_blocks_when_full(
    tmp_path: Path, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    full: list[str] = []

    def drop(buffer: BlockBuffer, why: str) -> None:
        buffer._blocks.clear()
        buffer._size = buffer._rows = 0
        full.extend([why] if buffer.fills else [])

    monkeypatch.setattr(BlockBuffer, "_lose", drop)
    section = {"enabled": True, "buffer_bytes": BUFFER_BYTES}
    options: dict[str, Any] = {"record_processing": {"queue_batches_max": 1}}
    with Running(shard, tmp_path / "log", section, offset_commit={"policy": "always"}, **options) as running:
        running.wait_for(mode="on")
        # A row in the segment that began then: as long as none is handled, the log is read, too.
        shard.commit(1)
        wait_until(lambda: running.view["position"] > _last_segment(running.log), 60, "a row of the segment")
        running.may_go_on.clear()
        for _ in range(12):
            shard.commit(1, WIDE)
        wait_until(lambda: "buffer full" in full, 60, "a full buffer")
        running.may_go_on.set()
        _require_gap(running)


@pytest.mark.slow
def test_the_check_finds_a_start_that_does_not_wait_for_the_log(
    tmp_path: Path, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = RealtimePath._next_event

    def passive_at_once(path: RealtimePath, sent: int) -> RealtimeEvent | None:
        event = found(path, sent)
        is_marked = path._side.state is RealtimeMode.STARTING and path._awaited is None
        return RealtimeEvent.LOG_PASSIVE if event is None and is_marked else event

    monkeypatch.setattr(RealtimePath, "_next_event", passive_at_once)
    with Running(shard, tmp_path / "log", False, record_processing={"queue_batches_max": 1}) as running:
        running.may_go_on.clear()
        for _ in range(12):
            shard.commit(1, WIDE)
        running.wait_for(mode="off")
        # Rows that come to the log later are in memory, too: there would be no gap.
        wait_until(lambda: _rows_in(running.log) == shard.count, 60, "the rows in the log")
        running.command(on=True)
        running.wait_for(mode="on")
        running.may_go_on.set()
        _require_gap(running)


def _rows_in(log: Path) -> int:
    with LogReader.open(log, "0") as reader:
        return sum(block.header.rows for block in reader.blocks(reader.start, reader.end().offset))


def _last_segment(log: Path) -> int:
    return LogDirectory.open(log).segments("0")[-1]


def _require_gap(running: Running) -> None:
    running.shard.commit(1)
    wait_until(lambda: running.shard.count in running.seen, 60, "the last row")
    assert running.seen != list(range(1, running.shard.count + 1)), "the planted bug was not found"
