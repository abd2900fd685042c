"""A scenario of real time: on, overflow, return, off, on again, with a process that may be killed meanwhile.

What the handler or Kafka got is checked at the end, a handler's at each start.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.reader import LogReader
from tailrace.changelog.retention.readers import Readers
from tailrace.errors import TailraceError
from tailrace.realtime import control
from tailrace.realtime.switching import MarkerKind
from tests.support.kafka.reading import read_topic
from tests.support.realtime.child import STALL
from tests.support.realtime.engine import BUFFER_BYTES, CONSUMER, WIDE, Shard, announced
from tests.support.realtime.markers import markers_in

DEADLINE_S = 60.0
OPTIONS = {"offset_commit": {"policy": "always"}, "record_processing": {"queue_batches_max": 1}}


def _into_kafka(bootstrap: str, prefix: str) -> dict[str, Any]:
    return {
        "kafka": {"bootstrap_servers": bootstrap, "offsets_topic": f"{prefix}-offsets"},
        "atomic_source_offset_commit": True,
        "transformations": [{"type": "route", "regex": r"public\.(.*)", "replacement": f"{prefix}.$1"}],
    }


class Killed(Exception):  # noqa: N818 - it is what happened
    """The process was killed by its armed failpoint."""


class Story:
    """A shard, the log of its engine, and the delivered rows.

    :param topics: the address of a cluster, and the prefix of topics there; None: a handler writes to a file.
    """

    def __init__(self, at: Path, topics: tuple[str, str] | None = None) -> None:
        package = announced(at)
        self.shard = Shard(at / "shard")
        self.log, self.out = at / "log", at / "out"
        self._topics, self._to_file = topics, topics is None
        self._options = OPTIONS if topics is None else _into_kafka(*topics)
        root = Path(__file__).resolve().parents[3]
        self._path = os.pathsep.join([str(package), str(root)])
        self._stderr = at / "stderr"
        self._process: subprocess.Popen[bytes] | None = None
        self.falls = 0
        self.starts: list[int] = []  # number of delivered lines at each start
        self._committed: list[int] = []  # committed log offset at each start
        self._markers: list[MarkerKind] = []  # the log's markers up to log offset `_read_to`
        self._read_to = 0
        self._begun = 0  # number of start markers at the last start

    @property
    def stall(self) -> Path:
        return Path(f"{self.out}{STALL}")

    def start(self, failpoints: str = "") -> None:
        """Start the engine with `failpoints` armed."""
        section = {"enabled": True, "buffer_bytes": BUFFER_BYTES, "return_automatically": True}
        source = {"type": "text_shards", "folder": str(self.shard.folder), "shards": ["a"]}
        settings = {"source": source, "log": {"path": str(self.log)}, "realtime": section}
        self.starts.append(len(self.lines()))
        # What is committed by now must not be delivered again.
        self._committed.append(self._committed_offset())
        self._begun = self.count(MarkerKind.TRY_START_REALTIME)
        with self._stderr.open("ab") as errors:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.realtime.child",
                    json.dumps(settings),
                    json.dumps(self._options),
                    str(self.out) if self._to_file else "",
                ],
                stderr=errors,
                env={**os.environ, "PYTHONPATH": self._path, "TAILRACE_FAILPOINTS": failpoints},
            )

    def stop(self) -> None:
        """End the engine in good order, if it runs."""
        self.stall.unlink(missing_ok=True)
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(DEADLINE_S)

    def wait(self, is_so: Callable[[], bool], what: str, poll_s: float = 0.1) -> None:
        """Wait until `is_so`, checked every `poll_s` seconds.

        :raises Killed: if the process is killed first.
        """
        until_s = time.monotonic() + DEADLINE_S
        while not is_so():
            assert self._process is not None
            status = self._process.poll()
            if status is not None:
                assert status == -signal.SIGKILL, self._stderr.read_text()[-2000:]
                raise Killed
            assert time.monotonic() < until_s, f"waited for {what}\n{self._stderr.read_text()[-2000:]}"
            time.sleep(poll_s)

    def begin(self) -> None:
        """Wait for real time after a start: the log may still have the start marker of the process before.

        :raises Killed: as do `play` and what follows.
        """
        if self.starts[1:] and self.log.exists():
            self.command(on=True)  # the process may have been killed while real time was switched off
        self.wait(lambda: self.is_on and self.count(MarkerKind.TRY_START_REALTIME) > self._begun, "real time")
        if self._to_file and self.shard.count:
            self.wait_for_all()  # the backlog of the process before may be more than the buffer holds

    def turn(self, choose: random.Random) -> None:
        """Do one random thing."""
        match choose.randrange(4):
            case 0:
                self.commit(choose.randrange(1, 5))
            case 1 | 2:
                self.overflow()
                self.command(on=True)  # at once, without the usual wait
                self.wait(lambda: self.is_on, "the return of real time")
            case 3:
                self.command(on=False)
                self.wait(lambda: not self.is_on, "the end of real time")
                self.command(on=True)
                self.wait(lambda: self.is_on, "real time")

    def play(self) -> None:
        """Switch real time in every way."""
        self.begin()
        # The backlog of the process before may overflow the buffer at once: its rows would come from the log.
        if self.shard.count:
            self.wait_for_all()
        self.wait(lambda: self.is_on, "real time, with nothing left")
        handled = self.count(MarkerKind.REALTIME)
        for _ in range(3):
            self.commit(2)
        self.wait(lambda: self.count(MarkerKind.REALTIME) > handled, "a marker of what is handled")
        self.overflow()
        self.wait(lambda: self.is_on, "the return of real time")
        self.commit(2)
        self.command(on=False)
        self.wait(lambda: not self.is_on, "the end of real time")
        self.commit(2)
        self.command(on=True)
        self.wait(lambda: self.is_on, "real time")
        self.commit(2)

    def wait_for_all(self) -> None:
        """Wait until every row is delivered."""
        if self._to_file:
            self.wait(lambda: self.lines()[-1:] != [] and self.lines()[-1][0] == self.shard.count, "the rows")
        else:
            # Each check reads the whole topic.
            self.wait(lambda: len(self.in_topic()) >= self.shard.count, "the rows in Kafka", 0.25)

    def commit(self, rows: int) -> None:
        """Commit a transaction and, with a handler, wait until it is delivered."""
        self.shard.commit(rows)
        if self._to_file:
            self.wait_for_all()

    def overflow(self) -> None:
        """Commit more than the buffer holds while the handler stalls, then let the handler go on."""
        self.wait(lambda: self.is_on, "real time, which returns by itself")
        stops = self.count(MarkerKind.STOP_REALTIME)
        self.stall.touch()
        self.shard.commit(2, WIDE)
        self.shard.commit(5, WIDE)
        self.wait(lambda: self.count(MarkerKind.STOP_REALTIME) > stops, "the fall-back")
        self.falls += 1
        self.stall.unlink()

    def command(self, *, on: bool) -> None:
        control.give_command(LogDirectory.open(self.log), CONSUMER, on=on)

    @property
    def is_on(self) -> bool:
        """Whether real time is on: recorded by the consumer, and the last switch in the log is a start
        marker.
        """
        try:
            kept = control.kept(LogDirectory.open(self.log), CONSUMER)
        except TailraceError:
            return False
        switches = [kind for kind in self.markers() if kind is not MarkerKind.REALTIME]
        return kept.is_on and switches[-1:] == [MarkerKind.TRY_START_REALTIME]

    def count(self, kind: MarkerKind) -> int:
        """Return the number of markers of a kind in the log."""
        return self.markers().count(kind)

    def markers(self) -> list[MarkerKind]:
        """Return the kinds of the markers in the log, in order."""
        try:
            with LogReader.open(self.log, "0") as reader:
                end = reader.end().offset
                for block in reader.blocks(self._read_to, end):
                    first = block.header.log_offset
                    self._markers += [
                        marker.kind
                        for at, marker in markers_in(reader.read(block))
                        if first + at > self._read_to
                    ]
                self._read_to = end
        except TailraceError:
            pass
        return self._markers

    def lines(self) -> list[tuple[int, int]]:
        """Return what the handler got: id and log offset."""
        try:
            text = self.out.read_text()
        except OSError:
            return []
        return [(int(line.split()[0]), int(line.split()[1])) for line in text.splitlines()]

    def in_topic(self) -> list[int]:
        """Return the rows that a reader of committed records finds, in order."""
        assert self._topics is not None
        bootstrap, prefix = self._topics
        return [message.document["after"]["id"] for message in read_topic(bootstrap, f"{prefix}.orders")]

    def check(self) -> None:
        """Check the deliveries: Kafka has each row once, in order; a handler gets rows again only after a
        start.
        """
        if not self._to_file:
            assert self.in_topic() == list(range(1, self.shard.count + 1))
            return
        lines = self.lines()
        assert {row for row, _ in lines} == set(range(1, self.shard.count + 1))
        for begin, end in zip(self.starts, [*self.starts[1:], len(lines)], strict=True):
            rows = [row for row, _ in lines[begin:end]]
            if rows:
                assert rows == list(range(rows[0], rows[0] + len(rows))), "out of order, or repeated"
                assert rows[0] <= (lines[begin - 1][0] if begin else 0) + 1, "a gap"
        for begin, committed in zip(self.starts, self._committed, strict=True):
            assert all(log_offset >= committed for _, log_offset in lines[begin:]), (
                "committed, but delivered again"
            )

    def _committed_offset(self) -> int:
        if not self._to_file:
            return 0
        try:
            reader = Readers.open(self.log).get(CONSUMER)
        except TailraceError:
            return 0
        kept = {} if reader is None else reader.kept.get("0", {})
        return int(kept.get("log_offset", 0))
