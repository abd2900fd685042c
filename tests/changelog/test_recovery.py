"""How a new writer recovers: truncated blocks, open units, damage, crashes in between."""

from __future__ import annotations

import os
import shutil
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

import pytest

from tailrace.changelog import directory
from tailrace.changelog import format as codec
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.endmark import MARK_NAME
from tailrace.changelog.index import Block, SegmentFile, walk_blocks
from tailrace.changelog.reader import LogReader
from tailrace.changelog.verify import verify
from tailrace.changelog.writer import LogOptions, LogWriter, Tail
from tailrace.errors import Kind, TailraceError
from tests.support.changelog.frames_of import Source, append, new_log, relation_frame
from tests.support.changelog.processes import write_until_killed
from tests.support.changelog.recovery import abandon, content, segment_files


def blocks_of(log: LogDirectory, path: Path) -> list[Block]:
    seed = codec.seed_of(log.identity.log_id, "0")
    file = SegmentFile.open(path, seed, bytes.fromhex(log.identity.log_id))
    try:
        return list(walk_blocks(file, file.start(), None))
    finally:
        file.close()


def abandoned_log(path: Path, *, synced: int, appended: int) -> tuple[LogDirectory, list[bytes]]:
    """Return a log that a killed writer left, and its transactions."""
    log, source = new_log(path), Source()
    writer = LogWriter.open(log, "0")
    sent = []
    for number in range(appended):
        sent.append((relation_frame() if number == 0 else b"") + source.transaction(1 + number % 2))
        append(writer, sent[-1])
        if number + 1 == synced:
            writer.sync()
    abandon(writer)
    return log, sent


@pytest.mark.slow
def test_a_log_truncated_at_any_byte_of_the_last_three_blocks_continues_without_them(
    memory_path: Path,
) -> None:
    log, sent = abandoned_log(memory_path / "log", synced=4, appended=7)
    [segment] = segment_files(log)
    blocks = blocks_of(log, segment)
    whole = segment.read_bytes()
    for length in range(blocks[-3].file_at, len(whole) + 1):
        shutil.rmtree(memory_path / "cut", ignore_errors=True)
        shutil.copytree(log.path, memory_path / "cut")
        cut = LogDirectory.open(memory_path / "cut")
        os.truncate(segment_files(cut)[0], length)
        kept = sum(block.file_at + block.header.size_on_disk <= length for block in blocks[1:])
        with LogWriter.open(cut, "0") as writer:
            assert writer.offset == writer.tail.offset == len(b"".join(sent[:kept]))
            assert writer.durable == writer.tail
            source = Source(lsn=0x1000 + 1000 * kept)
            again = source.transaction(2, "again")
            append(writer, again)
        assert content(cut) == b"".join(sent[:kept]) + again
        report = verify(cut.path)
        assert report.sound, report.problems


@pytest.mark.slow
def test_a_log_truncated_before_its_durable_end_is_refused_and_not_changed(memory_path: Path) -> None:
    log, _ = abandoned_log(memory_path / "log", synced=5, appended=5)
    [segment] = segment_files(log)
    whole = segment.read_bytes()
    for length in range(len(whole)):
        os.truncate(segment, length)
        with pytest.raises(TailraceError) as caught:
            LogWriter.open(log, "0")
        assert caught.value.kind is Kind.LOG_CORRUPT
        assert caught.value.hint
        assert segment.stat().st_size == length
        segment.write_bytes(whole)
    with LogWriter.open(log, "0") as writer:
        assert writer.offset > 0


@pytest.mark.slow
def test_damage_before_sound_blocks_is_refused_even_after_the_durable_end(memory_path: Path) -> None:
    log, _ = abandoned_log(memory_path / "log", synced=2, appended=6)
    [segment] = segment_files(log)
    blocks = blocks_of(log, segment)
    whole = segment.read_bytes()
    for at in range(blocks[-1].file_at):
        segment.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(TailraceError) as caught:
            LogWriter.open(log, "0")
        assert caught.value.kind in {Kind.LOG_CORRUPT, Kind.LOG_FORMAT_UNKNOWN}
        if caught.value.kind is Kind.LOG_CORRUPT:
            assert caught.value.context["file"] == str(segment)
            assert 0 <= at - caught.value.context["byte"] < 400
    segment.write_bytes(whole)
    LogWriter.open(log, "0").close()


@pytest.mark.follows("log_format_unknown")
@pytest.mark.parametrize("where", [codec, directory], ids=["segment", "identity"])
def test_a_log_of_a_later_version_is_refused_and_not_changed(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, where: ModuleType
) -> None:
    path = memory_path / "log"
    with monkeypatch.context() as later:
        later.setattr(where, "FORMAT_VERSION", codec.FORMAT_VERSION + 1)
        log, sent = abandoned_log(path, synced=3, appended=3)
    [segment] = segment_files(log)
    before = segment.read_bytes()
    for attempt in (lambda: content(LogDirectory.open(path)), lambda: LogWriter.open(new_log(path), "0")):
        with pytest.raises(TailraceError) as caught:
            attempt()
        assert caught.value.kind is Kind.LOG_FORMAT_UNKNOWN
        assert caught.value.hint == "read the log with the version of tailrace that wrote it"
    assert segment.read_bytes() == before
    with monkeypatch.context() as later:
        later.setattr(where, "FORMAT_VERSION", codec.FORMAT_VERSION + 1)
        assert content(LogDirectory.open(path)) == b"".join(sent)
        again = Source(lsn=0x1000 + 1000 * len(sent)).transaction()
        with LogWriter.open(LogDirectory.open(path), "0") as writer:
            append(writer, again)
        assert content(LogDirectory.open(path)) == b"".join(sent) + again


@pytest.mark.parametrize("garbage", [b"\0" * 5000, b"TLb\x01" * 100, os.urandom(3000)])
def test_bytes_that_are_no_block_after_the_end_are_cut_off(memory_path: Path, garbage: bytes) -> None:
    log, sent = abandoned_log(memory_path / "log", synced=3, appended=3)
    [segment] = segment_files(log)
    with segment.open("ab") as file:
        file.write(garbage)
    LogWriter.open(log, "0").close()
    assert content(log) == b"".join(sent)
    assert verify(log.path).sound


def test_an_open_unit_is_cut_off_even_over_many_segments(memory_path: Path) -> None:
    log, source = new_log(memory_path / "log"), Source()
    writer = LogWriter.open(log, "0", options=LogOptions(segment_bytes=600))
    whole = source.transaction(2)
    append(writer, whole, source.begin(), relation_frame(99))
    for _ in range(12):
        append(writer, *(source.insert() for _ in range(3)))
    writer.sync()
    assert writer.tail.offset == len(whole)
    assert len(segment_files(log)) > 3
    assert writer.schema_in_force
    abandon(writer)
    with LogWriter.open(log, "0") as after:
        assert after.tail == Tail(len(whole), 0x1000 + 1008, writer.tail.position_time_us)
        assert after.schema_in_force == {}
        assert len(segment_files(log)) == 1
    assert content(log) == whole
    assert verify(log.path).sound


def test_discarding_an_open_unit_keeps_everything_before_it(memory_path: Path) -> None:
    log, source = new_log(memory_path / "log"), Source()
    with LogWriter.open(log, "0", options=LogOptions(segment_bytes=600)) as writer:
        want = relation_frame() + source.transaction(1)
        append(writer, want)
        for rows in (1, 3, 12):
            append(writer, source.begin(), relation_frame(rows))
            for _ in range(rows):
                append(writer, source.insert(), source.insert())
            source.lsn -= 1000
            writer.discard_open_unit()
            assert writer.offset == writer.tail.offset == len(want)
            assert set(writer.schema_in_force) == {"R16400"}
            again = source.transaction(rows)
            want += again
            append(writer, again)
        writer.discard_open_unit()
        assert writer.offset == len(want)
    assert content(log) == want
    assert verify(log.path).sound


def test_a_unit_that_is_open_from_the_first_byte_is_cut_off(memory_path: Path) -> None:
    log, source = new_log(memory_path / "log"), Source()
    writer = LogWriter.open(log, "0", options=LogOptions(segment_bytes=300))
    append(writer, relation_frame(), source.begin())
    for _ in range(6):
        append(writer, source.insert())
    writer.sync()
    abandon(writer)
    source = Source()
    with LogWriter.open(log, "0") as after:
        assert (after.offset, after.schema_in_force) == (0, {})
        want = source.transaction()
        append(after, want)
    assert content(log) == want
    assert verify(log.path).sound


def test_a_last_segment_with_a_damaged_header_is_removed_if_it_was_empty(memory_path: Path) -> None:
    log, source = new_log(memory_path / "log"), Source()
    with LogWriter.open(log, "0") as writer:
        want = source.transaction()
        append(writer, want)
    head_size = blocks_of(log, segment_files(log)[0])[1].file_at
    for length in range(head_size):
        stray = log.task_path("0") / codec.segment_name(len(want))
        stray.write_bytes(segment_files(log)[0].read_bytes()[:length])
        if length < codec.SEGMENT_HEADER_SIZE:
            LogWriter.open(log, "0").close()
        else:
            # Its whole header belongs to another offset: no writer left it so.
            with pytest.raises(TailraceError) as caught:
                LogWriter.open(log, "0")
            assert caught.value.kind is Kind.LOG_CORRUPT
            stray.unlink()
        assert [path.name for path in segment_files(log)] == [codec.segment_name(0)]
    assert content(log) == want


def test_a_lost_end_mark_is_recreated_with_a_higher_epoch(memory_path: Path) -> None:
    log, sent = abandoned_log(memory_path / "log", synced=3, appended=3)
    mark = log.task_path("0") / MARK_NAME
    for damage in (b"", b"\0" * 200, None):
        if damage is None:
            mark.unlink()
        else:
            mark.write_bytes(damage)
        assert content(log) == b"".join(sent), "readers use the segments then"
        before = max(
            SegmentFile.open(
                path, codec.seed_of(log.identity.log_id, "0"), bytes.fromhex(log.identity.log_id)
            ).header.epoch
            for path in segment_files(log)
        )
        with LogWriter.open(log, "0") as writer:
            assert writer.epoch > before
            sent.append(Source(lsn=writer.tail.position).transaction())
            append(writer, sent[-1])


def test_a_missing_last_segment_is_reported(memory_path: Path) -> None:
    log, source = new_log(memory_path / "log"), Source()
    with LogWriter.open(log, "0", options=LogOptions(segment_bytes=1)) as writer:
        for _ in range(3):
            append(writer, source.transaction())
    segment_files(log)[-1].unlink()
    with pytest.raises(TailraceError) as caught:
        LogWriter.open(log, "0")
    assert caught.value.kind is Kind.LOG_CORRUPT
    for path in segment_files(log):
        path.unlink()
    with pytest.raises(TailraceError) as caught:
        LogWriter.open(log, "0")
    assert caught.value.kind is Kind.LOG_CORRUPT


POINTS = [
    ("log.before_fsync", 1),
    ("log.before_fsync", 7),
    ("log.after_fsync", 1),
    ("log.after_fsync", 9),
    ("log.before_roll", 2),
    ("log.after_seal", 2),
    ("log.after_roll", 1),
    ("log.after_roll", 4),
    ("log.recovery", 1),
    ("log.recovery", 3),
    ("log.before_retention", 1),
    ("log.in_retention", 1),
    ("log.in_retention", 2),
    ("log.after_retention", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("point", "count"), POINTS)
def test_after_a_kill_at_a_failpoint_the_log_has_all_acknowledged_data(
    memory_path: Path, processes: type[BaseProcess], point: str, count: int
) -> None:
    told = memory_path / "acknowledged"
    process = processes(target=write_until_killed, args=(memory_path / "log", told, f"{point}=kill@{count}"))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    acknowledged = [int(line) for line in told.read_text().split()]
    log = LogDirectory.open(memory_path / "log")
    with LogWriter.open(log, "0") as writer:
        assert writer.tail.position >= max(acknowledged, default=0)
        append(writer, Source(lsn=max(writer.tail.position, 0x1000)).transaction())
        assert writer.sync() == writer.tail
    report = verify(log.path)
    assert report.sound, report.problems
    with LogReader.open(log, "0") as reader:
        assert reader.blocks(reader.start, reader.end().offset)
