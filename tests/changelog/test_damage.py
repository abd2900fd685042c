"""A flip of any byte of a log is detected and located; readers never return damaged data."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.readers import Readers
from tailrace.changelog.verify import verify
from tailrace.changelog.writer import LogOptions, LogWriter
from tailrace.errors import Kind, TailraceError
from tests.support.changelog.frames_of import Source, append, new_log, relation_frame


@pytest.fixture(params=["none", "zstd"])
def log(memory_path: Path, request: pytest.FixtureRequest) -> LogDirectory:
    """A small log of two sealed segments, with a reader and a state file."""
    made, source = new_log(memory_path / "log"), Source()
    options = LogOptions(segment_bytes=1500, compression=request.param)
    with LogWriter.open(made, "0", options=options) as writer:
        append(writer, relation_frame(), source.transaction(2))
        append(writer, source.transaction(1), source.begin())
        append(writer, source.insert(note="a" * 600), source.commit())
        append(writer, source.transaction(3, note="b" * 200))
        append(writer, source.transaction(1))
    Readers(made).register("sink", {"0": 0})
    made.state_write("tasks/0/capture.state", {"slot": "s", "lsn": 5})
    made.state_write("tasks/0/capture.state", {"slot": "s", "lsn": 6})
    assert len(made.segments("0")) == 2
    return made


@pytest.mark.ci
def test_every_single_byte_flip_is_found_and_located(log: LogDirectory) -> None:
    assert verify(log.path).sound
    checked = 0
    for path in sorted(log.path.rglob("*")):
        if path.is_dir() or path.name == "lock":
            continue
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
            report = verify(log.path)
            inside = str(path.relative_to(log.path))
            assert any(problem.file == inside and problem.byte <= at for problem in report.problems), (
                inside,
                at,
                report,
            )
            checked += 1
        path.write_bytes(whole)
    assert verify(log.path).sound
    assert checked > 2500


@pytest.mark.slow
def test_readers_return_the_same_or_an_error_after_any_byte_flip_in_a_segment(log: LogDirectory) -> None:
    def read() -> bytes:
        with LogReader.open(log, "0") as reader:
            refs = reader.blocks(reader.start, reader.end().offset)
            schema = b"".join(frame for ref in refs for frame in reader.schema_before(ref))
            return b"".join(bytes(reader.read(ref)) for ref in refs) + schema

    sound = read()
    refused = accepted = flips = 0
    for path in sorted(log.task_path("0").glob("*.seg")):
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x81]) + whole[at + 1 :])
            try:
                assert read() == sound, "the footer is a cache: without it readers return the same"
            except TailraceError as error:
                refused += error.kind is Kind.LOG_CORRUPT
            else:
                accepted += 1
        path.write_bytes(whole)
        flips += len(whole)
    assert refused + accepted == flips
    assert refused > 1500


@pytest.mark.parametrize("log", ["none"], indirect=True)
def test_a_segment_without_its_footer_is_read_and_reported(log: LogDirectory) -> None:
    def runs() -> object:
        with LogReader.open(log, "0") as reader:
            return reader.blocks(0, reader.end().offset)

    sound = runs()
    for path in log.task_path("0").glob("*.seg"):
        whole = path.read_bytes()
        footer_at = len(whole) - int.from_bytes(whole[-8:-4], "little")
        for length in range(footer_at, len(whole)):
            os.truncate(path, length)
            assert runs() == sound
        path.write_bytes(whole)
    first = min(log.task_path("0").glob("*.seg"))
    os.truncate(first, first.stat().st_size - 1)
    [problem] = verify(log.path).problems
    assert problem.file.endswith(first.name)


@pytest.mark.parametrize("torn", ["zeros", "its first page is zeros", "zeros behind its header"])
def test_remains_of_a_loss_of_power_after_the_durable_end_are_no_damage(memory_path: Path, torn: str) -> None:
    log, source = new_log(memory_path / "log"), Source()
    with LogWriter.open(log, "0", options=LogOptions(compression="none")) as writer:
        append(writer, relation_frame(), source.transaction(2))
        writer.sync()
        (segment,) = log.task_path("0").glob("*.seg")
        whole = segment.stat().st_size
        append(writer, source.transaction(1, note="b" * 9000))
        block = segment.read_bytes()[whole:]
        zeros = b"\0" * len(block)
        left = {
            "zeros": zeros,
            "its first page is zeros": zeros[:4096] + block[4096:],
            "zeros behind its header": block[:500] + zeros[500:],
        }[torn]
        segment.write_bytes(segment.read_bytes()[:whole] + left)
        report = verify(log.path)
        assert report.sound, report
        assert [note for note in report.notes if "cuts it off" in note] == report.notes != []
        os.truncate(segment, whole)


@pytest.mark.slow
def test_a_log_is_verified_as_sound_while_it_is_written(memory_path: Path) -> None:
    log, source, done = new_log(memory_path / "log"), Source(), threading.Event()
    writer = LogWriter.open(log, "0", options=LogOptions(segment_bytes=20_000))

    def keep_writing() -> None:
        while not done.is_set():
            append(writer, source.transaction(3), source.begin())
            append(writer, source.insert(note="z" * 5000), source.commit())
            writer.sync()
            log.state_write("tasks/0/capture.state", {"lsn": source.lsn})

    thread = threading.Thread(target=keep_writing)
    thread.start()
    deadline, verified, units = time.monotonic() + 60, 0, 0
    try:
        # The test shows something only if the writer makes progress meanwhile.
        while verified < 20 or units < 8:
            assert time.monotonic() < deadline, f"the writer wrote only {units} units"
            report = verify(log.path)
            assert report.sound, report.problems
            verified, units = verified + 1, report.units
    finally:
        done.set()
        thread.join(30)
        writer.close()


@pytest.mark.parametrize("log", ["none"], indirect=True)
def test_a_missing_segment_in_the_middle_is_reported(log: LogDirectory) -> None:
    source = Source(lsn=0x9000)
    with LogWriter.open(log, "0") as writer:
        append(writer, source.transaction())
    middle = sorted(log.task_path("0").glob("*.seg"))[1]
    middle.unlink()
    assert not verify(log.path).sound
    with LogReader.open(log, "0") as reader, pytest.raises(TailraceError) as caught:
        reader.blocks(0, reader.end().offset)
    assert caught.value.kind is Kind.LOG_CORRUPT
