"""Chunks that others read: the log is the same as if they had been read here, whatever befalls them."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from capture.captured import SLOT, capturing, run_to_end
from capture.delegating import Elsewhere
from capture.test_snapshot_resumed import SMALL, create_tables, judge, until_whole
from fix_postgres import Database
from fix_wait import wait_until
from tailrace.capture import delegated, staged
from tailrace.capture.staged import StagedFile, StagedWriter, TooLarge
from tailrace.changelog.reader import LogReader
from tailrace.errors import Kind, TailraceError
from tailrace.protocol import frames


def units_of(log: Path) -> dict[tuple[str, int | None], list[bytes]]:
    """Return what is in each unit of a snapshot, in an order of its own: its rows, and its tables."""
    found: dict[tuple[str, int | None], list[bytes]] = defaultdict(list)
    name: tuple[str, int | None] | None = None
    with LogReader.open(log, "0") as reader:
        for ref in reader.blocks(reader.start, reader.end().offset):
            for _, frame in frames.each_frame(reader.read(ref)):
                if frame[5:6] == b"x" and frame[6:7] == frames.SNAPSHOT_BEGIN:
                    said = frames.control_json(frame)
                    name = ",".join(said["tables"]), said["chunk"]
                elif frame[5:6] == b"x" and frame[6:7] == frames.SNAPSHOT_END:
                    name = None
                elif name is not None and frame[5:6] == b"s":
                    found[name] += bytes(frame[frames.SNAPSHOT_TEXT_AT :]).splitlines()
                elif name is not None and frame[5:6] == b"w":
                    found[name].append(bytes(frame[frames.XLOG_PAYLOAD_AT :]))
    return {name: sorted(content) for name, content in found.items()}


def test_the_log_is_the_same_as_if_this_process_had_read(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tables(pg)
    pg.execute("analyze")  # chunks go by the server's estimates, which must not change between the ways
    monkeypatch.setattr(delegated, "FULL_WAIT_S", 0.01)
    monkeypatch.setattr(delegated, "AGAIN_S", 0.01)
    ways: dict[str, Elsewhere | None] = {
        "here": None,
        "elsewhere": Elsewhere(),
        "among faults": Elsewhere(faulty=True),
        "in part": Elsewhere(),  # chunks of `items` are too large for it
    }
    logs: dict[str, Any] = {}
    for way, delegate in ways.items():
        log = tmp_path / way
        if way == "in part":
            monkeypatch.setattr(delegated, "SIZE_MIN", 100_000)
            monkeypatch.setattr(delegated, "SIZE_TIMES_PLANNED", 0)
        with capturing(
            pg.dsn, log, delegate=delegate, snapshot_connections=3, snapshot_chunk_rows=200
        ) as running:
            running.catch_up(pg.query, 60)
            shown = running.task.progress().snapshot
            assert {name: (table.rows, table.done) for name, table in shown.items()} == {
                "public.empty": (0, True),
                "public.items": (3000, True),
                "public.pairs": (2500, True),
                "public.parts": (2900, True),
                "public.plain": (2600, True),
            }
        logs[way] = units_of(log)
        assert not list(log.rglob("*.rows"))
        judge(pg, log)
        wait_until(lambda: not pg.query("select 1 from pg_replication_slots where active"))
        pg.execute("select pg_drop_replication_slot(%s)", [SLOT])
    assert len(logs["here"]) > 15
    for way in ways:
        assert logs[way] == logs["here"], way
    faulty = ways["among faults"]
    assert faulty is not None
    assert faulty.faults == faulty.assignments - faulty.faults > 15
    assert faulty.prepared == 1


def test_readers_that_are_lost_for_long_delay_the_snapshot_and_no_more(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tables(pg)
    monkeypatch.setattr(delegated, "AGAIN_S", 0.01)
    delegate = Elsewhere(lost=20)
    with capturing(pg.dsn, tmp_path / "log", delegate=delegate, **SMALL) as running:
        running.catch_up(pg.query, 120)
        error = running.task.progress()
        assert error.reconnects >= 1
    until_whole(pg, tmp_path / "log")
    judge(pg, tmp_path / "log")


def test_a_log_that_is_not_there_for_others_stops_with_the_way_out(
    pg: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_tables(pg)
    folder = tmp_path / "elsewhere"
    monkeypatch.setattr(staged, "new_folder", lambda _: folder)
    error = run_to_end(pg.dsn, tmp_path / "log", delegate=Elsewhere(), **SMALL)
    assert error is not None
    assert error.kind is Kind.ENVIRONMENT_UNFIT
    assert "log.path" in error.hint


def frame(text: bytes) -> tuple[bytearray, int]:
    """Return a frame of rows as it is staged."""
    rows = text.count(b"\n")
    head = frames.SNAPSHOT_TEXT_AT
    made = bytearray(head) + text
    made[0:1] = b"d"
    made[1:5] = (len(made) - 1).to_bytes(4, "big")
    made[head - 4 : head] = rows.to_bytes(4, "big")
    return made, rows


def test_only_a_file_that_is_exactly_what_was_told_is_taken(tmp_path: Path) -> None:
    rows = [frame(b"1\ta\n2\tb\n"), frame(b"3\tc\n")]
    with StagedWriter(str(tmp_path), 1000) as writer:
        writer.write(rows)
        whole = writer.finish()
    staged.check(whole)
    assert list(staged.rows_of(whole)) == rows
    content = Path(whole.path).read_bytes()
    for spoilt in (content[:-1], content + b"x", content[:40] + b"?" + content[41:], b""):
        Path(whole.path).write_bytes(spoilt)
        with pytest.raises(TailraceError) as raised:
            staged.check(whole)
        assert raised.value.kind is Kind.SPARK_FAILED
    Path(whole.path).write_bytes(content)
    for told in (
        StagedFile(whole.path, whole.size, whole.rows + 1, whole.crc),
        StagedFile(whole.path, whole.size + 50, whole.rows, whole.crc),
        StagedFile(whole.path, len(rows[0][0]) + 3, whole.rows, whole.crc),
    ):
        with pytest.raises(TailraceError):
            list(staged.rows_of(told))
    os.unlink(whole.path)
    with pytest.raises(TailraceError) as raised:
        staged.check(whole)
    assert raised.value.context == {"file": whole.path}


def test_a_file_that_was_not_finished_is_removed(tmp_path: Path) -> None:
    with pytest.raises(TooLarge), StagedWriter(str(tmp_path), 30) as writer:
        writer.write([frame(b"1\n"), frame(b"2\n")])
    assert not list(tmp_path.iterdir())
    with pytest.raises(TailraceError, match="not there for the executor"):
        StagedWriter(str(tmp_path / "gone"), 30)
