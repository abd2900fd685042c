"""The log's file is truncated: the unacknowledged end may be lost, acknowledged data may not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tailrace.changelog import index
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.format import seed_of
from tailrace.changelog.reader import LogReader
from tailrace.changelog.writer import LogWriter
from tailrace.errors import Kind, TailraceError
from tests.support.postgres import Database
from tests.support.torture.harness import Round
from tests.support.wait import wait_until

TASK = "0"


def _slot(round_: Round) -> str:
    return str(
        round_.database.query("select slot_name from pg_replication_slots where slot_name <> 'kept'")[0][0]
    )


def _copy_slot(round_: Round, source: str, target: str) -> None:
    active = "select 1 from pg_replication_slots where active"
    wait_until(lambda: not round_.database.query(active), 60, "the slot to be let go")
    if round_.database.query("select 1 from pg_replication_slots where slot_name = %s", [target]):
        round_.database.execute("select pg_drop_replication_slot(%s)", [target])
    round_.database.execute("select pg_copy_logical_replication_slot(%s, %s)", [source, target])


def _last_blocks(log: Path, count: int) -> tuple[Path, int, int]:
    """Return the last segment, the offset of its last `count` blocks, and its size."""
    directory = LogDirectory.open(log)
    segment = max(directory.task_path(TASK).glob("*.seg"))
    log_id = directory.identity.log_id
    file = index.SegmentFile.open(segment, seed_of(log_id, TASK), bytes.fromhex(log_id))
    blocks = list(index.walk_blocks(file, file.start(), None, payloads=True))
    file.close()
    assert len(blocks) > count + 1, "the log is smaller than the test needs"
    return segment, blocks[-count].file_at, segment.stat().st_size


@pytest.fixture
def killed(pg: Database, make_round: Callable[..., Round]) -> Round:
    """A pipeline that is killed after it appended a few blocks that were not durable yet."""
    # Pauses make small blocks: each byte of the last three is a case.
    round_ = make_round(pg, pause_s=0.1)
    # A single segment: a new one would wait for the hanging fsync, and nothing would be appended.
    round_.settings["log"] = {"segment_bytes": 64 << 20}
    round_.write_file()
    assert round_.live().wait() == 0
    with round_.at_work(transactions=None) as workload:
        life = round_.live("log.before_fsync=sleep:60000@5", until_caught_up=False)
        wait_until(lambda: round_.hits()["log.before_fsync"] >= 6, 60)
        wait_until(lambda: workload.committed > 30, 60)
        before = round_.hits()["capture.after_append"]
        wait_until(lambda: round_.hits()["capture.after_append"] > before + 8, 60)
        life.kill()
    return round_


@pytest.mark.ci
def test_a_pipeline_continues_from_a_truncated_log(killed: Round) -> None:
    segment, start, size = _last_blocks(killed.log, 3)
    slot, whole = _slot(killed), killed.root / "whole"
    _copy_slot(killed, slot, "kept")
    shutil.copytree(killed.log, whole)
    for kept in (*range(start, size, max(1, (size - start) // 7)), size):
        shutil.rmtree(killed.log)
        shutil.copytree(whole, killed.log)
        with segment.open("r+b") as file:
            file.truncate(kept)
        _copy_slot(killed, "kept", slot)
        life = killed.live()
        assert life.wait() == 0, life.last_words()
        assert killed.judge_log() == [], f"cut after {kept} of {size} bytes"


def test_a_log_that_lost_acknowledged_data_is_refused(killed: Round) -> None:
    durable = LogReader.open(killed.log, TASK).end().offset
    segment = max(killed.log.rglob("*.seg"))
    assert int(segment.stem, 16) < durable
    with segment.open("r+b") as file:
        file.truncate(segment.stat().st_size // 8)
    life = killed.live()
    assert life.wait() == 1
    assert "log_corrupt" in life.last_words()
    with pytest.raises(TailraceError) as refused:
        LogWriter.open(LogDirectory.open(killed.log), TASK)
    assert refused.value.kind is Kind.LOG_CORRUPT
