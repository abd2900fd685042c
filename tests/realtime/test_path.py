"""The path's driver on a real log: restarts, a log that is opened again, a consumer that goes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tailrace import failpoints
from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.changelog.writer import LogWriter
from tailrace.config.sections import RealtimeConfig
from tailrace.realtime import control
from tailrace.realtime.handover import Handover
from tailrace.realtime.path import RealtimePath
from tailrace.realtime.switching import LogMode, MarkerKind, RealtimeMode
from tests.support.changelog.frames_of import Source, append, new_log
from tests.support.realtime.markers import markers_in

BUFFER_BYTES = 64 * 1024
_START, _STOP = MarkerKind.TRY_START_REALTIME, MarkerKind.STOP_REALTIME


@pytest.fixture
def log(tmp_path: Path) -> LogDirectory:
    return new_log(tmp_path / "log")


@contextmanager
def _running(
    log: LogDirectory, handled: int = 0, **section: object
) -> Iterator[tuple[RealtimePath, Handover, LogWriter]]:
    """Yield a path that a writer feeds, as after a start."""
    config = RealtimeConfig.model_validate({"enabled": True, "buffer_bytes": BUFFER_BYTES} | section)
    path = RealtimePath("c", config, 1 << 20)
    handover = Handover([path.buffer], lambda: None)
    path.attach(handover)
    with LogWriter.open(log, "0", listener=handover) as writer:
        path.open(log, handled)
        yield path, handover, writer


def _switches(log: LogDirectory) -> list[MarkerKind]:
    with LogReader.open(log, "0") as reader:
        blocks = reader.blocks(0, reader.end().offset)
        kinds = [marker.kind for block in blocks for _, marker in markers_in(reader.read(block))]
    return [kind for kind in kinds if kind is not MarkerKind.REALTIME]


def _turn(path: RealtimePath, writer: LogWriter) -> None:
    """Send everything that is in the log, then what the path itself has written there."""
    path.turn(writer.offset)
    path.turn(writer.offset)


def _fall_back(path: RealtimePath, writer: LogWriter, source: Source) -> None:
    _turn(path, writer)
    assert path.works
    append(writer, source.transaction(1, note="x" * BUFFER_BYTES))
    _turn(path, writer)
    assert (path.view().mode, path.view().fall_backs) == (RealtimeMode.OFF, 1)


def test_a_second_crash_during_the_start_after_a_crash_is_no_fall_back(log: LogDirectory) -> None:
    with _running(log) as (path, _, writer):
        append(writer, Source().transaction(1))
        _turn(path, writer)
        assert path.works
    failpoints.arm("realtime.after_keep=error")  # recorded as off, not yet as on again
    with _running(log) as (path, _, writer), pytest.raises(failpoints.FailpointError):
        _turn(path, writer)
    failpoints.arm("")
    assert not control.kept(log, "c").is_on
    with _running(log) as (path, _, writer):
        _turn(path, writer)
        assert path.works
    assert _switches(log) == [_START, _STOP, _START]


def test_after_a_fall_back_real_time_stays_off_over_restarts_until_a_command(
    log: LogDirectory,
) -> None:
    source = Source()
    with _running(log) as (path, _, writer):
        _fall_back(path, writer, source)
    for _ in range(2):
        with _running(log) as (path, _, writer):
            _turn(path, writer)
            assert path.view().mode is RealtimeMode.OFF
            assert path.view().because == "it fell back, and waits for a command"
    control.give_command(log, "c", on=True)
    with _running(log) as (path, _, writer):
        _turn(path, writer)
        assert path.works
        _fall_back(path, writer, source)
    with _running(log) as (path, _, writer):
        _turn(path, writer)
        assert not path.works, "the command was carried out already"


def test_of_commands_in_quick_succession_the_last_one_holds(log: LogDirectory) -> None:
    with _running(log, enabled=False) as (path, _, writer):
        append(writer, Source().transaction(1))
        for on in (True, False, True, False, True):
            control.give_command(log, "c", on=on)
            path.keep(0)
            _turn(path, writer)
            assert path.works is on
        for on in (False, True, False):
            control.give_command(log, "c", on=on)
        path.keep(0)
        _turn(path, writer)
        assert (path.view().mode, path.view().log_mode) == (RealtimeMode.OFF, LogMode.ACTIVE)
    assert _switches(log) == [_START, _STOP] * 3


@pytest.mark.parametrize("falls_back", [False, True])
def test_a_marker_that_waits_for_a_long_transaction_is_written_by_the_next_writer(
    log: LogDirectory, *, falls_back: bool
) -> None:
    """Some captures open the log again at each connection."""
    source = Source()
    with _running(log) as (path, handover, writer):
        append(writer, source.transaction(1))
        if falls_back:
            _turn(path, writer)
            assert path.works
            sent = writer.offset
            append(writer, source.begin(), source.insert(note="x" * BUFFER_BYTES))
            path.turn(sent)
        else:
            append(writer, source.begin(), source.insert())
            path.turn(writer.tail.offset)
        assert path.view().mode is (RealtimeMode.STOPPING if falls_back else RealtimeMode.STARTING)
        writer.close()
        path.turn(writer.tail.offset)
        assert _switches(log) == ([_START] if falls_back else [])
        with LogWriter.open(log, "0", listener=handover) as again:
            assert path.buffer.lost == ("buffer full" if falls_back else "")
            _turn(path, again)
            assert path.works is not falls_back
            if falls_back:
                assert path.view().mode is RealtimeMode.OFF
            append(again, source.transaction(1))
    assert _switches(log) == [_START, _STOP][: 1 + falls_back]


def test_a_consumer_that_goes_back_gets_everything_again_from_the_log(log: LogDirectory) -> None:
    """As a sink does whose target was emptied and which is opened again."""
    source = Source()
    with _running(log) as (path, _, writer):
        append(writer, source.transaction(1))
        _turn(path, writer)
        append(writer, source.transaction(1))
        writer.sync()
        (block,) = path.take_after(0, (), 1 << 20)
        path.keep(block.header.end)
        assert path.keep(block.header.end) == block.header.end
        before = path.generation
        path.open(log, 0)
        path.turn(0)
        assert path.view().mode is RealtimeMode.STARTING
        assert path.generation > before
        assert path.keep(0) == 0, "the position must not be ahead of what the consumer needs again"
        assert path.reads_until == writer.tail.offset
        assert path.take_after(0, (), 1 << 20) == ()
        _turn(path, writer)
        assert path.works
    assert _switches(log) == [_START, _STOP, _START]


def test_a_consumer_that_has_failed_keeps_nothing_in_memory_until_it_is_opened_again(
    log: LogDirectory,
) -> None:
    source = Source()
    with _running(log) as (path, _, writer):
        append(writer, source.transaction(1))
        _turn(path, writer)
        append(writer, source.transaction(1))
        path.leave("the sink has failed")
        append(writer, source.transaction(1))
        view = path.view()
        assert (view.mode, view.because, view.buffer_bytes) == (RealtimeMode.OFF, "the sink has failed", 0)
        path.turn(writer.offset)
        assert not path.buffer.fills
        path.open(log, 0)
        _turn(path, writer)
        assert path.works
    assert _switches(log) == [_START, _STOP, _START]
