"""The agenda beside the log: after a kill at any moment, a chunk that is in the log is found there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.writer import LogWriter
from tailrace.protocol import frames
from tailrace.sources.postgres.snapshot import chunk_writer
from tailrace.sources.postgres.snapshot.chunk_writer import ChunkWriter
from tailrace.sources.postgres.snapshot.plan import (
    Origin,
    SnapshotPlan,
    SnapshotPlans,
    TableSnapshotPlan,
    unit_name,
)
from tailrace.sources.postgres.snapshot.state import SnapshotState
from tailrace.sources.postgres.streaming.appender import PostgresAppender
from tests.support.orders_log import OID, directory_at, relation

LSN = 1000


class Orders:
    """The frames of a published table that are written before its rows."""

    oid = OID

    def facts_frame(self, *_: Any) -> bytes:
        return b""

    def schema_frames(self, lsn: int, server_time_us: int) -> bytes:
        return frames.xlog_frame(lsn, lsn, server_time_us, relation())


def rows(count: int) -> list[tuple[bytearray, int]]:
    text = b"1\tthing\n" * count
    frame = bytearray(frames.SNAPSHOT_TEXT_AT) + text
    frame[0:1], frame[5:6] = b"d", b"s"
    frame[1:5] = (len(frame) - 1).to_bytes(4, "big")
    frame[6:10] = OID.to_bytes(4, "big")
    frame[frames.SNAPSHOT_TEXT_AT - 4 : frames.SNAPSHOT_TEXT_AT] = count.to_bytes(4, "big")
    return [(frame, count)]


@contextmanager
def appending(directory: LogDirectory) -> Iterator[PostgresAppender]:
    with LogWriter.open(directory, "0") as writer:
        appender = PostgresAppender(writer, threading.Event())
        appender.start()
        try:
            yield appender
        finally:
            appender.close()


def planned(ledger: SnapshotState, chunks: int) -> SnapshotPlan:
    table = TableSnapshotPlan(0, OID, "public", "orders", fresh=True)
    snapshot = SnapshotPlan("1", Origin.INITIAL, [table])
    ledger.replace(SnapshotPlans([snapshot]))
    table.plan(chunks, whole=False, facts="", rows_estimated=chunks)
    ledger.write()
    return snapshot


@pytest.mark.parametrize("point", ["snapshot.in_copy", "snapshot.before_chunk_end", "snapshot.after_chunk"])
def test_a_chunk_is_found_after_a_kill_although_another_thread_wrote_the_agenda_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """The end of a chunk's unit may be durable before the thread that appended it can record that."""
    directory = directory_at(tmp_path / "log")
    with appending(directory) as appender:
        ledger = SnapshotState(directory, appender)
        snapshot = planned(ledger, 3)
        writer = ChunkWriter(
            appender, LSN, threading.Event(), name_of=lambda _: None, admitted=lambda: None,
            closing=ledger.closing,
        )  # fmt: skip
        killed: list[set[int]] = []

        def hit(name: str) -> None:
            if name == point:
                appender.sync()
                planner = threading.Thread(target=ledger.write)
                planner.start()
                planner.join(60)
                killed.append(found_at_a_start(directory, appender))

        monkeypatch.setattr(f"{chunk_writer.__name__}.failpoints.hit", hit)
        for chunk in range(3):
            unit = chunk_writer.Unit(unit_name(snapshot, snapshot.tables[0], chunk))
            writer.write(unit, Orders(), rows(2))  # type: ignore[arg-type]
            writer.part_done(unit, 2)
        done_at_kill = [set(), {0}, {0, 1}] if point != "snapshot.after_chunk" else [{0}, {0, 1}, {0, 1, 2}]
        assert killed == done_at_kill
        ledger.checkpoint()
        assert found_at_a_start(directory, appender) == {0, 1, 2}
        assert ledger.plans.log_offset == appender.durable.offset


def found_at_a_start(directory: LogDirectory, appender: PostgresAppender) -> set[int]:
    """Return the chunks that a process starting now would take for done."""
    later = SnapshotState(directory, appender)
    later.open()
    return later.plans.open[0].tables[0].done
