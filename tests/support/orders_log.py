"""Small change logs made by hand, for tests that need no server."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tailrace.changelog.directory import LogDirectory
from tailrace.changelog.endmark import MARK_NAME
from tailrace.changelog.writer import LogListener, LogOptions, LogWriter
from tailrace.model import POSTGRES_EPOCH_US, SourceFingerprint
from tailrace.protocol import frames

FINGERPRINT = SourceFingerprint("postgresql", "7", "shop", "tailrace_shop")
OID = 16384
#: 2026-01-01T00:00:00Z
EPOCH_US = 1_767_225_600_000_000


def directory_at(path: Path) -> LogDirectory:
    return LogDirectory.create_or_open(path, FINGERPRINT)


class LogOfOrders:
    """A log of one table `public.orders (id int primary key, what text)`, written by transactions."""

    def __init__(self, path: Path, *, segment_bytes: int = 1 << 26) -> None:
        self.directory = directory_at(path)
        self._options = LogOptions(segment_bytes=segment_bytes)
        self.writer = LogWriter.open(self.directory, "0", options=self._options)
        self.number = 0

    def insert(self, *ids: int) -> int:
        """Append one transaction with a row for each id; return the log's new durable end."""
        self.number += 1
        lsn, time_us = self.number * 1000, EPOCH_US + self.number * 1_000_000
        messages = [begin(lsn, time_us, 700 + self.number), relation()]
        messages += [inserted(number) for number in ids]
        messages.append(commit(lsn, time_us))
        return self._append(b"".join(frames.xlog_frame(lsn, lsn, 0, message) for message in messages))

    def insert_in_blocks(self, *parts: Sequence[int]) -> int:
        """Append one transaction, a block for each part; return the log's new durable end."""
        self.number += 1
        lsn, time_us = self.number * 1000, EPOCH_US + self.number * 1_000_000
        blocks = [[begin(lsn, time_us, 700 + self.number), relation()]]
        blocks += [[inserted(number) for number in ids] for ids in parts]
        end = 0
        for messages in [*blocks, [commit(lsn, time_us)]]:
            end = self._append(b"".join(frames.xlog_frame(lsn, lsn, 0, message) for message in messages))
        return end

    def progress(self) -> int:
        """Append a frame without rows; return the log's new durable end."""
        self.number += 1
        lsn = self.number * 1000
        return self._append(frames.control_frame(frames.PROGRESS, lsn, EPOCH_US, {}))

    def close(self) -> None:
        self.writer.close()

    @contextmanager
    def power_lost(self) -> Iterator[None]:
        """At the end of the block, close the log and set its end mark, which is not fsynced, back."""
        mark = self.directory.task_path("0") / MARK_NAME
        kept = mark.read_bytes()
        yield
        self.close()
        mark.write_bytes(kept)

    def open_again(self) -> None:
        """Open the closed log for writing."""
        self.writer = LogWriter.open(self.directory, "0", options=self._options)

    def roll(self) -> int:
        """Append frames without rows until the next segment begins; return where it begins."""
        known = self.directory.segments("0")[-1]
        while self.directory.segments("0")[-1] == known:
            self.progress()
        return self.directory.segments("0")[-1]

    def give_to(self, listener: LogListener) -> None:
        """Give `listener` what is appended from now on."""
        self.writer.close()
        self.writer = LogWriter.open(self.directory, "0", options=self._options, listener=listener)

    def _append(self, data: bytes) -> int:
        chunk = np.frombuffer(data, np.uint8)
        self.writer.append(chunk, frames.summarise(chunk, self.writer.scan_state()))
        return self.writer.sync().offset


def begin(lsn: int, time_us: int, xid: int) -> bytes:
    return struct.pack("!cQqI", b"B", lsn, time_us - POSTGRES_EPOCH_US, xid)


def commit(lsn: int, time_us: int) -> bytes:
    return struct.pack("!cbQQq", b"C", 0, lsn, lsn + 10, time_us - POSTGRES_EPOCH_US)


def relation() -> bytes:
    columns = struct.pack("!b", 1) + b"id\0" + struct.pack("!Ii", 23, -1)
    columns += struct.pack("!b", 0) + b"what\0" + struct.pack("!Ii", 25, -1)
    return struct.pack("!cI", b"R", OID) + b"public\0orders\0" + b"d" + struct.pack("!h", 2) + columns


def inserted(number: int) -> bytes:
    cells = b"".join(b"t" + struct.pack("!i", len(cell)) + cell for cell in (str(number).encode(), b"thing"))
    return struct.pack("!cI", b"I", OID) + b"N" + struct.pack("!h", 2) + cells
