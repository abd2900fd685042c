"""What retention may remove: the rules as a table, then the removal."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import structlog

from tailrace.changelog import lock
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.format import segment_name
from tailrace.changelog.index import SegmentFile
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.policy import RetentionPlan, RetentionRules, SegmentFacts, now_of, plan
from tailrace.changelog.retention.prune import apply, segment_facts
from tailrace.changelog.retention.readers import Readers
from tailrace.changelog.verify import verify
from tailrace.changelog.writer import LogOptions, LogWriter
from tailrace.config import LogConfig, RetentionConfig
from tailrace.errors import Kind, TailraceError
from tailrace.pipeline import source_worker
from tailrace.pipeline.source_worker import RetentionTimer
from tests.support.changelog.frames_of import SECOND_US, Source, append, new_log
from tests.support.torture import disk

#: Four segments of 10 bytes, whose last units ended at 1 s, 2 s, 3 s and 4 s; the last is written.
SEGMENTS = [SegmentFacts(n * 100, n * 100 + 100, 10, (n + 1) * SECOND_US) for n in range(4)]
HOLD, DROP = "hold", "drop"


@pytest.mark.parametrize(
    ("rules", "readers", "durable_end", "remove", "drop", "held_by"),
    [
        # no limit: nothing is removed, however far all readers have read
        ({}, {"a": 400}, 400, (), (), ()),
        # by size
        ({"size_bytes": 40}, {}, 400, (), (), ()),
        ({"size_bytes": 39}, {}, 400, (0,), (), ()),
        ({"size_bytes": 20}, {}, 400, (0, 100), (), ()),
        ({"size_bytes": 0}, {}, 400, (0, 100, 200), (), ()),  # never the last segment
        # by age, at 4 s
        ({"age_s": 3}, {}, 400, (), (), ()),
        ({"age_s": 2.5}, {}, 400, (0,), (), ()),
        ({"age_s": 0}, {}, 400, (0, 100, 200), (), ()),
        # either limit is enough
        ({"age_s": 2.5, "size_bytes": 20}, {}, 400, (0, 100), (), ()),
        # not segments after the durable end
        ({"size_bytes": 0}, {}, 199, (0,), (), ()),
        ({"size_bytes": 0}, {}, 200, (0, 100), (), ()),
        ({"size_bytes": 0}, {}, 0, (), (), ()),
        # a reader holds the segment that it has not read completely
        ({"size_bytes": 0}, {"a": 400, "b": 100}, 400, (0,), (), ("b",)),
        ({"size_bytes": 0}, {"a": 199, "b": 199}, 400, (0,), (), ("a", "b")),
        ({"size_bytes": 0}, {"a": 200}, 400, (0, 100), (), ("a",)),
        ({"size_bytes": 20}, {"a": 200}, 400, (0, 100), (), ()),
        ({"size_bytes": 40}, {"a": 0}, 400, (), (), ()),
        # or is dropped, but only if its segments are removed
        ({"size_bytes": 20, "on_slow_reader": DROP}, {"a": 199, "b": 200}, 400, (0, 100), ("a",), ()),
        ({"size_bytes": 40, "on_slow_reader": DROP}, {"a": 0}, 400, (), (), ()),
        ({"size_bytes": 0, "on_slow_reader": DROP}, {"a": 0, "b": 250}, 400, (0, 100, 200), ("a", "b"), ()),
        ({"size_bytes": 20, "on_slow_reader": HOLD}, {"a": 99}, 400, (), (), ("a",)),
    ],
)
def test_the_rules_of_retention(rules, readers, durable_end, remove, drop, held_by) -> None:
    decided = plan(SEGMENTS, readers, RetentionRules(**rules), durable_end=durable_end, now_us=4 * SECOND_US)
    assert decided == RetentionPlan(remove, drop, held_by)


def test_a_clock_that_jumps_ahead_removes_nothing() -> None:
    ten_years = 10 * 365 * 86400 * SECOND_US
    for newest, wall in ((4 * SECOND_US, ten_years), (ten_years, 4 * SECOND_US)):
        assert now_of(newest, wall) == 4 * SECOND_US


@pytest.fixture
def log(memory_path: Path) -> LogDirectory:
    made, source = new_log(memory_path / "log"), Source()
    with LogWriter.open(made, "0", options=LogOptions(segment_bytes=1)) as writer:
        for _ in range(6):
            append(writer, source.transaction())
    return made


def test_removed_segments_are_gone_and_the_rest_is_sound(log: LogDirectory) -> None:
    facts = segment_facts(log, "0")
    assert [fact.first_offset for fact in facts] == log.segments("0")
    pruned = apply(log, "0", RetentionRules(age_s=1.5), wall_clock_us=lambda: 2**62)
    assert len(pruned.segments) == 4, "two are younger than that, by the log's own clock"
    assert pruned.size_bytes == sum(fact.size_bytes for fact in facts[:4])
    assert log.segments("0") == [fact.first_offset for fact in facts[4:]]
    assert verify(log.path).sound
    assert apply(log, "0", RetentionRules(age_s=1.5)).segments == ()
    with LogWriter.open(log, "0") as writer:
        append(writer, Source(lsn=writer.tail.position).transaction())


def test_segments_that_retention_removes_during_a_verification_are_no_damage(
    log: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, first = SegmentFile.open, [log.task_path("0") / segment_name(at) for at in log.segments("0")[:4]]

    def after_retention(path: Path, *rest: Any) -> SegmentFile:
        if path == first[2]:
            for each in first:
                each.unlink()
        return opened(path, *rest)

    monkeypatch.setattr(SegmentFile, "open", after_retention)
    report = verify(log.path)
    assert report.problems == []
    assert len(report.notes) == 2
    assert report.segments == 4


def test_retention_tolerates_segments_that_the_writer_discards_meanwhile(
    log: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = LogDirectory.segments
    with LogWriter.open(log, "0", options=LogOptions(segment_bytes=1)) as writer:
        source, durable = Source(lsn=writer.tail.position), log.segments("0")
        append(writer, source.begin())
        append(writer, source.insert())
        append(writer, source.insert())
        assert len(log.segments("0")) == len(durable) + 3

        def listed_then_cut(self: LogDirectory, task: str) -> list[int]:
            found = listed(self, task)
            writer.discard_open_unit()
            return found

        with monkeypatch.context() as patched:
            patched.setattr(LogDirectory, "segments", listed_then_cut)
            assert len(apply(log, "0", RetentionRules(age_s=1.5)).segments) == 4
    assert log.segments("0") == durable[4:]


def test_a_slow_reader_holds_the_log_until_it_commits(log: LogDirectory) -> None:
    readers = Readers(log)
    offsets = log.segments("0")
    readers.register("slow", {"0": 0})
    rules = RetentionRules(size_bytes=1)
    assert apply(log, "0", rules).held_by == ("slow",)
    assert log.segments("0") == offsets
    readers.commit("slow", "0", offsets[3])
    assert len(apply(log, "0", rules).segments) == 3
    readers.remove("slow")
    assert readers.all() == []
    assert len(apply(log, "0", rules).segments) == 2


def test_a_dropped_reader_gets_an_error_and_may_register_again(log: LogDirectory) -> None:
    readers = Readers(log)
    readers.register("slow", {"0": 0})
    pruned = apply(log, "0", RetentionRules(size_bytes=1, on_slow_reader="drop"))
    assert pruned.dropped_readers == ("slow",)
    with pytest.raises(TailraceError) as caught:
        readers.commit("slow", "0", 5)
    assert caught.value.kind is Kind.LOG_RANGE_GONE
    with LogReader.open(log, "0") as reader:
        readers.register("slow", {"0": reader.start})
        readers.commit("slow", "0", reader.end().offset)
    [found] = readers.all()
    assert (found.name, found.dropped) == ("slow", False)


def test_commits_only_go_forward_and_need_a_registration(log: LogDirectory) -> None:
    readers = Readers(log)
    with pytest.raises(TailraceError) as caught:
        readers.commit("nobody", "0", 1)
    assert caught.value.kind is Kind.LOG_RANGE_INVALID
    assert "Start this one again" in caught.value.hint
    readers.register("a/b: c", {"0": 10})
    readers.commit("a/b: c", "0", 30)
    readers.commit("a/b: c", "0", 20)
    readers.register("a/b: c", {"0": 0, "1": 7})
    [found] = Readers.open(log.path).all()
    assert (found.name, dict(found.offsets)) == ("a/b: c", {"0": 30, "1": 7})


def test_an_offset_and_a_release_that_two_threads_commit_at_once_are_both_kept(log: LogDirectory) -> None:
    Readers(log).register("engine:shop", {"0": 0})

    def release() -> None:
        for offset in range(1, 40):
            Readers(log).commit("engine:shop", "0", offset)

    with ThreadPoolExecutor(1) as pool:
        releasing = pool.submit(release)
        for number in range(40):
            Readers(log).commit("engine:shop", "0", 0, kept={"log_offset": number})
            assert Readers(log).require("engine:shop").kept["0"] == {"log_offset": number}
        releasing.result()
    assert Readers(log).require("engine:shop").offsets["0"] == 39


def test_a_temporary_reader_that_begins_during_retention_is_known_to_have_ended(
    log: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers, take = Readers(log), lock._lock

    def retention_first(fd: int) -> bool:
        readers.remove_ended()
        return take(fd)

    monkeypatch.setattr(lock, "_lock", retention_first)
    reading = readers.temporary("replay:out")
    name = reading.__enter__()
    monkeypatch.undo()
    readers.register(name, {"0": 0})
    readers.remove_ended()
    assert [reader.name for reader in readers.all()] == [name]
    monkeypatch.setattr(readers, "remove", lambda _: None)
    monkeypatch.setattr(Path, "unlink", lambda *_, **_options: None)
    reading.__exit__(None, None, None)  # as the end of its process does: only the lock ends
    monkeypatch.undo()
    readers.remove_ended()
    assert readers.all() == []


def test_files_that_a_killed_process_left_are_removed_once_no_process_can_use_them(log: LogDirectory) -> None:
    readers = Readers(log)
    readers.register("lake", {"0": 0})
    left, new = (log.path / "readers" / name for name in (".replay%3Aout%3A1.tmp", ".lake.json.1.tmp"))
    for file in (left, new):
        file.touch()
    os.utime(left, (0, 0))
    readers.remove_ended()
    assert not left.exists()
    assert new.exists()


def test_a_temporary_reader_whose_lock_can_not_be_looked_at_stays(
    log: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = Readers(log)
    with readers.temporary("replay:out") as name:
        readers.register(name, {"0": 0})

        def too_many(*_: object) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with monkeypatch.context() as patched:
            patched.setattr(os, "open", too_many)
            with pytest.raises(OSError, match="open files"):
                readers.remove_ended()
        assert readers.require(name).offsets == {"0": 0}


def test_retention_that_fails_is_tried_again(log: LogDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = RetentionTimer(LogConfig(path=log.path, retention=RetentionConfig(age_s=0.001)), "0", None)
    monkeypatch.setattr(source_worker, "RETENTION_INTERVAL_S", 0.0)
    before = log.segments("0")

    def too_many(*_: object) -> SegmentFile:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched, structlog.testing.capture_logs() as said:
        patched.setattr(SegmentFile, "open", too_many)
        timer.turn()
    assert [line["event"] for line in said] == ["retention failed"]
    assert log.segments("0") == before
    timer.turn()
    assert log.segments("0") == before[-1:]


def test_a_damaged_reader_file_prevents_any_removal(log: LogDirectory) -> None:
    readers = Readers(log)
    readers.register("sink", {"0": 10**6})
    for path in (log.path / "readers").iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(TailraceError) as caught:
        apply(log, "0", RetentionRules(size_bytes=1))
    assert caught.value.kind is Kind.LOG_CORRUPT
    assert len(log.segments("0")) == 6


def test_a_reader_finds_the_next_first_segment_when_retention_removes_one(
    log: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = LogReader.open(log, "0")
    look = LogReader._first_boundary
    taken: list[Path] = []

    def look_too_late(self: LogReader) -> int:
        if not taken:
            taken.append(min(log.task_path("0").glob("*.seg")))
            taken[0].unlink()
        return look(self)

    monkeypatch.setattr(LogReader, "_first_boundary", look_too_late)
    assert reader.start > int(taken[0].stem, 16)


@pytest.mark.skipif(not disk.can_mount(), reason="mounts a small disk, which needs root")
def test_on_a_full_disk_readers_move_on_so_that_retention_makes_room(tmp_path: Path) -> None:
    with disk.small_disk(tmp_path / "disk", 1) as small:
        made, source = new_log(small / "log"), Source()
        readers = Readers(made)
        readers.register("sink", {"0": 0})
        with LogWriter.open(made, "0", options=LogOptions(segment_bytes=1)) as writer:
            for _ in range(6):
                append(writer, source.transaction())
            end = writer.sync().offset
            ballast = disk.fill(small)
            with pytest.raises(TailraceError, match="No space left on device"):
                append(writer, source.transaction())
            for committed in (end // 2, end):  # each over the generation before
                readers.commit("sink", "0", committed)
                assert readers.require("sink").offsets == {"0": committed}
            assert len(apply(made, "0", RetentionRules(size_bytes=0)).segments) == 5
            source = Source(lsn=writer.tail.position)
            append(writer, source.transaction())
        # A damaged generation is not what the next one is written over, if it is the newest.
        ballast.write_bytes(b"")
        readers.commit("sink", "0", end + 1)
        (made.path / "readers" / "sink.json").write_bytes(b"damaged")
        disk.fill(small)
        with pytest.raises(TailraceError) as caught:
            readers.commit("sink", "0", end + 2)
        assert caught.value.kind is Kind.LOG_FULL
        assert readers.require("sink").offsets == {"0": end}
