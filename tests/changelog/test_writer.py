"""The writer: what is durable when, which process may write, and what happens when writing fails."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import threading
import warnings
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tailrace import failpoints
from tailrace.changelog import durable
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.lock import LOCK_NAME, is_locked
from tailrace.changelog.reader import LogReader
from tailrace.changelog.verify import verify
from tailrace.changelog.writer import LogOptions, LogWriter
from tailrace.errors import Kind, TailraceError
from tailrace.protocol import frames
from tests.support.changelog.frames_of import TABLE, Source, append, chunk_of, new_log, relation_frame
from tests.support.changelog.processes import open_at_once
from tests.support.changelog.recovery import abandon, content, segment_files
from tests.support.forked import PROCESSES


@pytest.fixture
def log(memory_path: Path) -> LogDirectory:
    return new_log(memory_path / "log")


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def kind_of(attempt: pytest.ExceptionInfo[TailraceError]) -> Kind:
    return attempt.value.kind


def test_a_disk_that_is_full_for_a_cut_ends_the_writer_and_the_next_one_goes_on(log: LogDirectory) -> None:
    source = Source()
    with LogWriter.open(log, "0") as writer:
        append(writer, source.transaction())
        end = writer.sync().offset
        append(writer, source.begin(), source.insert())
        failpoints.arm("log.recovery=enospc")
        for attempt in (writer.discard_open_unit, writer.check_fence):
            with pytest.raises(TailraceError) as caught:
                attempt()
            assert kind_of(caught) is Kind.LOG_WRITE_FAILED, "it is not retried with this writer"
            assert "make room" in caught.value.hint
    failpoints.arm("")
    with LogWriter.open(log, "0") as writer:
        assert writer.offset == end


def test_nothing_is_durable_or_readable_before_sync(log: LogDirectory) -> None:
    source = Source()
    with LogWriter.open(log, "0") as writer, LogReader.open(log, "0") as reader:
        append(writer, source.transaction())
        assert (writer.durable.offset, reader.end().offset) == (0, 0)
        assert writer.sync() == writer.durable == writer.tail == reader.end()
        durable_end = writer.durable
        append(writer, source.begin(), source.insert())
        assert writer.sync() == durable_end, "an open unit does not move the boundary"
        append(writer, source.commit())
        assert writer.sync().position == source.lsn + 8


def test_a_chunk_with_a_boundary_inside_is_one_unbroken_batch(log: LogDirectory) -> None:
    source = Source()
    with LogWriter.open(log, "0") as writer:
        first = source.transaction(2)
        rest = [source.begin(), source.insert()]
        append(writer, relation_frame(), first, *rest)
        assert writer.tail.offset == len(relation_frame() + first)
        assert writer.offset == writer.tail.offset + len(b"".join(rest))
        state = writer.scan_state()
        assert (state[frames.OPEN], state[frames.ORDINAL]) == (frames.TRANSACTION_OPEN, 1)
        rest.append(source.commit())
        append(writer, rest[-1])
    assert content(log) == relation_frame() + first + b"".join(rest)


def test_a_source_may_append_nothing(log: LogDirectory) -> None:
    source = Source()
    with LogWriter.open(log, "0") as writer:
        append(writer)
        append(writer, whole := source.transaction())
        append(writer)
    assert content(log) == whole


def test_a_chunk_that_does_not_continue_at_the_logs_end_is_refused(log: LogDirectory) -> None:
    source = Source()
    chunk = chunk_of(source.transaction())
    with LogWriter.open(log, "0") as writer:
        summary = frames.summarise(chunk, writer.scan_state())
        writer.append(chunk, summary)
        with pytest.raises(TailraceError) as caught:
            writer.append(chunk, summary)
        assert kind_of(caught) is Kind.INTERNAL
    assert content(log) == bytes(chunk)


def test_a_segment_repeats_the_schema_in_force(log: LogDirectory) -> None:
    source = Source(described={TABLE})
    old, new = relation_frame(columns=("id",)), relation_frame(columns=("id", "note"))
    with LogWriter.open(log, "0", options=LogOptions(segment_bytes=1)) as writer:
        append(writer, source.begin(), old, relation_frame(7), source.commit())
        append(writer, source.begin(), new, source.commit())
        append(writer, source.transaction())
        assert writer.schema_in_force == {"R16400": new, "R7": relation_frame(7)}
        writer.sync()
        with LogReader.open(log, "0") as reader:
            [first, second, third] = reader.blocks(0, reader.end().offset)
            assert reader.schema_before(first) == []
            assert reader.schema_before(second) == [old, relation_frame(7)]
            assert reader.schema_before(third) == [new, relation_frame(7)]
            assert reader.all_schema_frames(0, reader.end().offset) == [old, relation_frame(7), new]
    with LogWriter.open(log, "0") as writer:
        assert writer.schema_in_force == {"R16400": new, "R7": relation_frame(7)}


def test_a_segment_holds_changes_also_if_the_schema_is_larger_than_it(log: LogDirectory) -> None:
    source = Source(described={TABLE})
    columns = tuple(f"c{number}" for number in range(500))
    tables = [relation_frame(), *(relation_frame(oid, columns) for oid in range(1, 21))]
    options = LogOptions(segment_bytes=64 * 1024)
    assert len(b"".join(tables)) > options.segment_bytes
    with LogWriter.open(log, "0", options=options) as writer:
        append(writer, source.begin(), *tables, source.commit())
        begun = len(segment_files(log))
        for _ in range(50):
            append(writer, source.transaction(note="x" * 1000))
        assert len(segment_files(log)) == begun + 1


def test_sync_runs_while_appends_go_on(log: LogDirectory) -> None:
    source, done = Source(), threading.Event()
    seen: list[int] = []
    with LogWriter.open(log, "0", options=LogOptions(segment_bytes=4000)) as writer:

        def keep_syncing() -> None:
            while not done.is_set():
                before = writer.tail.offset
                seen.append(writer.sync().offset)
                assert seen[-1] >= before

        thread = threading.Thread(target=keep_syncing)
        thread.start()
        want = b""
        for number in range(400):
            sent = source.transaction(1 + number % 3)
            append(writer, sent)
            want += sent
        done.set()
        thread.join(30)
        assert writer.sync().offset == len(want)
    assert seen == sorted(seen)
    assert len(segment_files(log)) > 10
    assert content(log) == want


# Which process may write


def test_a_second_writer_is_refused_and_the_error_names_the_first(log: LogDirectory) -> None:
    with LogWriter.open(log, "0"):
        with pytest.raises(TailraceError) as caught:
            LogWriter.open(log, "0")
        assert kind_of(caught) is Kind.LOG_LOCKED
        assert f"pid {os.getpid()}" in caught.value.message
        LogWriter.open(log, "1").close()
    LogWriter.open(log, "0").close()


@pytest.mark.slow
def test_of_processes_that_open_a_log_at_once_one_writes(
    memory_path: Path, processes: type[BaseProcess]
) -> None:
    told = memory_path / "told"
    told.mkdir()
    for attempt in range(3):
        barrier = PROCESSES.Barrier(4)
        path = memory_path / f"log{attempt}"
        started = [processes(target=open_at_once, args=(path, barrier, told)) for _ in range(4)]
        for process in started:
            process.start()
        for process in started:
            process.join(60)
        outcomes = sorted((told / str(process.pid)).read_text() for process in started)
        assert outcomes[-1] == "writer"
        assert all(outcome.startswith(Kind.LOG_LOCKED) for outcome in outcomes[:-1])


def test_a_process_that_was_forked_does_not_keep_the_lock(log: LogDirectory) -> None:
    lock = log.task_path("0") / LOCK_NAME
    writer = LogWriter.open(log, "0")
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process may have threads
        child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent closes the pipe
        os._exit(0)
    try:
        assert is_locked(lock)
        writer.close()
        LogWriter.open(log, "0").close()
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)


@pytest.mark.follows("log_fenced")
def test_a_writer_that_was_taken_over_can_neither_append_nor_acknowledge(log: LogDirectory) -> None:
    source = Source()
    options = LogOptions(segment_bytes=1500)
    stale = LogWriter.open(log, "0", options=options)
    append(stale, first := relation_frame() + source.transaction())
    stale.sync()
    append(stale, second := source.transaction(), source.begin())
    (log.task_path("0") / LOCK_NAME).unlink()  # as where locks do not work: in another container
    fresh = LogWriter.open(log, "0", options=options)
    assert fresh.epoch == stale.epoch + 1
    for attempt in (
        lambda: append(stale, source.insert()),
        stale.sync,
        stale.check_fence,
        stale.discard_open_unit,
    ):
        with pytest.raises(TailraceError) as caught:
            attempt()
        assert kind_of(caught) is Kind.LOG_FENCED
        assert "stop that one, then start this one again" in caught.value.hint
    stale.close()
    append(fresh, others := Source(lsn=fresh.tail.position).transaction())
    with pytest.raises(TailraceError) as caught:
        LogWriter.open(log, "0", options=options)
    assert kind_of(caught) is Kind.LOG_LOCKED
    fresh.close()
    with LogWriter.open(log, "0", options=options) as again:
        append(again, own := Source(lsn=again.tail.position).transaction())
    assert content(log) == first + second + others + own
    assert verify(log.path).sound


def test_a_write_of_a_stale_writer_damages_nothing(log: LogDirectory) -> None:
    """The worst case: it was stopped between its check and its write, and goes on later."""
    source = Source()
    stale = LogWriter.open(log, "0")
    first = source.transaction()
    append(stale, first)
    stale.sync()
    second = chunk_of(source.transaction())
    (log.task_path("0") / LOCK_NAME).unlink()
    fresh = LogWriter.open(log, "0")
    again = Source(lsn=fresh.tail.position).transaction(3, "fresh")
    append(fresh, again)
    fresh.sync()
    encoded = stale._encoder.blocks([(second, frames.summarise(second, stale.scan_state()))], stale._place)
    assert stale._segment is not None
    stale._write(stale._segment, encoded.parts)
    stale._mark.publish(stale.tail)
    assert content(log) == first + again
    fresh.close()
    [problem] = verify(log.path).problems
    assert "footer" in problem.what
    with LogWriter.open(log, "0") as third:
        assert third.tail.offset == len(first + again)
    assert content(log) == first + again
    abandon(stale)


def test_an_fsync_that_fails_after_a_takeover_cuts_nothing_off(
    log: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source()
    stale = LogWriter.open(log, "0")
    append(stale, first := source.transaction())
    took_over: list[LogWriter] = []
    fsync = os.fsync

    def fail_late(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        (log.task_path("0") / LOCK_NAME).unlink()
        took_over.append(LogWriter.open(log, "0"))
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail_late)
    with pytest.raises(TailraceError):
        stale.sync()
    with took_over[0] as fresh:
        assert fresh.durable.offset == len(first)
    assert content(log) == first
    assert verify(log.path).sound
    stale.close()


def test_a_log_that_is_removed_while_it_is_written_is_said_to_be_gone(log: LogDirectory) -> None:
    writer = LogWriter.open(log, "0")
    shutil.rmtree(log.path)
    with pytest.raises(TailraceError) as caught:
        append(writer, Source().transaction())
    assert kind_of(caught) is Kind.LOG_MISSING
    writer.close()


# What no reader could decode


@pytest.mark.parametrize("tables", [1, 100], ids=["one table", "more than are listed"])
@pytest.mark.parametrize("late", [False, True], ids=["never", "too late"])
def test_a_change_of_a_table_that_is_not_described_before_is_refused(
    log: LogDirectory, tables: int, late: bool
) -> None:
    source = Source()
    with LogWriter.open(log, "0") as writer:
        append(writer, first := source.transaction())
        begin, known = source.begin(), b"".join(source.insert(table) for table in range(100, 100 + tables))
        described, change, commit = source.insert(7), source.insert(7), source.commit()
        after = relation_frame(7) if late else b""
        with pytest.raises(TailraceError, match="not described before it") as caught:
            append(writer, begin, known, change, after, commit)
        assert (kind_of(caught), caught.value.context) == (Kind.SCHEMA_MISSING, {"relation": 7})
        append(writer, second := begin + known + described + change + commit)
    with LogWriter.open(log, "0") as writer:  # it is described in the log
        append(writer, third := source.begin() + change + source.commit())
    assert content(log) == first + second + third


# When writing fails


@pytest.mark.follows("log_write_failed")
@pytest.mark.parametrize("point", ["log.before_fsync", "log.after_fsync"])
@pytest.mark.parametrize("action", ["eio", "enospc"])
def test_a_failed_fsync_ends_the_writer_permanently(log: LogDirectory, point: str, action: str) -> None:
    source = Source()
    writer = LogWriter.open(log, "0")
    append(writer, first := source.transaction())
    acknowledged = writer.sync()
    append(writer, second := source.transaction())
    failpoints.arm(f"{point}={action}")
    for attempt in (
        writer.sync,
        writer.sync,
        lambda: append(writer, source.transaction()),
        writer.check_fence,
    ):
        with pytest.raises(TailraceError) as caught:
            attempt()
        assert kind_of(caught) is Kind.LOG_WRITE_FAILED
    assert "then start again: what was acknowledged is in the log, the rest comes from the source again" in (
        caught.value.hint
    )
    assert writer.durable == acknowledged
    writer.close()
    failpoints.arm("")  # the disk works again
    with LogWriter.open(log, "0") as after:
        assert after.tail.offset >= acknowledged.offset
        if after.tail.offset == acknowledged.offset:
            append(after, second)
    assert content(log) == first + second


def test_blocks_whose_fsync_failed_are_not_treated_as_durable(
    log: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source()
    writer = LogWriter.open(log, "0")
    append(writer, source.transaction())
    acknowledged = writer.sync()
    append(writer, source.transaction())
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", _failing(errno.EIO))
        with pytest.raises(TailraceError) as caught:
            writer.sync()
    assert kind_of(caught) is Kind.LOG_WRITE_FAILED
    writer.close()
    with LogWriter.open(log, "0") as after:
        assert after.tail == acknowledged


@pytest.mark.parametrize(
    ("call", "segment_bytes"),
    [("stat", 1 << 20), ("stat", 2000), ("pwritev", 1 << 20)],
    ids=["before it writes", "before it rolls", "while it writes"],
)
def test_the_log_can_be_continued_after_an_fsync_failed_during_an_append(
    log: LogDirectory, monkeypatch: pytest.MonkeyPatch, call: str, segment_bytes: int
) -> None:
    source, cut = Source(), threading.Event()
    writer = LogWriter.open(log, "0", options=LogOptions(segment_bytes=segment_bytes))
    append(writer, first := source.transaction())
    acknowledged = writer.sync()
    append(writer, source.transaction(3, "x" * 1000))
    real, fsync, ftruncate = getattr(os, call), os.fsync, os.ftruncate

    def fail_once(_: int) -> None:
        monkeypatch.setattr(os, "fsync", fsync)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def truncate_and_tell(fd: int, size: int) -> None:
        ftruncate(fd, size)
        cut.set()

    def beside_a_failing_fsync(*arguments: object) -> object:
        monkeypatch.setattr(os, call, real)
        monkeypatch.setattr(os, "fsync", fail_once)
        monkeypatch.setattr(os, "ftruncate", truncate_and_tell)
        syncing.start()
        cut.wait(0.2)  # times out if nothing is truncated before this write ends
        return real(*arguments)

    def sync() -> None:
        with contextlib.suppress(TailraceError):
            writer.sync()

    syncing = threading.Thread(target=sync)
    monkeypatch.setattr(os, call, beside_a_failing_fsync)
    with contextlib.suppress(TailraceError):
        append(writer, source.transaction())
    syncing.join(30)
    monkeypatch.undo()
    with pytest.raises(TailraceError) as caught:
        writer.check_fence()
    assert kind_of(caught) is Kind.LOG_WRITE_FAILED
    writer.close()
    with LogWriter.open(log, "0") as after:
        assert after.tail == acknowledged
        append(after, again := Source(lsn=after.tail.position).transaction())
    assert content(log) == first + again
    assert verify(log.path).sound


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_a_failed_write_ends_the_writer(
    log: LogDirectory, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    source = Source()
    writer = LogWriter.open(log, "0")
    append(writer, source.transaction())
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwritev", _failing(number))
        with pytest.raises(TailraceError):
            append(writer, source.transaction())
    with pytest.raises(TailraceError) as caught:
        append(writer, source.transaction())
    assert kind_of(caught) is Kind.LOG_WRITE_FAILED
    writer.close()


def test_short_writes_and_reads_are_continued(log: LogDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwritev, os.pread
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: write(fd, [bytes(parts[0])[:7]], at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: read(fd, min(size, 100), at))
    source = Source()
    with LogWriter.open(log, "0", options=LogOptions(segment_bytes=700)) as writer:
        want = [source.transaction(3) for _ in range(6)]
        for sent in want:
            append(writer, sent)
    assert content(log) == b"".join(want)
    assert verify(log.path).sound


def test_a_write_on_a_full_disk_is_undone_and_may_be_repeated(
    log: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, write = Source(), os.pwritev
    want = [source.transaction(3) for _ in range(8)]
    with LogWriter.open(log, "0", options=LogOptions(segment_bytes=700)) as writer:
        for sent in want:
            for room in (0, 10, 300):
                monkeypatch.setattr(os, "pwritev", _disk_with(room))
                before = writer.tail
                with pytest.raises(TailraceError) as caught:
                    append(writer, sent)
                assert kind_of(caught) is Kind.LOG_FULL
                assert writer.tail == before
                monkeypatch.setattr(os, "pwritev", write)
                writer.sync()
            append(writer, sent)
    assert content(log) == b"".join(want)
    assert verify(log.path).sound


@pytest.mark.parametrize("call", ["link", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_creating_a_segment_on_a_full_disk_may_be_repeated(
    log: LogDirectory, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    source = Source()
    if call == "replace":
        writer = LogWriter.open(log, "0")
        append(writer, source.begin(), source.insert())
        source.lsn -= 1000
        abandon(writer)  # with a segment that contains no change
    with LogWriter.open(log, "0") as writer:
        for _ in range(2):
            sent = source.transaction()
            with monkeypatch.context() as patched:
                patched.setattr(os, call, _failing(number))
                with pytest.raises(TailraceError) as caught:
                    append(writer, sent)
            assert kind_of(caught) is Kind.LOG_FULL
            assert not list(log.task_path("0").glob(".*"))
            assert writer.sync() == writer.tail
            source.lsn -= 1000
            source.described.clear()
        append(writer, sent)
    assert content(log) == sent
    assert verify(log.path).sound


def test_an_open_unit_is_discarded_even_on_a_full_disk(
    log: LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source()
    with LogWriter.open(log, "0") as writer:
        first = source.transaction(3)
        append(writer, first, source.begin(), source.insert())
        source.lsn -= 1000
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwritev", _full_but_for_marks())
            writer.discard_open_unit()
        again = source.transaction(2)
        append(writer, again)
    assert content(log) == first + again


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_on_a_full_disk_durable_data_is_read_and_writing_goes_on_once_there_is_space(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    try:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(2 << 20))
        log, source, want = new_log(disk / "log"), Source(), []
        with LogWriter.open(log, "0", options=LogOptions(segment_bytes=300_000)) as writer:
            sent, full = source.transaction(100, "x" * 300), False
            while not full:
                try:
                    append(writer, sent)
                except TailraceError as error:
                    full = error.kind is Kind.LOG_FULL
                else:
                    want.append(sent)
                    writer.sync()
                    sent = source.transaction(100, "x" * 300)
            assert len(want) > 10
            assert content(log) == b"".join(want)
            with pytest.raises(TailraceError):
                append(writer, sent)
            ballast.unlink()
            append(writer, sent)
            writer.sync()
        assert content(log) == b"".join([*want, sent])
        assert verify(log.path).sound
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _failing(number: int):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def _full_but_for_marks():
    """Return a `pwritev` for a full disk: files may keep their size but not grow."""
    write = os.pwritev

    def pwritev(fd: int, parts: list[memoryview], at: int) -> int:
        if at + sum(map(len, parts)) > os.fstat(fd).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, parts, at)

    return pwritev


def _disk_with(room: int):
    """Return a `pwritev` for a disk with so many free bytes, whatever the file."""
    write, left = os.pwritev, [room]

    def pwritev(fd: int, parts: list[memoryview], at: int) -> int:
        data = b"".join(parts)[: left[0]]
        if not data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= len(data)
        return write(fd, [data], at)

    return pwritev


def test_errors_of_a_full_disk_are_distinguished_from_other_failures() -> None:
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        failure = durable.write_failure(OSError(number, "x"), "append", Path("f"))
        assert failure.kind is Kind.LOG_FULL
    assert durable.write_failure(OSError(errno.EIO, "x"), "append", Path("f")).kind is Kind.LOG_WRITE_FAILED


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_rows_of_a_snapshot_are_not_compressed(log: LogDirectory, compression: str) -> None:
    source = Source()
    options = LogOptions(compression=compression)
    lsn = source.lsn + 500
    text = b"7\tthe same\n" * 100
    rows = source.transaction(100)
    with LogWriter.open(log, "0", options=options) as writer:
        append(writer, frames.control_frame(frames.SNAPSHOT_BEGIN, lsn, 0, {}), relation_frame(5))
        [file] = segment_files(log)
        before = file.stat().st_size
        append(writer, frames.snapshot_frame(5, 0, 100, text))
        of_snapshot = file.stat().st_size - before
        append(writer, frames.control_frame(frames.SNAPSHOT_END, lsn, 0, {}))
        before = file.stat().st_size
        append(writer, rows)
        of_transaction = file.stat().st_size - before
    assert of_snapshot >= len(text)
    assert (of_transaction < len(rows) // 2) == (compression != "none")
    assert content(log).endswith(rows)
    assert verify(log.path).problems == []
