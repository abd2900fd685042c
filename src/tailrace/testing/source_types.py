"""Checks that a type of source keeps its contract (`tailrace.sources.contract`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tailrace.changelog.directory import TASK, LogDirectory
from tailrace.changelog.format import BlockHeader, Tail
from tailrace.changelog.reader import LogReader
from tailrace.changelog.writer import LogListener, LogWriter
from tailrace.config.sections import LogConfig
from tailrace.config.source.section import SourceSection
from tailrace.errors import Kind, TailraceError
from tailrace.protocol.frames import Bytes
from tailrace.sources.contract import Capture, Source
from tailrace.testing.contexts import require
from tailrace.waits import wait_until

#: Longest wait of a check for behaviour that the contract requires, in seconds.
WAIT_S = 60.0
_LOOK_S = 0.02


def check_source(source: Source, section: SourceSection, log: Path, commit: Callable[[], int]) -> None:
    """Check a type of source against a running database.

    :param section: settings of the source, of a pipeline named `conformance`.
    :param log: path of a change log that does not exist yet.
    :param commit: commits one transaction, and returns its number of changes of captured tables, 1 or more.
    """
    require(isinstance(section, source.settings), "`settings` is the class of the section")
    options, stop = LogConfig(path=log), threading.Event()
    news = threading.Event()

    def capture(listener: LogListener | None = None) -> Capture:
        return source.capture(section, log, options, name="conformance", listener=listener)

    with _running(capture(_Listener(news))) as (first, wait):
        wait(lambda: first.caught_up(source.end(section, stop)), "what was there is in the log")
        begun = _rows(log)
        news.clear()
        before, expected = source.end(section, stop), commit()
        end = source.end(section, stop)
        require(end > before, "`end` rises with every commit")
        wait(lambda: first.caught_up(end), "`caught_up` says so once a transaction is durable")
        require(news.wait(WAIT_S), "the log's writer has the `listener`")
        require(first.progress().durable.position >= end, "`progress` tells what is durable")
        require(_rows(log) == begun + expected, "each change is in the log once")
        _check_alone(capture())
    expected += commit()
    with _running(capture()) as (second, wait):
        end = source.end(section, stop)
        wait(lambda: second.caught_up(end), "what was committed while nothing ran is captured later")
        # One more transaction, so that changes that a faulty source repeats are in the log, too.
        expected += commit()
        after = source.end(section, stop)
        wait(lambda: second.caught_up(after), "`caught_up` says so once a transaction is durable")
    found = _rows(log)
    require(found >= begun + expected, "no change is missing when `caught_up` says so, also after a restart")
    require(found == begun + expected, "what is in the log is not captured again")


class _Listener:
    """A listener that sets an event when transactions have become durable."""

    def __init__(self, news: threading.Event) -> None:
        self._news = news

    def opened(self, writer: LogWriter) -> None:
        pass

    def appended(self, header: BlockHeader, frames: Bytes, schema: Mapping[str, bytes]) -> None:
        pass

    def cut(self, log_offset: int) -> None:
        pass

    def durable(self, tail: Tail) -> None:
        self._news.set()

    def closed(self) -> None:
        pass


def _check_alone(other: Capture) -> None:
    try:
        other.run()
    except TailraceError as error:
        require(error.kind is Kind.LOG_LOCKED, "a second capture of one log fails with LOG_LOCKED")
    else:
        require(False, "a second capture of one log fails with LOG_LOCKED")


@contextmanager
def _running(capture: Capture) -> Iterator[tuple[Capture, Callable[[Callable[[], bool], str], None]]]:
    """Run a capture during the block; yield it, and a function that waits for a rule while it runs."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            capture.run()
        except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, name="conformance-capture", daemon=True)
    thread.start()

    def wait(is_so: Callable[[], bool], rule: str) -> None:
        wait_until(lambda: is_so() or not thread.is_alive(), WAIT_S, _LOOK_S)
        require(
            is_so(), f"{rule} ({WAIT_S:.0f} s)" if thread.is_alive() else f"{rule}: `run` has ended before"
        )

    try:
        yield capture, wait
    except AssertionError:
        if failed:
            raise failed[0] from None
        raise
    finally:
        capture.stop()
        thread.join(WAIT_S)
    require(not thread.is_alive(), "`run` returns after `stop`")
    if failed:
        raise failed[0]
    require(capture.progress().phase == "stopped", "`progress` says `stopped` when `run` has returned")


def _rows(log: Path) -> int:
    try:
        directory = LogDirectory.open(log)
    except TailraceError as error:
        if error.kind is not Kind.LOG_MISSING:
            raise
        return 0
    with LogReader.open(directory, TASK) as reader:
        return sum(block.header.rows for block in reader.blocks(reader.start, reader.end().offset))
