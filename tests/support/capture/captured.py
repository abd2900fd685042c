"""What tests of the capture share: a capture task in a thread, and a simple reader of its log."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tailrace.changelog.reader import LogReader
from tailrace.config.sections import LogConfig
from tailrace.config.source.postgres import PostgresSource
from tailrace.errors import TailraceError
from tailrace.model import parse_lsn
from tailrace.protocol import frames
from tailrace.sources.postgres.streaming.capture_task import CaptureTask
from tests.support.wait import wait_until

NAME = "t"
SLOT = "tailrace_t"
CREATE_ITEMS = "create table items(id bigint primary key, note text)"


class Running:
    """A capture task in its own thread."""

    def __init__(self, task: CaptureTask) -> None:
        self.task = task
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="capture")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.task.run()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait_for(self, phase: str, timeout_s: float = 30) -> None:
        wait_until(lambda: self.is_over or self.task.progress().phase == phase, timeout_s, phase)
        assert not self.is_over, self.error

    def catch_up(self, query: Any, timeout_s: float = 30) -> None:
        """Wait until everything committed so far is durable in the log."""
        query("select pg_switch_wal()")  # otherwise a quiet server keeps some WAL unflushed
        # Not the insert position: that may lie behind a page header, where nothing is written until the
        # server next logs its running transactions, up to 15 s later.
        lsn = parse_lsn(query("select pg_current_wal_flush_lsn()::text")[0][0])
        wait_until(lambda: self.is_over or self.task.caught_up(lsn), timeout_s, "the log to catch up")
        assert not self.is_over, self.error

    def stop(self, timeout_s: float = 20) -> None:
        self.task.stop()
        self.join(timeout_s)
        if self.error is not None:
            raise self.error

    def join(self, timeout_s: float = 30) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the task did not end"


def make_task(dsn: str, path: Path, **options: Any) -> CaptureTask:
    given = {
        "tables": ("public.*",),
        "status_interval_s": 1.0,
        "reconnect_delay_s": 0.05,
        "reconnect_delay_s_max": 0.5,
        **options,
    }
    log = {name: given.pop(name) for name in ("segment_bytes", "compression") if name in given}
    semaphore = given.pop("semaphore", None)
    source, kept = PostgresSource(dsn=dsn, **given), LogConfig(path=path, **log)
    return CaptureTask(source, path, kept, name=NAME, semaphore=semaphore)


@contextmanager
def capturing(dsn: str, path: Path, **options: Any) -> Iterator[Running]:
    """Run a task while the block runs, then stop it and raise what it raised."""
    running = Running(make_task(dsn, path, **options))
    try:
        yield running
    except BaseException:
        running.task.stop()
        running.join()
        raise
    running.stop()


def run_to_end(dsn: str, path: Path, **options: Any) -> TailraceError | None:
    """Run a task that ends by itself; return why it ended."""
    running = Running(make_task(dsn, path, **options))
    running.join(60)
    assert running.error is None or isinstance(running.error, TailraceError), running.error
    return running.error


@dataclass
class Captured:
    """The changes of a log in log order; the first column of its tables is a number."""

    snapshot: list[int] = field(default_factory=list)
    inserts: list[int] = field(default_factory=list)
    deletes: list[int] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)  # end LSNs
    messages: list[bytes] = field(default_factory=list)
    relations: list[bytes] = field(default_factory=list)  # Relation messages, whole
    facts: list[dict[str, Any]] = field(default_factory=list)
    text: bytearray = field(default_factory=bytearray)  # of the snapshot

    @property
    def ids(self) -> list[int]:
        return self.snapshot + self.inserts


def read_log(path: Path) -> Captured:
    found = Captured()
    with LogReader.open(path, "0") as reader:
        for ref in reader.blocks(reader.start, reader.end().offset):
            for _, frame in frames.each_frame(reader.read(ref)):
                _take(found, bytes(frame))
    return found


def _take(found: Captured, frame: bytes) -> None:
    if frame[5:6] == b"s":
        text = frame[frames.SNAPSHOT_TEXT_AT :]
        found.text += text
        found.snapshot += [int(line.split(b"\t")[0]) for line in text.split(b"\n")[:-1]]
    elif frame[5:6] == b"x" and frame[6:7] == frames.FACTS:
        found.facts.append(frames.control_json(frame))
    elif frame[5:6] == b"w":
        message = frame[frames.XLOG_PAYLOAD_AT :]
        if message[:1] == b"I":
            found.inserts.append(_first_column(message, 8))
        elif message[:1] == b"D":
            found.deletes.append(_first_column(message, 8))
        elif message[:1] == b"C":
            found.commits.append(struct.unpack_from("!Q", message, 10)[0])
        elif message[:1] == b"M":
            found.messages.append(message[10:])
        elif message[:1] == b"R":
            found.relations.append(message)


def _first_column(message: bytes, at: int) -> int:
    size = struct.unpack_from("!i", message, at + 1)[0]
    return int(message[at + 5 : at + 5 + size])
