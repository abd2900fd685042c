"""Readers: ranges, boundaries, and reading while the writer is at work."""

from __future__ import annotations

import pickle
import random
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.changelog import format as codec
from tailrace.changelog import runs
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.policy import RetentionRules
from tailrace.changelog.retention.prune import apply
from tailrace.changelog.writer import LogOptions, LogWriter
from tailrace.errors import Kind, TailraceError
from tailrace.ranges.positions import LogPoint, locate
from tests.support.changelog.frames_of import BEGAN_US, SECOND_US, Source, append, new_log, relation_frame
from tests.support.changelog.recovery import abandon, segment_files
from tests.support.examples import examples
from tests.support.orders_log import EPOCH_US, LogOfOrders


@dataclass
class Unit:
    """What was sent as one transaction."""

    start: int
    end: int
    rows: int
    position: int
    time_us: int


def written(
    path: Path, seed: int, *, units: int = 40, segment_bytes: int = 2500
) -> tuple[LogDirectory, list[Unit], bytes]:
    """Return a sealed log of random transactions in random chunks, its units and its content."""
    log, source, choose = new_log(path), Source(), random.Random(seed)
    sent: list[bytes] = []
    found: list[Unit] = []
    offset = 0
    for number in range(units):
        rows = choose.choice([0, 1, 1, 2, 5, 9])
        frames_ = [relation_frame(16400 + number)] if choose.random() < 0.1 else []
        jitter = choose.randrange(-3, 3) * SECOND_US
        frames_ += [source.begin(BEGAN_US + number * SECOND_US + jitter)]
        frames_ += [source.insert(note="n" * choose.randrange(40)) for _ in range(rows)]
        frames_ += [source.commit()]
        start, offset = offset, offset + sum(map(len, frames_))
        found.append(Unit(start, offset, rows, source.lsn + 8, source.time_us))
        sent += frames_
    with LogWriter.open(log, "0", options=LogOptions(segment_bytes=segment_bytes)) as writer:
        at = 0
        while at < len(sent):
            count = choose.choice([1, 2, 5, 20])
            append(writer, *sent[at : at + count])
            at += count
    return log, found, b"".join(sent)


def test_the_boundary_of_an_empty_range_is_its_end(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RUN_BYTES_MAX", 1500)
    log, units, _ = written(Path(tempfile.mkdtemp(dir=memory_path)), 8748)
    with LogReader.open(log, "0") as reader:
        assert [reader.boundary_within(unit.end, 0, 0, unit.end) for unit in units] == [
            unit.end for unit in units
        ]


@given(st.integers(0, 10_000), st.data())
@settings(examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_boundary_function_agrees_with_a_count_by_hand(
    memory_path: Path, seed: int, data: st.DataObject
) -> None:
    path = Path(tempfile.mkdtemp(dir=memory_path))
    run_bytes = data.draw(st.sampled_from([1, 400, 1500, 1 << 20]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runs, "RUN_BYTES_MAX", run_bytes)
        log, units, content = written(path, seed)
        reader = LogReader.open(log, "0")
        boundaries = [0, *(unit.end for unit in units)]
        for _ in range(8):
            low, high = sorted(data.draw(st.lists(st.sampled_from(boundaries), min_size=2, max_size=2)))
            refs = reader.blocks(low, high)
            raw = b"".join(bytes(reader.read(ref)) for ref in refs)
            if refs:
                first = refs[0].header.log_offset
                assert content[first : first + len(raw)] == raw
                assert first <= low
                assert first + len(raw) >= high
            rows_max = data.draw(st.integers(0, 60))
            bytes_max = data.draw(st.integers(0, 3000))
            wanted = low
            for unit in units:
                if low < unit.end <= high:
                    rows = sum(u.rows for u in units if low <= u.start and u.end <= unit.end)
                    if wanted == low or (rows <= rows_max and unit.end - low <= bytes_max):
                        wanted = unit.end
            assert reader.boundary_within(low, rows_max, bytes_max, high) == wanted
            unit, somewhere = data.draw(st.sampled_from(units)), data.draw(st.integers(0, len(content)))
            # No unit is open where a segment begins between a table's description and a transaction, either.
            assert max(end for end in boundaries if end <= somewhere) <= reader.boundary_up_to(somewhere)
            assert reader.boundary_up_to(somewhere) <= somewhere
            assert reader.boundary_up_to(unit.end) == unit.end
            for lsn in (unit.position - 1, unit.position):
                past = [u.start for u in units if u.position > lsn]
                assert reader.boundary_at_position(lsn) == (past[0] if past else len(content))
            for time_us in (unit.time_us, unit.time_us + 1):
                later = [u.start for u in units if u.time_us >= time_us]
                assert reader.boundary_at_time(time_us) == (later[0] if later else len(content))


@pytest.mark.parametrize("run_bytes", [1, 700, 1 << 20])
def test_a_range_has_the_same_runs_while_written_sealed_and_without_footers(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, run_bytes: int
) -> None:
    monkeypatch.setattr(runs, "RUN_BYTES_MAX", run_bytes)
    log, source, want = new_log(memory_path / "log"), Source(), {}
    with (
        LogWriter.open(log, "0", options=LogOptions(segment_bytes=3000)) as writer,
        LogReader.open(log, "0") as reader,
    ):
        for number in range(60):
            before = writer.tail.offset
            append(writer, source.transaction(1 + number % 4))
            after = writer.sync().offset
            want[before, after] = reader.blocks(before, after)
            want[0, after] = reader.blocks(0, after)
    with LogReader.open(log, "0") as reader:
        assert {key: reader.blocks(*key) for key in want} == want
    for path in segment_files(log):
        whole = path.read_bytes()
        path.write_bytes(whole[: -int.from_bytes(whole[-8:-4], "little")])
    with LogReader.open(log, "0") as reader:
        assert {key: reader.blocks(*key) for key in want} == want


def test_a_boundary_in_a_run_that_grows_is_found_without_reading_the_run(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, source, read = new_log(memory_path / "log"), Source(), []
    with LogWriter.open(log, "0") as writer, LogReader.open(log, "0") as reader:
        offsets = []
        for _ in range(100):
            append(writer, source.transaction(3))
            offsets.append(writer.sync().offset)
        before = reader.read
        monkeypatch.setattr(reader, "read", lambda ref: read.append(ref.header.raw_size) or before(ref))
        assert reader.boundary_up_to(offsets[-2]) == offsets[-2]
    assert sum(read) <= 2 * offsets[0]


def test_a_run_can_be_sent_to_another_process(memory_path: Path) -> None:
    log, _, content = written(memory_path / "log", 1)
    with LogReader.open(log, "0") as reader:
        refs = pickle.loads(pickle.dumps(reader.blocks(0, len(content))))  # noqa: S301 (our own)
    with LogReader.open(str(log.path), "0") as reader:
        assert b"".join(bytes(reader.read(ref)) for ref in refs) == content


def test_offsets_that_are_no_boundaries_or_not_durable_are_refused(memory_path: Path) -> None:
    log, units, content = written(memory_path / "log", 2)
    with LogReader.open(log, "0") as reader:
        whole = [unit for unit in units if unit.rows > 1]
        for start, end in [
            (units[0].end + 1, units[3].end),
            (0, whole[0].end - 10),
            (0, len(content) + 1),
            (units[3].end, units[1].end),
            (-5, units[1].end),
        ]:
            with pytest.raises(TailraceError) as caught:
                reader.blocks(start, end)
            assert caught.value.kind is Kind.LOG_RANGE_INVALID
        assert reader.blocks(units[3].end, units[3].end) == []
        before = max([unit.end for unit in units if unit.end < whole[0].end], default=0)
        # Follow the hint.
        for within, begins in ((units[0].end + 1, units[0].end), (whole[0].end - 10, before)):
            with pytest.raises(TailraceError, match="is not where a transaction ends") as caught:
                reader.blocks(within, len(content))
            assert f"the transaction begins at {begins}: use that" in caught.value.hint
            assert reader.blocks(begins, len(content))


def test_a_missing_task_is_reported(memory_path: Path) -> None:
    log, _, _ = written(memory_path / "log", 3, units=1)
    with pytest.raises(TailraceError) as caught:
        LogReader.open(log, "7")
    assert caught.value.kind is Kind.LOG_MISSING
    assert "it has: 0" in caught.value.hint


def test_readers_of_an_empty_log_see_an_empty_range(memory_path: Path) -> None:
    log = new_log(memory_path / "log")
    with LogWriter.open(log, "0"), LogReader.open(log, "0") as reader:
        assert (reader.start, reader.end().offset) == (0, 0)
        assert reader.blocks(0, 0) == []
        assert reader.all_schema_frames(0, 0) == []
        assert reader.boundary_within(0, 10, 10, 0) == 0
        assert reader.boundary_at_position(5) == reader.boundary_at_time(5) == 0


def test_a_reader_follows_while_the_writer_appends_rolls_and_truncates(memory_path: Path) -> None:
    log, source, done = new_log(memory_path / "log"), Source(), threading.Event()
    got: list[bytes] = []
    failed: list[BaseException] = []
    writer = LogWriter.open(log, "0", options=LogOptions(segment_bytes=4000))

    def follow() -> None:
        try:
            with LogReader.open(log, "0") as reader:
                at = 0
                while not (done.is_set() and at == reader.end().offset):
                    end = reader.end().offset
                    upto = reader.boundary_within(at, 7, 5000, end)
                    for ref in reader.blocks(at, upto):
                        first = ref.header.log_offset
                        raw = bytes(reader.read(ref))
                        got.append(raw[max(at - first, 0) : upto - first])
                    at = upto
        except BaseException as error:  # noqa: BLE001 (shown by the test)
            failed.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    want = []
    for number in range(300):
        want.append(source.transaction(number % 4))
        append(writer, want[-1])
        if number % 10 == 0:
            append(writer, source.begin(), source.insert(), relation_frame(number))
            append(writer, *(source.insert(note="y" * 500) for _ in range(number % 40)), source.insert())
            writer.sync()
            source.lsn -= 1000
            writer.discard_open_unit()
        if number % 3 == 0:
            writer.sync()
    writer.close()
    done.set()
    thread.join(60)
    assert not failed, failed
    assert b"".join(got) == b"".join(want)


@pytest.mark.parametrize(
    "look",
    [
        lambda reader, inside, _end: reader.boundary_up_to(inside),
        lambda reader, inside, _end: reader.read_on(inside, 1000),
        lambda reader, _inside, end: reader.all_schema_frames(end, end),
    ],
    ids=["boundary_up_to", "read_on", "all_schema_frames"],
)
def test_a_segment_that_is_replaced_after_a_lost_connection_is_read_as_replaced(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[LogReader, int, int], object]
) -> None:
    monkeypatch.setattr(runs, "RUN_BYTES_MAX", 1)
    log, source = new_log(memory_path / "log"), Source()
    with (
        LogWriter.open(log, "0", options=LogOptions(segment_bytes=3000)) as writer,
        LogReader.open(log, "0") as reader,
    ):
        append(writer, relation_frame(), source.begin(), source.insert())
        append(writer, source.insert())
        append(writer, last := source.insert(note="x" * 3000), source.commit())
        end = writer.sync().offset
        append(writer, source.begin(), source.insert())  # in the next segment, which is not durable
        assert log.segments("0") == [0, end]
        look(reader, end - len(last), end)
        writer.discard_open_unit()
        source.lsn -= 1000
        append(writer, again := source.transaction(2))
        [ref] = reader.blocks(end, writer.sync().offset)
        assert bytes(reader.read(ref)) == again


def test_an_empty_segment_that_another_writer_replaces_is_read_as_replaced(memory_path: Path) -> None:
    log, source = new_log(memory_path / "log"), Source()
    writer = LogWriter.open(log, "0", options=LogOptions(segment_bytes=1))
    append(writer, relation_frame(), source.transaction())
    end = writer.sync().offset
    append(writer, source.begin(), source.insert())
    assert len(apply(log, "0", RetentionRules(size_bytes=0)).segments) == 1
    abandon(writer)
    with LogReader.open(log, "0") as reader:
        assert reader.all_schema_frames(end, end) == [relation_frame()]
        with LogWriter.open(log, "0") as after:
            append(after, again := source.transaction(2))
            [ref] = reader.blocks(end, after.sync().offset)
            assert reader.schema_before(ref) == [relation_frame()]
            assert bytes(reader.read(ref)) == again


def test_a_range_that_retention_removed_is_refused_and_never_skipped(memory_path: Path) -> None:
    log, units, content = written(memory_path / "log", 4, segment_bytes=800)
    with LogReader.open(log, "0") as old:
        refs = old.blocks(0, len(content))
        pruned = apply(log, "0", RetentionRules(size_bytes=4000))
        assert len(pruned.segments) > 3
        for attempt in (
            lambda: old.read(refs[0]),
            lambda: old.blocks(0, units[5].end),
            lambda: old.boundary_within(0, 5, 5, len(content)),
            lambda: old.schema_before(refs[0]),
            lambda: old.boundary_at_position(units[0].position),
            lambda: old.boundary_at_time(units[0].time_us),
        ):
            with pytest.raises(TailraceError) as caught:
                attempt()
            assert caught.value.kind is Kind.LOG_RANGE_GONE
        for reader in (old, LogReader.open(log, "0")):
            start = reader.start
            assert start in [unit.end for unit in units]
            assert start >= log.segments("0")[0]
            kept = reader.blocks(start, len(content))
            raw = b"".join(bytes(reader.read(ref)) for ref in kept)
            assert raw == content[kept[0].header.log_offset :]


def test_a_place_before_a_transaction_whose_start_was_removed_is_refused(tmp_path: Path) -> None:
    log = LogOfOrders(tmp_path / "log", segment_bytes=1 << 16)
    log.insert(1)
    start = log.insert_in_blocks(*(range(first, first + 500) for first in range(0, 6000, 500)))
    log.insert(2)
    log.close()
    apply(log.directory, "0", RetentionRules(size_bytes=1))
    time_us = EPOCH_US + 2_000_000  # of the transaction that ends at `start`
    with LogReader.open(log.directory, "0") as reader:
        assert 0 < log.directory.segments("0")[0] < reader.start == start
        for find, value in ((reader.boundary_at_position, 2000), (reader.boundary_at_time, time_us)):
            with pytest.raises(TailraceError) as caught:
                find(value)
            assert caught.value.kind is Kind.LOG_RANGE_GONE
        with pytest.raises(TailraceError) as caught:
            locate(reader, LogPoint("time", time_us))
        assert caught.value.hint == f"start at {start} or later"
        assert reader.boundary_at_position(2999) == reader.boundary_at_time(time_us + 1) == start


def test_a_range_is_read_while_retention_removes_segments_before_it(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, units, content = written(memory_path / "log", 9, segment_bytes=800)
    starts = [offset for offset in log.segments("0") if offset in {unit.end for unit in units}]
    assert len(starts) > 3
    looked_up = vars(LogReader)["start"].fget
    for start in starts:
        reader = LogReader.open(log, "0")

        def first_then_gone(self: LogReader, start: int = start) -> int:
            first = looked_up(self)
            for offset in log.segments("0"):
                if offset < start:
                    (log.task_path("0") / codec.segment_name(offset)).unlink()
            return first

        with monkeypatch.context() as patched:
            patched.setattr(LogReader, "start", property(first_then_gone))
            refs = reader.blocks(start, len(content))
        assert b"".join(bytes(reader.read(ref)) for ref in refs) == content[start:]


def test_a_reader_beside_retention_gets_complete_ranges_or_an_error(memory_path: Path) -> None:
    log, _, content = written(memory_path / "log", 5, units=300, segment_bytes=600)
    started, outcomes = threading.Event(), []

    def read_again_and_again() -> None:
        with LogReader.open(log, "0") as reader:
            for _ in range(200):
                started.set()
                start = 0
                try:
                    start = reader.start
                    refs = reader.blocks(start, len(content))
                    raw = b"".join(bytes(reader.read(ref)) for ref in refs)
                    assert raw == content[refs[0].header.log_offset :]
                    outcomes.append("read")
                except TailraceError as error:
                    outcomes.append(error.kind)

    thread = threading.Thread(target=read_again_and_again)
    thread.start()
    assert started.wait(60)
    for size in range(60_000, 2000, -1500):
        apply(log, "0", RetentionRules(size_bytes=size))
    thread.join(60)
    assert len(outcomes) == 200
    assert set(outcomes) <= {"read", Kind.LOG_RANGE_GONE}
    assert outcomes[-1] == "read"


def test_one_damaged_slot_of_the_end_mark_shows_an_older_end_not_a_wrong_one(memory_path: Path) -> None:
    log, source = new_log(memory_path / "log"), Source()
    writer = LogWriter.open(log, "0")
    ends = []
    for _ in range(3):
        append(writer, source.transaction())
        ends.append(writer.sync())
    mark = log.task_path("0") / "end"
    whole = mark.read_bytes()
    with LogReader.open(log, "0") as watching:
        assert watching.end() == ends[-1]
        for at in range(len(whole)):
            mark.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            with LogReader.open(log, "0") as fresh:
                assert fresh.end() in ends[-2:]
            assert watching.end() == ends[-1]
    abandon(writer)
